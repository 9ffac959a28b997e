# ruff: noqa: F821 (names of the lab)
"""Step 1: the weights alone"""

STEP, HINT = 1, "biases"


def predict(width: int, hidden: int, blocks: int, rows: int) -> Parts:
    """What one step of Net with `blocks` blocks, dropout and Adam will need, in float32."""
    psi = 2 * width * hidden
    psi += blocks * 2 * 4 * hidden * hidden
    norm, up, gelu, down = hidden + 2, hidden, 4 * hidden, 4 * hidden
    mask = 4 * hidden  # of one byte each
    saved = blocks * rows * (4 * (norm + up + gelu + down) + mask)
    saved += 4 * rows * (hidden + width)  # the last layer and the loss
    return Parts(4 * psi, 4 * psi, 8 * psi, saved)
