"""The size of the tensor decides whether a ring or recursive doubling is faster.

Both all-reduces are built from send and recv. If a message takes α + β·bytes, they take

    ring                  2(n-1) α  +  2(n-1)/n · β S
    recursive doubling    log2(n) α  +  log2(n) · β S

The ring sends the fewest bytes and waits for the most messages. Recursive doubling sends the
whole tensor in each of its few rounds. Both take the same time at
S* = α/β · (2(n-1) - log2 n) / (log2 n - 2(n-1)/n), which is 8 α/β for four ranks. The program
measures both from 1 KiB to 16 MiB and fits one α and one β to all the points. It compares the
predicted size at which both take the same time with the measured size. It also draws
all_reduce_crossing.svg.
"""

import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

SIZES = [2**k for k in range(10, 25)]  # bytes, 1 KiB to 16 MiB
ROUNDS = 2
sent: list[int] = []  # bytes of each message of this rank


def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send one tensor and receive another at the same time."""
    sent.append(outgoing.nbytes)
    ops = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, incoming, source)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def ring(tensor: torch.Tensor, scratch: torch.Tensor) -> None:
    """Sum `tensor` with 2(n-1) messages of S/n bytes, one after the other."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)
    incoming = scratch[: len(chunks[0])]
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], (rank + 1) % n, incoming, (rank - 1) % n)
        chunks[(rank - step - 1) % n].add_(incoming)
    for step in range(n - 1):
        into = chunks[(rank - step) % n]
        exchange(chunks[(rank - step + 1) % n], (rank + 1) % n, into, (rank - 1) % n)


def recursive_doubling(tensor: torch.Tensor, scratch: torch.Tensor) -> None:
    """Sum `tensor` with log2(n) messages of S bytes to the ranks at distance 1, 2, 4, …"""
    rank, n = dist.get_rank(), dist.get_world_size()
    incoming = scratch[: len(tensor)]
    distance = 1
    while distance < n:
        partner = rank ^ distance
        exchange(tensor, partner, incoming, partner)
        tensor.add_(incoming)
        distance *= 2


ALGORITHMS: dict[str, Callable] = {"ring": ring, "recursive doubling": recursive_doubling}


def steps_and_bytes(name: str, n: int, size: float) -> tuple[float, float]:
    """Return the number of messages in a row, and the total number of their bytes."""
    if name == "ring":
        return 2 * (n - 1), 2 * (n - 1) / n * size
    return math.log2(n), math.log2(n) * size


def measure(name: str, size: int) -> float:
    """Seconds of the fastest of a few runs, as measured by the slowest rank."""
    tensor, scratch = torch.ones(size // 4), torch.empty(size // 4)
    times = []
    for _ in range(2 if size > 2**22 else 6):
        tensor.fill_(1.0)
        sent.clear()
        dist.barrier()
        begin = time.perf_counter()
        ALGORITHMS[name](tensor, scratch)
        times.append(time.perf_counter() - begin)
    n = dist.get_world_size()
    assert tensor.eq(n).all()
    assert (len(sent), sum(sent)) == steps_and_bytes(name, n, size)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    assert all(t <= of_all for t, of_all in zip(times, slowest.tolist(), strict=True))
    return slowest.min().item()


def fit(measured: dict[str, list[float]], n: int) -> tuple[float, float]:
    """Fit one α and one β to both curves. Every point counts by its relative error."""
    rows, ones = [], []
    for name, seconds in measured.items():
        for size, t in zip(SIZES, seconds, strict=True):
            messages, carried = steps_and_bytes(name, n, size)
            rows.append([messages / t, carried / t])
            ones.append([1.0])
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (rows, ones))
    alpha, beta = torch.linalg.lstsq(a, b).solution.flatten().tolist()
    return alpha, beta


def crossing(measured: dict[str, list[float]]) -> float:
    """Interpolate the size from which the ring is faster. Medians of three smooth the ratio."""
    ratio = [math.log(r / d) for r, d in zip(*measured.values(), strict=True)]
    smooth = [statistics.median(ratio[max(i - 1, 0) : i + 2]) for i in range(len(ratio))]
    for i in range(len(smooth) - 1, 0, -1):
        if smooth[i] <= 0 < smooth[i - 1]:
            share = smooth[i - 1] / (smooth[i - 1] - smooth[i])
            return SIZES[i - 1] * (SIZES[i] / SIZES[i - 1]) ** share
    return math.nan


def human(size: float) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def predict_crossing(alpha: float, beta: float, n: int) -> float:
    """The size at which both all-reduces take the same time according to the model."""
    factor = (2 * (n - 1) - math.log2(n)) / (math.log2(n) - 2 * (n - 1) / n)
    return factor * alpha / beta


