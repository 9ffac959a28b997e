"""Step 1: stage 3 if nothing fits"""

STEP, HINT = 1, "none_fits"


def smallest_stage(psi, n, limit, room):

    for stage in range(3):
        if sum(bytes_per_rank(psi, n, stage)) + room <= limit:  # noqa: F821
            return stage
    return 3
