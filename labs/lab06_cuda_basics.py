# %% [markdown]
# # Lab 06: Write CUDA and Triton kernels
#
# A GPU runs your function in thousands of threads at the same time, and you decide what each
# thread does. In this lab you write eight kernels, seven in CUDA C++ and one in Triton. Each
# kernel teaches one thing that makes kernels right or fast: the index, the order of the
# accesses to memory, shared memory and its barriers, warps, banks, atomics and tiles. This
# command runs the finished lab:
#
#     python labs/lab06_cuda_basics.py
#
# You do not need a GPU. The program `cuda_on_cpu.py` in the same folder is an emulator: it runs
# CUDA C++ on the CPU, and it runs each thread of a block separately. It reports accesses out of
# bounds, memory that is read before it is written, and missing barriers. The lab also uses it
# to count the accesses to memory. The emulator cannot measure the time that a GPU would need.
# If there is an NVIDIA GPU, each kernel runs on the GPU as well, the results are compared, and
# the last cell measures the speed. Use these commands to do the lab yourself:
#
#     python labs/start.py 06
#     python my_labs/lab06_cuda_basics.py
#     python labs/check.py my_labs/lab06_cuda_basics.py
#
# The first command writes your copy, with blanks, to `my_labs/`. The second one runs it. The
# third one grades it step by step, and with `--step 2` it grades only step 2. You need Linux,
# g++ 12 or newer, and Triton. PyTorch for CUDA includes Triton. Otherwise, install it with
# `pip install triton`.
#
# There are eight steps. Each step has a text, one or two blanks, and a check that prints what
# it has shown. Your copy runs up to the first blank, and then it prints one line that says what
# belongs there. In this lab, a kernel is a string that a function returns. A blank in such a
# kernel is the line `#error`, and you replace it by C++. The first page of chapter 06 explains
# the machine, and the page "Writing and debugging CUDA kernels" explains the kernels. The lab
# takes about three hours.

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
# the file and calls what you wrote. So put additional code of yours into functions or into such
# cells.
#
# ## How a kernel runs here
#
# You may skip the next cell. `Kernels(function)` compiles the source that the function returns.
# `run("name", grid, block, *arguments)` launches one kernel of this source, like
# `name<<<grid, block>>>(arguments)` in a `.cu` file. A tensor is passed as a pointer, and after
# the launch it contains what the kernel has written. A `printf` in a kernel prints. The method
# `run` returns counts:
#
# * The 32 lanes of a warp execute a load together. Such a load is one **request**. Memory
#   delivers **sectors** of 32 bytes, so the cost of a request is the number of sectors that its
#   lanes touch.
# * Shared memory has 32 **banks** of 4 bytes. A bank delivers one word per **pass**. If the
#   lanes of a request need several different words from one bank, the request needs the same
#   number of passes.


# %%
class Counts(NamedTuple):
    """How often one launch used memory."""

    loads: int  # loads of single threads from global memory
    load_requests: int  # loads of whole warps from global memory
    load_sectors: int
    store_requests: int
    store_sectors: int
    shared_requests: int
    shared_passes: int
    global_atomics: int  # of single threads
    shared_atomics: int


class Fault(AssertionError):
    """An error of a kernel that was found when it was compiled or run."""


