# ruff: noqa: F821 (names of the lab)
"""Step 1: no mask"""

STEP, HINT = 1, "missing_part"


def predict(width: int, hidden: int, blocks: int, rows: int) -> Parts:
    """What one step of Net with `blocks` blocks, dropout and Adam will need, in float32."""
    psi = width * hidden + hidden + hidden * width + width
    psi += blocks * (2 * hidden + 2 * 4 * hidden * hidden + 4 * hidden + hidden)
    norm, up, gelu, down = hidden + 2, hidden, 4 * hidden, 4 * hidden
    mask = 0
    saved = blocks * rows * (4 * (norm + up + gelu + down) + mask)
    saved += 4 * rows * (hidden + width)  # the last layer and the loss
    return Parts(4 * psi, 4 * psi, 8 * psi, saved)
