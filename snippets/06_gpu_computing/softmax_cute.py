"""Softmax of rows in CuTe DSL: the program of a thread, in Python, with layouts for its data.

Without a GPU, the program compiles the kernel for sm_90, runs its PTX on the CPU and prints
what the machine code uses. On a GPU, it checks the kernel and measures its speed.

It needs nvidia-cutlass-dsl: pip install -r requirements/cute.txt
"""

import math
import operator
import sys

from softmax_problem import Binary, run_program

try:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor
except ImportError:
    sys.exit("this program needs CuTe DSL: pip install -r requirements/cute.txt")

THREADS, WARPS = 256, 8


# --8<-- [start:block]
@cute.jit
def over_block(
    value: cutlass.Float32,
    op: cutlass.Constexpr,
    neutral: cutlass.Constexpr,
    partial: cute.Tensor,
) -> cutlass.Float32:
    """Combine the values of all threads of a block with `op`; all get the result."""
    value = cute.arch.warp_reduction(value, op)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    cute.arch.sync_threads()  # others may still read what the previous call left in `partial`
    if lane == 0:
        partial[warp] = value
    cute.arch.sync_threads()
    value = cutlass.Float32(neutral)
    if lane < WARPS:
        value = partial[lane]
    return cute.arch.warp_reduction(value, op)


# --8<-- [end:block]
# --8<-- [start:kernel]
@cute.kernel
def softmax_kernel(x: cute.Tensor, y: cute.Tensor, block: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    one_copy = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128
    )
    threads, values = cute.make_layout((1, THREADS), stride=(0, 1)), cute.make_layout((1, 4))
    mine = cute.make_tiled_copy_tv(one_copy, threads, values).get_slice(thread)

    tile, at = (1, block), (row, 0)
    source = mine.partition_S(cute.local_tile(x, tile, at))  # ((4, 1), 1, block / 1024)
    target = mine.partition_D(cute.local_tile(y, tile, at))
    where = mine.partition_S(cute.local_tile(cute.make_identity_tensor(x.shape), tile, at))
    vectors = cute.size(where, mode=[2])
    inside = cute.make_rmem_tensor((1, 1, vectors), cutlass.Boolean)
    for k in cutlass.range_constexpr(vectors):
        inside[0, 0, k] = where[(0, 0), 0, k][1] < x.shape[1]

    # --8<-- [end:kernel]
    # --8<-- [start:values]
    registers = cute.make_rmem_tensor_like(source)
    registers.fill(-math.inf)
    cute.copy(one_copy, source, registers, pred=inside)
    partial = cutlass.memory.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(WARPS)
    )
    values = registers.load()
    top = values.reduce(cute.ReductionOp.MAX, -math.inf, 0)
    top = over_block(top, cute.arch.fmax, -math.inf, partial)
    e = cute.math.exp(values - top)
    total = over_block(e.reduce(cute.ReductionOp.ADD, 0.0, 0), operator.add, 0.0, partial)
    registers.store(e / total)
    cute.copy(one_copy, registers, target, pred=inside)


# --8<-- [end:values]
# --8<-- [start:launch]
@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, block: cutlass.Constexpr):
    softmax_kernel(x, y, block).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1))


def build(x: cute.Tensor, y: cute.Tensor, options: str = ""):
    """Compile for tensors of this shape; the number of columns must be a multiple of 4."""
    block = -(-x.shape[1] // (4 * THREADS)) * 4 * THREADS
    return cute.compile(launch, x, y, block, options=options)


KERNELS = {}


def softmax(x):
    """Return the softmax of each row of x [rows, columns]."""
    y = x.new_empty(x.shape)
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (x, y)]
    if x.shape not in KERNELS:
        KERNELS[x.shape] = build(*tensors)
    KERNELS[x.shape](*tensors)
    return y


# --8<-- [end:launch]


def compiled(rows: int, columns: int) -> dict[str, Binary]:
    """Compile for a tensor that does not exist. The launch adds the 32 bytes of `partial`."""
    tensor = make_fake_compact_tensor(
        cutlass.Float32, (rows, columns), stride_order=(1, 0), assumed_align=16
    )
    kernel = build(tensor, tensor, "--gpu-arch sm_90 --keep-cubin --keep-ptx")
    return {"CuTe DSL": Binary(kernel.artifacts.CUBIN, kernel.artifacts.PTX, shared=4 * WARPS)}


if __name__ == "__main__":
    run_program({"CuTe DSL": softmax}, compiled)
