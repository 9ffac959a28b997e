"""Assignment 3: capture a step, plan its memory, fuse it, replay it, and read its trace.

    python assessment/assignment3_graphs.py

What CUDA graphs and a compiler do with a step, in small. A dispatch mode records the launches;
a plan lets buffers share memory; pointwise launches become one kernel; graphs for a few sizes
serve all sizes; and a trace of kernels tells whether the device waits for the host. A buffer is
a storage: a view of it has the same number.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POINTWISE = {
    "add",
    "add_",
    "sub",
    "mul",
    "mul_",
    "div",
    "relu",
    "tanh",
    "sigmoid",
    "exp",
    "neg",
}
HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}


@dataclass(frozen=True)
class Node:
    """One launch: it reads some buffers and writes one."""

    name: str
    inputs: tuple[int, ...]
    output: int

    @property
    def pointwise(self) -> bool:
        return self.name in POINTWISE


class Capture(TorchDispatchMode):
    """Records launches in `nodes`, and bytes of each buffer in `sizes`."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.sizes: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []  # what is captured keeps its memory
        self.numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's buffer; a new one if it was not seen before."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.kept.append(tensor)
            self.numbers[storage._cdata] = len(self.numbers)
            self.sizes[self.numbers[storage._cdata]] = storage.nbytes()
        return self.numbers[storage._cdata]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator; record it unless it is a view, refuse it if the host must wait."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        # >>> solution 1: refuse HOST_READS with RuntimeError; number inputs, then the output
        # hint: func.is_view says whether nothing is launched; tree_leaves finds tensors in args
        if name in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        inputs = tuple(dict.fromkeys(map(self.number, tensors)))
        result = func(*args, **kwargs)
        if not func.is_view:
            self.nodes.append(Node(name, inputs, self.number(result)))
        return result
        # <<< solution


def plan(nodes: list[Node], sizes: dict[int, int], keep: set[int]) -> dict[int, int]:
    """An offset for each buffer that a node writes first; what lives at once does not overlap.

    A buffer lives from the node that writes it first to the last one that touches it, both
    included; those in `keep` to the end. In order of their first node, each gets the lowest
    offset where it fits. Buffers that are read before they are written are inputs: no offset.
    """
    # >>> solution 2: lifetimes first; then for each the gaps between those that live with it
    born, dies = {}, {}
    inputs = set()
    for i, node in enumerate(nodes):
        inputs |= {number for number in node.inputs if number not in born}
        for number in (*node.inputs, node.output):
            dies[number] = len(nodes) if number in keep else i
        if node.output not in inputs:
            born.setdefault(node.output, i)
    offsets: dict[int, int] = {}
    for number, birth in born.items():
        living = sorted(
            (offset, offset + sizes[other])
            for other, offset in offsets.items()
            if dies[other] >= birth
        )
        place = 0
        for start, end in living:
            if start - place >= sizes[number]:
                break
            place = max(place, end)
        offsets[number] = place
    return offsets
    # <<< solution


def fuse(nodes: list[Node]) -> list[list[Node]]:
    """Kernels: a pointwise node joins the last one if that is pointwise and feeds it."""
    # >>> solution 3: look at the last kernel only, so the order of launches stays
    kernels: list[list[Node]] = []
    for node in nodes:
        last = kernels[-1] if kernels else []
        made = {other.output for other in last}
        joins = node.pointwise and all(other.pointwise for other in last)
        if joins and made & set(node.inputs):
            last.append(node)
        else:
            kernels.append([node])
    return kernels
    # <<< solution


def traffic(kernels: list[list[Node]], sizes: dict[int, int], keep: set[int]) -> int:
    """Bytes that the kernels load and store.

    A kernel loads each buffer once that it does not make itself, and stores each that a later
    kernel reads or that is in `keep`.
    """
    # >>> solution 3: for each kernel what comes from outside, and what is wanted outside
    total = 0
    for i, kernel in enumerate(kernels):
        made: set[int] = set()
        loads: set[int] = set()
        for node in kernel:
            loads |= set(node.inputs) - made
            made.add(node.output)
        later = {n for other in kernels[i + 1 :] for node in other for n in node.inputs}
        total += sum(sizes[n] for n in loads) + sum(sizes[n] for n in made & (later | keep))
    return total
    # <<< solution


class Buckets:
    """Graphs for a few numbers of rows serve all: the smallest that is large enough.

    `capture(rows)` gives a graph with `input` and `output`, tensors of so many rows, and
    `replay()`. `plain` serves what is larger than the largest bucket.
    """

    def __init__(self, capture: Callable, plain: Callable, sizes: tuple[int, ...]):
        self.capture, self.plain, self.sizes = capture, plain, sorted(sizes)
        self.graphs: dict[int, object] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result for the rows of x, in memory that no later call writes to."""
        # >>> solution 4: choose, capture if new, copy in, replay, copy out what belongs to x
        rows = len(x)
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None:
            return self.plain(x)
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        graph = self.graphs[size]
        graph.input[:rows].copy_(x)
        graph.replay()
        return graph.output[:rows].clone()
        # <<< solution


def idle(kernels: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds between the first and the last kernel when none runs: all, and due to the host.

    A kernel is (launched, start, end), in any stream. A gap is due to the host if the kernel
    that ends it was launched only after the gap had begun.
    """
    # >>> solution 5: by start; remember the latest end so far, streams overlap
    gaps = late = 0.0
    latest = None
    for launched, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if latest is not None and start > latest:
            gaps += start - latest
            late += (start - latest) * (launched > latest)
        latest = end if latest is None else max(latest, end)
    return gaps, late
    # <<< solution


# --8<-- [start:main]
def main() -> None:
    torch.manual_seed(0)
    x, w, v = torch.randn(32, 64), torch.randn(64, 64), torch.randn(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(torch.mm(x, w) * 0.5 + x)
            x = torch.relu(torch.mm(x, v.t()) - x)
        return x

    with Capture() as capture:
        result = step(x)
    nodes, sizes, keep = capture.nodes, capture.sizes, {capture.number(result)}
    offsets = plan(nodes, sizes, keep)
    planned = max(offset + sizes[n] for n, offset in offsets.items())
    alone = sum(sizes[n] for n in offsets)
    kernels = fuse(nodes)
    before, after = (traffic(k, sizes, keep) for k in ([[n] for n in nodes], kernels))
    print(f"{len(nodes)} launches, {len(kernels)} kernels when fused")
    print(f"buffers: {alone // 1024} KiB side by side, {planned // 1024} KiB by the plan")
    print(f"traffic: {before // 1024} KiB, fused {after // 1024} KiB")
    assert planned < alone / 4 and after < before
    try:
        with Capture():
            step(x).sum().item()
    except RuntimeError as error:
        print("RuntimeError:", error)
    gaps, late = idle([(0, 5, 20), (4, 22, 30), (8, 10, 45), (46, 50, 55), (47, 58, 60)])
    print(f"a trace: {gaps:g} µs idle of 55, {late:g} because the host came late")


# --8<-- [end:main]


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
