"""Which batch reaches a loss soonest? The number of steps times the time of a step.

Reaching the loss needs K(B) = K_min (1 + B_crit / B) steps, and a step takes t(B) = t_0 + t_1 B
seconds. The product is smallest at B* = sqrt(B_crit t_0 / t_1). The program fits both laws on
this machine, for a linear regression, and draws fastest_batch.svg.
"""

import math
import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

DIMENSIONS, NOISE, TARGET = 32, 2.0, 0.02
BATCHES = [2**k for k in range(2, 15, 2)]


def steps_to_target(batch: int, noise: float = NOISE) -> int:
    """SGD steps until the error is TARGET of the first one, with the best of 12 learning rates.

    All rates use the same samples, and each has its own weights: [12, h] together.
    """
    generator = torch.Generator().manual_seed(batch)
    rates = torch.logspace(-3, -0.02, 12)[:, None]
    truth = torch.ones(DIMENSIONS)
    weights = torch.zeros(12, DIMENSIONS)
    smooth = torch.ones(12)
    for step in range(1, 20000):
        x = torch.randn(batch, DIMENSIONS, generator=generator)
        y = x @ truth + noise * torch.randn(batch, generator=generator)
        weights -= rates * (((x @ weights.T).T - y) @ x) / batch
        smooth.lerp_(((weights - truth) ** 2).mean(1), 0.2)
        if smooth.nan_to_num(9).min() < TARGET:
            return step
    raise RuntimeError("the target was not reached")


# --8<-- [start:step]
def step_seconds(batch: int) -> float:
    """Time 30 steps of the same regression with autograd. Return the shortest time, in s."""
    model = torch.nn.Linear(DIMENSIONS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = torch.randn(batch, DIMENSIONS), torch.randn(batch, 1)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        optimizer.zero_grad()
        output = model(x)
        torch.nn.functional.mse_loss(output, y).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    assert output.shape == y.shape == (batch, 1)  # the time belongs to this batch
    assert model.weight.grad.abs().max() > 0
    return min(times)


def line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Fit y ≈ a + b x with equal weights for relative errors. Return a and b."""
    design = torch.tensor([[1 / v, u / v] for u, v in zip(x, y, strict=True)]).double()
    a, b = torch.linalg.lstsq(design, torch.ones(len(x), 1).double()).solution.flatten()
    return a.item(), b.item()


# --8<-- [end:step]


def draw(curve: list[tuple[float, float]], total: list[float], best: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fastest_batch", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    axes.loglog(*zip(*curve, strict=True), color="#0b6e99", linewidth=1.5)
    axes.loglog(BATCHES, [1e3 * t for t in total], "o", color="#c2410c")
    axes.axvline(best, color="#52525b", linestyle=":")
    axes.text(best * 1.1, max(total) * 800, "B* predicted", color="#52525b")
    axes.text(BATCHES[0] * 1.3, 1e3 * total[0], "too many steps", color="#c2410c")
    axes.text(BATCHES[-1], 1e3 * total[-1] * 1.5, "steps too long", color="#c2410c", ha="right")
    axes.set_yticks([3, 5, 10, 20], ["3", "5", "10", "20"])
    axes.minorticks_off()
    axes.set(xlabel="batch (samples)", ylabel="time to the target (ms)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("fastest_batch.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    counts = [steps_to_target(b) for b in BATCHES]
    seconds = [step_seconds(b) for b in BATCHES]
    least, slope = line([1 / b for b in BATCHES], counts)
    fixed, each = line(BATCHES, seconds)
    critical, half = slope / least, fixed / each
    print(f"steps: K_min ≈{least:.0f}, B_crit ≈{critical:.0f}")
    print(f"time: t_0 ≈{1e6 * fixed:.0f} µs, t_1 ≈{1e9 * each:.0f} ns, t_0 / t_1 ≈{half:.0f}")
    best = math.sqrt(critical * half)

    def predict(b: float) -> float:
        return least * (1 + critical / b) * (fixed + each * b)

    print("batch   steps   step       samples/s     time to target   predicted")
    totals = [k * t for k, t in zip(counts, seconds, strict=True)]
    for b, k, t, total in zip(BATCHES, counts, seconds, totals, strict=True):
        assert round(total / t) == k
        assert abs(least * (1 + critical / b) / k - 1) < 0.4, (b, k)
        print(
            f"{b:5}   ≈{k:4}   ≈{1e6 * t:4.0f} µs   ≈{b / t / 1e6:6.2f} M     "
            f"≈{1e3 * total:6.1f} ms        ≈{1e3 * predict(b):.1f} ms"
        )
    print(
        f"fastest of these: ≈{BATCHES[totals.index(min(totals))]}, "
        f"B* = sqrt(B_crit t_0 / t_1) ≈{best:.0f}"
    )
    assert totals[0] > min(totals) and totals[-1] > min(totals)
    assert steps_to_target(BATCHES[0], noise=0.0) < counts[0] / 2  # the reason is noise
    curve = [(b, 1e3 * predict(b)) for b in [2 ** (k / 8) for k in range(16, 113)]]
    lowest = min(curve, key=lambda point: point[1])[0]
    within = min(max(best, curve[0][0]), curve[-1][0])  # a busy machine can distort the fit
    assert abs(math.log2(within / lowest)) < 1 / 8, (best, lowest)
    draw(curve, totals, best)


if __name__ == "__main__":
    main()