HOST = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static char** word;  // the arguments that have not been read yet
static struct { void* at; size_t bytes; } arrays[16];
static int used;
static void* take() {  // a tensor, whose bytes come from standard input
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
    """Count requests of warps. An access is [block, thread, instruction, byte, what]."""
    single = [0] * 6  # reads, writes, atomics in global memory, then in shared memory
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
    """The path of cuda_on_cpu.py: next to this file, or in the original folder labs."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "labs", Path("labs").resolve()):
        if (folder / "cuda_on_cpu.py").is_file():
            return folder / "cuda_on_cpu.py"
    sys.exit("cuda_on_cpu.py is missing: copy it from the folder labs next to this file")


def source_of(function: Callable[[], str]) -> tuple[str, int]:
    """The source that a function returns, and the line of the file where the source begins."""
    source = function()
    file = Path(function.__code__.co_filename).read_text(encoding="utf-8")
    first = file[: max(file.find(source), 0)].count("\n") + 1
    if blank := re.search(r'#error "(step \d+: .*)"', source):
        error = NotImplementedError(blank[1])
        error.line = first + source[: blank.start()].count("\n")
        raise error
    return source, first


class Kernels:
    """Compiled kernels. Functions return their sources."""

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
        """The source of the host program, which launches the kernel that its arguments name."""
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
        """Raise an error of the compiler or the emulator, with the line in this file."""
        lines = [line for line in said.splitlines() if mark in line] or said.splitlines()
        what = lines[which] if lines else "the program failed without a message"
        place = re.match(r".*?kernels\.cu:(\d+)(?::\d+)?: (.*)", what)
        error = Fault(re.sub(r"kernels\.cu:(\d+)", r"line \1", place[2] if place else what))
        if place:
            error.line = int(place[1])
        raise error

    def run(self, name: str, grid, block, *arguments: torch.Tensor | int) -> Counts:
        """Launch a kernel. It writes its results into the (contiguous) tensors."""
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
            self.fail(said, "kernels.cu:", -1)  # after the lines that the kernel has printed
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
        """Repeat the launch on the GPU, compiled by NVRTC, and compare the results."""
        kernel = torch.cuda._compile_kernel(self.source, name)
        mine = [a.cuda() if isinstance(a, torch.Tensor) else a for a in before]
        kernel(grid=grid, block=block, args=mine)
        torch.cuda.synchronize()
        for theirs, ours in zip(mine, after, strict=True):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(theirs.cpu(), ours, equal_nan=True)


def ask(condition: bool, otherwise: str) -> None:
    """Raise an error with this message unless the condition is true."""
    if not condition:
        raise AssertionError(otherwise)


def numbers(*shape: int) -> torch.Tensor:
    """Small whole numbers as floats. Their sums are exact in any order."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * 37 % 101 - 50).view(shape)


def nothing(*shape: int) -> torch.Tensor:
    """A tensor for a result. It is full of NaN, so unwritten elements can be seen."""
    return torch.full(shape, float("nan"))


# %% [markdown]
# ## Step 1: which thread does which element
#
# A kernel is the body of a loop, but without the loop. You launch it as a **grid** of
# **blocks** of threads. All threads run the same function, and each thread finds out its work
# from its position. `blockIdx.x` is the number of its block, `threadIdx.x` is its number within
# the block, and `blockDim.x` is the number of threads in a block. So the expression
#
#     blockIdx.x * blockDim.x + threadIdx.x
#
# numbers all threads of the grid: 0, 1, 2 and so on. Thread $i$ then computes element $i$.
#
# All blocks have the same size, and $n$ is rarely a multiple of this size. With 128 threads per
# block, you launch $\lceil n / 128 \rceil$ blocks. These are more threads than elements, and
# the last threads must do nothing. If a kernel forgets this, it writes behind its arrays. On a
# GPU, this may destroy a different tensor and remain unnoticed for weeks. The emulator knows
# where each array ends, so it reports the access.


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
    """The number of blocks with this number of threads that n elements need."""
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
# One block for every 128 elements is simple, but the launch then depends on $n$. A kernel with
# a **grid-stride loop** works with any grid. Let $G$ be the number of all threads, which is
# `gridDim.x * blockDim.x`. Thread $i$ computes the elements $i$, $i + G$, $i + 2G$ and so on.
# You can launch as many blocks as fit on the GPU at the same time. Then each thread has work,
# and it can keep numbers in registers from one element to the next.
#
# Why does a thread not get $n / G$ neighboring elements, as you would do it on a CPU? The
# reason is what a warp reads *at the same moment*. The 32 lanes of a warp execute a load
# together. If they read 32 neighboring floats, the request touches $32 \cdot 4 / 32 = 4$
# sectors, and all their bytes are used. Such an access is **coalesced**. If each lane reads in
# a separate piece, each lane touches a different sector. These are 32 sectors, and only 4 bytes
# of each are used. The work is the same, but each request costs eight times as much. (A cache
# can save this cost only if it keeps the 32 sectors of every warp until the lanes read their
# next floats.)
#
# Write the loop. Then write a function that predicts the number of sectors for a warp whose
# lane $l$ reads the float number $l \cdot \text{stride}$. The check compares your prediction
# with the count for the kernel `copy_every`.


# %%
def add_in_strides() -> str:
    """c = a + b for vectors of n floats, with a grid of any size."""
    return r"""
__global__ void add_in_strides(const float* a, const float* b, float* c, int n) {
  // >>> solution 2: a loop from this thread's number up to n in steps of all threads
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) c[i] = a[i] + b[i];
  // <<< solution
}
"""


def copy_every() -> str:
    """y[i] = x[i * stride]. This kernel is finished."""
    return r"""
__global__ void copy_every(const float* x, float* y, int n, int stride) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i * stride];
}
"""


def sectors(stride: int) -> int:
    """The number of 32-byte sectors that a warp touches. Lane l reads float number l * stride.

    The float of lane 0 is at the beginning of a sector.
    """
    # >>> solution 2: the number of different sectors among the 32 addresses
    # hint: the float number i begins at byte 4 * i
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
# To add up a million numbers, threads must exchange their results. The threads of a block can
# use **shared memory** for this. It is small and fast, it is on the SM, and you declare it with
# `__shared__`. All threads of the block can read and write it. Its content is undefined until a
# thread has written it.
#
# The sum is a tree. Each thread writes its number to `part[t]`. Then the lower half of the
# threads adds the numbers of the upper half: `part[t] += part[t + half]`, with `half` $= 128,
# 64, …, 1$. After $\log_2 256 = 8$ rounds, `part[0]` is the sum of the block.
#
# Threads do not run in step. One warp can be in the second round while another warp has not
# started the first round. The function `__syncthreads()` is the **barrier**. No thread
# continues before all threads of the block have reached it, and after it every thread can read
# what was written before it. You need one barrier after the numbers are written, and one
# barrier after each round. *All* threads must reach the barrier. If the barrier is inside of
# `if (t < half)` or `if (i < n)`, some threads wait for threads that never arrive. The emulator
# reports such threads, and it reports two accesses that no barrier orders.
#
# A thread whose element is beyond $n$ must take part, too. It writes a zero, because other
# threads read its place in `part`.


# %%
def block_sum() -> str:
    """sums[block] = the sum of the blockDim.x elements of a block. blockDim.x is a power of
    two, and at most 256."""
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
# returns the `v` of the lane whose number is larger by $d$. The last $d$ lanes get their own
# `v`. The argument `mask` names the lanes that take part. `0xffffffff` names all 32 lanes, and
# all of them must execute the call. Five such calls add up a warp:
#
#     for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);
#
# After the loop, lane 0 has the sum. (The other lanes have partial sums that you do not need.)
#
# A block of 256 threads has 8 warps. Each warp adds up its own numbers, and its lane 0 writes
# the sum to shared memory. After one barrier, the first warp reads the 8 sums and adds them
# with the same five shuffles. Its other lanes use zeros. This saves eight of the nine barriers,
# and all accesses to shared memory except for $2 \cdot 8$.


# %%
def warp_sum() -> str:
    """The sums of block_sum with shuffles. blockDim.x is a multiple of 32, at most 1024."""
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
# The transpose $y = x^T$ moves every number once and computes nothing. Still, a simple kernel
# touches eight times as many sectors as necessary when it writes. The thread for element
# $(r, c)$ reads `x[r][c]` next to its neighbors. But it writes `y[c][r]`, which is one row away
# from the elements of its neighbors. Either the reads are coalesced or the writes are
# coalesced, but not both.
#
# Shared memory solves this problem. A block works on a tile of $32 \times 32$ elements. It
# reads rows of $x$ into the tile and waits at a barrier. Then it writes rows of $y$, which it
# reads from the *columns* of the tile. Now both accesses to global memory are coalesced. The
# access by columns happens in shared memory, which has no sectors.
#
# However, shared memory has banks. Word $w$ is in bank $w \bmod 32$. A row of the tile has 32
# words in 32 different banks. A column of `float tile[32][32]` consists of the words $0, 32,
# 64, …$, which are all in bank 0, so it needs 32 passes. Add one unused column: `tile[32][33]`.
# A column then consists of the words $0, 33, 66, …$, which are in 32 different banks.
#
# The block has $32 \times 8$ threads, and `threadIdx.x` runs along a row. So each thread moves
# four elements, which are 8 rows apart. $x$ has `rows` rows and `columns` columns, and neither
# number has to be a multiple of 32. Guard the reads by the shape of $x$, and guard the writes
# by the shape of $y$. Block `(blockIdx.x, blockIdx.y)` reads the tile that begins at column
# `32 * blockIdx.x` and row `32 * blockIdx.y`.


# %%
def transpose() -> str:
    """y [columns, rows] = x [rows, columns] transposed, with blocks of 32 × 8 threads."""
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
    """The transpose without a tile. This kernel is finished."""
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
# A histogram counts how often each value occurs: `counts[x[i]] += 1`. If two threads have the
# same value, both may read the same old count and write the old count plus one. One of the two
# is then lost. To prevent this, the three operations (read, add, write) must be one indivisible
# operation: `atomicAdd(&counts[v], 1)`.
#
# Atomics at one address are executed one after another, and all threads of the grid use the few
# addresses of a histogram. So let every block first count in shared memory. There, `atomicAdd`
# works too, and it is much faster. At its end, the block adds its counts to the global counts.
# Then there are only `blocks * bins` global atomics, no matter how long $x$ is.
#
# There can be more bins than threads in a block, so set the bins to zero in a loop and add them
# in a loop. You need a barrier between setting to zero and counting, and a barrier between
# counting and adding. A grid-stride loop decides which elements a block counts.


# %%
def histogram() -> str:
    """counts[v] += how many of the n numbers x are equal to v. 0 <= v < bins <= 256."""
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
# In CUDA you write what one thread does. In Triton you write what one block does. Such a block
# is called a **program**, and it works with whole vectors. `tl.arange(0, BLOCK)` contains all
# positions of the block, a load gets a pointer for each position, and a **mask** says which
# positions exist. The mask is the guard of step 1. The compiler decides which thread works on
# which position, and it adds shuffles, shared memory and barriers.
#
# The softmax of a row is $y_j = e^{x_j - m} / \sum_k e^{x_k - m}$ with $m = \max_k x_k$. With
# separate operations of PyTorch, the row is read and written several times. In one fused
# kernel, a program loads its row once, computes everything in registers, and stores the row
# once.
#
# `BLOCK` must be a power of two, but the length of a row rarely is. So the positions beyond the
# row need a value that changes neither the maximum nor the sum. A row begins `stride` elements
# after the previous row, and `stride` can be larger than the number of columns.
#
# Without a GPU, Triton's interpreter runs the program on the CPU, one operation after the
# other. It does not check bounds.


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
    """y = softmax of the rows of x. Both are [rows, columns], and each row is contiguous."""
    # >>> solution 7: launch softmax_kernel with one program for each row
    # hint: kernel[(programs,)](arguments, BLOCK=...); triton.next_power_of_2(columns)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    softmax_kernel[(rows,)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block)
    # <<< solution


# %%
def no_blank(kernel: object) -> None:
    """Raise an error if a Triton kernel still has its blank. Triton would hide the blank."""
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
# The product $C = AB$ with $A\,[M, K]$ and $B\,[K, N]$ needs $MNK$ multiply-adds. If each
# thread computes one element of $C$ alone, it loads a row of $A$ and a column of $B$. These are
# $2K$ loads for $K$ multiply-adds. But a GPU can execute dozens of multiply-adds in the time in
# which its memory delivers one number.
#
# However, the threads of a block need the same numbers. Let a block of $16 \times 16$ threads
# compute a tile of $C$, and let it walk along $K$ in steps of 16. In each step, every thread
# loads *one* element of the tile of $A$ and *one* element of the tile of $B$ into shared
# memory. After a barrier, each thread performs 16 multiply-adds with numbers from shared
# memory. A second barrier is necessary, because the next step overwrites the tiles. Each loaded
# number is used 16 times, so a thread needs only $2K / 16$ loads for $K$ multiply-adds.
#
# At the edges, all threads still load and wait. An element outside of $A$ or $B$ counts as
# zero. Only the store depends on whether the thread's own element of $C$ exists. (If a thread
# returned early, its neighbors would miss the numbers that it should have loaded.) As in the
# other steps, `threadIdx.x` runs along rows.


# %%
def matmul() -> str:
    """c [m, n] = a [m, k] @ b [k, n], with blocks of 16 × 16 threads, one per element of c."""
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
# ## How fast your kernels are on a GPU
#
# If there is a GPU, the next cell measures your kernels at sizes that fill it. It prints their
# bytes per second as a percentage of the bytes per second of PyTorch's plain copy. Expect that
# `transpose_naive` is much slower than `transpose`: on an H200, they reached 12% and 63% of the
# copy.


# %%
def gpu_seconds(launch: Callable[[], object]) -> float:
    """The median time of ten launches in seconds, measured with events."""
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
