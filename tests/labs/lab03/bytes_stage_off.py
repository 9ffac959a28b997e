"""Step 1: stage 1 shards the gradients as well"""

STEP, HINT = 1, "sharded"


def bytes_per_rank(psi, n, stage):

    shard = -(-psi // n)
    return (
        4 * (shard if stage >= 2 else psi),
        4 * (shard if stage >= 1 else psi),
        8 * (shard if stage >= 1 else psi),
    )
