"""On this machine, a step with 64 tokens is far cheaper than 64 steps with one token.

The program multiplies 640 MiB of weights, which do not fit into the caches of our CPU, by 1, 4,
16 and 64 tokens. The column `estimate` is the roofline of two other measurements: the speed of
a sum over the weights, and the speed of a square product. It is not a limit, because a product
with a vector can read memory faster than a sum does.
"""

import time
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, LAYERS = 2048, 40  # 40 matrices of 16 MiB


def seconds(calls: dict[object, Callable[[], object]], rounds: int = 4) -> dict[object, float]:
    """Return the shortest processor time of each call in seconds. The calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - begin)
    return best


class WeightsRead(TorchDispatchMode):
    """Add up the bytes of the weights that enter a matrix product or a sum."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.storage, self.bytes = weights.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.sum.default):
            storage = args[-1].untyped_storage().data_ptr()
            self.bytes += args[-1].nbytes if storage == self.storage else 0
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = torch.randn(LAYERS, HIDDEN, HIDDEN) / HIDDEN**0.5  # keeps the norm

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
    ridge = peak / bandwidth
    print(f"ridge ≈{ridge:.0f} FLOPs per byte; a step has tokens/2 of them")
    print("tokens   estimate    measured     tokens/s")
    estimate, rate = {}, {}
    for tokens in (1, 4, 16, 64):
        reading, computing = weights.nbytes / bandwidth, 2 * tokens * weights.numel() / peak
        estimate[tokens], rate[tokens] = max(reading, computing), tokens / took[tokens]
        print(f"{tokens:4}    ≈{1e3 * estimate[tokens]:4.0f} ms     "
              f"≈{1e3 * took[tokens]:4.0f} ms      ≈{rate[tokens]:.0f}")  # fmt: skip
    # --8<-- [end:measure]
    many, alone = calls[64](), x[0]
    for layer in range(LAYERS):
        alone = torch.mv(weights[layer], alone)
    assert many.shape == (64, HIDDEN)
    torch.testing.assert_close(many[0], alone, rtol=1e-3, atol=1e-4)
    with FlopCounterMode(display=False) as counter:
        calls["product"]()
    assert abs(peak * took["product"] / counter.get_total_flops() - 1) < 1e-9
    # inside the calls that were timed: each step reads all weights once and adds up its FLOPs
    for tokens in (1, 16, "read"):
        with FlopCounterMode(display=False) as counter, WeightsRead(weights) as read:
            calls[tokens]()
        flops = 0 if tokens == "read" else 2 * tokens * weights.numel()
        assert counter.get_total_flops() == flops
        assert read.bytes == weights.nbytes
    for tokens, least in estimate.items():  # beyond the ridge, arithmetic takes longer
        assert (least > weights.nbytes / bandwidth) == (tokens / 2 > ridge)
    print("a token's result does not depend on the other tokens of the step")
    assert rate[64] > 2 * rate[1], "tokens in one step should share the reading"
    assert estimate[1] > 0.1 * took[1], "one token should take about as long as reading"
    assert estimate[64] > estimate[1] and estimate[64] > 0.1 * took[64]


if __name__ == "__main__":
    main()
