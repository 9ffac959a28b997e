"""Step 4: no communication at all"""

STEP, HINT = 4, "not_reduced"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1
