"""Two numbers that predict an all-reduce: α and β fitted on half of the sizes.

The time of dist.all_reduce is modelled as α + β·S. Every second size from 1 KiB to 64 MiB is
used for the fit, by relative error, so that a microsecond at 1 KiB counts as much as a
millisecond at 64 MiB. The error on the sizes that the fit has not seen is what the model is
worth on this machine. Draws cost_model.svg.
"""

import math
import os
import statistics
import sys
import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

SIZES = [2**k for k in range(10, 27)]  # bytes, 1 KiB to 64 MiB
ROUNDS = 2


def measure_all_reduce(size: int) -> float:
    """Seconds of the fastest of a few all-reduces, as the slowest rank saw it."""
    tensor = torch.empty(size // 4)
    times = []
    for _ in range(2 if size > 2**22 else 9):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    assert all(t <= of_all for t, of_all in zip(times, slowest.tolist(), strict=True))
    return slowest.min().item()


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Least squares for t = α + β·size with equal weight for equal relative error."""
    s, t = torch.tensor(sizes).double(), torch.tensor(seconds).double()
    rows = torch.stack([1 / t, s / t], dim=1)  # (α + β·s) / t, which should be one
    alpha, beta = torch.linalg.lstsq(rows, torch.ones_like(t)[:, None]).solution[:, 0].tolist()
    return alpha, beta


def human(size: float) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def draw(seconds: list[float], alpha: float, beta: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cost_model", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    line = [1e3 * (alpha + beta * size) for size in SIZES]
    axes.plot(SIZES, line, color="#52525b", linewidth=1.5)
    axes.plot(SIZES[::2], [1e3 * t for t in seconds[::2]], "o", color="#0b6e99", markersize=7)
    axes.plot(SIZES[1::2], [1e3 * t for t in seconds[1::2]], "s", color="#c2410c", markersize=7)
    top = max(1e3 * t for t in seconds)
    axes.text(SIZES[0], top * 0.7, "● fitted", color="#0b6e99")
    axes.text(SIZES[0], top * 0.3, "■ predicted, then measured", color="#c2410c")
    axes.text(SIZES[0], top * 0.13, "— α + βS", color="#52525b")
    axes.axvline(alpha / beta, color="#52525b", linestyle="--", linewidth=1)
    axes.text(1.2 * alpha / beta, line[0] * 0.5, "S = α/β", color="#52525b")
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time (ms)")
    axes.set_ylim(bottom=line[0] / 4)
    axes.set_xticks(SIZES[::4], [human(size) for size in SIZES[::4]])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("cost_model.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("cost_model.py needs 2 ranks or more, started by torchrun")
    dist.init_process_group("gloo")  # it reads the host's clock, so tensors of the host

    # the sizes take turns
    rounds = [[measure_all_reduce(size) for size in SIZES] for _ in range(ROUNDS)]
    seconds = [min(times) for times in zip(*rounds, strict=True)]

    if dist.get_rank() == 0:
        alpha, beta = fit(SIZES[::2], seconds[::2])
        predictions = [alpha + beta * size for size in SIZES]
        # least squares: no change of α or β would make the relative errors smaller
        left = [(p / t - 1) / t for p, t in zip(predictions, seconds, strict=True)][::2]
        assert abs(sum(left)) < 1e-6 * sum(map(abs, left))
        slopes = [e * size for e, size in zip(left, SIZES[::2], strict=True)]
        assert abs(sum(slopes)) < 1e-6 * sum(map(abs, slopes))
        n = dist.get_world_size()
        print(f"{n} ranks, fitted on {len(SIZES[::2])} sizes: ", end="")
        print(f"α ≈{1e6 * alpha:.0f} µs, 1/β ≈{1e-9 / beta:.2f} GB/s")
        print("held out   predicted    measured   error")
        errors = []
        held_out = zip(SIZES[1::2], predictions[1::2], seconds[1::2], strict=True)
        for size, predicted, measured in held_out:
            errors.append(predicted / measured - 1)
            assert math.isclose(measured * (1 + errors[-1]), predicted)
            times = [f"≈{1e3 * t:.2f} ms" for t in (predicted, measured)]
            error = f"≈{errors[-1]:+.2f}"  # a machine decides
            print(f"{human(size):8}  {times[0]:>10}  {times[1]:>10}  {error:>6}")
        typical = statistics.median(abs(error) for error in errors)
        print(f"typical error (median of the absolute values): ≈{typical:.2f}")
        print(f"half of the time is latency at α/β, ≈{alpha / beta / 2**10:.0f} KiB")
        draw(seconds, alpha, beta)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
