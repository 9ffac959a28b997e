"""Step time against bucket size: small buckets pay latency, and a single one cannot overlap.

An all-reduce of s bytes takes α + β·s seconds. If S bytes of gradients are divided into K
buckets, the link is busy for K·α + β·S seconds, so α demands few buckets. But a bucket can
start only when its last gradient is ready. The last bucket starts when backward has ended, so α
+ β·S/K seconds stay exposed, and β demands many buckets. The fastest size is in between.

The program measures all-reduces of a few sizes and fits α and β. It also measures when each
gradient is ready in a backward pass without communication. From these numbers alone it predicts
the time of a step. If bucket i is full at r_i, then

    T = max over i of (r_i + c_i + c_(i+1) + … ),  c_i = α + β·s_i

Then it measures the steps. The fastest of a few rounds counts, because other work on the
machine can only make a step slower. In the output, compare the last two columns.

On two cores there is no network, so the link is emulated: after the real all-reduce, its thread
sleeps until latency + bytes / bandwidth of a 1 Gbit/s Ethernet have passed. The program reads
the clock of the host, so it runs on the CPU only. It draws bucket_sweep.svg.
"""

import math
import os
import queue
import sys
import threading
import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

LATENCY, BANDWIDTH = 1e-3, 125e6  # of the emulated link, in seconds and bytes/s
LAYERS, WIDTH, BATCH = 32, 192, 512
CAPS_MB = [1 / 2048, 1 / 128, 1 / 4, 1 / 2, 1, 2, 4, 8]
ROUNDS = 3
MIB = 2**20


