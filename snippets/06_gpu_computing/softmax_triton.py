"""Softmax of rows in Triton: the kernel computes with whole rows, and it names no thread.

Without a GPU, the program compiles the kernel for sm_90, runs its PTX on the CPU and prints
what the machine code uses. On a GPU, it checks the kernel and measures its speed.
"""

import triton
import triton.language as tl
from softmax_problem import Binary, run_program
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


# --8<-- [start:kernel]
@triton.jit
def triton_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + row * columns + i, y, mask=i < columns)


def triton_softmax(x):
    """Return the softmax of each row of x [rows, columns], which must be contiguous."""
    y, (rows, columns) = x.new_empty(x.shape), x.shape
    block = triton.next_power_of_2(columns)
    triton_kernel[(rows,)](x, y, columns, BLOCK=block, num_warps=8)
    return y


# --8<-- [end:kernel]
# --8<-- [start:compiled]
def compiled_triton(rows: int, columns: int) -> dict[str, Binary]:
    """Compile as a launch would: an argument that is a multiple of 16 is promised to be one."""
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "columns": "i32", "BLOCK": "constexpr"}
    multiples = [0, 1, 2] if columns % 16 == 0 else [0, 1]
    promises = {(i,): [["tt.divisibility", 16]] for i in multiples}
    sizes = {"BLOCK": triton.next_power_of_2(columns)}
    source = ASTSource(triton_kernel, types, sizes, promises)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    asm, shared = built.asm, built.metadata.shared
    return {"Triton": Binary(asm["cubin"], asm["ptx"], (columns, 0, 0), shared)}


# --8<-- [end:compiled]


if __name__ == "__main__":
    run_program({"Triton": triton_softmax}, compiled_triton, pinned=False)
