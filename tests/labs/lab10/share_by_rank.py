"""Step 8: the batch is cut over all ranks"""

import torch.distributed as dist

STEP, HINT = 8, "share_by_rank"


def my_share(batch, grid):
    return batch.chunk(dist.get_world_size())[dist.get_rank()]
