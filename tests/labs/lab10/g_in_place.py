"""Step 2: g overwrites its argument"""

import torch.distributed as dist

STEP, HINT = 2, "in_place"


class SumOverShards:
    @staticmethod
    def forward(ctx, part, group):
        dist.all_reduce(part, group=group)
        return part.clone()
