"""Step 7: Adam's states are left out"""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

STEP, HINT = 7, "moments_lost"


def save(model, adam, step, folder, group=None):
    parameters, _ = get_state_dict(model, adam)
    state = {"model": parameters, "step": step}
    dcp.save(state, checkpoint_id=folder, process_group=group)


def load(model, adam, folder, group=None):
    parameters, _ = get_state_dict(model, adam)
    state = {"model": parameters, "step": 0}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    return state["step"]
