"""What the memory of one pipeline stage contains at every moment of a training step.

    python step_memory.py

The program repeats the replay of memory.py. For every layer of every forward and backward pass
of the last step, it notes the largest number of allocated bytes. The sums of memory.py explain
which part of these bytes belongs to activations and logits. rank_memory.py prints the moments
with --view step, and the page "Training memory calculator" draws them.
"""

import math
from itertools import pairwise

from allocator import Block
from memory import (
    Layout,
    Replay,
    closed_form,
    layer_activation_bytes,
    mlp_activation_bytes,
    replay,
    with_unseen,
)
from plan import CONSTANTS, the_model, why_not
from transformer import Shape


# --8<-- [start:timeline]
class Timeline(Replay):
    """Replay a rank, and note the moments of the last step: one for each layer of
    each pass, for the head, for the embedding and for the optimizer.

    A moment is `[kind, micro-batch, layer, layers with activations, most allocated bytes]`.
    """

    def __init__(self, shape: Shape, layout: Layout, sequence: int, index: int) -> None:
        super().__init__(shape, layout, sequence, index)
        self.moments: list[list] = []
        self.top = self.live = self.forwards = self.backwards = self.at = 0
        self.passing, self.head = "forward", False
        # the number of forward passes in each step of the replay
        self.each = self.flying + min(layout.micro_batches - self.flying, 3)
        self.new = self.malloc  # the replay calls this method for each allocation

    def malloc(self, size: float) -> Block:
        block = self.pool.malloc(size)
        self.top = max(self.top, self.pool.allocated)
        return block

    def note(self, kind: str, layer: int = 0) -> None:
        micro = self.backwards if self.passing == "backward" else self.forwards
        most = max(self.top, self.pool.allocated)
        self.moments.append([kind, micro, layer, self.live, most])
        self.top = 0

    def forward(self) -> tuple:
        if self.forwards % self.each == 0:  # a step begins
            self.moments, self.top, self.forwards, self.backwards = [], 0, 0, 0
        self.passing, self.at = "forward", 0
        self.forwards += 1
        made = super().forward()
        if self.stage.head:
            self.note("head forward")
        return made

    def layer_forward(self, x: Block) -> tuple[list[Block], Block]:
        self.end_head()
        made = super().layer_forward(x)
        if self.passing == "forward":
            self.at += 1
            self.live += 1
            self.note("forward", self.at)
        return made

    def end_head(self) -> None:
        if self.head:
            self.note("head backward")
        self.head = False

    def layer_backward(self, kept: list, gradient: Block) -> tuple[Block, list[Block]]:
        self.end_head()
        made = super().layer_backward(kept, gradient)
        self.note("backward", self.at)
        self.at -= 1
        self.live -= 1
        return made

    def backward(self, state: tuple) -> None:
        self.passing, self.head, self.at = "backward", self.stage.head, self.stage.layers
        self.backwards += 1
        super().backward(state)
        if self.stage.embedding:
            self.note("embedding")


def moments(shape: Shape, layout: Layout, sequence: int, index: int) -> list[list]:
    line = Timeline(shape, layout, sequence, index)
    line.run()
    line.note("optimizer")
    return line.moments


def parts_at(moment: list, shape: Shape, layout: Layout, sequence: int, index: int) -> dict:
    """Return the bytes of each part. All other bytes are counted as "temporary"."""
    kind, _, _, live, allocated = moment
    parts = closed_form(shape, layout, sequence, index)
    tokens = layout.micro_batch * sequence / layout.cp
    layer = layer_activation_bytes(shape, tokens, layout.tp)
    mlp = mlp_activation_bytes(shape, tokens, layout.tp)
    kept, again = {  # bytes that a layer keeps, and bytes that its backward pass recomputes
        "": (layer, 0.0),
        "mlp": (layer - mlp, mlp),
        "layer": (2 * tokens * shape.hidden / layout.tp, layer),
    }[layout.recompute]
    parts["activations"] = live * kept + again * (kind == "backward")
    parts["logits"] *= {"head forward": 1, "head backward": 3 / 4}.get(kind, 0)
    more = with_unseen(allocated, CONSTANTS["memory"]) - sum(parts.values())
    return parts | {"temporary": max(0.0, more)}


# --8<-- [end:timeline]


def words(moment: list) -> str:
    kind, micro, layer, _, _ = moment
    if kind == "optimizer":
        return "optimizer step"
    passing = "forward" if "forward" in kind else "backward"
    where = f"layer {layer}" if layer else kind.split()[0]
    return f"{passing} pass of micro-batch {micro}, {where}"


def passes(every: list[list]) -> list[list]:
    """The fullest moment of each forward pass, of each backward pass and of the optimizer."""
    found: list[list] = []
    for each in every:
        same = found and words(each).split(",")[0] == words(found[-1]).split(",")[0]
        if not same:
            found.append(each)
        elif each[-1] > found[-1][-1]:
            found[-1] = each
    return found


def check() -> None:
    """The fullest moment of the last step is the peak of the replay, for every stage."""
    for name, layout in (
        ("llama-3-70b", Layout(dp=16, pp=4, tp=4, micro_batches=32)),
        ("llama-3-70b", Layout(dp=32, pp=2, tp=4, micro_batches=32, recompute="layer")),
        ("llama-3-8b", Layout(dp=8, micro_batches=8, zero=3, recompute="mlp")),
        ("llama-3-8b", Layout(dp=8, micro_batches=8, zero=2)),
        ("llama-3-8b", Layout(dp=8, pp=2, tp=2, micro_batches=8, zero=0, virtual=2)),
    ):
        shape = the_model(name)
        assert not why_not(shape, layout, 8192)
        for index in range(layout.pp):
            every = moments(shape, layout, 8192, index)
            most = max(every, key=lambda each: each[-1])
            assert most[-1] == replay(shape, layout, 8192, index)[1], (name, index)
            assert every[-1][3] == 0, "activations are left after the last backward pass"
            for each in every:  # the sums explain no more than there is, within 1%
                needed = with_unseen(each[-1], CONSTANTS["memory"])
                parts = parts_at(each, shape, layout, 8192, index)
                assert sum(parts.values()) <= 1.01 * needed, (name, index, each)
            for before, after in pairwise(every):  # a layer adds what the sums say, within 1%
                if before[:2] == after[:2] and after[0] == "forward":
                    said = [
                        parts_at(each, shape, layout, 8192, index)["activations"]
                        for each in (before, after)
                    ]
                    added = after[-1] - before[-1]
                    assert math.isclose(added, said[1] - said[0], rel_tol=0.01), (name, after)
            print(f"{name}, stage {index} of {layout.pp}: fullest in the {words(most)}")


if __name__ == "__main__":
    check()
