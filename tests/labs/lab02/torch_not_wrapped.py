"""Step 8: the module comes back as it was"""

STEP, HINT = 8, "not_torch"


def wrap(module, device):
    return module
