"""The throughput of a training loop is the smaller of two rates, of the loader and of the step.

Reading a sample only sleeps, like a worker that waits for a disk. The step sleeps too, like a
host that waits for a GPU. w workers read w batches at a time. Draws loader_rate.svg.
"""

import os
import time
import warnings

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch.utils.data import DataLoader, Dataset

BATCH, READ_S, STEP_S = 8, 0.01, 0.02
STEPS, WARM = 17, 8  # batches in an epoch, and how many of them to leave out


class SlowStorage(Dataset):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> int:
        time.sleep(READ_S)
        return os.getpid()


# --8<-- [start:rates]
def predicted(workers: int) -> float:
    """Samples per second in the steady state."""
    batch_s = BATCH * READ_S
    if workers == 0:  # the same process reads, and then trains
        return BATCH / (batch_s + STEP_S)
    return min(workers * BATCH / batch_s, BATCH / STEP_S)


def measured(workers: int) -> tuple[float, float, set[int]]:
    """Samples/s after the warm-up, seconds until the first batch, and the reading processes."""
    begin, arrivals, readers = time.perf_counter(), [], set()
    for batch in DataLoader(SlowStorage(), BATCH, num_workers=workers):
        arrivals.append(time.perf_counter())
        readers.update(batch.tolist())
        time.sleep(STEP_S)
    rate = (STEPS - 1 - WARM) * BATCH / (arrivals[-1] - arrivals[WARM])
    return rate, arrivals[0] - begin, readers


# --8<-- [end:rates]


def draw(workers: list[int], rates: list[float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "loader_rate", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    axes.plot([0.3, 4, 6], [30, 400, 400], color="#52525b", linewidth=1.5)
    axes.annotate("loader: w / t per batch", (2.2, 215), xytext=(2.6, 130), color="#52525b")
    axes.text(6, 412, "step", color="#52525b", ha="right")
    axes.plot(workers, rates, "o", color="#c2410c", markersize=8)
    axes.text(workers[-1] - 0.1, rates[-1] - 55, "measured", color="#c2410c", ha="right")
    axes.set(xlabel="workers w", ylabel="samples per second", xlim=(-0.3, 6), ylim=(0, 460))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("loader_rate.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    print(
        f"a batch of {BATCH}: {1e3 * BATCH * READ_S:.0f} ms to read, "
        f"{1e3 * STEP_S:.0f} ms to train on"
    )
    print("workers   predicted   measured   first batch")
    counts, rates = [0, 1, 2, 4, 5], []
    for workers in counts:
        begin = time.perf_counter()
        rate, first, readers = measured(workers)
        whole = time.perf_counter() - begin
        rates.append(rate)
        print(
            f"{workers:7} {predicted(workers):9.0f}/s   ≈{rate:6.0f}/s   ≈{1e3 * first:.0f} ms"
        )
        # No sleep is too short, so these limits are valid on any machine. If the host stops for
        # a moment, two workers have four finished batches: 8 batches need 240 ms, not 320 ms.
        most = 1.35 if workers in (1, 2) else 1.01
        assert rate < most * predicted(workers), (workers, rate)
        assert rate * (whole - first) > (STEPS - 1 - WARM) * BATCH, "samples are missing"
        assert len(readers) == max(workers, 1)
        assert (os.getpid() in readers) == (workers == 0)
    print(f"enough workers: {BATCH * READ_S / STEP_S:.0f}; more do not help")
    draw(counts, rates)


if __name__ == "__main__":
    main()
