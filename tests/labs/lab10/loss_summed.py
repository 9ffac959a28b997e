"""Step 5: the sum over positions"""

import torch.distributed as dist

STEP, HINT = 5, "loss_not_mean"


def vocabulary_parallel_loss(logits, targets, grid):
    width = logits.size(-1)
    highest = all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)  # noqa: F821
    shifted = logits - highest.unsqueeze(-1)
    total = sum_over_shards(shifted.exp().sum(dim=-1), grid)  # noqa: F821
    place = targets - grid.shard * width
    mine = (place >= 0) & (place < width)
    found = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(found * mine, grid)  # noqa: F821
    return (total.log() - target).sum()
