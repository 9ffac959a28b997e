"""Step 8: every replica reads the whole batch"""

STEP, HINT = 8, "share_same"


def my_share(batch, grid):
    return batch
