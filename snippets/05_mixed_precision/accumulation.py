"""Sums of n bf16 numbers: one after another, in pairs, and with an fp32 accumulator.

All three results are bf16 numbers. If the numbers are added one after another, the error grows
with n, until the sum stops growing. In pairs, the error barely grows. With an fp32 accumulator
there is only one rounding. The second table shows the same for dot products, of which a matrix
product consists. Draws accumulation.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

COUNTS = [2**k for k in range(4, 17, 2)]
TRIALS = 32
WAYS = ("one by one", "in pairs", "fp32 accumulator")


def one_by_one(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, rounded to bf16 after each addition. [trials, n]"""
    total = torch.zeros(x.shape[:-1], dtype=torch.bfloat16)
    for column in x.unbind(-1):
        total = total + column
    return total


def in_pairs(x: torch.Tensor) -> torch.Tensor:
    """Add neighbours, then neighbouring sums: each number takes part in log2(n) additions."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def fp32_accumulator(x: torch.Tensor) -> torch.Tensor:
    return x.float().sum(-1).bfloat16()


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the errors, divided by the norm of the exact values. [trials]"""
    return ((ours.double() - exact).norm() / exact.norm()).item()


def draw(errors: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "accumulation", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.9))
    rows = (("#c2410c", 1.25), ("#7c3aed", 1.3), ("#0b6e99", 0.62))
    for way, (colour, above) in zip(WAYS, rows, strict=True):
        axes.plot(COUNTS, errors[way], "o-", color=colour, markersize=5, linewidth=2)
        at = 3 if way == "one by one" else 4
        words = f"bf16, {way}" if "fp32" not in way else way
        axes.text(
            COUNTS[at],
            errors[way][at] * above,
            words,
            color=colour,
            ha="right",
            va="bottom" if above > 1 else "top",
        )
    axes.set(xscale="log", yscale="log", ylim=(4e-4, 2.2))
    axes.set(xlabel="numbers added, n", ylabel="relative error of the sum")
    axes.set_xticks(COUNTS, [f"{n:,}" for n in COUNTS])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("accumulation.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(1, 1024, dtype=torch.bfloat16)
    by_ways = [f(ones).item() for f in (one_by_one, in_pairs, fp32_accumulator)]
    assert one_by_one(ones).item() == 256
    four = torch.tensor([[256.0, 1, 1, 1]]).bfloat16()  # (256 + 1) + (1 + 1) is 256 + 2 in bf16
    orders = [f(four).item() for f in (one_by_one, in_pairs, fp32_accumulator)]
    assert orders == [256, 258, 260]
    print(
        "1,024 ones: " + ", ".join(f"{w} {v:.0f}" for w, v in zip(WAYS, by_ways, strict=True))
    )

    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    print("sums of n numbers between 0 and 1, relative error against float64")
    print("     n   one by one  1-512/n   in pairs   fp32 accumulator   torch.sum")
    for n in COUNTS:
        x = torch.rand(TRIALS, n, generator=generator).bfloat16()
        exact = x.double().sum(-1)
        sums = [f(x) for f in (one_by_one, in_pairs, fp32_accumulator)]
        for way, result in zip(WAYS, sums, strict=True):
            errors[way].append(relative(result, exact))
        library = relative(x.sum(-1), exact)
        stop = 1 - 512 / n  # the sum stops at 256, and n/2 would be right
        shown = f"{stop:.4f}" if n >= 1024 else "–"
        print(
            f"{n:6}   ≈{errors[WAYS[0]][-1]:<9.4f}  {shown:8}  ≈{errors[WAYS[1]][-1]:<8.4f}"
            f"   ≈{errors[WAYS[2]][-1]:<16.4f}  ≈{library:.4f}"
        )
        assert n < 1024 or sums[0].eq(256).all()
        assert n < 1024 or abs(errors[WAYS[0]][-1] - stop) < 0.01
        once = relative(exact.bfloat16(), exact)  # of a single rounding
        assert abs(errors[WAYS[2]][-1] / once - 1) < 0.05
        assert library < 1.1 * errors[WAYS[2]][-1]  # so torch accumulates in fp32
    assert errors[WAYS[0]] == sorted(errors[WAYS[0]]) and errors[WAYS[0]][-1] > 0.9
    for pairs, fp32 in zip(errors["in pairs"], errors["fp32 accumulator"], strict=True):
        assert fp32 < pairs < 2 * fp32 < 0.008  # it does not grow with n

    print("dot products of length K, numbers of both signs")
    print("     K   bf16 accumulator   fp32 accumulator   torch.matmul")
    for k in COUNTS[1::2]:
        a = torch.randn(TRIALS, k, generator=generator).bfloat16()
        b = torch.randn(TRIALS, k, generator=generator).bfloat16()
        exact = (a.double() * b.double()).sum(-1)
        products = a.float() * b.float()  # exact: 8 bits times 8 bits
        assert products.double().equal(a.double() * b.double())
        total = torch.zeros(TRIALS, dtype=torch.bfloat16)
        for column in products.unbind(-1):
            total = (total.float() + column).bfloat16()
        library = (a[:, None] @ b[:, :, None]).flatten()  # [trials, 1, K] @ [trials, K, 1]
        parts = [relative(t, exact) for t in (total, products.sum(-1).bfloat16(), library)]
        print(f"{k:6}   ≈{parts[0]:<16.4f}   ≈{parts[1]:<16.4f}   ≈{parts[2]:.4f}")
        assert max(parts[1:]) < 0.004 < 0.007 < parts[0]
    draw(errors)


if __name__ == "__main__":
    main()
