"""A timeline of one step: the all-reduces run after backward, or at the same time as backward.

Backward computes for t_b seconds and fills buckets. The all-reduce of bucket i needs the link
for c_i seconds, and all of them need t_c seconds. After backward, the times add up: t_b + t_c.
During backward, bucket i can start when it is full, at time r_i, and when the link has finished
bucket i-1. So the step ends at

    T = max over i of (r_i + c_i + c_(i+1) + … )

The last bucket is full when backward ends, so T ≥ t_b + c_last. The first bucket gives T ≥
r_first + t_c. With small buckets, T is about max(t_b, t_c): the shorter of the two is hidden,
apart from one bucket. In the output, compare the exposed times.

On two cores there is no network, and gloo computes its sums on the cores that backward needs.
So the first two cases run on an emulated link: after the real all-reduce, its thread sleeps
until latency + bytes / bandwidth of a 1 Gbit/s Ethernet have passed. The last two cases run
without the emulated link. The program reads the clock of the host, so it runs on the CPU only.
It draws overlap.svg.
"""

import itertools
import math
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

LATENCY, BANDWIDTH = 1e-3, 125e6  # of the emulated link, in seconds and bytes/s
LAYERS, WIDTH, BATCH = 12, 512, 768
STEPS = 4
MIB = 2**20


@dataclass
class Timeline:
    """Seconds since the start of backward."""

    gradients: list[float] = field(default_factory=list)  # when each gradient was ready
    full: list[float] = field(default_factory=list)  # when each bucket was full
    reduced: list[tuple[float, float]] = field(default_factory=list)  # start and end of each
    launched: list[int] = field(default_factory=list)  # all-reduces, when each bucket was full
    backward: float = 0.0
    total: float = 0.0


class Link(threading.Thread):
    """A thread that all-reduces one bucket after the other, in the order of the calls."""

    def __init__(self, emulated: bool) -> None:
        super().__init__(daemon=True)
        self.emulated = emulated
        self.seconds: list[float] = []  # of each emulated all-reduce
        self.jobs: queue.Queue = queue.Queue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            flat, spans, done = job
            begin = time.perf_counter()
            dist.all_reduce(flat)
            if self.emulated:
                n = dist.get_world_size()
                sent = 2 * (n - 1) / n * flat.nbytes  # bytes from each rank of a ring
                self.seconds.append(LATENCY + sent / BANDWIDTH)
                time.sleep(max(0.0, begin + self.seconds[-1] - time.perf_counter()))
            spans.append((begin, time.perf_counter()))
            done.set()

    def all_reduce(self, flat: torch.Tensor, spans: list) -> threading.Event:
        done = threading.Event()
        self.jobs.put((flat, spans, done))
        return done


class Buckets:
    """One bucket for every two layers, last layers first. The gradients are views into it."""

    def __init__(self, model: nn.Sequential, link: Link, overlap: bool) -> None:
        self.link, self.overlap = link, overlap
        self.flats, self.bucket_of, self.sizes = [], {}, []
        linears = [layer for layer in reversed(model) if isinstance(layer, nn.Linear)]
        for pair in zip(linears[::2], linears[1::2], strict=True):
            group = [p for layer in pair for p in (layer.bias, layer.weight)]
            flat = torch.zeros(sum(p.numel() for p in group))
            for p, view in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad = view.view_as(p)
                self.bucket_of[p] = len(self.flats)
                p.register_post_accumulate_grad_hook(self.gradient_ready)
            self.flats.append(flat)
            self.sizes.append(len(group))

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        now = time.perf_counter()
        self.timeline.gradients.append(now)
        bucket = self.bucket_of[parameter]
        self.missing[bucket] -= 1
        if self.missing[bucket] == 0:
            self.timeline.full.append(now)
            if self.overlap:
                self.launch(bucket)
            self.timeline.launched.append(len(self.handles))

    def launch(self, bucket: int) -> None:
        self.handles.append(self.link.all_reduce(self.flats[bucket], self.timeline.reduced))

    def step(self, loss: torch.Tensor) -> Timeline:
        """Run backward and the all-reduces, and return their times."""
        self.timeline, self.handles, self.missing = Timeline(), [], self.sizes.copy()
        for flat in self.flats:
            flat.zero_()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        self.timeline.backward = time.perf_counter() - start
        if not self.overlap:
            for bucket in range(len(self.flats)):
                self.launch(bucket)
        for handle in self.handles:
            handle.wait()
        self.timeline.total = time.perf_counter() - start
        for times in (self.timeline.gradients, self.timeline.full):
            times[:] = [t - start for t in times]
        self.timeline.reduced = [(a - start, b - start) for a, b in self.timeline.reduced]
        return self.timeline


