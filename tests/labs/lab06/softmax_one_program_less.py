"""Step 7: the last row has no program"""

import torch
import triton

STEP, HINT = 7, "programs"


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """y = softmax of the rows of x; both [rows, columns], with columns side by side."""
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    softmax_kernel[(max(rows - 1, 1),)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block)  # noqa: F821
