"""Step 7: divided by the ranks, not by the micro-batches"""

import torch.distributed as dist

STEP, HINT = 7, "loss_wrong"


def accumulate(ddp, loss_of, micro_batches):
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / dist.get_world_size()).backward()
    (loss_of(ddp, last) / dist.get_world_size()).backward()
    ddp.finish()
