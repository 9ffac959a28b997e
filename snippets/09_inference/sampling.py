"""The usual ways to choose the next token, from scratch, each tested against its distribution.

A method is a filter for logits. The softmax of its result is the distribution of the draws. The
program draws with the Gumbel-max trick, tests with chi-square, and draws sampling.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch


# --8<-- [start:filters]
def temperature(logits: torch.Tensor, t: float) -> torch.Tensor:
    return logits / t  # p^(1/t), normalised


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k most likely, and whatever ties with the last of them."""
    least = logits.topk(k).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the fewest most likely that hold at least p together."""
    ordered, index = logits.sort(descending=True)
    shares = ordered.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    before = shares.cumsum(-1) - shares  # what the more likely ones hold: 0 for the first
    drop = (before >= p) & (before > 0)
    drop = torch.empty_like(drop).scatter_(-1, index, drop)
    return logits.masked_fill(drop, -math.inf)


def min_p(logits: torch.Tensor, share: float) -> torch.Tensor:
    """Keep what is at least `share` times as likely as the most likely."""
    least = logits.amax(-1, keepdim=True) + math.log(share)
    return logits.masked_fill(logits < least, -math.inf)


def repetition_penalty(logits: torch.Tensor, used: torch.Tensor, by: float) -> torch.Tensor:
    """Make tokens of `used` less likely: divide a positive logit, multiply a negative one."""
    old = logits.gather(-1, used)
    return logits.scatter(-1, used, torch.where(old > 0, old / by, old * by))


def gumbel_max(logits: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw from softmax(logits) without ever computing it: the argmax of logits plus noise."""
    uniform = torch.rand(draws, len(logits), generator=generator, dtype=torch.float64)
    return (logits - (-uniform.log()).log()).argmax(-1)


# --8<-- [end:filters]


def away(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Standard deviations of Pearson's statistic from its mean, over what p keeps."""
    seen = torch.bincount(tokens, minlength=len(p)).double()
    assert seen[p == 0].sum() == 0, "a token was drawn that the filter had removed"
    kept = p > 0
    expected = p[kept].double() * len(tokens)
    statistic = ((seen[kept] - expected) ** 2 / expected).sum().item()
    freedom = int(kept.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def draw(rows: dict[str, torch.Tensor]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sampling", "font.size": 12}
    names = ("plain", "temperature 2", "top-k 5", "top-p 0.9")
    names += ("min-p 0.1", "temperature 2, then min-p 0.1")
    figure, grid = plt.subplots(2, 3, figsize=(7, 3.9), sharex=True, sharey=True)
    order = rows["plain"].argsort(descending=True)
    for axes, name in zip(grid.flat, names, strict=True):
        q = rows[name].softmax(-1)[order]
        kept = int((q > 0).sum())  # they come first in this order
        axes.bar(range(kept), q[:kept], color="#0b6e99", width=0.8)
        axes.plot(
            range(len(q)), rows["plain"].softmax(-1)[order], color="#c2410c", linewidth=1.2
        )
        axes.set_title(
            name.replace(", then", ",\nthen"), fontsize=11, loc="left", y=0.72, x=0.2
        )
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("token, by rank")
    for axes in grid[:, 0]:
        axes.set_ylabel("probability")
    figure.tight_layout()
    figure.savefig("sampling.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, generator=generator) * 1.5
    p = logits.softmax(-1)
    used = torch.cat([p.topk(2).indices, p.argmin()[None]])  # the last has a negative logit
    rows = {
        "plain": logits,
        "temperature 0.5": temperature(logits, 0.5),
        "temperature 2": temperature(logits, 2.0),
        "top-k 5": top_k(logits, 5),
        "top-p 0.9": top_p(logits, 0.9),
        "min-p 0.1": min_p(logits, 0.1),
        "repetition 1.3": repetition_penalty(logits, used, 1.3),
        "temperature 2, then min-p 0.1": min_p(temperature(logits, 2.0), 0.1),
        "min-p 0.1, then temperature 2": temperature(min_p(logits, 0.1), 2.0),
    }
    print("method                          tokens   most likely   bits   off by, in σ")
    for words, filtered in rows.items():
        q = filtered.softmax(-1)
        drawn = gumbel_max(filtered, 100_000, generator)
        bits = -torch.xlogy(q, q).sum() / math.log(2)
        print(f"{words:30} {int((q > 0).sum()):7} {q.max():12.3f} {bits:8.2f}   "
              f"≈{away(drawn, q):+.1f}")  # fmt: skip
        assert away(drawn, q) < 5
    assert (
        away(gumbel_max(logits, 100_000, generator), temperature(logits, 1.1).softmax(-1)) > 5
    )

    draw(rows)

    # what the definitions promise
    coin = torch.tensor([0] * 60 + [1] * 40)  # Pearson's statistic is 4, one degree of freedom
    assert abs(away(coin, torch.tensor([0.5, 0.5])) - 3 / 2**0.5) < 1e-6
    two = torch.stack([logits, 0.1 * logits.flip(0)])  # in a batch, each row is by itself
    for keep, value in ((top_k, 5), (top_p, 0.9), (min_p, 0.1)):
        assert keep(two, value).equal(torch.stack([keep(row, value) for row in two]))
    torch.testing.assert_close(temperature(logits, 0.5).softmax(-1), p**2 / (p**2).sum())
    tied = torch.tensor([1.0, 3.0, 1.0, 0.0])
    assert (top_k(tied, 2) > -math.inf).tolist() == [True, True, True, False]
    assert (top_p(tied, 0.0) > -math.inf).tolist() == [False, True, False, False]
    penalised, rest = repetition_penalty(logits, used, 1.3), torch.ones(24, dtype=torch.bool)
    rest[used] = False
    assert (penalised[used] < logits[used]).all() and penalised[rest].equal(logits[rest])
    factors = [round(math.log(penalised[i] / logits[i], 1.3), 3) for i in used]
    assert factors == [-1, -1, 1], "a positive logit is divided, a negative one multiplied"
    moved = repetition_penalty(logits + 1, used, 1.3)  # softmax ignores the 1
    assert (moved.softmax(-1) - penalised.softmax(-1)).abs().max() > 0.01
    flat = torch.zeros(4096, dtype=torch.bfloat16)  # a sum in bf16 would stop growing
    assert (top_p(flat, 0.5) == 0).sum() == 2048
    kept = p[top_p(logits, 0.9) > -math.inf]
    assert kept.sum() >= 0.9 > kept.sum() - kept.min()
    assert (min_p(logits, 0.1) > -math.inf).equal(p >= 0.1 * p.max())
    assert gumbel_max(temperature(logits, 1e-4), 100, generator).unique().item() == p.argmax()
    print("the definitions hold; temperature 0.0001 is greedy; a wrong temperature is noticed")


if __name__ == "__main__":
    main()
