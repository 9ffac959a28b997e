"""Step 7: the sum over the ranks"""

import torch
import torch.distributed as dist

STEP, HINT = 7, "not_divided"


def bf16_hook(group, bucket):
    narrow = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future):
        return future.value()[0].to(bucket.buffer().dtype)

    return work.get_future().then(widen)
