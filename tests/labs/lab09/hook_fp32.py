"""Step 7: the bucket as it is"""

import torch.distributed as dist

STEP, HINT = 7, "not_narrow"


def bf16_hook(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)

    def widen(future):
        return future.value()[0] / dist.get_world_size(group)

    return work.get_future().then(widen)  # torch.bfloat16 was forgotten
