"""Softmax of rows in Gluon: the Triton kernel with a layout that says which thread has what.

Gluon is a part of Triton's package. Without a GPU, the program compiles the kernel for sm_90,
runs its PTX on the CPU and prints what the machine code uses. On a GPU, it checks the kernel
and measures its speed.
"""

import triton
from softmax_problem import Binary, run_program
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


# --8<-- [start:kernel]
@gluon.jit
def gluon_kernel(x_ptr, y_ptr, columns, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    # 4 neighbouring elements for each thread, 32 threads for each warp, then the next warp
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    row = gl.program_id(0).to(gl.int64)
    i = gl.arange(0, BLOCK, layout=layout)
    x = gl.load(x_ptr + row * columns + i, mask=i < columns, other=-float("inf"))
    e = gl.exp(x - gl.max(x, axis=0))
    y = e / gl.sum(e, axis=0)
    gl.store(y_ptr + row * columns + i, y, mask=i < columns)


def gluon_softmax(x):
    """Return the softmax of each row of x [rows, columns], which must be contiguous."""
    y, (rows, columns) = x.new_empty(x.shape), x.shape
    block = triton.next_power_of_2(columns)
    gluon_kernel[(rows,)](x, y, columns, BLOCK=block, WARPS=8, num_warps=8)
    return y


# --8<-- [end:kernel]


def compiled_gluon(rows: int, columns: int) -> dict[str, Binary]:
    """Compile as a launch would: an argument that is a multiple of 16 is promised to be one."""
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "columns": "i32"}
    types |= {"BLOCK": "constexpr", "WARPS": "constexpr"}
    multiples = [0, 1, 2] if columns % 16 == 0 else [0, 1]
    promises = {(i,): [["tt.divisibility", 16]] for i in multiples}
    sizes = {"BLOCK": triton.next_power_of_2(columns), "WARPS": 8}
    source = GluonASTSource(gluon_kernel, types, sizes, promises)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    asm, shared = built.asm, built.metadata.shared
    return {"Gluon": Binary(asm["cubin"], asm["ptx"], (columns, 0, 0), shared)}


if __name__ == "__main__":
    run_program({"Gluon": gluon_softmax}, compiled_gluon, pinned=False)
