"""Step 7: rows taken to be contiguous"""

import torch
import triton

STEP, HINT = 7, "row_stride"


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """y = softmax of the rows of x; both [rows, columns], with columns side by side."""
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    softmax_kernel[(rows,)](x, y, columns, columns, columns, BLOCK=block)  # noqa: F821
