"""Step 1: Adam has one moment"""

STEP, HINT = 1, "bytes"


def bytes_per_rank(psi, n, stage):

    shard = -(-psi // n)
    return (
        4 * (shard if stage >= 3 else psi),
        4 * (shard if stage >= 2 else psi),
        4 * (shard if stage >= 1 else psi),
    )