def predict(timeline: Timeline, overlap: bool) -> float:
    """Return max over i of (r_i + c_i + c_(i+1) + …) for the times of one step."""
    c = [end - begin for begin, end in timeline.reduced]
    if not overlap:
        return timeline.backward + sum(c)
    return max(ready + sum(c[i:]) for i, ready in enumerate(timeline.full))


def measure(emulated: bool, overlap: bool) -> Timeline:
    """Return the timeline of the step with the median time."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    inputs = torch.rand(BATCH, WIDTH)
    link = Link(emulated)
    link.start()
    buckets = Buckets(model, link, overlap)
    timelines = [buckets.step(model(inputs).square().mean()) for _ in range(STEPS)][1:]
    ones = torch.ones(3)
    link.all_reduce(ones, []).wait()
    link.jobs.put(None)
    link.join()
    count = len(buckets.flats)
    assert ones.tolist() == [dist.get_world_size()] * 3
    assert len(link.seconds) == (STEPS * count + 1 if emulated else 0)
    # With overlap, each bucket was sent when it was full. Otherwise all waited for backward.
    now = list(range(1, count + 1)) if overlap else [0] * count
    assert all(t.launched == now for t in timelines)
    n = dist.get_world_size()
    for t in timelines:
        for flat, (begin, end) in zip(buckets.flats, t.reduced, strict=True):
            chunk = flat.nbytes / n  # a ring sends 2(N - 1) of them from each rank
            limit = LATENCY + 2 * (n - 1) * chunk / BANDWIDTH
            # all buckets have the same size, so the first emulated time represents the others
            assert not emulated or math.isclose(link.seconds[0], limit)
            assert end - begin > (limit - 1e-6 if emulated else 0)  # no faster than the link
    return sorted(timelines, key=lambda t: t.total)[len(timelines) // 2]


def report(t: Timeline, predicted: float) -> str:
    exposed = t.total - t.backward
    return (
        f"    backward ≈{t.backward * 1e3:.0f} ms + exposed ≈{exposed * 1e3:.0f} ms\n"
        f"    total ≈{t.total * 1e3:.0f} ms, predicted ≈{predicted * 1e3:.0f} ms"
    )


assert report(Timeline(backward=0.1, total=0.12), 0.11) == (
    "    backward ≈100 ms + exposed ≈20 ms\n    total ≈120 ms, predicted ≈110 ms"
)


def draw(cases: dict[str, Timeline], path: str) -> None:
    """Draw two lanes for each case: backward and the all-reduces."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "overlap", "font.size": 11})
    figure, axes = plt.subplots(len(cases), 1, figsize=(7, 4.2), sharex=True)
    for axis, (title, t) in zip(axes, cases.items(), strict=True):
        edges = [0.0, *t.full]
        for i, (begin, end) in enumerate(itertools.pairwise(edges)):
            where = {"height": 0.7, "edgecolor": "white", "linewidth": 0.8}
            axis.barh(1, (end - begin) * 1e3, left=begin * 1e3, color="#0b6e99", **where)
            axis.text((begin + end) * 500, 1, str(i), ha="center", va="center", color="white")
        for i, (begin, end) in enumerate(t.reduced):
            axis.barh(0, (end - begin) * 1e3, left=begin * 1e3, color="#c2410c", **where)
            axis.text((begin + end) * 500, 0, str(i), ha="center", va="center", color="white")
        axis.vlines([g * 1e3 for g in t.gradients], 1.35, 1.5, color="#52525b", linewidth=1)
        axis.axvline(t.backward * 1e3, color="#52525b", linestyle=":", linewidth=1.2)
        exposed = (t.total - t.backward) * 1e3
        axis.text(t.backward * 1e3 + 3, 1, f"exposed ≈{exposed:.0f} ms", va="center")
        axis.set_yticks([1, 0], ["backward", "all-reduce"])
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_ylim(-0.5, 1.6)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axes[-1].set_xlabel("milliseconds since the start of backward")
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=2 overlap.py")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    titles = {False: "communicate after backward", True: "overlap with backward"}
    drawn = {}
    for emulated in (True, False):
        if rank == 0:
            link = f"emulated {8e-9 * BANDWIDTH:g} Gbit/s link"
            name = link if emulated else "gloo without the emulated link"
            print(f"{name}, {n} ranks:")
        for overlap, title in titles.items():
            t = measure(emulated, overlap)
            if emulated:
                drawn[title] = t
            if rank == 0:
                predicted = predict(t, overlap)
                free = 0.0  # the time when the link is free, bucket after bucket
                for full, (begin, end) in zip(t.full, t.reduced, strict=True):
                    free = max(free, full if overlap else t.backward) + end - begin
                assert math.isclose(predicted, free)
                assert predicted < t.total + 1e-6  # nothing ends before it can
                print(f"  {title}:")
                print(report(t, predicted))
    if rank == 0:
        draw(drawn, "overlap.svg")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
