"""Step 3: nothing is sent"""

STEP, HINT = 3, "not_broadcast"


def broadcast_state(module):
    for tensor in module.state_dict().values():
        tensor.clone()
