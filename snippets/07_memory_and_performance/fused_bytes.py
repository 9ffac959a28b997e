"""Four elementwise operators in one kernel: the bytes are counted, and the time is measured.

Eager mode reads and writes memory for each operator. A fused kernel reads each input once and
writes the result once. If memory is the bound, the speed-up is the ratio of the bytes. The
program needs a C++ compiler.
"""

import shutil
import sys
import time

import torch
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode


# --8<-- [start:chain]
def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A residual branch: scale, shift, clamp, add."""
    return (x * 0.5 + 1.0).relu() + y


class Traffic(TorchDispatchMode):
    """Counts operators, and the bytes of the tensors that they read and write."""

    calls = moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        self.moved += sum(t.nbytes for t in tensors)
        return result


# --8<-- [end:chain]


def seconds(work, calls: int = 1, rounds: int = 9) -> float:
    """The shortest time per call, in s, with one wait for the device after `calls` calls."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


def main() -> None:
    if not shutil.which("g++") and not shutil.which("c++"):
        sys.exit("torch.compile needs a C++ compiler (g++) on the path")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    n = 2**23 if device.type == "cpu" else 2**26  # 32 MiB each, on a GPU 256
    x, y = (torch.randn(n, device=device) for _ in range(2))
    with Traffic() as eager:
        expected = chain(x, y)
    fused = x.nbytes + y.nbytes + expected.nbytes
    print(f"eager: {eager.calls} operators, {eager.moved / 2**20:.0f} MiB of traffic")
    assert eager.moved == (2 + 2 + 2 + 3) * x.nbytes
    metrics.reset()
    compiled = torch.compile(chain)
    begin = time.perf_counter()
    torch.testing.assert_close(compiled(x, y), (0.5 * x + 1).clamp(min=0) + y)
    first = time.perf_counter() - begin
    assert metrics.generated_kernel_count == 1
    print(f"compiled: {metrics.generated_kernel_count} kernel, {fused / 2**20:.0f} MiB; equal")
    before, after = seconds(lambda: chain(x, y)), seconds(lambda: compiled(x, y))
    print(f"by bytes {eager.moved / fused:.1f} times as fast, measured ≈{before / after:.1f}")
    if device.type != "cpu":
        ahead = seconds(lambda: chain(x, y), 10) / seconds(lambda: compiled(x, y), 10)
        print(f"ten calls to one wait: ≈{ahead:.1f}")
    saved = before - after
    calls = first / saved
    print(f"first call ≈{first:.1f} s, repaid after ≈{calls:.0f} calls")
    assert after < before and abs(calls * before - (first + calls * after)) < before


if __name__ == "__main__":
    main()
