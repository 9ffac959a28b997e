# %% [markdown]
# # Lab 06: Write CUDA and Triton kernels
#
# A GPU runs your function a hundred thousand times at once, and leaves to you who does what. In
# this lab you write eight kernels: seven in CUDA C++, one in Triton. With each you meet one
# thing that makes kernels right, or fast: the index, the order of accesses in memory, shared
# memory and its barriers, warps, banks, atomics, tiles.
#
#     python labs/lab06_cuda_basics.py
#
# runs the finished lab. No GPU is needed: `cuda_on_cpu.py`, which lies beside it, runs CUDA C++
# on the CPU, every thread of a block by itself. It finds accesses out of bounds, memory read
# before it was written, missing barriers, and the lab lets it count what the memory of a GPU
# would have to do. What it cannot tell is time. Where there is an NVIDIA GPU, each kernel runs
# there too, its results are compared, and the last cell measures. To do it yourself:
#
#     python labs/start.py 06
#     python my_labs/lab06_cuda_basics.py
#     python labs/check.py my_labs/lab06_cuda_basics.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step; `--step 2` grades one step. You need Linux, g++ 12 or newer, and Triton (PyTorch for
# CUDA brings it; otherwise `pip install triton`).
#
# There are eight steps. Each has a text, one or two blanks, and a check that prints what it
# proved. Your copy runs as far as the first blank and says in one line what belongs there.
# Kernels are strings here, returned by functions: a blank in a kernel is the line `#error`,
# which you replace by C++. The chapter "GPU computing" derives what you need to know of the
# machine, "Kernels" what you write. Allow three hours.

# %%
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

ON_GPU = torch.cuda.is_available() and torch.version.cuda is not None
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the import: run by Python, on the CPU
try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit("this lab needs Triton: pip install triton")


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence from one rank."""
    blank = issubclass(kind, NotImplementedError)  # if so, every rank stops at a blank
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 prints first, and its launcher then ends the other ranks
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


if __name__ == "__main__":
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## How a kernel runs here
#
# You may skip the next cell. `Kernels(function)` compiles the source that the function returns,
# and `run("name", grid, block, *arguments)` launches one kernel of it, as
# `name<<<grid, block>>>(arguments)` does in a `.cu` file. Tensors become pointers; what the
# kernel writes is in the tensors afterwards. A `printf` in a kernel prints. What comes back are
# counts:
#
# * A warp's 32 lanes execute a load together: that is one **request**. Memory hands out
#   **sectors** of 32 bytes, so a request costs as many sectors as its lanes touch.
# * Shared memory has 32 **banks** of 4 bytes. A request costs as many **passes** as the fullest
#   bank has different words to give.


# %%
class Counts(NamedTuple):
    """What the memory had to do for one launch."""

    loads: int  # of global memory, by single threads
    load_requests: int  # the same by warps
    load_sectors: int
    store_requests: int
    store_sectors: int
    shared_requests: int
    shared_passes: int
    global_atomics: int  # by single threads
    shared_atomics: int


class Fault(AssertionError):
    """What is wrong with a kernel, found when it was compiled or run."""


HOST = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static char** word;  // what is left of the command line
static struct { void* at; size_t bytes; } arrays[16];
static int used;
static void* take() {  // a tensor: its bytes come on standard input
  size_t bytes = atoll(*word++);
  void *host = malloc(bytes), *device;
  if (fread(host, 1, bytes, stdin) != bytes) exit(3);
  cudaMalloc(&device, bytes);
  cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
  arrays[used].at = device, arrays[used++].bytes = bytes;
  return device;
}

struct Access { unsigned block, thread, instruction, at, what; };
static Access* accesses = (Access*)malloc(sizeof(Access) << 22);
static unsigned long noted;
static void note(size_t at, size_t size, int access, const char* kind, uint32_t instruction) {
  unsigned what = (*kind == 's' ? 3 : 0) + access;  // a read, a write, an atomic
  if (noted < 1 << 22)
    accesses[noted++] = {emu::block_number(), emu::self->id, instruction, (unsigned)at, what};
}

static FILE* results;
static int report() {
  cudaError_t error = cudaDeviceSynchronize();
  if (!error) error = cudaGetLastError();
  if (error) return fprintf(stderr, "the launch failed: %s\n", cudaGetErrorString(error)), 1;
  for (int i = 0; i < used; i++) {
    void* host = malloc(arrays[i].bytes);
    cudaMemcpy(host, arrays[i].at, arrays[i].bytes, cudaMemcpyDeviceToHost);
    fwrite(host, 1, arrays[i].bytes, results);
  }
  fwrite(accesses, sizeof(Access), noted, results);
  return fclose(results);
}
"""


