"""Step 1: shards are rounded down"""

STEP, HINT = 1, "round_up"


def bytes_per_rank(psi, n, stage):

    shard = psi // n
    return (
        4 * (shard if stage >= 3 else psi),
        4 * (shard if stage >= 2 else psi),
        8 * (shard if stage >= 1 else psi),
    )
