"""Step 7: the other 16 bits"""

import torch
import torch.distributed as dist

STEP, HINT = 7, "fp16"


def bf16_hook(group, bucket):
    narrow = bucket.buffer().to(torch.float16)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future):
        return future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size(group)

    return work.get_future().then(widen)
