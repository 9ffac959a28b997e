"""What does the next token cost after s tokens, with and without a cache? FLOPs and time.

Without a cache, the model computes the whole text again for each token. With a cache, it only
computes the new token, which reads the cache. Draws cost_per_token.svg.
"""

import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, HEADS, LAYERS, VOCABULARY = 256, 4, 4, 256
POINTS = (64, 128, 256, 512, 1024)


class PlainBlock(nn.Module):
    """As in kv_cache.py."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x, past=None):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5  # written out, so that they count
        if past is None:
            scores += torch.full(scores.shape[2:], -torch.inf).triu(1)
        mixed = scores.softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


# --8<-- [start:cost]
def run(blocks, head, x, cache):
    """A forward pass of the new tokens `x` [1, s, h]. Returns the logits of the last one."""
    for i, block in enumerate(blocks):
        x, cache[i] = block(x, cache[i])
    return head(x[:, -1:])


def formula(new: int, seen: int) -> int:
    """FLOPs of `new` tokens that attend to `seen` tokens: matrix products, and attention."""
    matrices = LAYERS * 12 * HIDDEN**2
    return new * (2 * matrices + 4 * LAYERS * HIDDEN * seen) + 2 * HIDDEN * VOCABULARY


# --8<-- [end:cost]


def measure(work, rounds: int) -> tuple[torch.Tensor, int, float]:
    """Result and FLOPs of a first call, and the shortest time of `rounds` more."""
    with FlopCounterMode(display=False) as counter:
        result = work()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return result, counter.get_total_flops(), min(times)


def draw(without: list[float], cached: list[float]) -> None:
    assert without[-1] > 5 * cached[-1]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cost", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.loglog(POINTS, [1e3 * t for t in without], "o-", color="#c2410c")
    axes.loglog(POINTS, [1e3 * t for t in cached], "o-", color="#0b6e99")
    middle = (without[-2] * without[-1]) ** 0.5
    axes.text(600, 1e3 * middle, "without a cache ", color="#c2410c", ha="right")
    axes.text(330, 1e3 * max(cached) * 1.35, "with one", color="#0b6e99", ha="center")
    axes.set(xlabel="tokens before this one", ylabel="time of one token (ms)")
    axes.set_xticks(POINTS, [f"{p}" for p in POINTS])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("cost_per_token.svg", transparent=True, metadata={"Date": None})


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
    head = nn.Linear(HIDDEN, VOCABULARY)
    text = torch.randn(1, max(POINTS), HIDDEN)
    x, block = text[:, :8], blocks[0]  # the block that is counted is one of a transformer
    q, k, v = block.qkv(block.norm1(x)).view(1, 8, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = x + block.out(mixed.transpose(1, 2).flatten(2))
    y += block.down(F.gelu(block.up(block.norm2(y))))
    torch.testing.assert_close(block(x)[0], y, rtol=1e-4, atol=1e-5)
    print("tokens    MFLOPs of the next token      its time")
    print("before    without      with   ratio     without       with")
    slow, fast = [], []
    for s in POINTS:
        x = text[:, :s]
        past = [None] * LAYERS
        run(blocks, head, x[:, :-1], past)
        works = (
            lambda x=x: run(blocks, head, x, [None] * LAYERS),
            lambda x=x, p=past: run(blocks, head, x[:, -1:], list(p)),
        )
        begin = time.perf_counter()
        results, counts, times = zip(measure(works[0], 3), measure(works[1], 15), strict=True)
        assert 3 * times[0] + 15 * times[1] < time.perf_counter() - begin  # one token's times
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        assert counts == (formula(s, s), formula(1, s))
        slow.append(times[0])
        fast.append(times[1])
        ratio = counts[0] / counts[1]
        print(f"{s:6} {counts[0] / 1e6:10.0f} {counts[1] / 1e6:9.1f} {ratio:7.0f}   "
              f"≈{1e3 * slow[-1]:6.1f} ms ≈{1e3 * fast[-1]:6.2f} ms")  # fmt: skip
    print("logits equal at every length; FLOPs equal the formula")
    draw(slow, fast)


if __name__ == "__main__":
    main()
