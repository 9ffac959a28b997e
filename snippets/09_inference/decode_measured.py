"""Prefill and decode on this machine: one set of weights, more and more tokens at a time.

The weights are larger than any cache, so each step reads them from memory. One token costs
about what reading costs; 64 cost a few times that, and not 64 times.
"""

import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, LAYERS = 2048, 40  # 40 matrices of 16 MiB


def seconds(calls: dict[object, Callable[[], object]], rounds: int = 4) -> dict[object, float]:
    """Least time of each call, all of them in turn, so that no one has the quiet moment."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = torch.randn(LAYERS, HIDDEN, HIDDEN) / HIDDEN**0.5  # keeps the size of what passes

    # --8<-- [start:measure]
    def step(x: torch.Tensor) -> torch.Tensor:  # [tokens, h] -> [tokens, h]
        for weight in weights:
            x = x @ weight.T
        return x

    square = torch.randn(1024, 1024)
    calls = {"read": lambda: weights.sum(), "product": lambda: square @ square}
    for tokens in (1, 4, 16, 64):
        x = torch.randn(tokens, HIDDEN)
        calls[tokens] = lambda x=x: step(x)
    took = seconds(calls)
    bandwidth, peak = weights.nbytes / took["read"], 2 * 1024**3 / took["product"]
    print(f"weights {weights.nbytes >> 20} MiB; reading ≈{bandwidth / 1e9:.1f} GB/s, "
          f"products ≈{peak / 1e9:.0f} GFLOP/s")  # fmt: skip
    print(f"ridge ≈{peak / bandwidth:.0f} FLOPs per byte; a step has tokens/2 of them")
    print("tokens   least       measured     tokens/s")
    for tokens in (1, 4, 16, 64):
        least = max(weights.nbytes / bandwidth, 2 * tokens * weights.numel() / peak)
        print(f"{tokens:4}    ≈{1e3 * least:4.0f} ms     ≈{1e3 * took[tokens]:4.0f} ms      "
              f"≈{tokens / took[tokens]:.0f}")  # fmt: skip
    # --8<-- [end:measure]
    many, alone = calls[64](), x[0]
    for layer in range(LAYERS):
        alone = torch.mv(weights[layer], alone)
    assert many.shape == (64, HIDDEN)
    torch.testing.assert_close(many[0], alone, rtol=1e-3, atol=1e-4)
    with FlopCounterMode(display=False) as counter:
        calls["product"]()
    assert abs(peak * took["product"] / counter.get_total_flops() - 1) < 1e-9
    ends = took["read"], 64 * 2 * weights.numel() / peak
    assert all(least > 0.999 * end for end in ends), "both have to be waited for"
    print("a token's result is the same in company")
    assert took[64] < 32 * took[1], "tokens in one step should share the reading"


if __name__ == "__main__":
    main()
