"""Softmax of rows in cuTile: the kernel computes with tiles, and the compiler has the threads.

Without a GPU, the program compiles the kernel for sm_90 and prints what the machine code uses.
The compiler of cuTile returns no PTX, so only a GPU can check the result: there the program
also measures the speed.

It needs cuda-tile and NVIDIA's compiler for Tile IR: pip install -r requirements/cutile.txt
"""

import io
import sys
from functools import partial

from softmax_problem import Binary, run_program

try:
    import cuda.tile as ct
    from cuda.tile import compilation
except ImportError:
    sys.exit("this program needs cuTile: pip install -r requirements/cutile.txt")


# --8<-- [start:kernel]
def rows_of_softmax(x, y, BLOCK: ct.Constant[int]):
    row = ct.bid(0)
    tile = ct.load(x, (row, 0), (1, BLOCK), padding_mode=ct.PaddingMode.NEG_INF)
    e = ct.exp(tile - ct.max(tile, 1, keepdims=True))
    ct.store(y, (row, 0), e / ct.sum(e, 1, keepdims=True))


HINT = 4  # blocks that should fit on an SM
KERNELS = {
    "cuTile": ct.kernel(rows_of_softmax),
    f"occupancy={HINT}": ct.kernel(rows_of_softmax, occupancy=HINT),
}


def softmax(kernel, x):
    """Return the softmax of each row of x [rows, columns]."""
    import torch

    y, (rows, columns) = x.new_empty(x.shape), x.shape
    block = 1 << (columns - 1).bit_length()
    ct.launch(torch.cuda.current_stream(), (rows, 1, 1), kernel, (x, y, block))
    return y


# --8<-- [end:kernel]


# --8<-- [start:compiled]
def compiled(rows: int, columns: int) -> dict[str, Binary]:
    """Compile with what a launch would find out about a tensor of this shape."""
    matrix = compilation.ArrayConstraint(
        ct.float32,
        ndim=2,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        stride_constant=(None, 1),
        stride_divisible_by=(4, 1),
        shape_divisible_by=(1, 4),
        base_addr_divisible_by=16,
        alias_groups=(),
        may_alias_internally=False,
    )
    convention = compilation.CallingConvention.cutile_python_v1()
    block = 1 << (columns - 1).bit_length()
    signature = compilation.KernelSignature([matrix, matrix, block], convention)
    binaries = {}
    for name, kernel in KERNELS.items():
        cubin = io.BytesIO()
        compilation.export_kernel(
            kernel, [signature], cubin, gpu_code="sm_90", output_format="cubin"
        )
        binaries[name] = Binary(cubin.getvalue())
    return binaries


# --8<-- [end:compiled]


if __name__ == "__main__":
    run_program({name: partial(softmax, kernel) for name, kernel in KERNELS.items()}, compiled)
