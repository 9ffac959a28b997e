"""Step 7: BLOCK is the number of columns"""

import torch

STEP, HINT = 7, "power_of_two"


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """y = softmax of the rows of x; both [rows, columns], with columns side by side."""
    rows, columns = x.shape
    block = columns
    softmax_kernel[(rows,)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block)  # noqa: F821
