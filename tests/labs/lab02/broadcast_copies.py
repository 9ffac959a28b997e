"""Step 3: copies are broadcast"""

import torch.distributed as dist

STEP, HINT = 3, "not_broadcast"


def broadcast_state(module):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor.clone(), src=0)
