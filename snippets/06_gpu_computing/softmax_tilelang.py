"""Softmax of rows in TileLang: fragments of a block, whose layout the compiler infers.

Without a GPU, the program prints the first part of the CUDA C++ that TileLang generates,
compiles all of it for sm_90, runs its PTX on the CPU and prints what the machine code uses. On
a GPU, it checks the kernel and measures its speed.

It needs tilelang and nvcc: pip install -r requirements/tilelang.txt
"""

import shutil
import sys

from softmax_problem import WIDTHS, Binary, run_program

try:
    import tilelang
    import tilelang.language as T
except ImportError:
    sys.exit("this program needs TileLang: pip install -r requirements/tilelang.txt")
from tilelang import tvm
from tilelang.contrib import nvcc
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

THREADS = 256


# --8<-- [start:kernel]
def make_kernel(rows: int, columns: int):
    """Return the kernel for these sizes; columns must be a multiple of 4."""
    block = -(-columns // (4 * THREADS)) * 4 * THREADS

    @T.prim_func
    def softmax_kernel(
        x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows, columns), "float32")
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            tile = T.alloc_fragment((block,), "float32")
            top = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i in T.Parallel(block):
                tile[i] = T.if_then_else(i < columns, x[row, i], -T.infinity("float32"))
            T.reduce_max(tile, top, dim=0)
            for i in T.Parallel(block):
                tile[i] = T.exp(tile[i] - top[0])
            T.reduce_sum(tile, total, dim=0)
            for i in T.Parallel(block):
                if i < columns:
                    y[row, i] = tile[i] / total[0]

    return softmax_kernel


# --8<-- [end:kernel]
KERNELS = {}


def softmax(x):
    """Return the softmax of each row of x [rows, columns]."""
    shape = tuple(x.shape)
    if shape not in KERNELS:
        KERNELS[shape] = tilelang.compile(make_kernel(*shape), out_idx=[1])
    return KERNELS[shape](x)


# --8<-- [start:compiled]
def compiled(rows: int, columns: int) -> dict[str, Binary]:
    """Generate CUDA C++ for sm_90, and compile it with nvcc."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    with target:
        lowered = tilelang.lower(make_kernel(rows, columns), target=target)
    source = lowered.kernel_source
    if columns == WIDTHS[-1]:
        lines = source[source.rindex('extern "C"') :].splitlines()
        end = next(i for i, text in enumerate(lines) if "AllReduce" in text)
        print(f"generated for rows of {columns}:", *lines[: end + 1], "  ...\n", sep="\n")
    folders = ["-I" + TILELANG_TEMPLATE_PATH, "-I" + CUTLASS_INCLUDE_DIR]
    cubin, ptx = (
        nvcc.compile_cuda(source, form, arch=["-arch=sm_90"], options=["-std=c++17", *folders])
        for form in ("cubin", "ptx")
    )
    (function,) = lowered.device_mod.functions.values()
    shared = int(function.attrs["dyn_shared_memory_buf"])
    return {"TileLang": Binary(bytes(cubin), ptx.decode(), shared=shared)}


# --8<-- [end:compiled]


if __name__ == "__main__":
    if not shutil.which("nvcc"):
        sys.exit("TileLang needs nvcc, of the CUDA toolkit (but no GPU)")
    run_program({"TileLang": softmax}, compiled)
