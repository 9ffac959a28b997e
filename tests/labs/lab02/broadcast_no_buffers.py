"""Step 3: the buffers are forgotten"""

import torch.distributed as dist

STEP, HINT = 3, "buffers"


def broadcast_state(module):
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), src=0)
