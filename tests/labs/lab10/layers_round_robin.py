"""Step 6: every p-th layer"""

STEP, HINT = 6, "layers"


def layers_of(stage, pp):
    return range(stage, LAYERS, pp)  # noqa: F821
