"""Step 1: room is forgotten"""

STEP, HINT = 1, "room"


def smallest_stage(psi, n, limit, room):

    for stage in range(4):
        if sum(bytes_per_rank(psi, n, stage)) <= limit:  # noqa: F821
            return stage
    return None
