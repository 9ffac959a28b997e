"""Step 7: a tensor in place of a future"""

import torch
import torch.distributed as dist

STEP, HINT = 7, "not_a_future"


def bf16_hook(group, bucket):
    narrow = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=group, async_op=True)
    work.wait()
    return narrow.float() / dist.get_world_size(group)
