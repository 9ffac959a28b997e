"""A sum over a block, written with numba: the shared memory of the block after each barrier.

Without a GPU, numba's simulator runs every CUDA thread as a Python thread. Shared memory,
barriers and atomics work, and a debugger can stop inside a kernel. An index outside of an array
raises an error that names the thread. On a GPU the same access raises no error here.
"""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
import numpy as np
from numba import cuda, float32

THREADS = 8


@cuda.jit
def reduce_kernel(x, total, trace):
    shared = cuda.shared.array(THREADS, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    shared[t] = x[i] if i < x.size else 0
    cuda.syncthreads()  # all values are stored
    level = 0
    reach = THREADS // 2
    while reach > 0:
        if cuda.blockIdx.x == 0:
            trace[level, t] = shared[t]
        if t < reach:
            shared[t] += shared[t + reach]
        cuda.syncthreads()  # outside of the if: every thread must reach it
        level += 1
        reach //= 2
    if t == 0:
        if cuda.blockIdx.x == 0:
            trace[level, 0] = shared[0]
        cuda.atomic.add(total, 0, shared[0])


@cuda.jit
def reduce_without_bound(x, total):
    cuda.atomic.add(total, 0, x[cuda.grid(1)])  # the last block reads past the end


def reduce(x: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum of x, and block 0's shared memory before each level of the tree."""
    total = np.zeros(1, np.float32)
    trace = np.zeros((THREADS.bit_length(), THREADS), np.float32)
    blocks = -(-x.size // THREADS)
    reduce_kernel[blocks, THREADS](x, total, trace)
    return float(total[0]), trace


def main() -> None:
    total, trace = reduce(np.arange(1, 9, dtype=np.float32))
    for level, row in enumerate(trace):
        live = THREADS >> level
        values = " ".join(f"{value:3.0f}" for value in row[:live])
        print(f"after barrier {level + 1}: {values:31} {live} partial sum{'s' * (live > 1)}")
    assert total == 36
    rng = np.random.default_rng(0)
    for n in (1, 7, 9, 50):
        x = rng.standard_normal(n).astype(np.float32)
        total, trace = reduce(x)
        np.testing.assert_allclose(total, x.sum(dtype=np.float64), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(trace[0, :n], x[:THREADS])  # of block 0, not of the last
        print(f"{n:2} elements, blocks: {-(-n // THREADS)}, equal to float64")
    try:
        reduce_without_bound[2, THREADS](np.ones(15, np.float32), np.zeros(1, np.float32))
        assert os.environ.get("NUMBA_ENABLE_CUDASIM") != "1", "the simulator saw nothing"
        print("index 15 of 15 elements: no error")
    except IndexError as error:
        print(f"IndexError: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
