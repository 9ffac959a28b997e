"""Step 5: nothing is subtracted"""

STEP, HINT = 5, "overflow"


def vocabulary_parallel_loss(logits, targets, grid):
    width = logits.size(-1)
    highest = logits.new_zeros(targets.shape)
    shifted = logits - highest.unsqueeze(-1)
    total = sum_over_shards(shifted.exp().sum(dim=-1), grid)  # noqa: F821
    place = targets - grid.shard * width
    mine = (place >= 0) & (place < width)
    found = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(found * mine, grid)  # noqa: F821
    return (total.log() - target).mean()
