"""The acceptance rule: keep or replace a token from q so that the result is distributed as p.

Keep x with probability min(1, p(x)/q(x)), otherwise draw from the positive part of p - q. The
program computes the resulting distribution exactly, and tests a million draws with chi-square.
Three likely mistakes fail the test.
"""

import math

import torch


# --8<-- [start:rule]
def speculate(p: torch.Tensor, q: torch.Tensor, draws: int, generator):
    """Draw tokens from `q`, correct them to `p`. Return tokens, drafts, and which are kept."""
    drafted = torch.multinomial(q, draws, replacement=True, generator=generator)
    keep = torch.rand(draws, generator=generator) < p[drafted] / q[drafted]
    residual = (p - q).clamp(min=0)
    residual = residual if residual.any() else p  # p = q: nothing is refused
    fresh = torch.multinomial(residual, draws, replacement=True, generator=generator)
    return torch.where(keep, drafted, fresh), drafted, keep


# --8<-- [end:rule]


# --8<-- [start:chi]
def chi_square(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Standard deviations by which Pearson's statistic exceeds its mean, if tokens follow p."""
    seen = torch.bincount(tokens, minlength=len(p)).double()
    expected = p.double() * len(tokens)
    statistic = ((seen - expected) ** 2 / expected).sum().item()
    freedom = len(p) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# --8<-- [end:chi]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(30, generator=generator).softmax(0)
    q = (p.log() + 0.7 * torch.randn(30, generator=generator)).softmax(0)

    # --8<-- [start:exact]
    eta = torch.minimum(p, q).sum()  # the fraction that is kept
    residual = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    result = torch.minimum(p, q) + (1 - eta) * residual
    torch.testing.assert_close(result, p)
    print(f"exactly: kept + replaced = p; kept {eta:.4f} = 1 - total "
          f"variation {1 - 0.5 * (p - q).abs().sum():.4f}")  # fmt: skip
    # --8<-- [end:exact]

    # --8<-- [start:siblings]
    left, refused, total = p, 1.0, torch.zeros_like(p)
    kept = []
    for _ in range(4):  # guesses from q: each is tested with the last residual
        total = total + refused * torch.minimum(left, q)
        refused *= 1 - torch.minimum(left, q).sum().item()
        left = (left - q).clamp(min=0) / (left - q).clamp(min=0).sum()
        torch.testing.assert_close(total + refused * left, p)
        kept.append(1 - refused)
    print("with 1 to 4 guesses, exactly p again; one is kept with",
          ", ".join(f"{share:.2f}" for share in kept))  # fmt: skip
    # --8<-- [end:siblings]

    draws = 10**6
    tokens, drafts, keep = speculate(p, q, draws, generator)
    assert speculate(p, p.clone(), 1000, generator)[2].all()  # a perfect draft is always kept
    plain = torch.multinomial(p, draws, replacement=True, generator=generator)
    print(f"a million draws: kept ≈{keep.float().mean():.4f}")
    assert abs(keep.float().mean() - eta) < 0.003
    print("standard deviations from p, by chi-square (above 5 is no coincidence)")
    drafted = torch.multinomial(q, draws, replacement=True, generator=generator)
    stays = torch.rand(draws, generator=generator) < p[drafted] / q[drafted]
    whole = torch.multinomial(p, draws, replacement=True, generator=generator)
    again = torch.where(stays, drafted, whole)  # replaced from p, not from the residual
    some = torch.where(p > p.median(), p, 0) / p[p > p.median()].sum()  # after a filter
    assert some[speculate(some, q, 10_000, generator)[0]].all()  # no other token is drawn
    rows = {
        "plain sampling": plain,
        "speculation": tokens,
        "mistake: the draft as it is": drafted,
        "mistake: replaced from p itself": again,
        "mistake: only kept ones count": drafted[stays],
    }
    coin = torch.tensor([0] * 60 + [1] * 40)  # Pearson's statistic is 4, one degree of freedom
    assert abs(chi_square(coin, torch.tensor([0.5, 0.5])) - 3 / 2**0.5) < 1e-6
    both = torch.minimum(p, q)  # the distributions that the mistakes have in truth
    truths = (q, both + (1 - eta) * p, both / eta)
    for mistake, truth in zip(list(rows)[2:], truths, strict=True):
        assert chi_square(rows[mistake], truth) < 5, mistake
    # the row "speculation" is made of drafts: it keeps most of them, and replaces the others
    same = rows["speculation"] == drafts
    assert same[keep].all() and not same[~keep].any() and 0.3 < keep.float().mean() < 0.7
    equal = (rows["plain sampling"] == drafts).float().mean()  # independent of the drafts
    assert abs(equal - (p * q).sum()) < 0.003
    for words, sample in rows.items():
        away = chi_square(sample, p)
        assert (away > 1000) if "mistake" in words else (away < 5), (words, away)
        print(f"  {words:32} ≈{away:.0f}")


if __name__ == "__main__":
    main()
