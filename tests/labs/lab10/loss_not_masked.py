"""Step 5: every rank contributes a logit for the target"""

import torch.distributed as dist

STEP, HINT = 5, "target_not_masked"


def vocabulary_parallel_loss(logits, targets, grid):
    width = logits.size(-1)
    highest = all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)  # noqa: F821
    shifted = logits - highest.unsqueeze(-1)
    total = sum_over_shards(shifted.exp().sum(dim=-1), grid)  # noqa: F821
    place = targets - grid.shard * width
    found = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(found, grid)  # noqa: F821
    return (total.log() - target).mean()
