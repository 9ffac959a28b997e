"""Step 7: the group of all ranks"""

import torch
import torch.distributed as dist

STEP, HINT = 7, "world_group"


def bf16_hook(group, bucket):
    narrow = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=dist.group.WORLD, async_op=True)

    def widen(future):
        return future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size(group)

    return work.get_future().then(widen)
