"""Step 7: rank 0 writes everything"""

import torch  # noqa: F401
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

STEP, HINT = 7, "one_writer"


def save(model, adam, step, folder, group=None):

    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters, moments = get_state_dict(model, adam, options=options)
    state = {"model": parameters, "adam": moments, "step": step}
    dcp.save(state, checkpoint_id=folder, process_group=group)