def draw(measured: dict[str, list[float]], alpha: float, beta: float, n: int) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "crossing", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for (name, seconds), colour in zip(measured.items(), ("#0b6e99", "#c2410c"), strict=True):
        axes.plot(SIZES, [1e3 * t for t in seconds], "o", color=colour, markersize=5)
        model = []
        for size in SIZES:
            messages, carried = steps_and_bytes(name, n, size)
            model.append(1e3 * (messages * alpha + carried * beta))
        axes.plot(SIZES, model, color=colour, linewidth=1.5)
    first = {name: 1e3 * seconds[0] for name, seconds in measured.items()}
    axes.text(SIZES[0], 1.5e3 * max(measured["ring"][:4]), "ring", color="#0b6e99")
    axes.text(
        SIZES[0], first["recursive doubling"] / 2.4, "recursive doubling", color="#c2410c"
    )
    predicted = predict_crossing(alpha, beta, n)
    axes.axvline(predicted, color="#52525b", linestyle="--", linewidth=1)
    axes.text(
        predicted * 1.15, 1e3 * measured["ring"][0], "predicted\ncrossing", color="#52525b"
    )
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time (ms)")
    axes.set_ylim(bottom=first["recursive doubling"] / 4)
    ticks = SIZES[::4]
    axes.set_xticks(ticks, [human(size) for size in ticks])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("all_reduce_crossing.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    n = int(os.environ.get("WORLD_SIZE", "0"))
    if n < 4 or n & (n - 1):
        sys.exit("all_reduce_crossing.py needs 4 or 8 ranks, started by torchrun")
    dist.init_process_group("gloo")  # the host's clock measures only work on the CPU
    torch.set_num_threads(1)

    # Every round measures all sizes and algorithms, so a slow second affects all of them.
    measured = {name: [math.inf] * len(SIZES) for name in ALGORITHMS}
    for _ in range(ROUNDS):
        for i, size in enumerate(SIZES):
            for name in ALGORITHMS:
                measured[name][i] = min(measured[name][i], measure(name, size))

    if dist.get_rank() == 0:
        alpha, beta = fit(measured, n)
        print(f"{n} ranks, α ≈{1e6 * alpha:.0f} µs, 1/β ≈{1e-9 / beta:.2f} GB/s")
        print("size            ring  recursive doubling")
        for size, r, d in zip(SIZES, *measured.values(), strict=True):
            times = [f"≈{1e3 * t:.2f} ms" for t in (r, d)]
            print(f"{human(size):8}  {times[0]:>10}  {times[1]:>18}")
        for i in (0, -1):
            ratio = measured["ring"][i] / measured["recursive doubling"][i]
            (m1, b1), (m2, b2) = (steps_and_bytes(name, n, 1) for name in ALGORITHMS)
            theory = f"messages {m1 / m2:.2f}" if i == 0 else f"bytes {b1 / b2:.2f}"
            print(f"ring / recursive doubling at {human(SIZES[i])}: ≈{ratio:.2f} ({theory})")
        # With small tensors the ring must be slower, because it waits for more messages. With
        # large tensors its disadvantage must be much smaller, because it sends fewer bytes.
        ring_times, doubling_times = measured["ring"], measured["recursive doubling"]
        small = sum(ring_times[:5]) / sum(doubling_times[:5])
        large = sum(ring_times[-3:]) / sum(doubling_times[-3:])
        assert small > max(1.0, 1.5 * large), (small, large)
        factor, predicted = (predict_crossing(*each, n) for each in ((1, 1), (alpha, beta)))
        # If the times are computed from the model, the fit must return its α, β and crossing.
        made = {name: [] for name in ALGORITHMS}
        for name, size in itertools.product(ALGORITHMS, SIZES):
            messages, carried = steps_and_bytes(name, n, size)
            made[name].append(3e-4 * messages + 2e-9 * carried)
        expected = [3e-4, 2e-9, predict_crossing(3e-4, 2e-9, n)]
        torch.testing.assert_close([*fit(made, n), crossing(made)], expected, rtol=0.05, atol=0)
        # One large tensor that takes 50% more time must not change α.
        made["ring"][-1] *= 1.5
        assert math.isclose(fit(made, n)[0], 3e-4, rel_tol=0.05)
        print(f"crossing, predicted: {factor:g} α/β, ≈{predicted / 2**10:.0f} KiB")
        print(f"crossing, measured: ≈{crossing(measured) / 2**10:.0f} KiB")
        draw(measured, alpha, beta, n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
