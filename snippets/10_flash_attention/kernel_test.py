"""This program tests attention kernels by their error in units of the error of plain bf16.

The rule is that of flash-attention's own tests: a kernel may make at most twice the error that
a plain implementation makes in the same precision. Two right kernels pass, and four broken ones
do not. The last two columns show two tests that are often used and should not be: bitwise
equality, and a tolerance that somebody chose by hand. Draws kernel_test.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

D, TILE = 64, 16
LENGTHS = [64, 130, 256, 515, 1024]


def plain(q, k, v):
    """Plain attention; each step is rounded to the precision of the inputs."""
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


# --8<-- [start:tiled]
def tiled(q, k, v, accumulate=torch.float32, rescale=True, scale=None, keys=None):
    """Online softmax over tiles of keys, as in a kernel; the options make it wrong."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.shape[-2] if keys is None else keys
    top = q.new_full((*q.shape[:-1], 1), -torch.inf, dtype=accumulate)
    total, out = torch.zeros_like(top), torch.zeros_like(q, dtype=accumulate)
    for begin in range(0, keys, TILE):
        tile = slice(begin, min(begin + TILE, keys))
        scores = (q.float() @ k[..., tile, :].float().mT * scale).to(accumulate)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
        total = total * shrink + weights.sum(-1, keepdim=True)
        # the weights are rounded to bf16 for the product with v, but not for the sum
        product = weights.to(q.dtype).float() @ v[..., tile, :].float()
        out = out * (shrink if rescale else 1) + product.to(accumulate)
        top = new_top
    return (out / total).to(q.dtype)


# --8<-- [end:tiled]

KERNELS = {
    "SDPA": F.scaled_dot_product_attention,
    "tiled, fp32 sums": tiled,
    "tiled, bf16 sums": lambda q, k, v: tiled(q, k, v, accumulate=torch.bfloat16),
    "no rescaling": lambda q, k, v: tiled(q, k, v, rescale=False),
    "last key lost": lambda q, k, v: tiled(q, k, v, keys=k.shape[-2] - 1),
    "scale 2% too large": lambda q, k, v: tiled(q, k, v, scale=1.02 * D**-0.5),
}
RIGHT = {"SDPA", "tiled, fp32 sums"}


# --8<-- [start:rule]
def errors(s: int) -> dict[str, tuple[float, bool, bool]]:
    """Return the error in yardsticks and the results of two other tests for each kernel."""
    q, k, v = (torch.randn(1, 4, s, D).bfloat16() for _ in range(3))
    exact = plain(q.double(), k.double(), v.double())
    reference = plain(q, k, v)
    yardstick = (reference.double() - exact).abs().max()
    found, outputs = {}, {name: kernel(q, k, v) for name, kernel in KERNELS.items()}
    assert not torch.equal(outputs["SDPA"], outputs["tiled, fp32 sums"]), "the same kernel"
    for name, out in (outputs | {"control": reference}).items():
        found[name] = (
            ((out.double() - exact).abs().max() / yardstick).item(),
            torch.equal(out, reference),
            torch.allclose(out, reference, rtol=0, atol=0.02),
        )
    return found


# --8<-- [end:rule]


def draw(ratios: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kernel_test", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    colours = ["#0b6e99", "#15803d", "#7c3aed", "#c2410c", "#be185d", "#a16207"]
    markers = ["o", "s", "^", "v", "D", "P"]
    for (name, values), colour, marker in zip(ratios.items(), colours, markers, strict=True):
        axes.loglog(LENGTHS, values, color=colour, marker=marker, linewidth=1.4, label=name)
    axes.axhline(2, color="#52525b", linewidth=1, linestyle="--")
    axes.text(66, 2.15, "twice", color="#52525b", va="bottom")
    axes.set(xlabel="keys s", ylabel="error / plain bf16's error")
    axes.set_xticks(LENGTHS, LENGTHS)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(  # above the axes and at the left, so that it is visible on a phone
        frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, labelcolor="linecolor"
    )
    figure.tight_layout()
    figure.savefig("kernel_test.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = [errors(s) for s in LENGTHS]
    assert all(each["control"] == (1, True, True) for each in found), "all three tests can pass"
    ratios = {name: [f[name][0] for f in found] for name in KERNELS}
    print(f"bf16, lengths {LENGTHS}")
    print("kernel                at 64   worst   at most 2   bitwise   atol=0.02")
    for name in KERNELS:
        passes = max(ratios[name]) <= 2
        bits, close = (all(f[name][i] for f in found) for i in (1, 2))
        print(f"{name:20} ≈{ratios[name][0]:6.2f} ≈{max(ratios[name]):6.2f}", end="")
        print(f"   {'pass' if passes else 'CAUGHT':>9}{bits!s:>10}{close!s:>12}")
        assert passes == (name in RIGHT), "the rule must pass right kernels and no other"
        assert not bits, "not even the right ones are equal to the last bit"
        assert close == (name in RIGHT or "bf16" in name), "what a hand-picked tolerance sees"
    rounded = ratios["tiled, bf16 sums"]
    assert rounded[0] <= 2 < rounded[-1], "it passes at 64 keys and fails at 1,024"
    assert max(max(ratios[name]) for name in RIGHT) < 1, "better than plain bf16"
    draw(ratios)


if __name__ == "__main__":
    main()