def count(accesses: Iterable[tuple[int, ...]]) -> Counts:
    """What warps asked of memory; an access is [block, thread, instruction, byte, what]."""
    single = [0] * 6  # reads, writes and atomics of global, then of shared memory
    times: dict[tuple[int, int, int], int] = {}
    requests: dict[tuple[int, ...], set[int]] = {}
    for block, thread, instruction, at, what in accesses:
        single[what] += 1
        me = (block, thread, instruction)
        times[me] = times.get(me, 0) + 1
        unit = 32 if what < 3 else 4
        request = (what, block, thread // 32, instruction, times[me])
        requests.setdefault(request, set()).add(at // unit)
    number, cost = [0] * 6, [0] * 6
    for (what, *_), touched in requests.items():
        number[what] += 1
        banks = [word % 32 for word in touched]
        cost[what] += len(touched) if what < 3 else max(map(banks.count, set(banks)))
    shared = (number[3] + number[4], cost[3] + cost[4])
    return Counts(
        single[0], number[0], cost[0], number[1], cost[1], *shared, single[2], single[5]
    )


def emulator() -> Path:
    """cuda_on_cpu.py: beside this file, or in the labs folder that my_labs was written from."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "labs", Path("labs").resolve()):
        if (folder / "cuda_on_cpu.py").is_file():
            return folder / "cuda_on_cpu.py"
    sys.exit("cuda_on_cpu.py is not here: copy it from the labs folder to beside this file")


def source_of(function: Callable[[], str]) -> tuple[str, int]:
    """The source a function returns, and the line of its file where that begins."""
    source = function()
    file = Path(function.__code__.co_filename).read_text(encoding="utf-8")
    first = file[: max(file.find(source), 0)].count("\n") + 1
    if blank := re.search(r'#error "(step \d+: .*)"', source):
        error = NotImplementedError(blank[1])
        error.line = first + source[: blank.start()].count("\n")
        raise error
    return source, first


class Kernels:
    """The kernels whose sources functions return, compiled for the CPU (and for the GPU)."""

    def __init__(self, *functions: Callable[[], str]):
        sources = [f"#line {line}\n{source}" for source, line in map(source_of, functions)]
        self.source = "\n".join(sources)
        self.kernels = {
            name: [parameter.strip() for parameter in parameters.split(",")]
            for name, parameters in re.findall(
                r"__global__\s+void\s+(\w+)\s*\(([^)]*)\)", self.source
            )
        }
        self.folder = tempfile.TemporaryDirectory(prefix="lab06-")
        self.program = Path(self.folder.name, "kernels")
        path = Path(self.folder.name, "kernels.cu")
        path.write_text(f"{HOST}\n{self.source}\n{self.main()}")
        compile_it = [sys.executable, emulator(), "-o", self.program, path]
        done = subprocess.run(compile_it, capture_output=True, text=True)
        if done.returncode:
            self.fail(done.stderr, "error: ", 0)  # the first of many

    def main(self) -> str:
        """The host's program: reads a kernel's name, its grid, and its arguments."""
        lines = ["int main(int, char** words) {", "  int size[6];"]
        lines += ['  results = fdopen(dup(1), "wb"), dup2(2, 1);  // a kernel may print, too']
        lines += ["  for (int i = 0; i < 6; i++) size[i] = atoi(words[2 + i]);"]
        lines += ["  dim3 grid(size[0], size[1], size[2]), block(size[3], size[4], size[5]);"]
        lines += ["  word = words + 8;"]
        for name, parameters in self.kernels.items():
            lines += [f'  if (!strcmp(words[1], "{name}")) {{']
            for i, parameter in enumerate(parameters):
                kind = re.sub(r"\b(__restrict__|const)\b|\w+$", "", parameter).strip()
                value = "take()" if "*" in parameter else "atoll(*word++)"
                lines += [f"    {kind} a{i} = ({kind}){value};"]
            passed = ", ".join(f"a{i}" for i in range(len(parameters)))
            lines += ["    emu::watch = note;", f"    {name}<<<grid, block>>>({passed});"]
            lines += ["    emu::watch = nullptr;", "  }"]
        return "\n".join([*lines, "  return report();", "}", ""])

    def fail(self, said: str, mark: str, which: int) -> None:
        """Raise what the compiler or the emulator said, with the line in this file."""
        lines = [line for line in said.splitlines() if mark in line] or said.splitlines()
        what = lines[which] if lines else "it ended without a word"
        place = re.match(r".*?kernels\.cu:(\d+)(?::\d+)?: (.*)", what)
        error = Fault(re.sub(r"kernels\.cu:(\d+)", r"line \1", place[2] if place else what))
        if place:
            error.line = int(place[1])
        raise error

    def run(self, name: str, grid, block, *arguments: torch.Tensor | int) -> Counts:
        """Launch a kernel; its tensors [any shape, contiguous] are written in place."""
        if len(self.kernels.get(name, [])) != len(arguments):
            raise Fault(f"there is no kernel {name} that takes {len(arguments)} arguments")
        grid, block = (
            (*(size if isinstance(size, tuple) else (size,)), 1, 1)[:3]
            for size in (grid, block)
        )
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        words = [a.nbytes if isinstance(a, torch.Tensor) else a for a in arguments]
        limited = ["sh", "-c", 'ulimit -S -t 2; exec "$@"', "sh"]  # seconds of processor time
        done = subprocess.run(
            [*limited, self.program, name, *map(str, (*grid, *block, *words))],
            input=b"".join(a.numpy().tobytes() for a in tensors),
            capture_output=True,
            env=os.environ | {"EMU_SEED": "1"},  # the threads of a block in random order
        )
        if done.returncode == -signal.SIGXCPU:
            raise Fault(f"{name} did not end within 2 seconds")
        said = done.stderr.decode(errors="replace")
        if done.returncode:
            self.fail(said, "kernels.cu:", -1)  # below what the kernel has printed
        print(said, end="")
        at = 0
        for a in tensors:
            mine = bytearray(done.stdout[at : at + a.nbytes])
            a.copy_(torch.frombuffer(mine, dtype=a.dtype).view_as(a))
            at += a.nbytes
        if ON_GPU:
            self.compare_on_gpu(name, grid, block, before, arguments)
        noted = iter(memoryview(done.stdout[at:]).cast("I").tolist())
        return count(zip(*[noted] * 5, strict=True))  # five numbers for each access

    def compare_on_gpu(self, name: str, grid, block, before, after) -> None:
        """The same launch on the GPU, compiled by NVRTC."""
        kernel = torch.cuda._compile_kernel(self.source, name)
        mine = [a.cuda() if isinstance(a, torch.Tensor) else a for a in before]
        kernel(grid=grid, block=block, args=mine)
        torch.cuda.synchronize()
        for theirs, ours in zip(mine, after, strict=True):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(theirs.cpu(), ours, equal_nan=True)


def ask(condition: bool, otherwise: str) -> None:
    """A check, in one line."""
    if not condition:
        raise AssertionError(otherwise)


def numbers(*shape: int) -> torch.Tensor:
    """Small whole numbers as floats: their sums are exact, in whatever order."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * 37 % 101 - 50).view(shape)


def nothing(*shape: int) -> torch.Tensor:
    """Room for a result, filled with NaN: what was not written shows."""
    return torch.full(shape, float("nan"))


# %% [markdown]
# ## Step 1: which thread does which element
#
# A kernel is the body of a loop without the loop. You launch it as a **grid** of **blocks** of
# threads, all of which run the same function; the only thing that tells them apart is where
# they stand. `blockIdx.x` is the number of my block, `threadIdx.x` my number within it, and
# `blockDim.x` the number of threads in a block. So
#
#     blockIdx.x * blockDim.x + threadIdx.x
#
# counts all threads of the grid through, 0, 1, 2, …, and thread $i$ does element $i$.
#
# Blocks are all of one size, and $n$ is rarely a multiple of it. You launch enough blocks,
# $\lceil n / 128 \rceil$ of 128 threads, which is too many threads: the last ones must do
# nothing. A kernel that forgets this writes behind its arrays. On a GPU that may destroy
# another tensor and go unnoticed for weeks. The emulator knows where each array ends.


# %%
def vector_add() -> str:
    """c = a + b for vectors of n floats, one thread for each element."""
    return r"""
__global__ void vector_add(const float* a, const float* b, float* c, int n) {
  // >>> solution 1: the number of this thread in the grid, the guard, and the sum
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
  // <<< solution
}
"""


def blocks_for(n: int, threads: int) -> int:
    """How many blocks of so many threads cover n elements."""
    # >>> solution 1: n / threads, rounded up, in whole numbers
    return (n + threads - 1) // threads
    # <<< solution


# %%
if __name__ == "__main__":

    def check_vector_add() -> None:
        sizes = (1, 31, 33, 128, 1000)
        kernels = Kernels(vector_add)
        grids = [blocks_for(n, 128) for n in sizes]
        ask(grids == [1, 1, 1, 1, 8], f"blocks_for({sizes}, 128) gives {grids}")
        for n, grid in zip(sizes, grids, strict=True):
            a, b, c = numbers(n), numbers(n).flip(0), nothing(n)
            kernels.run("vector_add", grid, 128, a, b, c, n)
            wrong = (c != a + b).sum()
            ask(wrong == 0, f"of {n} elements {wrong} are not a + b")
        print(f"step 1: a + b for n = {', '.join(map(str, sizes))} in {grids} blocks of 128")

    check_vector_add()

# %% [markdown]
# ## Step 2: a grid that strides, and what a warp asks for
#
# A block for every 128 elements is simple, and ties the launch to $n$. A kernel with a
# **grid-stride loop** works with any grid: thread $i$ does the elements $i$, $i + G$, $i + 2G$,
# …, where $G$ is the number of all threads, `gridDim.x * blockDim.x`. Launched with as many
# blocks as the GPU can hold at once, it starts no thread in vain and can keep numbers in
# registers from one element to the next.
#
# Why not give each thread a piece of its own, $n / G$ elements in a row, as you would on a CPU?
# Because of who reads *at the same moment*. The 32 lanes of a warp execute a load together.
# If they read 32 neighbouring floats, the request touches $32 \cdot 4 / 32 = 4$ sectors, and
# every byte that comes is used: the access is **coalesced**. If each lane is in a piece of its
# own, every lane touches a sector of its own: 32 of them, of which 4 bytes each are used. The
# sum of work is the same, and each request costs eight times as much. (A cache gives that back
# only if it can keep 32 sectors for every warp until the lanes come to their next float.)
#
# Write the loop, and predict the sectors of a warp whose lane $l$ reads the float number
# $l \cdot \text{stride}$. The check counts them in the kernel `copy_every`.


# %%
def add_in_strides() -> str:
    """c = a + b for vectors of n floats, by a grid of any size."""
    return r"""
__global__ void add_in_strides(const float* a, const float* b, float* c, int n) {
  // >>> solution 2: a loop from this thread's number up to n in steps of all threads
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) c[i] = a[i] + b[i];
  // <<< solution
}
"""


def copy_every() -> str:
    """y[i] = x[i * stride]: nothing to write here."""
    return r"""
__global__ void copy_every(const float* x, float* y, int n, int stride) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i * stride];
}
"""


def sectors(stride: int) -> int:
    """Sectors of 32 bytes that lanes 0 to 31 touch which read the floats number lane * stride.

    Lane 0's float lies at the beginning of a sector.
    """
    # >>> solution 2: the number of different sectors among the 32 addresses
    # hint: the float number i lies at byte 4 * i
    return len({4 * lane * stride // 32 for lane in range(32)})
    # <<< solution


# %%
if __name__ == "__main__":

    def check_strides() -> None:
        kernels = Kernels(add_in_strides, copy_every)
        for n, grid, block in ((1, 2, 32), (1000, 3, 64), (512, 2, 64)):
            a, b, c = numbers(n), numbers(n).flip(0), nothing(n)
            counts = kernels.run("add_in_strides", grid, block, a, b, c, n)
            wrong = (c != a + b).sum()
            ask(wrong == 0, f"{grid} blocks of {block}: of {n} elements {wrong} are not a + b")
        each = counts.load_sectors / counts.load_requests
        ask(each == 4, f"a warp's load touches {each:g} sectors, neighbours would touch 4")
        print(f"step 2: grid-stride loop: a + b by any grid, {each:g} sectors a request")
        for stride in (1, 2, 3, 5, 8, 32):
            counts = kernels.run(
                "copy_every", 1, 64, numbers(64 * stride), nothing(64), 64, stride
            )
            counted, mine = counts.load_sectors / counts.load_requests, sectors(stride)
            ask(mine == counted, f"stride {stride}: {mine} predicted, {counted:g} counted")
            print(
                f"        stride {stride:2}: {mine:2} sectors predicted, {counted:2g} counted"
            )

    check_strides()

# %% [markdown]
# ## Step 3: shared memory and barriers
#
# To add up a million numbers, threads must give each other their results. The threads of one
# block have **shared memory** for that: small, fast, on the SM itself, declared by
# `__shared__`. What lies in it is visible to the whole block, and undefined until somebody has
# written it.
#
# The sum is a tree. Each thread puts its number into `part[t]`. Then the lower half of the
# threads adds what the upper half has: `part[t] += part[t + half]`, with `half` $= 128, 64, …,
# 1$. After $\log_2 256 = 8$ rounds, `part[0]` is the sum of the block.
#
# Threads do not run in step: one warp can be in the second round while another has not begun
# the first. `__syncthreads()` is the **barrier**: nobody goes on before all threads of the
# block have arrived, and what was written before it can be read behind it. One is needed after
# the numbers are put there, and one after each round. And *all* threads must come to it: a
# barrier inside of `if (t < half)` or `if (i < n)` lets threads wait where others never come.
# The emulator names barriers that are missed and accesses that none of them orders.
#
# Threads whose element is beyond $n$ must take part too, with a zero: their place in `part` is
# read by others.


# %%
def block_sum() -> str:
    """sums[block] = the sum of the blockDim.x elements of that block; blockDim.x is a power
    of two, at most 256."""
    return r"""
__global__ void block_sum(const float* x, float* sums, int n) {
  __shared__ float part[256];
  int t = threadIdx.x;
  // >>> solution 3: my element (or 0) into part[t], halve until one is left, write it
  int i = blockIdx.x * blockDim.x + t;
  part[t] = i < n ? x[i] : 0;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = part[0];
  // <<< solution
}
"""


# %%
if __name__ == "__main__":

    def assert_sums(function: Callable[[], str], name: str) -> Counts:
        kernels = Kernels(function)
        for n, block in ((1, 64), (1000, 64), (700, 256)):
            grid = blocks_for(n, block)
            x, sums = numbers(n), nothing(grid)
            counts = kernels.run(name, grid, block, x, sums, n)
            true = torch.nn.functional.pad(x, (0, grid * block - n)).view(grid, block).sum(1)
            wrong = (sums != true).sum()
            ask(wrong == 0, f"{grid} blocks of {block}: {wrong} of the sums are wrong")
        return counts

    def check_block_sum() -> None:
        counts = assert_sums(block_sum, "block_sum")
        print(
            f"step 3: sums of blocks of 64 and 256 are right; 3 blocks of 256 took "
            f"{counts.shared_requests} requests of shared memory"
        )

    check_block_sum()

# %% [markdown]
# ## Step 4: within a warp, no memory at all
#
# The 32 threads of a warp can read each other's registers. `__shfl_down_sync(mask, v, d)`
# returns the `v` of the lane that is $d$ further on (for the last $d$ lanes, their own `v`).
# `mask` names the lanes that take part, `0xffffffff` all 32 of them, and each of these must
# come to the call. Five of them add up a warp:
#
#     for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);
#
# and lane 0 has the sum. (The other lanes hold sums of something, of no use to anybody.)
#
# A block of 256 threads is 8 warps. Each adds up its own; lane 0 of each puts one number into
# shared memory; one barrier; then the first warp reads the 8 numbers and adds them by the same
# five shuffles, its other lanes with zeros. Eight barriers and all but $2 \cdot 8$ accesses to
# shared memory are gone.


# %%
def warp_sum() -> str:
    """The same sums as block_sum, by shuffles; blockDim.x is a multiple of 32, at most 1024."""
    return r"""
__device__ float sum_of_warp(float v) {
  // >>> solution 4: five shuffles, after which lane 0 returns the sum of all 32 lanes' v
  for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);
  return v;
  // <<< solution
}

__global__ void warp_sum(const float* x, float* sums, int n) {
  __shared__ float part[32];  // one number for each warp
  int t = threadIdx.x, lane = t % 32, warp = t / 32;
  // >>> solution 4: sum_of_warp, one number for each warp into part, and the sum of these
  int i = blockIdx.x * blockDim.x + t;
  float v = sum_of_warp(i < n ? x[i] : 0);
  if (lane == 0) part[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = sum_of_warp(lane < blockDim.x / 32 ? part[lane] : 0);
    if (lane == 0) sums[blockIdx.x] = v;
  }
  // <<< solution
}
"""


# %%
if __name__ == "__main__":

    def check_warp_sum() -> None:
        counts = assert_sums(warp_sum, "warp_sum")
        used = counts.shared_requests
        ask(used <= 3 * 18, f"{used} requests of shared memory, 3 * (8 + 1) would do")
        print(f"step 4: the same by shuffles: {used} requests of shared memory")

    check_warp_sum()

# %% [markdown]
# ## Step 5: a transpose, and the banks
#
# $y = x^T$ moves every number once and computes nothing, and still it is easy to make it touch
# eight times the sectors: thread $(r, c)$ that reads `x[r][c]` beside its neighbours writes
# `y[c][r]`, a row away from what its neighbours write. Reads are coalesced or writes are, not
# both.
#
# The way out goes through shared memory. A block takes a tile of $32 \times 32$: it reads rows
# of $x$ into the tile, waits at a barrier, and writes rows of $y$ out of the *columns* of the
# tile. Both sides of global memory are coalesced; the awkward walk happens in shared memory,
# which has no sectors.
#
# It has banks instead. Word $w$ of shared memory lies in bank $w \bmod 32$. A row of the tile
# is 32 words, in 32 banks; a column of `float tile[32][32]` is the words $0, 32, 64, …$, all in
# bank 0: 32 passes. With a column more, `tile[32][33]`, which nobody uses, a column is the
# words $0, 33, 66, …$ in 32 different banks.
#
# The block has $32 \times 8$ threads, `threadIdx.x` along a row, so each thread moves four
# elements, 8 rows apart. $x$ has `rows` rows and `columns` columns, neither a multiple of 32:
# guard the reads by the shape of $x$ and the writes by that of $y$. Block `(blockIdx.x,
# blockIdx.y)` reads the tile that begins at column `32 * blockIdx.x`, row `32 * blockIdx.y`.


# %%
def transpose() -> str:
    """y [columns, rows] = x [rows, columns] transposed; blocks of 32 × 8 threads."""
    return r"""
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  // >>> solution 5: a padded tile, four rows of x into it, a barrier, four rows of y out of it
  // hint: the tile's row of a thread is threadIdx.y + 0, 8, 16, 24
  // hint: y's tile begins at row 32 * blockIdx.x, column 32 * blockIdx.y
  __shared__ float tile[32][33];
  int row = 32 * blockIdx.y, column = 32 * blockIdx.x + threadIdx.x;
  for (int k = threadIdx.y; k < 32; k += 8)
    if (row + k < rows && column < columns)
      tile[k][threadIdx.x] = x[(row + k) * columns + column];
  __syncthreads();
  row = 32 * blockIdx.x, column = 32 * blockIdx.y + threadIdx.x;
  for (int k = threadIdx.y; k < 32; k += 8)
    if (row + k < columns && column < rows)
      y[(row + k) * rows + column] = tile[threadIdx.x][k];
  // <<< solution
}
"""


def transpose_naive() -> str:
    """The same without a tile: nothing to write here."""
    return r"""
__global__ void transpose_naive(const float* x, float* y, int rows, int columns) {
  int column = 32 * blockIdx.x + threadIdx.x;
  for (int k = threadIdx.y; k < 32; k += 8) {
    int row = 32 * blockIdx.y + k;
    if (row < rows && column < columns) y[column * rows + row] = x[row * columns + column];
  }
}
"""


# %%
if __name__ == "__main__":

    def check_transpose() -> None:
        print("step 5: 64 × 64 transposed, sectors or passes for each request of a warp:")
        kernels = Kernels(transpose_naive, transpose)
        for name in ("transpose_naive", "transpose"):
            for rows, columns in ((45, 70), (1, 40), (64, 64)):
                x, y = numbers(rows, columns), nothing(columns, rows)
                grid = (blocks_for(columns, 32), blocks_for(rows, 32))
                counts = kernels.run(name, grid, (32, 8), x, y, rows, columns)
                wrong = (y != x.T).sum()
                ask(wrong == 0, f"{rows} × {columns}: {wrong} elements are wrong")
            load = counts.load_sectors / counts.load_requests
            store = counts.store_sectors / counts.store_requests
            passes = counts.shared_passes / max(counts.shared_requests, 1)
            seen = f"{load:g} read, {store:2g} written, {passes:g} in shared memory"
            print(f"        {name:15} {seen}")
        ask((load, store) == (4, 4), "read and write neighbours: 4 sectors a request")
        ask(passes == 1, "lanes meet in one bank: pad the tile")

    check_transpose()

# %% [markdown]
# ## Step 6: atomics
#
# A histogram counts how often each value occurs: `counts[x[i]] += 1`. Two threads with the same
# value read the same old count and both write one more than that: one is lost. The three
# steps, read, add, write, must be one that nobody can come between: `atomicAdd(&counts[v], 1)`.
#
# Atomics at one address happen one after another, and all threads of the grid meet at the few
# addresses of a histogram, across the whole chip. So let every block count for itself first, in
# shared memory (`atomicAdd` works there too, and is far nearer), and add its counts to the
# global ones once at the end: `blocks * bins` global atomics, however long $x$ is.
#
# The bins can outnumber the threads of a block: zeroing and adding are loops. Between zeroing
# and counting, and between counting and adding, stands a barrier. Which elements a block counts
# is a grid-stride loop's business.


# %%
def histogram() -> str:
    """counts[v] += how many of the n numbers x are v; 0 <= v < bins <= 256."""
    return r"""
__global__ void histogram(const int* x, int* counts, int n, int bins) {
  __shared__ int mine[256];
  // >>> solution 6: zero mine, count into it, add it to counts, with barriers between
  for (int b = threadIdx.x; b < bins; b += blockDim.x) mine[b] = 0;
  __syncthreads();
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
    atomicAdd(&mine[x[i]], 1);
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) atomicAdd(&counts[b], mine[b]);
  // <<< solution
}
"""


# %%
if __name__ == "__main__":

    def check_histogram() -> None:
        kernels = Kernels(histogram)
        for n, bins, grid, block in ((1, 4, 1, 32), (777, 9, 2, 64), (3000, 100, 3, 64)):
            x = numbers(n).int().remainder(bins)
            counted = torch.zeros(bins, dtype=torch.int32)
            counts = kernels.run("histogram", grid, block, x, counted, n, bins)
            true = torch.bincount(x, minlength=bins)
            ask(torch.equal(counted, true.int()), f"{n} numbers, {bins} bins: wrong counts")
        most = grid * bins
        ask(
            counts.global_atomics <= most, f"{counts.global_atomics} global atomics, not {most}"
        )
        print(
            f"step 6: 3,000 numbers counted with {counts.shared_atomics:,} atomics in shared "
            f"memory and {grid} × {bins} = {counts.global_atomics} in global memory"
        )

    check_histogram()

# %% [markdown]
# ## Step 7: the same thinking in Triton
#
# In CUDA you write what one thread does. In Triton you write what one block does, called a
# **program**, with whole vectors: `tl.arange(0, BLOCK)` are all its positions at once, a load
# has a pointer for each, and a **mask** says which of them exist: the guard of step 1. Which
# thread holds what, shuffles, shared memory and barriers are the compiler's business.
#
# The softmax of a row, $y_j = e^{x_j - m} / \sum_k e^{x_k - m}$ with $m = \max_k x_k$, in
# PyTorch's single operations reads and writes the row again and again. Fused into one kernel, a
# program loads its row once, does everything in registers, and stores it once.
#
# `BLOCK` must be a power of two, the row rarely is one: the places beyond it need a value that
# changes neither the maximum nor the sum. And a row begins `stride` elements after the one
# before, which is not always the number of columns.
#
# Without a GPU, Triton's interpreter runs the program, operation by operation, on the CPU. It
# does not check bounds.


# %%
@triton.jit
def softmax_kernel(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    # >>> solution 7: load a row of x, masked; subtract its maximum; exp; divide; store, masked
    # hint: tl.program_id(0) is the row; x_ptr + i with a vector i is a vector of pointers
    # hint: tl.load(pointers, mask=..., other=...), tl.max(v, axis=0), tl.exp, tl.sum
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < columns
    x = tl.load(x_ptr + row * x_stride + i, mask=inside, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * y_stride + i, e / tl.sum(e, axis=0), mask=inside)
    # <<< solution


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """y = softmax of the rows of x; both [rows, columns], with columns side by side."""
    # >>> solution 7: launch softmax_kernel with one program for each row
    # hint: kernel[(programs,)](arguments, BLOCK=...); triton.next_power_of_2(columns)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    softmax_kernel[(rows,)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block)
    # <<< solution


# %%
def no_blank(kernel: object) -> None:
    """Say so if a Triton kernel still has its blank: Triton would bury it in its own error."""
    lines, first = inspect.getsourcelines(kernel.fn)
    text = "".join(lines)
    if blank := re.search(r'raise NotImplementedError\(\s*"(step \d+: .*)"', text):
        error = NotImplementedError(blank[1])
        error.line = first + text[: blank.start()].count("\n")
        raise error


if __name__ == "__main__":

    def check_softmax() -> None:
        no_blank(softmax_kernel)
        device = "cuda" if ON_GPU else "cpu"
        for rows, columns in ((3, 1), (2, 33), (4, 100)):
            high_and_low = 200 * (-1) ** torch.arange(rows)[:, None]
            x = 3 * numbers(rows, 128) + high_and_low  # rows 128 apart
            x = x.to(device)[:, :columns]
            y = nothing(rows, 160).to(device)[:, :columns]
            softmax(x, y)
            torch.testing.assert_close(y, x.softmax(1), msg=f"{rows} × {columns}: wrong values")
        print(f"step 7: softmax of {rows} rows of {columns} by {rows} programs: torch's")

    check_softmax()

# %% [markdown]
# ## Step 8: a tiled matrix product
#
# $C = AB$ with $A\,[M, K]$ and $B\,[K, N]$ takes $MNK$ multiply-adds. If each thread makes one
# element of $C$ by itself, it loads a row of $A$ and a column of $B$: $2K$ loads for $K$
# multiply-adds. In the time that memory takes for one number, a GPU makes dozens of them.
#
# But threads of one block need the same numbers. Let a block of $16 \times 16$ threads make a
# tile of $C$. It walks along $K$ in steps of 16: every thread loads *one* element of $A$'s tile
# and *one* of $B$'s into shared memory; barrier; then each thread does 16 multiply-adds from
# there; barrier, for the next step overwrites the tiles. Each number that was loaded is used
# 16 times: $2K / 16$ loads for $K$ multiply-adds.
#
# At the edges, all threads still load and wait: an element outside of $A$ or $B$ counts as
# zero, and only the store asks whether the thread's own element of $C$ exists. (A thread that
# returns early loads nothing for its neighbours.) Let `threadIdx.x` run along rows, as ever.


# %%
def matmul() -> str:
    """c [m, n] = a [m, k] @ b [k, n]; blocks of 16 × 16 threads, one element of c for each."""
    return r"""
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[16][16], b_tile[16][16];
  int row = 16 * blockIdx.y + threadIdx.y, column = 16 * blockIdx.x + threadIdx.x;
  float sum = 0;
  // >>> solution 8: for each 16 of k: two tiles, barrier, 16 multiply-adds, barrier; store
  for (int k0 = 0; k0 < k; k0 += 16) {
    int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
    a_tile[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0;
    b_tile[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0;
    __syncthreads();
    for (int j = 0; j < 16; j++) sum += a_tile[threadIdx.y][j] * b_tile[j][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
  // <<< solution
}
"""


# %%
if __name__ == "__main__":

    def check_matmul() -> None:
        kernels = Kernels(matmul)
        for m, n, k in ((1, 1, 1), (20, 33, 17), (32, 32, 32)):
            a, b, c = numbers(m, k), numbers(k, n), nothing(m, n)
            grid = (blocks_for(n, 16), blocks_for(m, 16))
            counts = kernels.run("matmul", grid, (16, 16), a, b, c, m, n, k)
            wrong = (c != a @ b).sum()
            ask(wrong == 0, f"{m} × {k} times {k} × {n}: {wrong} elements are wrong")
        naive, tiled = 2 * m * n * k, 2 * m * n * k // 16
        ask(counts.loads <= tiled, f"{counts.loads} loads, tiles would take {tiled}")
        print(
            f"step 8: 32 × 32 times 32 × 32: {counts.loads:,} loads counted, "
            f"2MNK/16 = {tiled:,} predicted; without tiles 2MNK = {naive:,}"
        )

    check_matmul()

# %% [markdown]
# ## What it is worth
#
# Where there is a GPU, the next cell measures your kernels at sizes that fill it: bytes moved
# by the time, beside what a plain copy of PyTorch reaches. Expect `transpose_naive` far below
# `transpose`: on an H200 they reached 12% of the copy and 63%.


# %%
def gpu_seconds(launch: Callable[[], object]) -> float:
    """The median of ten launches, by events."""
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times[2:])[5]


if __name__ == "__main__":

    def measure() -> None:
        side = 8192
        x = torch.rand(side, side, device="cuda")
        y, n, grid = torch.empty_like(x), x.numel(), (side // 32, side // 32)
        copy = gpu_seconds(lambda: y.copy_(x))
        print(f"on the GPU: copy_ ≈{2 * x.nbytes / copy / 1e9:.0f} GB/s; of that")
        for function, shape, block, sizes, traffic in (
            (transpose_naive, grid, (32, 8, 1), (side, side), 2),
            (transpose, grid, (32, 8, 1), (side, side), 2),
            (block_sum, (n // 256,), (256, 1, 1), (n,), 1),
            (warp_sum, (n // 256,), (256, 1, 1), (n,), 1),
        ):
            kernel = torch.cuda._compile_kernel(function(), function.__name__)
            shape = (*shape, 1, 1)[:3]
            arguments = [x, y, *sizes]
            seconds = gpu_seconds(
                lambda k=kernel, s=shape, b=block, a=arguments: k(grid=s, block=b, args=a)
            )
            share = 100 * traffic / 2 * copy / seconds
            print(f"            {function.__name__:15} ≈{share:.0f}%")

    if ON_GPU:
        measure()
    print("eight kernels, every result exact or torch's")
