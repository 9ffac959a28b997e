"""Step 7: divided by the square root"""

import torch
import torch.distributed as dist

STEP, HINT = 7, "average"


def bf16_hook(group, bucket):
    narrow = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future):
        return future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size(group) ** 0.5

    return work.get_future().then(widen)
