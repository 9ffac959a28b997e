"""The error of a gradient all-reduce in bf16, from 2 to 1,024 ranks, in the order of a ring.

A ring adds the gradients of a chunk one rank after the other, and rounds each partial sum to
the type on the wire. With 4 ranks the order is checked against gloo's own all-reduce; then one
process plays the ring for more. Draws ring_precision.svg.
"""

import os
import sys

import matplotlib
import torch
import torch.distributed as dist

matplotlib.use("svg")
import matplotlib.pyplot as plt

ELEMENTS = 2048
SIZES = [2**k for k in range(1, 11)]
WAYS = {  # name: type on the wire, type in which partial sums are kept
    "fp32": (torch.float32, torch.float32),
    "bf16 sent, fp32 added": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
}


def ring_sum(gradients: torch.Tensor, wire: torch.dtype, partial: torch.dtype) -> torch.Tensor:
    """The sum over the ranks of [n, elements], as a ring makes it: rounded n-1 times.

    The elements are cut into n chunks; the sum of chunk c starts on rank c and goes round.
    """
    n, elements = gradients.shape
    start = torch.arange(elements) * n // elements  # the rank on which an element's sum starts
    total = gradients.gather(0, start[None])[0].to(wire).to(partial)
    for step in range(1, n):
        rank = (start + step) % n
        total = total + gradients.gather(0, rank[None])[0].to(wire).to(partial)
    return total.to(wire)


def draw_gradients(n: int, common: float) -> torch.Tensor:
    """Noise of each rank's own samples, and `common` times a gradient that all ranks share."""
    torch.manual_seed(n)
    return torch.randn(n, ELEMENTS) + common * torch.randn(ELEMENTS)  # [n, elements]


def error(gradients: torch.Tensor, name: str) -> float:
    """Relative error of the sum, in the 2-norm, against float64."""
    exact = gradients.double().sum(0)
    off = ring_sum(gradients, *WAYS[name]).double() - exact
    return (off.norm() / exact.norm()).item()


def matches_gloo() -> tuple[float, float]:
    """The share of elements that a ring adds up to: of gloo's bf16 sum, and of one in pairs."""
    n = dist.get_world_size()
    gradients = draw_gradients(n, 1.0).bfloat16()
    summed = gradients[dist.get_rank()].clone()
    dist.all_reduce(summed)
    possible = []
    for start in range(n):
        for direction in (1, -1):
            total = gradients[start]
            for step in range(1, n):
                total = total + gradients[(start + direction * step) % n]
            possible.append(total)
    rings = torch.stack(possible)  # [2n, elements]
    ours = ring_sum(gradients, *WAYS["bf16"]).chunk(n)
    for c, chunk in enumerate(ours):  # chunk c starts on rank c and goes up
        assert torch.equal(chunk, possible[2 * c].chunk(n)[c])
    pairs = (gradients[0] + gradients[1]) + (gradients[2] + gradients[3])
    shares = [(rings == t).any(0).double().mean().item() for t in (summed, pairs)]
    return shares[0], shares[1]


def draw(curves: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ring_precision", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    colours = dict(zip(curves, ("#0b6e99", "#15803d", "#c2410c"), strict=True))
    for name, values in curves.items():
        axes.plot(SIZES, values, "o-", color=colours[name], markersize=4)
    axes.text(30, 1.3e-2, "bf16 partial sums", color=colours["bf16"], ha="right")
    axes.text(1024, 5e-4, "bf16 sent, fp32 added", color="#15803d", ha="right", va="top")
    axes.text(1024, 2.2e-7, "fp32", color="#0b6e99", ha="right", va="top")
    axes.set(xscale="log", yscale="log", xlabel="ranks n", ylabel="relative error of the sum")
    axes.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
    axes.set_ylim(1e-8, 1)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("ring_precision.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("start this program with: torchrun --nproc-per-node=4 ring_precision.py")
    dist.init_process_group("gloo")
    gloo, pairs = matches_gloo()
    assert gloo == 1 and pairs < 1
    if dist.get_rank() == 0:
        print("4 ranks, bf16: the share of elements that is a sum in the order of a ring")
        print(f"  of gloo's all-reduce {gloo:.0%}, of a sum in pairs ≈{pairs:.0%}")
    if dist.get_rank() == 0:
        curves = {name: [error(draw_gradients(n, 1.0), name) for n in SIZES] for name in WAYS}
        print(f"{'ranks':>6}" + "".join(f"{name:>24}" for name in WAYS))
        for column, n in enumerate(SIZES):
            cells = "".join(f"{f'≈{curves[name][column]:.0e}':>24}" for name in WAYS)
            print(f"{n:6}{cells}")
        sent = draw_gradients(4, 1.0)
        kinds = WAYS["bf16 sent, fp32 added"]  # rounded before it is added, on every rank
        assert torch.equal(ring_sum(sent, *kinds), ring_sum(sent.bfloat16(), *kinds))
        ones = torch.ones(1024, 1024)
        print(f"1024 ranks with a gradient of 1: {ring_sum(ones, *WAYS['bf16'])[0].item():.0f}")
        assert curves["bf16"][-1] > 10 * curves["bf16"][0]
        assert max(curves["bf16 sent, fp32 added"]) < 2 * curves["bf16"][0]
        draw(curves)
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
