"""Step 7: the load has no mask"""

import triton
import triton.language as tl

STEP, HINT = 7, "load_mask"


@triton.jit
def softmax_kernel(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < columns
    x = tl.load(x_ptr + row * x_stride + i)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * y_stride + i, e / tl.sum(e, axis=0), mask=inside)
