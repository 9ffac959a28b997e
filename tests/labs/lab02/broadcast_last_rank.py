"""Step 3: the last rank is the source"""

import torch.distributed as dist

STEP, HINT = 3, "other_source"


def broadcast_state(module):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=dist.get_world_size() - 1)
