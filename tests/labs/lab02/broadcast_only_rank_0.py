"""Step 3: only the sender calls broadcast"""

import torch.distributed as dist

STEP, HINT = 3, "some_ranks"


def broadcast_state(module):
    if dist.get_rank() == 0:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
