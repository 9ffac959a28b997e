"""Compares int8 with fp32 and bf16: bytes and time of one linear layer.

The program measures the int8 product alone, and the whole dynamic int8 layer, which must also
find a range, round the input and scale the sums. On a CPU it uses one core. On a GPU it uses
the sizes of large models and the GPU's own clock, and also measures the compiled layer and an
fp8 product. It then prints the names of the kernels.

If torch has no fast int8 kernel for the CPU, the program prints this fact and stops.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
TOKENS = (8, 64, 256) if DEVICE == "cpu" else (32, 256, 2048, 8192)  # cuBLAS: more than 16
WIDTHS = (1024,) if DEVICE == "cpu" else (4096, 8192)


def fastest_ms(functions: list[Callable[[], object]], rounds: int = 5) -> list[float]:
    """The fastest call of each function; ten in a row per round. Other work only adds time."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, seconds in zip(functions, times, strict=True):
            for _ in range(10):
                if sum(seconds) > 0.5:
                    break  # a slow function, like bf16 without an instruction for it
                begin = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - begin)
    return [min(seconds) * 1e3 for seconds in times]


def on_gpu(functions: list[Callable[[], object]], rounds: int = 5) -> list[float]:
    """The same by the GPU's clock: ten calls between two events, with a queue that is full."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
            if torch.cuda.is_available():
                torch.cuda._sleep(4_000_000)  # clock cycles: 2 ms to fill the queue
            begin.record()
            for _ in range(10):
                function()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 10)
    return [min(found) for found in times]


# --8<-- [start:layer]
def int8_layer(x: torch.Tensor, weight: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Dynamic int8, symmetric: weight [in, out] in int8, step [1, out]."""
    scale = x.abs().amax(1, keepdim=True) / 127  # [tokens, 1]
    q = (x / scale).round().to(torch.int8)
    return torch._int_mm(q, weight).float() * (scale * step)


# --8<-- [end:layer]


def has_int8_kernel(weight: torch.Tensor) -> bool:
    """Whether torch multiplies int8 with a kernel of oneDNN on this CPU, not in a plain loop.

    The kernel is 10 to 500 times as fast as the loop, so one call of each tells them apart.
    """
    x, seconds = torch.ones(16, len(weight), dtype=torch.int8), []
    enabled = torch.backends.mkldnn.enabled  # MKL-DNN is an older name of oneDNN
    for use in (enabled, False):
        torch.backends.mkldnn.set_flags(use)
        torch._int_mm(x, weight)  # the first call prepares what later calls reuse
        begin = time.perf_counter()
        torch._int_mm(x, weight)
        seconds.append(time.perf_counter() - begin)
    torch.backends.mkldnn.set_flags(enabled)
    return seconds[1] > 3 * seconds[0]


def more_on_gpu(
    x: torch.Tensor, weight: torch.Tensor, integers: torch.Tensor, step: torch.Tensor
) -> str:
    """The columns of a GPU: the compiled layer, and an fp8 product where there is one."""
    compiled = torch.compile(int8_layer, dynamic=False)
    functions = [lambda: compiled(x, integers, step)]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        short = x.to(torch.float8_e4m3fn)
        column = weight.T.contiguous().to(torch.float8_e4m3fn).T  # as cuBLAS wants it
        one = torch.ones((), device=DEVICE)  # a scale of 1: only the time matters
        functions.append(
            lambda: torch._scaled_mm(short, column, one, one, out_dtype=torch.bfloat16)
        )
    for function in functions:
        function()
    return "".join(f"   {f'≈{ms:.3f} ms':>11}" for ms in on_gpu(functions))


def kernels(function: Callable[[], object]) -> list[str]:
    """The names of the kernels that one call runs on a GPU."""
    with profile() as profiler:
        function()
        torch.accelerator.synchronize()
    return [row.key for row in profiler.key_averages() if row.device_type != DeviceType.CPU]


def main() -> None:
    torch.set_num_threads(1)
    if str(DEVICE).startswith("mps"):
        sys.exit("torch._int_mm has no kernel for this accelerator")
    for width in WIDTHS:
        table(width)


def table(width: int) -> None:
    """Print the times of a layer from `width` to `width`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, width, generator=generator).to(DEVICE)  # [in, out]
    step = weight.abs().amax(0, keepdim=True) / 127
    integers = (weight / step).round().to(torch.int8)
    if DEVICE != "cpu":
        integers = integers.T.contiguous().T  # cuBLAS wants the second factor column by column
    elif not has_int8_kernel(integers):
        sys.exit(
            "torch has no fast int8 kernel for this processor (on x86 it needs AVX-512 VNNI). "
            "It multiplies int8 in a plain loop: int8_without_vnni.py shows what that costs."
        )
    vnni = "ONEDNN_MAX_CPU_ISA" not in os.environ and torch.cpu._is_vnni_supported()
    ones = (torch.eye(width, device=DEVICE) * 127).to(torch.int8).T
    short = weight.bfloat16()
    for name, tensor in (("fp32", weight), ("bf16", short), ("int8", integers)):
        print(f"{name} weight of {width} × {width}: {tensor.nbytes / 2**20:.0f} MiB")

    last = "layer against fp32" if DEVICE == "cpu" else "   compiled   fp8 product"
    print(f"tokens       fp32       bf16   int8 product   int8 layer   {last}")
    for tokens in TOKENS:
        x = torch.randn(tokens, width, generator=generator).to(DEVICE)
        x16, q = x.bfloat16(), (x * 30).round().clamp(-127, 127).to(torch.int8)
        functions = [
            lambda x=x: x @ weight,
            lambda x=x16: x @ short,
            lambda q=q: torch._int_mm(q, integers),
            lambda x=x: int8_layer(x, integers, step),
        ]
        kinds = [torch.float32, torch.bfloat16, torch.int32, torch.float32]
        results = [function() for function in functions]  # these calls also warm up
        assert [y.dtype for y in results] == kinds
        exact = x @ weight
        expected = (exact, exact, q.float() @ integers.float(), exact)
        for y, right in zip(results, expected, strict=True):
            # int8: 1.0%, or slightly more if an x86 without VNNI saturates a few sums
            assert (y.float() - right).norm() < 0.05 * right.norm()
        full, half, bare, whole = (fastest_ms if DEVICE == "cpu" else on_gpu)(functions)
        more = f"       ≈{full / whole:.1f} times as fast"
        if DEVICE != "cpu":
            more = more_on_gpu(x, weight, integers, step)
        digits = 2 if DEVICE == "cpu" else 3
        cells = [f"≈{ms:.{digits}f} ms" for ms in (full, half, bare, whole)]
        print("{:6} {:>10} {:>11}   {:>12}   {:>10}".format(tokens, *cells) + more)
        # with weights of 1 the layer returns its input, within half a step of each token
        off = (int8_layer(x, ones, torch.tensor(1 / 127)) - x).abs().amax(1)
        assert (off < 0.501 * x.abs().amax(1) / 127).all()
        if DEVICE == "cpu" and tokens >= 64 and vnni:
            assert bare < full, (bare, full)  # by a factor of 7 or more on our CPU
    if DEVICE != "cpu":
        compiled = torch.compile(int8_layer, dynamic=False)  # from the cache
        functions[3] = lambda: compiled(x, integers, step)
        for name, function in zip(("bf16", "int8", "layer"), functions[1:], strict=True):
            for kernel in kernels(function):
                print(f"  {name:5} {kernel[:80]}")


if __name__ == "__main__":
    main()
