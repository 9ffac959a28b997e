"""int8 against fp32 and bf16: bytes and time of one linear layer, in one run on one core.

Timed: the product alone, and the whole dynamic int8 layer around it, which has to find a
range and round the input, then scale the sums.
"""

import sys
import time
from collections.abc import Callable

import torch

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
TOKENS = (8 if DEVICE == "cpu" else 32, 64, 256)  # cuBLAS wants more than 16 rows
WIDTH = 1024


def fastest_ms(functions: list[Callable[[], object]], rounds: int = 5) -> list[float]:
    """Fastest call of each, ten in a row per round; other work on the machine only adds."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, seconds in zip(functions, times, strict=True):
            for _ in range(10):
                if len(seconds) > 1 and sum(seconds) > 0.6:
                    break  # slow enough, as bf16 where the processor has no instruction for it
                if DEVICE != "cpu":
                    torch.accelerator.synchronize()
                begin = time.perf_counter()
                function()
                if DEVICE != "cpu":
                    torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - begin)
    return [min(seconds[1:]) * 1e3 for seconds in times]


# --8<-- [start:layer]
def int8_layer(x: torch.Tensor, weight: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Dynamic int8, symmetric: weight [in, out] in int8, step [1, out]."""
    scale = x.abs().amax(1, keepdim=True) / 127  # [tokens, 1]
    q = (x / scale).round().to(torch.int8)
    return torch._int_mm(q, weight).float() * (scale * step)


# --8<-- [end:layer]


def main() -> None:
    torch.set_num_threads(1)
    if str(DEVICE).startswith("mps"):
        sys.exit("torch._int_mm has no kernel for this accelerator")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, generator=generator).to(DEVICE)  # [in, out]
    step = weight.abs().amax(0, keepdim=True) / 127
    integers = (weight / step).round().to(torch.int8)
    if DEVICE != "cpu":
        integers = integers.T.contiguous().T  # cuBLAS wants the second factor column by column
    ones = (torch.eye(WIDTH, device=DEVICE) * 127).to(torch.int8).T
    short = weight.bfloat16()
    for name, tensor in (("fp32", weight), ("bf16", short), ("int8", integers)):
        print(f"{name} weight of {WIDTH} × {WIDTH}: {tensor.nbytes / 2**20:.0f} MiB")

    print("tokens       fp32       bf16   int8 product   int8 layer   layer against fp32")
    for tokens in TOKENS:
        x = torch.randn(tokens, WIDTH, generator=generator).to(DEVICE)
        x16, q = x.bfloat16(), (x * 30).round().clamp(-127, 127).to(torch.int8)
        functions = [
            lambda x=x: x @ weight,
            lambda x=x16: x @ short,
            lambda q=q: torch._int_mm(q, integers),
            lambda x=x: int8_layer(x, integers, step),
        ]
        kinds = [torch.float32, torch.bfloat16, torch.int32, torch.float32]
        assert [function().dtype for function in functions] == kinds
        full, half, bare, whole = fastest_ms(functions)
        cells = [f"≈{ms:.2f} ms" for ms in (full, half, bare, whole)]
        print("{:6}  {:>9} {:>11}   {:>12}   {:>10}".format(tokens, *cells),
              f"       ≈{full / whole:.1f} times as fast")  # fmt: skip
        # with weights of 1 what comes back is the input, each token's within half its step
        off = (int8_layer(x, ones, torch.tensor(1 / 127)) - x).abs().amax(1)
        assert (off < 0.501 * x.abs().amax(1) / 127).all()
        exact = x @ weight
        error = ((int8_layer(x, integers, step) - exact).norm() / exact.norm()).item()
        # 1.0%, and somewhat more where an x86 without VNNI saturates a few sums
        assert error < 0.05, error


if __name__ == "__main__":
    main()
