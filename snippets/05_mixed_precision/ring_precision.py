"""The rounding error of a gradient sum in bf16 grows with the number of ranks in a ring.

A ring adds the gradients of a chunk one rank after the other, and rounds each partial sum to
the type of the message. With 4 ranks the program compares this order with gloo's own
all-reduce. Then one process repeats the order of the ring for up to 1,024 ranks.

Look at the column "bf16", and then at the last table: the error of a sum depends on the
gradients, so the program also adds the gradients of a small network, before and after training.
Draws ring_precision.svg.
"""

import os
import sys

import torch
import torch.distributed as dist

WIDTH_IN, WIDTH = 32, 64  # of the small network
ELEMENTS = WIDTH_IN * WIDTH
SIZES = [2**k for k in range(1, 11)]
WAYS = {  # name: type of the messages, type of the partial sums
    "fp32": (torch.float32, torch.float32),
    "bf16 sent, fp32 added": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
}


def ring_sum(gradients: torch.Tensor, wire: torch.dtype, partial: torch.dtype) -> torch.Tensor:
    """Add [n, elements] over the ranks in the order of a ring, which rounds n-1 times.

    The elements are cut into n chunks. The sum of chunk c starts on rank c and then visits
    all other ranks.
    """
    n, elements = gradients.shape
    start = torch.arange(elements) * n // elements  # the rank on which an element's sum starts
    ranks = (start + torch.arange(n)[:, None]) % n  # [n, elements], in the order of the ring
    first, *others = gradients.gather(0, ranks).to(wire).to(partial)
    total = first
    for gradient in others:
        total = total + gradient
    return total.to(wire)


def all_to_all_sum(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's chunk of the sum. Each rank sends bf16 chunks and adds in fp32."""
    received = torch.empty_like(gradient)  # a second buffer of the same size
    assert received.dtype == torch.bfloat16  # the messages have 2 bytes per element
    dist.all_to_all_single(received, gradient)
    return received.view(dist.get_world_size(), -1).sum(0, dtype=torch.float32)


def draw_gradients(n: int, common: float) -> torch.Tensor:
    """Noise of each rank's own samples, and `common` times a gradient that all ranks share."""
    torch.manual_seed(n)
    return torch.randn(n, ELEMENTS) + common * torch.randn(ELEMENTS)  # [n, elements]


def network_gradients(ranks: int, steps: int) -> torch.Tensor:
    """Gradients of a layer of a small network, 8 samples for each rank, after some steps."""
    torch.manual_seed(5)
    w1 = torch.randn(WIDTH_IN, WIDTH) / WIDTH_IN**0.5
    w2 = torch.randn(WIDTH, 1) / WIDTH**0.5
    teacher = torch.randn(WIDTH_IN, 1) / WIDTH_IN**0.5

    def backward(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(ranks, 8, WIDTH_IN)
        y = torch.tanh(3 * x @ teacher) + 0.3 * torch.randn(ranks, 8, 1)
        hidden = torch.tanh(x @ w1)
        slope = (hidden @ w2 - y) * 2 / 8  # of the mean square error, [ranks, 8, 1]
        g1 = x.transpose(1, 2) @ (slope @ w2.T * (1 - hidden**2))
        return g1, hidden.transpose(1, 2) @ slope

    for _ in range(steps):
        g1, g2 = backward(64)
        w1, w2 = w1 - 0.3 * g1.mean(0), w2 - 0.3 * g2.mean(0)
    return backward(ranks)[0].flatten(1)  # [ranks, elements]


def relative_distance(estimate: torch.Tensor, exact: torch.Tensor) -> float:
    return ((estimate.double() - exact).norm() / exact.norm()).item()


def error(gradients: torch.Tensor, name: str) -> float:
    """Relative error of the sum, in the 2-norm, against float64."""
    return relative_distance(ring_sum(gradients, *WAYS[name]), gradients.double().sum(0))


def matches_gloo() -> tuple[float, float]:
    """Return two fractions of elements that some ring, in its order, would also compute.

    The first fraction is for gloo's sum, and the second fraction is for sums in pairs.
    """
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

    chunk = all_to_all_sum(gradients[dist.get_rank()].clone())
    exact = gradients.double().sum(0).chunk(n)[dist.get_rank()]
    assert (
        relative_distance(chunk, exact) < 1e-6 < relative_distance(ours[dist.get_rank()], exact)
    )
    return shares[0], shares[1]


def draw(curves: dict[str, list[float]]) -> None:
    import matplotlib  # only rank 0 draws

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

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


def report_networks() -> None:
    """The error of the bf16 ring for real gradients, next to the noise of their samples."""
    print("gradients of a small network: error of the bf16 ring, and noise of the samples")
    table = {}
    for title, steps in (("before training", 0), ("after 1,000 steps", 1000)):
        gradients = network_gradients(4096, steps)
        true = gradients.double().mean(0)
        for n in (64, 1024):
            rounding = error(gradients[:n], "bf16")
            noise = relative_distance(gradients[:n].double().mean(0), true)
            table[n, steps] = rounding, noise
            print(f"  {title:17}  {n:5} ranks  error ≈{rounding:.0e}  noise ≈{noise:.0e}")
    for n, steps, bound in ((64, 0, 0.05), (64, 1000, 0.05), (1024, 1000, 0.2)):
        rounding, noise = table[n, steps]
        assert 3e-3 < rounding < bound * noise  # the choice of samples matters more
    assert table[1024, 0][0] > table[1024, 0][1]  # here rounding is the larger error
    assert (
        table[1024, 0][0] > 2 * table[1024, 1000][0]
    )  # gradients that agree are the hard case


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("start this program with: torchrun --nproc-per-node=4 ring_precision.py")
    dist.init_process_group("gloo")
    gloo, pairs = matches_gloo()
    assert gloo == 1 and pairs < 1
    if dist.get_rank() == 0:
        print("4 ranks, bf16: the fraction of elements that is a sum in the order of a ring")
        print(f"  of gloo's all-reduce {gloo:.0%}, of a sum in pairs ≈{pairs:.0%}")
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
        for n, measured in zip(SIZES[:7], curves["bf16"], strict=False):  # the formula's range
            assert 0.5 < measured / (2**-9 * (n / 3) ** 0.5) < 3
        report_networks()
        draw(curves)
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