class Link(threading.Thread):
    """A thread that all-reduces one bucket after the other, at the speed of a slow link."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.Queue = queue.Queue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            flat, done = job
            begin = time.perf_counter()
            dist.all_reduce(flat)
            n = dist.get_world_size()
            sent = 2 * (n - 1) / n * flat.nbytes  # bytes from each rank of a ring
            time.sleep(max(0.0, begin + LATENCY + sent / BANDWIDTH - time.perf_counter()))
            done.set()

    def all_reduce(self, flat: torch.Tensor) -> threading.Event:
        done = threading.Event()
        self.jobs.put((flat, done))
        return done

    def fit(self) -> tuple[float, float]:
        """Fit seconds = α + β·bytes to all-reduces of five sizes, by least squares."""
        rows, seconds = [], []
        for size in (2**12, 2**15, 2**17, 2**18, 2**19):
            flat = torch.ones(size)
            times = []
            for _ in range(7):
                dist.barrier()
                begin = time.perf_counter()
                self.all_reduce(flat).wait()
                times.append(time.perf_counter() - begin)
            n = dist.get_world_size()
            assert flat.eq(n**7).all()  # summed seven times
            assert (
                min(times) > 2 * (n - 1) * (flat.nbytes / n) / BANDWIDTH
            )  # no faster than the link
            seconds.append(min(times))
            rows.append([1.0, flat.nbytes])
        solution = torch.linalg.lstsq(
            torch.tensor(rows, dtype=torch.float64),
            torch.tensor(seconds, dtype=torch.float64)[:, None],
        ).solution
        return solution[0].item(), solution[1].item()


class Buckets:
    """Flat buckets, which `link` all-reduces as soon as they are full."""

    def __init__(self, model: nn.Module, link: Link) -> None:
        self.parameters = list(reversed(list(model.parameters())))
        self.link = link
        self.ready: list[float] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def cut(self, cap_mb: float) -> None:
        """Give every parameter a gradient in new buckets of at least `cap_mb` MiB."""
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in self.parameters:
            if sum(p.nbytes for p in groups[-1]) >= cap_mb * MIB:
                groups.append([])
            groups[-1].append(parameter)
        self.sizes = [len(group) for group in groups]
        self.flats = [torch.zeros(sum(p.numel() for p in group)) for group in groups]
        self.bucket_of = {}
        for number, (group, flat) in enumerate(zip(groups, self.flats, strict=True)):
            views = flat.split([p.numel() for p in group])
            for parameter, view in zip(group, views, strict=True):
                parameter.grad = view.view_as(parameter)
                self.bucket_of[parameter] = number

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        self.ready.append(time.perf_counter())
        number = self.bucket_of[parameter]
        self.missing[number] -= 1
        if self.missing[number] == 0 and self.communicate:
            self.handles.append(self.link.all_reduce(self.flats[number]))

    def step(self, loss: torch.Tensor, communicate: bool = True) -> float:
        """Return the seconds from the start of backward until every gradient is all-reduced."""
        self.ready, self.handles, self.missing = [], [], self.sizes.copy()
        self.communicate = communicate
        for flat in self.flats:
            flat.zero_()
        dist.barrier()
        begin = time.perf_counter()
        loss.backward()
        for handle in self.handles:
            handle.wait()
        took = time.perf_counter() - begin
        self.ready = [t - begin for t in self.ready]
        return took


def predict(buckets: Buckets, ready: list[float], alpha: float, beta: float) -> float:
    """Return max over i of (r_i + c_i + c_(i+1) + …), with c_i = α + β·bytes."""
    costs = [alpha + beta * flat.nbytes for flat in buckets.flats]
    # the number of the gradient that fills each bucket
    last = [sum(buckets.sizes[: i + 1]) - 1 for i in range(len(costs))]
    return max(ready[g] + sum(costs[i:]) for i, g in enumerate(last))


def draw(predicted: list[float], measured: list[float], compute: float, path: str) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sweep", "font.size": 11})
    figure, axis = plt.subplots(figsize=(7, 3.8))
    axis.plot(CAPS_MB, [t * 1e3 for t in predicted], color="#c2410c", linewidth=2)
    axis.plot(CAPS_MB, [t * 1e3 for t in measured], "o", color="#0b6e99", markersize=8)
    axis.axhline(compute * 1e3, color="#52525b", linestyle=":", linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(CAPS_MB, ["1/2048", "1/128", "1/4", "1/2", "1", "2", "4", "8"])
    axis.set_ylim(0, max(*predicted, *measured) * 1.15e3)
    axis.text(CAPS_MB[0], compute * 1e3 - 3, "backward alone", va="top", color="#52525b")
    axis.text(2**-7.2, predicted[0] * 1e3, "predicted from α and β", color="#c2410c")
    axis.text(2**-1.2, measured[-1] * 1.02e3, "measured", color="#0b6e99", ha="center")
    axis.set_xlabel("bucket_cap_mb, MiB")
    axis.set_ylabel("backward + all-reduce, ms")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=2 bucket_sweep.py")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    inputs = torch.rand(BATCH, WIDTH)

    def loss() -> torch.Tensor:
        return model(inputs).square().mean()

    link = Link()
    alpha, beta = link.fit()
    buckets = Buckets(model, link)
    buckets.cut(CAPS_MB[-1])

    profiles = []  # when each gradient is ready, without communication
    for _ in range(2 * ROUNDS):
        buckets.step(loss(), communicate=False)
        profiles.append(buckets.ready)
    ready = min(profiles, key=lambda profile: profile[-1])

    measured: dict[float, list[float]] = {cap: [] for cap in CAPS_MB}
    for _ in range(ROUNDS):  # the sizes take turns, so that a slow second affects all of them
        for cap in CAPS_MB:
            buckets.cut(cap)
            measured[cap].append(buckets.step(loss()))
    link.jobs.put(None)
    link.join()

    if rank == 0:
        total = sum(p.nbytes for p in model.parameters()) / MIB
        print(
            f"{n} ranks, {total:.2f} MiB of gradients, backward alone ≈{ready[-1] * 1e3:.0f} ms"
        )
        print(f"fitted: α ≈{alpha * 1e3:.2f} ms, 1/β ≈{1 / beta / 1e6:.0f} MB/s")
        print("bucket_cap_mb  buckets  predicted  measured")
        predictions, fastest = [], []
        for cap in CAPS_MB:
            buckets.cut(cap)
            predictions.append(predict(buckets, ready, alpha, beta))
            fastest.append(min(measured[cap]))
            free, count = 0.0, 0  # the time when the link is free, bucket after bucket
            for size, flat in zip(buckets.sizes, buckets.flats, strict=True):
                count += size
                free = max(free, ready[count - 1]) + alpha + beta * flat.nbytes
            assert math.isclose(predictions[-1], free)
            busy = len(buckets.flats) * LATENCY + 2 * (n - 1) / n * total * MIB / BANDWIDTH
            assert fastest[-1] > busy  # no step is faster than the link
            print(
                f"{cap:13.4f}  {len(buckets.flats):7}  "
                f"≈{predictions[-1] * 1e3:.0f} ms  ≈{fastest[-1] * 1e3:.0f} ms"
            )
        draw(predictions, fastest, ready[-1], "bucket_sweep.svg")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
