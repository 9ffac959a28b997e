"""The kernel challenge: rows of numbers to int8, each number moved once, 16 bytes at a time.

    python assessment/challenge_kernel.py

A layer in int8 quantizes its activations at every step, with a scale for each row. `slow` is
such a kernel as one writes it first. A GPU decides, by the share of a copy's bandwidth. Without
one, counts do: what memory must do (lab 06's emulator) and what the compiler made of it (nvcc).
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path += [str(Path(__file__).resolve().parents[1] / "labs"), "labs"]
from lab06_cuda_basics import Counts, Kernels, gpu_seconds

THREADS = 256  # of a block; there is a block for each row


def slow() -> str:
    """q = the rows of x, divided by their scale and rounded; scale = the largest |x| / 127.

    `columns` is a multiple of 1,024, and at most 4,096. A row of zeros has the scale 0.
    """
    return r"""
__global__ void slow(const float* x, signed char* q, float* scales, int columns) {
  __shared__ float part[256];
  int t = threadIdx.x, each = columns / 256;
  x += blockIdx.x * columns;
  q += blockIdx.x * columns;
  float most = 0;
  for (int k = 0; k < each; k++) most = fmaxf(most, fabsf(x[t * each + k]));
  part[t] = most;
  __syncthreads();
  for (int s = 1; s < 256; s *= 2) {
    int at = 2 * s * t;
    if (at < 256) part[at] = fmaxf(part[at], part[at + s]);
    __syncthreads();
  }
  float scale = part[0] / 127;
  if (t == 0) scales[blockIdx.x] = scale;
  for (int k = 0; k < each; k++)
    q[t * each + k] = scale > 0 ? (int)rintf(x[t * each + k] / scale) : 0;
}
"""


def fast() -> str:
    """The same."""
    return r"""
struct alignas(4) Codes { signed char a, b, c, d; };  // four at once; the emulator has no char4

__global__ void fast(const float* x, signed char* q, float* scales, int columns) {
  // >>> solution 1: the same numbers; x is read once, and neighbours take neighbours
  // hint: a thread's share of a row fits into registers, as float4 v[4]
  // hint: shuffles for the largest number, and one barrier
  __shared__ float part[8];
  int t = threadIdx.x, fours = columns / 4;
  const float4* row = (const float4*)x + (size_t)blockIdx.x * fours;
  Codes* out = (Codes*)q + (size_t)blockIdx.x * fours;
  constexpr int SHARE = 4;
  auto place = [=](int k) { return k * 256 + t; };
  float4 v[SHARE];
  float most = 0;
#pragma unroll
  for (int k = 0; k < SHARE; k++) {
    int i = place(k);
    v[k] = i < fours ? row[i] : make_float4(0, 0, 0, 0);
    most = fmaxf(most, fmaxf(fabsf(v[k].x), fabsf(v[k].y)));
    most = fmaxf(most, fmaxf(fabsf(v[k].z), fabsf(v[k].w)));
  }
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
  if (t % 32 == 0) part[t / 32] = most;
  __syncthreads();
  most = part[t % 8];
  for (int d = 4; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
  float scale = most / 127;
  if (t == 0) scales[blockIdx.x] = scale;
  auto code = [=](float a) { return (signed char)(scale > 0 ? (int)rintf(a / scale) : 0); };
#pragma unroll
  for (int k = 0; k < SHARE; k++) {
    int i = place(k);
    if (i < fours) out[i] = {code(v[k].x), code(v[k].y), code(v[k].z), code(v[k].w)};
  }
  // <<< solution
}
"""


# --8<-- [start:counts]
def moved(counts: Counts) -> int:
    """Bytes that memory hands out and takes: whole sectors of 32."""
    return 32 * (counts.load_sectors + counts.store_sectors)


def requests(counts: Counts) -> int:
    """Loads and stores of global memory, by warps."""
    return counts.load_requests + counts.store_requests


def compiled(source: str) -> dict[str, int]:
    """What nvcc made of it for an H100: registers, bytes of local memory, loads of 16 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(source)
        command = "nvcc -O3 -std=c++17 -arch=sm_90 -Xptxas -v --keep -cubin kernel.cu"
        done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[0])
        wide = len(re.findall(r"\bld\.global\S*\.v4\.", Path(folder, "kernel.ptx").read_text()))
    local, registers = re.search(
        r"(\d+) bytes stack.*Used (\d+) reg", done.stderr, re.S
    ).groups()
    return {"registers": int(registers), "local": int(local), "wide": wide}


# --8<-- [end:counts]
# --8<-- [start:gpu]
def share_of_copy(function: Callable[[], str], rows: int = 32768, columns: int = 4096) -> float:
    """On a GPU: the bandwidth of the kernel, 5 bytes a number, as a share of copy_'s."""
    x = torch.randn(rows, columns, device="cuda")
    q = torch.empty(rows, columns, dtype=torch.int8, device="cuda")
    scales, y = torch.empty(rows, device="cuda"), torch.empty_like(x)
    kernel = torch.cuda._compile_kernel(function(), function.__name__)
    shape = {"grid": (rows, 1, 1), "block": (THREADS, 1, 1)}
    mine = gpu_seconds(lambda: kernel(**shape, args=[x, q, scales, columns]))
    torch.testing.assert_close(scales, x.abs().amax(1) / 127)
    error = (x - q * scales[:, None]).abs().amax(1)
    assert (error <= 0.501 * scales).all(), "the GPU's codes are not the nearest"
    copy = gpu_seconds(lambda: y.copy_(x))
    return 5 / mine / (8 / copy)


# --8<-- [end:gpu]


def main() -> None:
    rows, columns = 2, 2048
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    print("      bytes a number  requests a row  passes a request of shared memory")
    kernels, codes = Kernels(slow, fast), []
    for name in ("slow", "fast"):
        q, scales = torch.zeros(rows, columns, dtype=torch.int8), torch.zeros(rows)
        counts = kernels.run(name, rows, THREADS, x, q, scales, columns)
        codes.append(q)
        passes = counts.shared_passes / max(counts.shared_requests, 1)
        print(
            f"{name}  {moved(counts) / x.numel():14.2f}"
            f"  {requests(counts) / rows:14g}  {passes:.2f}"
        )
    torch.testing.assert_close(*codes, rtol=0, atol=0)
    assert q.abs().amax() == 127
    for kernel in (slow, fast) if shutil.which("nvcc") else ():
        found = compiled(kernel())
        print(
            f"{kernel.__name__}: ≈{found['registers']} registers, {found['local']} bytes of "
            f"local memory, {found['wide']} loads of 16 bytes in the code"
        )
    if torch.cuda.is_available():
        print(*(f"{f.__name__} ≈{100 * share_of_copy(f):.0f}% of copy_" for f in (slow, fast)))


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
