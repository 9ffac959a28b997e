"""Step 2: g sums over all ranks"""

import torch.distributed as dist

STEP, HINT = 2, "not_tp_group"


class SumOverShards:
    @staticmethod
    def forward(ctx, part, group):
        total = part.detach().clone()
        dist.all_reduce(total)
        return total
