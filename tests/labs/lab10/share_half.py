"""Step 8: part of the batch is read by nobody"""

STEP, HINT = 8, "share_lost"


def my_share(batch, grid):
    return batch.chunk(2 * grid.dp)[grid.replica]
