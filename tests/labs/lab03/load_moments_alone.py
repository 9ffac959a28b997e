"""Step 7: the parameters are not loaded"""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEP, HINT = 7, "parameters_lost"


def load(model, adam, folder, group=None):

    parameters, moments = get_state_dict(model, adam)
    state = {"adam": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(model, adam, model_state_dict=parameters, optim_state_dict=moments)
    return state["step"]
