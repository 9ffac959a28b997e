"""Step 8: gradients in the type of autocast"""

STEP, HINT = 8, "held_fp32"


def bytes_held(low, rows):
    wide, size = (4, 4 if low is None else low.itemsize)
    unit = rows * WIDTH  # noqa: F821
    block = unit * wide + 2 * rows * wide + unit * size + 4 * unit * size + 4 * unit * size
    return {
        "parameters": wide * PSI,  # noqa: F821
        "gradients": size * PSI,  # noqa: F821
        "moments": 2 * wide * PSI,  # noqa: F821
        "casts": 0 if low is None else size * MATRICES,  # noqa: F821
        "activations": LAYERS * block,  # noqa: F821
    }
