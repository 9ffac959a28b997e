"""This program cuts the keys of a decoding step into parts and merges the parts (split-K).

With one query per request, most SMs of a GPU have no work. More parts make more blocks. The
parts are merged exactly by their log-sum-exps. The number of parts follows the rule of
FlashAttention-2, and the program reproduces the example in its source code. Look at the columns
"in use" and "then in use". The program draws split_k.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

SMS = 132  # of an H100


# --8<-- [start:split]
def partial(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output over some of the keys, and the log of the softmax's denominator."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def compute_parts(q, k, v, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the parts independently. On a GPU, each part is one block."""
    pieces = zip(k.tensor_split(parts, dim=-2), v.tensor_split(parts, dim=-2), strict=True)
    outs, lses = zip(*(partial(q, kk, vv) for kk, vv in pieces), strict=True)
    return torch.stack(outs), torch.stack(lses)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Merge outputs [parts, ..., d] by their lses [parts, ..., 1]; the weights are e^lse."""
    return (torch.softmax(lses, dim=0) * outs).sum(0)


# --8<-- [end:split]


# --8<-- [start:rule]
def efficiency(blocks: int, parts: int, sms: int = SMS) -> float:
    """Return the fraction of SM time in use, if all blocks last equally long."""
    waves = blocks * parts / sms
    return waves / math.ceil(waves)


def choose(blocks: int, key_tiles: int, sms: int = SMS, most: int = 128) -> int:
    """Return the fewest parts with 85% of the best efficiency (rule of FlashAttention-2)."""
    if blocks >= 0.8 * sms:
        return 1
    each = [math.ceil(key_tiles / n) for n in range(1, min(most, sms, key_tiles) + 1)]
    eligible = [n for n in range(1, len(each) + 1) if n == 1 or each[n - 1] != each[n - 2]]
    best = max(efficiency(blocks, n, sms) for n in eligible)
    return next(n for n in eligible if efficiency(blocks, n, sms) >= 0.85 * best)


# --8<-- [end:rule]


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "split_k", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7, 3.4))
    parts = list(range(1, 41))
    for blocks, colour in ((8, "#0b6e99"), (20, "#c2410c"), (96, "#15803d")):
        values = [100 * efficiency(blocks, n) for n in parts]
        axes.plot(parts, values, color=colour, linewidth=1.5, label=f"{blocks} blocks")
        for n, drawn in zip(parts, values, strict=True):
            waves = len(range(0, blocks * n, SMS))  # pieces in steps of a whole wave
            assert math.isclose(drawn, 100 * blocks * n / (waves * SMS))
        chosen = choose(blocks, key_tiles=256)
        assert chosen == {8: 14, 20: 6, 96: 4}[blocks]
        axes.plot(chosen, values[chosen - 1], "o", color=colour, markersize=8)
    axes.set(
        xlabel="parts that the keys are cut into",
        ylabel="SM time in use, %",
        ylim=(0, 105),
        xlim=(0, 40),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(  # above and at the left: there on a narrow screen too
        frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, labelcolor="linecolor"
    )
    figure.tight_layout()
    figure.savefig("split_k.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q = torch.randn(2, 8, 1, 64)  # one new token in each of two requests
    k, v = torch.randn(2, 8, 1000, 64), torch.randn(2, 8, 1000, 64)
    k[..., 900, :] = 3 * q[..., 0, :]  # one part outweighs the rest
    truth = F.scaled_dot_product_attention(q, k, v)
    for parts in (1, 2, 7, 64, 1000):
        outs, lses = compute_parts(q, k, v, parts)
        assert outs.shape == (parts, *truth.shape) and lses.shape == (parts, 2, 8, 1, 1)
        torch.testing.assert_close(merge(outs, lses), truth, rtol=1e-4, atol=1e-5)
    # some scores are above 100, and exp() of them overflows
    larger = F.scaled_dot_product_attention(5 * q, k, v)
    torch.testing.assert_close(merge(*compute_parts(5 * q, k, v, 7)), larger)
    # if all scores are 0, the log-sum-exp of a part is the logarithm of its number of keys
    lses = compute_parts(0 * q, k, v, 7)[1]
    assert lses.exp().round()[:, 0, 0, 0, 0].tolist() == [143] * 6 + [142]
    outs, _ = compute_parts(q, k, v, 8)
    assert (outs.mean(0) - truth).abs().max() > 0.1, "a plain mean of the parts is wrong"
    print("1, 2, 7, 64 and 1,000 parts: equal to SDPA; the mean of the parts is not")

    assert choose(106, 64) == 1 < choose(105, 64)  # 80% of 132
    assert choose(1, 10**6, sms=200) == math.ceil(0.85 * 128)  # no more than 128 parts
    assert choose(48, 64) == 5  # six requests with 8,192 tokens: 91% of two waves
    assert [round(efficiency(48, n), 2) for n in (2, 3, 5, 11)] == [0.73, 0.55, 0.91, 1]
    assert [round(efficiency(8, n), 2) for n in (14, 17)] == [0.85, 0.52]
    example = [round(efficiency(48, n, sms=108), 2) for n in (2, 3)]
    assert example == [0.89, 0.67] and choose(48, 64, sms=108) == 2
    print(
        f"FlashAttention's example, 48 blocks on an A100's 108 SMs: {example[0]:.0%} in use",
        end="",
    )
    print(f" with 2 parts, {example[1]:.0%} with 3")

    print(f"\n{SMS} SMs, 8 key heads, tiles of 128 keys")
    print("requests   context   blocks   in use   parts   then in use")
    for requests, context in (
        (1, 500),
        (1, 4096),
        (1, 32768),
        (4, 32768),
        (12, 32768),
        (16, 512),
    ):
        blocks, tiles = requests * 8, math.ceil(context / 128)
        parts = choose(blocks, tiles)
        before, after = efficiency(blocks, 1), efficiency(blocks, parts)
        assert after >= before
        print(
            f"{requests:8} {context:9} {blocks:8} {100 * before:7.0f}%"
            f" {parts:7} {100 * after:12.0f}%"
        )
    twice = [choose(blocks, tiles, sms=2 * SMS) for blocks, tiles in ((8, 256), (128, 4))]
    print(f"with two blocks on each SM: {twice[0]} parts for 1 request of 32,768 tokens, and "
          f"{twice[1]} parts for 16 requests of 512 tokens")  # fmt: skip
    draw()


if __name__ == "__main__":
    main()
