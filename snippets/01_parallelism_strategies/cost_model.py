"""Two numbers, α and β, are fitted on some sizes and predict the all-reduce of other sizes.

The time of dist.all_reduce is modelled as α + β·S. The fit uses every second size from 1 KiB to
4 MiB and minimizes the relative error, so that a microsecond at 1 KiB counts as much as a
millisecond at 4 MiB. The model is then tested on the sizes between them and on larger sizes.
Two simpler models, with α alone and with β alone, are fitted and tested in the same way. Draws
cost_model.svg.
"""

import itertools
import math
import os
import statistics
import sys
import time
from unittest import mock

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

SIZES = [2**k for k in range(10, 27)]  # bytes, 1 KiB to 64 MiB
FITTED = SIZES[:13:2]  # up to 4 MiB
HELD_OUT = [size for size in SIZES if size not in FITTED]
ROUNDS = 2


def measure_all_reduce(size: int) -> float:
    """Seconds of the fastest of a few all-reduces, as measured by the slowest rank."""
    tensor = torch.empty(size // 4)
    assert tensor.nbytes == size
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


def fit(seconds: dict[int, float], terms: str = "αβ") -> tuple[float, float]:
    """Least squares for t = α + β·size, in seconds and seconds per byte, from {size: t}.

    It minimizes the sum of the squared relative errors. `terms` names the constants that are
    fitted; the other constant is zero.
    """
    s, t = torch.tensor([*seconds]).double(), torch.tensor([*seconds.values()]).double()
    columns = {"α": 1 / t, "β": s / t}  # (α + β·s) / t should equal 1
    rows = torch.stack([columns[term] for term in terms], dim=1)
    found = torch.linalg.lstsq(rows, torch.ones_like(t)[:, None]).solution[:, 0].tolist()
    constants = dict(zip(terms, found, strict=True))
    return constants.get("α", 0.0), constants.get("β", 0.0)


def worst_factor(alpha: float, beta: float, seconds: dict[int, float]) -> float:
    """The largest factor between predicted and measured time, over the sizes held out."""
    ratios = [(alpha + beta * size) / seconds[size] for size in HELD_OUT]
    return max(max(ratio, 1 / ratio) if ratio > 0 else math.inf for ratio in ratios)


def human(size: float) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def report(ranks: int, seconds: dict[int, float]) -> tuple[list[str], float, float]:
    """Return the lines of the output for the measured times, and the fitted α and β."""
    known = {size: seconds[size] for size in FITTED}
    alpha, beta = fit(known)
    lines = [
        f"{ranks} ranks, fitted on {len(known)} sizes, {human(min(known))} to "
        f"{human(max(known))}: α ≈{1e6 * alpha:.0f} µs, 1/β ≈{1e-9 / beta:.2f} GB/s",
        "not fitted   predicted    measured   error",
    ]
    errors = {}
    for size in HELD_OUT:
        predicted, measured = alpha + beta * size, seconds[size]
        errors[size] = predicted / measured - 1
        times = [f"≈{1e3 * t:.2f} ms" for t in (predicted, measured)]
        where = "" if size < FITTED[-1] else "  beyond the fitted sizes"
        lines.append(
            f"{human(size):10}  {times[0]:>10}  {times[1]:>10}  ≈{errors[size]:+.2f}{where}"
        )
    inside = [abs(error) for size, error in errors.items() if size < FITTED[-1]]
    median = statistics.median(inside)
    lines.append(f"typical error between the fitted sizes: ≈{median:.2f} (median)")
    factors = {"α + βS": worst_factor(alpha, beta, seconds)}
    for terms, name in (("α", "α alone"), ("β", "βS alone")):
        factors[name] = worst_factor(*fit(known, terms), seconds)
    # The sizes differ by a factor of 2^16, so a model with one constant is clearly worse.
    assert 2 * factors["α + βS"] < min(factors["α alone"], factors["βS alone"])
    worst = ", ".join(f"{name} ≈{factor:.1f}" for name, factor in factors.items())
    lines.append(f"largest factor between predicted and measured: {worst}")
    lines.append(f"half of the time is latency at α/β, ≈{alpha / beta / 2**10:.0f} KiB")
    return lines, alpha, beta


def check() -> None:
    """Check the report of invented times, and that the clock runs only in the all-reduce."""
    made = {size: 2e-3 + 5e-10 * size for size in SIZES}
    made |= {size: 1.25 * made[size] for size in HELD_OUT[2:6]} | {2**26: made[2**26] / 3}
    lines, alpha, _ = report(4, made)
    assert lines[0].endswith("on 7 sizes, 1 KiB to 4 MiB: α ≈2000 µs, 1/β ≈2.00 GB/s")
    assert lines[7] == "2 MiB         ≈3.05 ms    ≈3.81 ms  ≈-0.20"
    assert lines[11] == "64 MiB       ≈35.55 ms   ≈11.85 ms  ≈+2.00  beyond the fitted sizes"
    assert lines[12].endswith("between the fitted sizes: ≈0.20 (median)")
    assert lines[13].endswith("measured: α + βS ≈3.0, α alone ≈8.6, βS alone ≈752.9")
    assert lines[14].endswith("at α/β, ≈3906 KiB")
    # One size that takes three times as long must not change α, the time of the small sizes.
    slow = {size: made[size] * (3 if size == 2**20 else 1) for size in FITTED}
    assert math.isclose(fit(slow)[0], alpha, rel_tol=0.05)

    clock = (n * n for n in itertools.count())  # the first of the nine calls is the fastest
    calls = mock.Mock(**{"perf_counter.side_effect": clock})
    with (
        mock.patch.multiple(dist, barrier=calls.barrier, all_reduce=calls.all_reduce),
        mock.patch.object(time, "perf_counter", calls.perf_counter),
    ):
        assert measure_all_reduce(2**10) == 1
    order = [name for name, _, _ in calls.mock_calls]
    assert order[:-1] == ["barrier", "perf_counter", "all_reduce", "perf_counter"] * 9


def draw(seconds: dict[int, float], alpha: float, beta: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cost_model", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    line = [1e3 * (alpha + beta * size) for size in SIZES]
    axes.plot(SIZES, line, color="#52525b", linewidth=1.5)
    for sizes, marker, colour in ((FITTED, "o", "#0b6e99"), (HELD_OUT, "s", "#c2410c")):
        times = [1e3 * seconds[size] for size in sizes]
        axes.plot(sizes, times, marker, color=colour, markersize=7)
    top = max(1e3 * t for t in seconds.values())
    axes.text(SIZES[0], top * 0.7, "● fitted", color="#0b6e99")
    axes.text(SIZES[0], top * 0.3, "■ not fitted", color="#c2410c")
    axes.text(SIZES[0], top * 0.13, "— α + βS", color="#52525b")
    axes.axvline(alpha / beta, color="#52525b", linestyle="--", linewidth=1)
    axes.text(1.2 * alpha / beta, line[0] * 0.5, "S = α/β", color="#52525b")
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time (ms)")
    axes.set_ylim(bottom=line[0] / 4)
    axes.set_xticks(SIZES[::4], [human(size) for size in SIZES[::4]])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    line, fitted, others, knee = axes.lines
    assert max(fitted.get_xdata()) == 2**22 and max(others.get_xdata()) == 2**26
    assert math.isclose(line.get_ydata()[-1], 1e3 * (alpha + beta * 2**26))
    assert math.isclose(beta * knee.get_xdata()[0], alpha)  # half of the time is latency
    figure.tight_layout()
    figure.savefig("cost_model.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("cost_model.py needs 2 ranks or more, started by torchrun")
    check()
    dist.init_process_group("gloo")  # the host's clock measures only work on the CPU

    # Each round measures all sizes, so a short disturbance does not affect only one size.
    rounds = [[measure_all_reduce(size) for size in SIZES] for _ in range(ROUNDS)]
    seconds = dict(zip(SIZES, map(min, zip(*rounds, strict=True)), strict=True))

    if dist.get_rank() == 0:
        lines, alpha, beta = report(dist.get_world_size(), seconds)
        print(*lines, sep="\n")
        draw(seconds, alpha, beta)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
