"""With N ranks the batch is N times larger: four rules for the learning rate, compared.

One process with batches of 16·N rows computes the gradient that N ranks with 16 rows each would
compute. The program first shows the reason for a larger learning rate: the variance of the
gradient falls as 1/N. Then it trains with four rules for SGD, each on the same samples, from
three seeds. A seed sets the initial weights and the order of the samples. Linear scaling with
warm-up is from Goyal et al. (2017). This is one small model on one data set.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

ROWS_PER_RANK, SAMPLES, EPOCHS, BASE_LR, WARMUP = 16, 4096, 6, 0.05, 0.2
SEEDS = (1, 2, 3)

RULES: dict[str, Callable[[int, float], float]] = {
    # the factor of BASE_LR, given N and the fraction of all samples that has been seen
    "unchanged": lambda n, done: 1,
    "square root": lambda n, done: math.sqrt(n),
    "linear": lambda n, done: n,
    "linear, warm-up": lambda n, done: 1 + (n - 1) * min(1, done / WARMUP),
}


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 32 numbers in 10 classes, chosen by a random network: [4096, 32] and [4096]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 32, generator=generator)
    hidden = torch.tanh(x @ torch.randn(32, 64, generator=generator) / 3)
    return x, (hidden @ torch.randn(64, 10, generator=generator)).argmax(1)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    widths = [32, 64, 64, 10]
    layers = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        nn.init.normal_(layers[-2].weight, std=1.5 * math.sqrt(2 / fan_in))
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


def train(n: int, rule: str, x: torch.Tensor, y: torch.Tensor, seed: int) -> list[float]:
    """Return the loss over all data before training and after each epoch."""
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR)
    seen, losses = 0, [F.cross_entropy(model(x), y).item()]
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(100 * seed + epoch)
        order = torch.randperm(SAMPLES, generator=generator)
        for rows in order.split(ROWS_PER_RANK * n):
            factor = RULES[rule](n, seen / (SAMPLES * EPOCHS))
            optimizer.param_groups[0]["lr"] = BASE_LR * factor
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            seen += len(rows)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y).item())
    return losses


def gradient_variance(n: int, x: torch.Tensor, y: torch.Tensor, batches: int = 300) -> float:
    """The summed variance of the elements of the gradient of a batch of 16·N rows."""
    model = make_model(SEEDS[0])
    generator = torch.Generator().manual_seed(2)
    gradients = []
    for _ in range(batches):
        rows = torch.randint(SAMPLES, (ROWS_PER_RANK * n,), generator=generator)
        grads = torch.autograd.grad(
            F.cross_entropy(model(x[rows]), y[rows]), list(model.parameters())
        )
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(gradients).var(0).sum().item()


def draw(curves: dict[str, list[list[float]]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "learning_rate", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    colours = ["#52525b", "#0b6e99", "#7c3aed", "#c2410c", "#15803d"]
    ends = []  # of the curves: last loss, name, colour
    samples = [epoch * SAMPLES / 1000 for epoch in range(EPOCHS + 1)]
    for (name, runs), colour in zip(curves.items(), colours, strict=True):
        losses = [fmean(each) for each in zip(*runs, strict=True)]
        axes.plot(samples, losses, color=colour, linewidth=2, marker="o", markersize=4)
        ends.append((losses[-1], name, colour))
    lowest = 0.0
    for last, name, colour in sorted(ends):  # a label is at its curve, or above the one below
        lowest = max(last, lowest + 0.14)
        axes.annotate(
            name, (samples[-1], lowest), (8, -4), textcoords="offset points", color=colour
        )
    axes.set(xlabel="samples seen (thousands)", ylabel="mean loss of three seeds (nats)")
    axes.set(ylim=(0.5, 2.5), xlim=(0, 32.5), xticks=range(0, 25, 4))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("learning_rate.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_default_dtype(torch.float64)  # so that every CPU prints the same digits
    torch.set_num_threads(1)  # the matrices are small
    x, y = make_data()

    alone = gradient_variance(1, x, y)
    print("variance of the gradient, divided by that of one rank:")
    for n in (2, 4, 8, 16):
        ratio = gradient_variance(n, x, y) / alone
        print(f"  N = {n:2}: {ratio:.3f}  (1/N = {1 / n:.3f})")
        assert abs(n * ratio - 1) < 0.1

    def final(runs: list[list[float]]) -> str:
        last = [losses[-1] for losses in runs]
        return f"{fmean(last):.3f}  ({min(last):.3f} to {max(last):.3f})"

    alone_runs = [train(1, "unchanged", x, y, seed) for seed in SEEDS]
    print(f"loss after {EPOCHS} epochs: mean and range of {len(SEEDS)} seeds")
    print(f"N = 1 ({EPOCHS * SAMPLES // ROWS_PER_RANK} steps)")
    print(f"  {'unchanged':15}  {final(alone_runs)}")
    curves = {"N = 1": alone_runs}
    for n in (4, 16):
        print(f"N = {n} ({EPOCHS * SAMPLES // (ROWS_PER_RANK * n)} steps)")
        for rule in RULES:
            runs = [train(n, rule, x, y, seed) for seed in SEEDS]
            print(f"  {rule:15}  {final(runs)}")
            if n == 16:
                curves[f"16, {rule}"] = runs
    # at N = 16, every seed orders the rules alike, and no rule is as good as N = 1
    for by_rule in zip(*curves.values(), strict=True):
        best, *others = [losses[-1] for losses in by_rule]
        assert best < others[3] < others[2] < others[1] < others[0]
    draw(curves)


if __name__ == "__main__":
    main()
