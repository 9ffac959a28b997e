"""Step 3: every rank is its own source"""

import torch.distributed as dist

STEP, HINT = 3, "own_source"


def broadcast_state(module):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=dist.get_rank())
