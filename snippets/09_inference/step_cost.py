"""The time of one step of a server: c0 + c1 · tokens + c2 · context, fitted to measured steps.

A step runs every new token through the model once, and reads the keys and values of all
earlier tokens of each sequence. Half of the measured steps fit the three constants, and the
other half tests them. The model is the model of the chapter, twice as wide. It has random
weights, because the time of a step does not depend on the values of the weights.
"""

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, LAYERS = 128, 4, 2


class WritingBlock(nn.Module):
    """Attention over a cache, then an MLP, each behind a norm and added to what came in."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """x is [b, s, h]; cache is [2, b, a, K, h/a], its last s places free for the new."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, h/a]
        new = x.shape[1]
        cache[0, :, :, -new:], cache[1, :, :, -new:] = k, v
        mixed = F.scaled_dot_product_attention(q, *cache, is_causal=new > 1)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# --8<-- [start:measure]
@torch.no_grad()
def step_seconds(blocks: nn.ModuleList, sequences: int, new: int, context: int) -> float:
    """Time of a step: `new` tokens for each sequence, `context` with them in its cache.

    The shortest of nine. Processor time does not include the time of other programs.
    """
    x = torch.randn(sequences, new, HIDDEN)
    caches = torch.randn(LAYERS, 2, sequences, HEADS, context, HIDDEN // HEADS)
    times = []
    for _ in range(9):
        begin = time.process_time()
        y = x
        for block, cache in zip(blocks, caches, strict=True):
            y = block(y, cache)
        times.append(time.process_time() - begin)
    return min(times)


def fit(shapes: list[tuple[int, int, int]], seconds: list[float], terms=3) -> torch.Tensor:
    """c0, c1, c2 by least squares of the relative error."""
    rows = [[1, sequences * new, sequences * context] for sequences, new, context in shapes]
    seconds = torch.tensor(seconds, dtype=torch.float64)[:, None]
    rows = torch.tensor(rows, dtype=torch.float64)[:, :terms]
    return torch.linalg.lstsq(rows / seconds, torch.ones_like(seconds)).solution[:, 0]


# --8<-- [end:measure]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = nn.ModuleList(WritingBlock(HIDDEN, HEADS) for _ in range(LAYERS))
    decode = [(b, 1, c) for b in (1, 2, 4, 8, 16, 32) for c in (32, 64, 128, 256)]
    prefill = [(1, s, s) for s in (16, 32, 64, 128)]
    shapes = decode + prefill
    begin = time.process_time()
    seconds = [step_seconds(blocks, *shape) for shape in shapes]
    assert 9 * sum(seconds) < time.process_time() - begin  # each ran nine times

    names = "c0, each step", "c1, each new token", "c2, each token of context"
    constants = dict(zip(names, fit(shapes[::2], seconds[::2]).tolist(), strict=True))
    fixed, token, context = constants.values()
    # least squares: the relative errors of the fitted steps, weighted, add up to 0
    rest = [(1 - (fixed + token * b * s + context * b * c) / took) / took
            for (b, s, c), took in list(zip(shapes, seconds, strict=True))[::2]]  # fmt: skip
    assert abs(sum(rest)) < 1e-6 * sum(map(abs, rest))
    for digits, (name, constant) in zip((0, 1, 3), constants.items(), strict=True):
        print(f"{name:25} ≈{1e6 * constant:.{digits}f} µs")
    assert constants["c2, each token of context"] < constants["c1, each new token"]

    errors = []
    print("sequences   new   context   measured   predicted")
    for (b, s, c), measured in list(zip(shapes, seconds, strict=True))[1::2]:
        predicted = fixed + token * b * s + context * b * c
        errors.append(abs(predicted / measured - 1))
        if c in (64, 256) or s > 1:
            print(f"{b:9} {s:5} {c:9}   ≈{1e3 * measured:.2f} ms   ≈{1e3 * predicted:.2f} ms")
    # without the third constant
    without = [(b, s, 0) for b, s, _ in shapes]
    c0, c1 = fit(without[::2], seconds[::2], terms=2).tolist()
    blind = [
        abs((c0 + c1 * b * s) / measured - 1)
        for (b, s, _), measured in list(zip(shapes, seconds, strict=True))[1::2]
    ]
    worse, error = statistics.median(blind), statistics.median(errors)
    print(f"median error on the steps that were not fitted: ≈{error:.0%}")
    print(f"with two constants, without the context:        ≈{worse:.0%}")
    assert 0 < error < 0.5, "three constants do not describe the steps"
    assert error < worse, "the cache costs nothing"
    full, short = seconds[shapes.index((32, 1, 256))], seconds[shapes.index((32, 1, 32))]
    assert full > 1.5 * short, "eight times the context is not read"
    alone, together = seconds[shapes.index((1, 1, 32))], seconds[shapes.index((32, 1, 32))]
    print(f"32 tokens in 32 steps take ≈{32 * alone / together:.0f} times as long as in one")
    assert alone < together < 16 * alone, "32 tokens share the fixed cost of a step"


if __name__ == "__main__":
    main()
