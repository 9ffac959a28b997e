"""Above the critical batch size, twice the data-parallel ranks no longer halve the steps.

McCandlish et al. (2018) model the K steps and the E = K·B samples that reach a given loss with
a batch of B samples: K = K_min(1 + B_crit/B) and E = E_min(1 + B/B_crit). They predict B_crit
from the noise of the gradient, tr(Σ)/|G|². Data parallelism can measure this noise at no
additional cost. It needs the norm of a rank's gradient before the all-reduce, and the norm of
the mean gradient after it (their Appendix A.1).

The program trains a linear regression by SGD, with the best of many learning rates for each
batch. It counts the steps to the same loss, fits the two constants, and measures the noise
scale during the training. Draws critical_batch.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

FEATURES, LABEL_NOISE = 16, 0.5
BATCHES = [2**k for k in range(11)]
RATES = torch.logspace(-2.5, 0.3, 32)  # learning rates, all tried at the same time
TARGET = 0.02  # fraction of the excess loss at the start
MAX_STEPS = 4000
SCALES = torch.logspace(0, -1, FEATURES)  # standard deviation of each feature


def sample(batch: tuple[int, ...], truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(*batch, FEATURES) * SCALES
    return x, x @ truth + LABEL_NOISE * torch.randn(batch)


def excess_loss(w: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The expected loss minus the least possible loss: half the mean of (x·(w - truth))²."""
    return 0.5 * ((w - truth) * SCALES).square().sum(dim=-1)


def steps_to_target(batch: int, truth: torch.Tensor) -> int:
    """Steps with the best rate until the excess loss, averaged over runs, is at the target."""
    runs = max(4, min(32, 2048 // batch))
    w = torch.zeros(runs, len(RATES), FEATURES)
    target = TARGET * excess_loss(torch.zeros(FEATURES), truth)
    for step in range(1, MAX_STEPS + 1):
        x, y = sample((runs, batch), truth)  # [runs, batch, features], [runs, batch]
        errors = w @ x.transpose(1, 2) - y[:, None]  # [runs, rates, batch]
        w -= RATES[:, None] * (errors @ x) / batch
        if (excess_loss(w, truth).mean(dim=0) <= target).any():  # NaN: rate too high
            return step
    raise RuntimeError(f"a batch of {batch} did not reach the target in {MAX_STEPS} steps")


def noise_scale(w: torch.Tensor, truth: torch.Tensor, ranks: int = 4, b: int = 64) -> float:
    """Estimate tr(Σ)/|G|² from the gradients that `ranks` data-parallel ranks have anyway."""
    signal = noise = 0.0
    for _ in range(500):
        x, y = sample((ranks, b), truth)
        gradients = ((x @ w - y)[..., None] * x).mean(dim=1)  # one per rank
        small = gradients.square().sum(dim=1).mean().item()  # |g|² before the all-reduce
        big = gradients.mean(dim=0).square().sum().item()  # |g|² after the all-reduce
        big_b = ranks * b
        signal += (big_b * big - b * small) / (big_b - b)  # estimates |G|²
        noise += (small - big) / (1 / b - 1 / big_b)  # estimates tr(Σ)
    return noise / signal


def descend(truth: torch.Tensor, share: float) -> torch.Tensor:
    """Follow the exact gradient until the excess loss is `share` of the initial excess loss."""
    w = torch.zeros(FEATURES)
    start = excess_loss(w, truth)
    while excess_loss(w, truth) > share * start:
        w += 0.5 * SCALES.square() * (truth - w)
    return w


def fit(steps: list[int]) -> tuple[float, float]:
    """Fit K_min and B_crit of K = K_min(1 + B_crit/B) to the least squared relative error."""
    counted = torch.tensor(steps, dtype=torch.float64)
    inverse = 1 / torch.tensor(BATCHES, dtype=torch.float64)
    rows = torch.stack([1 / counted, inverse / counted], dim=1)
    ones = torch.ones(len(steps), 1, dtype=torch.float64)
    k_min, product = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    return k_min, product / k_min


def draw(steps: list[int], k_min: float, critical: float, noise: dict[str, float]) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "critical", "font.size": 12})
    figure, axis = plt.subplots(figsize=(7, 3.8))
    smooth = torch.logspace(0, 10, 100, base=2)
    blue, orange = "#0b6e99", "#c2410c"
    axis.plot(smooth, 1 + critical / smooth, color=blue, linewidth=2)
    axis.plot(smooth, 1 + smooth / critical, color=orange, linewidth=2)
    axis.plot(BATCHES, [s / k_min for s in steps], "o", color=blue)
    e_min = k_min * critical
    axis.plot(
        BATCHES, [s * b / e_min for s, b in zip(steps, BATCHES, strict=True)], "s", color=orange
    )
    axis.axvspan(noise["start"], noise["end"], color="#52525b", alpha=0.12, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_ylim(0.8, 150)
    axis.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    axis.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axis.text(1.1, 12, "● steps", color=blue)
    axis.text(1000, 12, "■ samples", color=orange, ha="right")
    axis.axvline(noise["half-way"], color="#52525b", linestyle=":", linewidth=1.5)
    axis.set_xlim(0.8, 2048)
    words = "noise scale tr(Σ)/|G|²\ngrey: start to end\ndotted: half-way"
    axis.text(noise["half-way"] * 1.15, 125, words, color="#52525b", va="top")
    axis.set_xlabel("batch, samples")
    axis.set_ylabel("times the least possible")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("critical_batch.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small
    torch.manual_seed(0)
    truth = torch.full((FEATURES,), 2 / FEATURES**0.5)
    steps = [steps_to_target(batch, truth) for batch in BATCHES]
    k_min, critical = fit(steps)
    noise = {
        name: noise_scale(descend(truth, share), truth)
        for name, share in {"start": 1.0, "half-way": TARGET**0.5, "end": TARGET}.items()
    }

    print("batch  steps  fitted  samples  a doubling saves")
    for batch, count, before in zip(BATCHES, steps, [None, *steps], strict=False):
        saved = "" if before is None else f"≈{100 * (1 - count / before):.0f}% of the steps"
        fitted = k_min * (1 + critical / batch)
        print(f"{batch:5}  ≈{count:<5} ≈{fitted:<6.0f} ≈{count * batch:<7} {saved}".rstrip())
    print(f"fitted B_crit ≈{critical:.0f} samples, K_min ≈{k_min:.0f} steps")
    listed = ", ".join(f"{name} ≈{value:.0f}" for name, value in noise.items())
    print(f"noise scale measured from four ranks' gradients: {listed}")
    assert noise["start"] < critical < noise["end"], "the noise scale should enclose B_crit"
    draw(steps, k_min, critical, noise)


if __name__ == "__main__":
    main()
