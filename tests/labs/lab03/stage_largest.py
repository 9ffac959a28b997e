"""Step 1: the largest stage is taken"""

STEP, HINT = 1, "smallest"


def smallest_stage(psi, n, limit, room):

    for stage in reversed(range(4)):
        if sum(bytes_per_rank(psi, n, stage)) + room <= limit:  # noqa: F821
            return stage
    return None
