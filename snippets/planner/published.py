"""The planner beside throughputs that others published, to none of which it was fitted.

    python published.py published.csv

Other software, other GPUs, other models and lengths than those of the benchmark that gave the
constants: what is missed here is what they do not know. Misses come first. `attention` is the
share of the peak that attention would have to reach for a row to be exact; it is printed where
attention is predicted to take two fifths of the step, since elsewhere it says nothing.
"""

import csv
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Self

from memory import Layout
from plan import CONSTANTS, GIB, called, mfu, stop, the_gpu, the_model, weigh
from step_time import Gpu, Step, step_time
from transformer import Shape

PLAIN = {  # layers, hidden, heads, vocabulary; a plain MLP of 4 h, tied embeddings
    "mpt-760m": (24, 1536, 12, 50368),
    "mpt-1b": (24, 2048, 16, 50368),
    "mpt-3b": (32, 2560, 32, 50368),
    "mpt-7b": (32, 4096, 32, 50368),
    "mpt-13b": (40, 5120, 40, 50368),
    "mpt-30b": (48, 7168, 56, 50368),
    "mpt-70b": (80, 8192, 64, 50368),
    "22b": (48, 6144, 64, 51200),
    "530b": (105, 20480, 128, 51200),
}


def shape_of(model: str) -> Shape:
    if model not in PLAIN:
        return the_model(model)
    layers, hidden, heads, vocabulary = PLAIN[model]
    return Shape(layers, hidden, heads, heads, 4 * hidden, vocabulary, tied=True, gated=False)


@dataclass
class Row:
    source: str
    model: str
    shape: Shape
    gpu: Gpu
    layout: Layout
    sequence: int
    unit: str  # tokens (a second and GPU), seconds (a step) or mfu (percent)
    published: float
    memory: float  # GiB, nan if not published

    @classmethod
    def read(cls, line: dict[str, str]) -> Self:
        names = ["dp", "pp", "tp", "cp", "micro_batch", "micro_batches", "zero", "virtual"]
        layout = Layout(**{name: int(line[name]) for name in names})
        layout = replace(layout, recompute="layer" if line["recompute"] == "1" else "")
        return cls(
            line["source"], line["model"], shape_of(line["model"]), the_gpu(line["gpu"]),
            layout, int(line["sequence"]), line["unit"], float(line["published"]),
            float(line["memory_gib"] or "nan"),
        )  # fmt: skip

    # --8<-- [start:speed]
    def step(self, **constants: float) -> Step:
        """Predicted, with these constants in place of the planner's."""
        given = CONSTANTS["time"] | constants
        return step_time(self.shape, self.layout, self.sequence, self.gpu, given)

    def tokens(self, seconds: float) -> float:
        """Per second and GPU, if a step takes so long."""
        layout = self.layout
        batch = layout.dp * layout.micro_batch * layout.micro_batches * self.sequence
        return batch / seconds / layout.gpus

    def was(self) -> float:
        """Published, in tokens per second and GPU."""
        if self.unit == "seconds":
            return self.tokens(self.published)
        if self.unit == "mfu":
            one = mfu(self.shape, 1, self.sequence, 1, Layout(), self.gpu)
            return self.published / 100 / one
        return self.published

    def attention_reaches(self, step: Step) -> float | None:
        """The share of the peak in attention that would make the row exact."""
        if step.parts["attention"] < 0.4 * step.seconds:
            return None
        low, high = 0.01, 1.0
        while high - low > 1e-4:
            share = (low + high) / 2
            slow = self.tokens(self.step(attention=share).seconds) < self.was()
            low, high = (share, high) if slow else (low, share)
        return low

    # --8<-- [end:speed]

    def peak(self, step: Step) -> float:
        """GiB of the fullest stage, predicted."""
        return weigh(self.shape, self.layout, self.sequence, self.gpu, step).needed / GIB


def main() -> None:
    if len(sys.argv) != 2:
        stop("published.py", "give it the file of published rows, published.csv")
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            rows = [Row.read(each) for each in csv.DictReader(r for r in file if r[0] != "#")]
    except OSError as error:
        stop("published.py", f"{sys.argv[1]} cannot be read: {error.strerror}")
    steps = [row.step() for row in rows]
    errors = [
        row.tokens(step.seconds) / row.was() - 1 for row, step in zip(rows, steps, strict=True)
    ]
    print("throughput, predicted over published")
    for source in dict.fromkeys(row.source for row in rows):
        some = [abs(e) for e, row in zip(errors, rows, strict=True) if row.source == source]
        near = sum(error <= 0.3 for error in some)
        print(
            f"  {source:11} {len(some):2} rows: median error {statistics.median(some):.0%}, "
            f"{near} within 30%"
        )
    short = [abs(e) for e, row in zip(errors, rows, strict=True) if row.sequence <= 4096]
    print(f"  up to 4,096 tokens {statistics.median(short):.0%}, at most {max(short):.0%}")
    assert statistics.median(short) < 0.15
    print(
        "all, misses first: tokens/s/GPU published and predicted; GiB published and predicted"
    )
    found = zip(errors, rows, steps, strict=True)
    for error, row, step in sorted(found, key=lambda each: -abs(each[0])):
        line = f"{error:+5.0%} {row.was():6.0f} {row.tokens(step.seconds):6.0f}  "
        line += f"{row.source:11} {row.model:13} s {row.sequence:6} {called(row.layout)}"
        if row.memory == row.memory:
            line += f"; {row.memory:.0f} and {row.peak(step):.0f} GiB"
        share = row.attention_reaches(step)
        print(line + (f"; attention {share:.0%}" if share else ""))


if __name__ == "__main__":
    main()
