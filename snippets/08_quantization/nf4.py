"""Derives the 16 levels of NF4 from normal quantiles and compares its error with other levels.

After Dettmers et al., QLoRA (2023): the levels are at equal steps of a Gaussian's probability,
scaled to [-1, 1], and one level is exactly zero. The scale of a block is its largest magnitude.
Then the program quantizes the scales as well. Draws nf4.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

PUBLISHED = """
-1.0 -0.6961928 -0.5250730 -0.3949175 -0.2844414 -0.1847734 -0.0910500 0.0
0.0795803 0.1609302 0.2461123 0.3379152 0.4407098 0.5626170 0.7229568 1.0
"""


# --8<-- [start:levels]
def quantile(p: torch.Tensor) -> torch.Tensor:
    """Return the x at which the normal distribution function is p."""
    return math.sqrt(2) * torch.erfinv(2 * p - 1)


def nf4_levels() -> torch.Tensor:
    """Eight levels above zero, zero, and seven below, at equal steps of probability per side.

    The outermost probability is the mean of 1 - 1/30 and 1 - 1/32. These are the middles of the
    outermost of 15 and of 16 equal shares.
    """
    last = (1 - 1 / 30 + 1 - 1 / 32) / 2
    above = quantile(torch.linspace(last, 0.5, 9, dtype=torch.float64)[:-1])
    below = -quantile(torch.linspace(last, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return levels / levels.max()


# --8<-- [end:levels]


# --8<-- [start:blocks]
def codes(w: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest level, after the largest of each row has become 1."""
    edges = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(w / w.abs().amax(1, keepdim=True), edges)


def relative_error(w: torch.Tensor, levels: torch.Tensor) -> float:
    back = levels[codes(w, levels)] * w.abs().amax(1, keepdim=True)
    return ((w - back).norm() / w.norm()).item()


def best_levels(w: torch.Tensor) -> torch.Tensor:
    """Lloyd's algorithm: each level moves to the mean of its numbers, forty times."""
    largest = w.abs().amax(1, keepdim=True)
    x, weight = (w / largest).flatten(), largest.square().expand_as(w).flatten()
    levels = torch.linspace(-1, 1, 16, dtype=w.dtype)
    for _ in range(40):
        index = codes(w, levels).flatten()
        total = torch.zeros(16, dtype=w.dtype).index_add_(0, index, weight)
        levels = torch.zeros(16, dtype=w.dtype).index_add_(0, index, weight * x) / total
    return levels


# --8<-- [end:blocks]


def double_quantize(scales: torch.Tensor) -> torch.Tensor:
    """Round scales [n] to fp8, minus their mean, with one fp32 factor for each 256."""
    mean = scales.mean()
    blocks = (scales - mean).view(-1, 256)
    factor = blocks.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return ((blocks / factor).to(torch.float8_e4m3fn).double() * factor).flatten() + mean


def draw(rows: dict[str, torch.Tensor]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "nf4", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7, 3.2))
    x = torch.linspace(-1, 1, 200)
    axes.fill_between(
        x, 0, 1.3 * torch.exp(-((2.4 * x) ** 2) / 2), color="#71717a", alpha=0.25, lw=0
    )
    colours = ("#c2410c", "#0b6e99", "#15803d")
    for height, (name, levels) in enumerate(rows.items()):
        axes.plot(
            levels, [0.3 + 0.4 * height] * len(levels), "|", color=colours[height], ms=16, mew=2
        )
        axes.text(
            -1.04, 0.3 + 0.4 * height, name, ha="right", va="center", color=colours[height]
        )
    axes.set(ylim=(0, 1.45), xlim=(-1.02, 1.02), yticks=[],
             xlabel="weight / largest magnitude of its block")  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("nf4.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    nf4 = nf4_levels()
    off = (
        (nf4 - torch.tensor([float(x) for x in PUBLISHED.split()]).double()).abs().max().item()
    )
    print("NF4:", " ".join(f"{x:.4f}" for x in nf4))
    assert off < 2e-6
    print("equal to the published levels within 0.000002")

    int4 = torch.arange(-7, 8, dtype=torch.float64) / 7  # 15 levels, with a zero
    even = torch.linspace(-1, 1, 16, dtype=torch.float64)  # all 16, and none of them zero
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64) / 6
    e2m1 = torch.cat([-e2m1.flip(0), e2m1[1:]])
    evenly = torch.arange(2**10, dtype=torch.float64).view(16, 64) % 16 / 7.5 - 1
    torch.testing.assert_close(
        best_levels(evenly), even
    )  # the best levels for evenly spaced numbers
    torch.manual_seed(0)
    print("relative error of Gaussian weights  int4, ±7  even 16     E2M1      NF4  Lloyd's 16")
    for block in (32, 64, 256, 1024):
        w = torch.randn(2**17 // block, block, dtype=torch.float64)
        best = best_levels(w)
        errors = [relative_error(w, levels) for levels in (int4, even, e2m1, nf4, best)]
        print(f"  blocks of {block:4}", " " * 18, *(f"{e:9.2%}" for e in errors))
        assert errors[4] < errors[3] < min(errors[:3])
        if block == 64:
            share = torch.bincount(codes(w, nf4).flatten(), minlength=16) / w.numel()
            draw({"even": even, "NF4": nf4, "Lloyd's": best})
    heavy = torch.distributions.StudentT(3.0).sample((2**12, 64)).double()
    heavy_even, heavy_nf4 = relative_error(heavy, even), relative_error(heavy, nf4)
    print(f"Student's t with 3 degrees of freedom, blocks of 64: even 16 {heavy_even:.2%}, "
          f"NF4 {heavy_nf4:.2%}")  # fmt: skip
    assert heavy_nf4 < 0.8 * heavy_even
    print(f"NF4's codes, blocks of 64: the rarest {share.min():.1%} of weights, "
          f"the most frequent {share.max():.1%}, evenly would be {1 / 16:.1%}")  # fmt: skip

    # --8<-- [start:double]
    w = torch.randn(2**14, 64, dtype=torch.float64)
    scales = w.abs().amax(1)
    rough = double_quantize(scales)
    plain, double = 4 + 32 / 64, 4 + 8 / 64 + 32 / (64 * 256)
    # --8<-- [end:double]
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(128)
    both = torch.cat([signs, 1e-6 * signs])  # 256 large and 256 small scales are both exact
    torch.testing.assert_close(double_quantize(both), both)
    # fp8 gives 8 numbers to an octave, so many of the 256 scales of a block become equal
    assert all(block.unique().numel() < 150 for block in rough.view(-1, 256)[:8])
    assert 0.001 < (rough - scales).norm() / scales.norm() < 0.01
    error = relative_error(w, nf4)
    back = nf4[codes(w, nf4)] * rough[:, None]
    with_rough = ((w - back).norm() / w.norm()).item()
    print(f"fp32 scales: {plain:.3f} bits a weight, error {error:.2%}; "
          f"double-quantized: {double:.3f}, {with_rough:.2%}")  # fmt: skip
    print(f"a model of 65 billion parameters saves {(plain - double) / 8 * 65:.1f} GB")
    assert with_rough < 1.02 * error and share.min() < 0.025 < 0.08 < share.max()


if __name__ == "__main__":
    main()
