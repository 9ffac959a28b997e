"""Memory of one rank: state, activations, logits, and what the caching allocator makes of
them.

Two answers. The closed form adds up what a rank keeps: 2 bytes of parameter, 4 of an
accumulated gradient and 12 of optimizer (04, "Where the memory goes"), and the activations of
the micro-batches in flight, all divided by TP with SP (03 Tensor parallelism, "What each rank
keeps"; 03, "1F1B: the same bubble, a bounded memory"). The replay makes every allocation of
three steps, in the order of a Llama in PyTorch with fused attention, in an allocator on sizes
alone: what that reserves is what nvidia-smi and an out-of-memory error see (07, "Out of
memory").
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from allocator import Allocator, Block
from transformer import Shape, layer_matrices, parameters

RECOMPUTED = ("", "mlp", "layer")  # by what is left


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1  # ranks that share each sequence
    ep: int = 1  # of the data-parallel ranks, those that share the experts
    micro_batch: int = 1  # sequences
    micro_batches: int = 1  # of a step, on each replica
    zero: int = 1  # 0, 1, 2, or 3 (FSDP)
    recompute: str = ""  # in backward: "mlp", what an MLP made from its input, or "layer"
    virtual: int = 1  # chunks of layers on each stage: interleaved 1F1B
    cut: str = "even"  # where a pipeline is cut: see `stages`
    stalls: bool = False  # a pipeline whose slots wait for each neighbour: see `read_rows`
    gradient_bytes: float = 4  # of an element of the buffer in which gradients are added up
    moment_bytes: float = 4  # of an element of each of Adam's two moments
    master_bytes: float = 4  # of an element of the master weights; 0 without them
    parameter_bytes: float = 2  # of an element of the weights between their uses
    frozen: bool = False  # weights without gradients, as under LoRA

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.tp * self.cp

    def shards(self, stage: int) -> int:
        """Ranks that share what this stage of ZeRO, and every later one, shards."""
        return self.dp * self.cp if self.zero >= stage else 1

    def flying(self, index: int) -> float:
        """Micro-batches that stage `index` holds activations of (03 Model parallelism, "1F1B:
        the same bubble, a bounded memory", "Schedules as data").
        """
        ahead, v = self.pp - index - 1, self.virtual
        held = 1 + ahead if v == 1 else (2 * ahead + (v - 1) * self.pp + 1) / v
        return min(held, self.micro_batches)


@dataclass(frozen=True)
class Stage:
    layers: int
    embedding: bool
    head: bool
    loss: bool  # with the cast of the logits to fp32; nanotron may cut between it and the head
    blocks: int  # also those without parameters: final norm, cast, loss


# --8<-- [start:stages]
@cache
def stages(shape: Shape, pp: int, cut: str = "even") -> list[Stage]:
    """As many layers on each stage, as Megatron-LM cuts; embedding and head count for one each,
    as in torchtitan, where that divides and the layers alone do not. Nothing need divide where
    nanotron cuts: after the block with which the products done so far have `reached` each p-th
    of the whole, or `passed` it, which in a tie is a layer later.
    """
    if cut == "even":
        ends = 1 if shape.layers % pp else 0
        each, rest = divmod(shape.layers + 2 * ends, pp)
        if not rest:
            counts = [each] * pp
            counts[0] -= ends
            counts[-1] -= ends
            last = pp - 1
            return [Stage(n, i == 0, i == last, i == last, n) for i, n in enumerate(counts)]
    layer = layer_matrices(shape, shape.active)
    head = shape.vocabulary * shape.hidden
    chain = [("embedding", 0), *[("layer", layer)] * shape.layers, ("norm", 0), ("head", head)]
    chain += [("cast", 0), ("loss", 0)]
    total, done, made = shape.layers * layer + head, 0, [[] for _ in range(pp)]
    at = 0
    for name, cost in chain:
        made[at].append(name)
        done += cost
        over = done - total * (at + 1) / pp
        if at < pp - 1 and (over > 0 or (over == 0 and cut == "reached")):
            at += 1
    return [
        Stage(s.count("layer"), "embedding" in s, "head" in s, "loss" in s, len(s))
        for s in made
    ]


@cache
def stage_parameters(shape: Shape, stage: Stage, tp: int, ep: int = 1) -> list[int]:
    """Elements of each tensor of a stage on one tensor-parallel rank, in order."""
    h, mlp = shape.hidden, (2 if shape.gated else 1) * shape.hidden * shape.ffn
    experts = -(-shape.experts // ep)
    qkv = h * (shape.attention_width + 2 * shape.kv_width)
    layer = [h, qkv // tp, h * shape.attention_width // tp, h]
    layer += [mlp // tp, h * shape.ffn // tp] * experts
    if shape.experts > 1:
        layer.append(h * shape.experts)
    ends = shape.vocabulary * h // tp
    tied = shape.tied and stage.embedding and stage.head
    head = ([h] if tied else [h, ends]) if stage.head else []
    return [ends] * stage.embedding + layer * stage.layers + head


# --8<-- [end:stages]


# --8<-- [start:closed]
def state_bytes(held: float, layout: Layout) -> dict[str, float]:
    """Of `held` parameters: bf16, an added up gradient, Adam with master weights in fp32."""
    return {
        "parameters": layout.parameter_bytes * held / layout.shards(3),
        "gradients": layout.gradient_bytes * held / layout.shards(2),
        "optimizer": (layout.master_bytes + 2 * layout.moment_bytes) * held / layout.shards(1),
    }


def layer_activation_bytes(shape: Shape, tokens: float, tp: int) -> float:
    """Kept by one layer for backward: inputs of two norms and of the products behind them, four
    of h; queries, keys, values, attention's output and its log-sums; three to four of f.
    """
    per_token = 2 * (4 * shape.hidden + 2 * shape.attention_width + 2 * shape.kv_width)
    per_token += 4 * shape.heads + 8  # log-sums, and the norms' deviations, fp32
    return (per_token + mlp_activation_bytes(shape, 1, 1)) * tokens / tp


def mlp_activation_bytes(shape: Shape, tokens: float, tp: int) -> float:
    """Of these, what lies inside the MLP: products of f columns, activation and gate."""
    return 2 * (4 if shape.gated else 2) * shape.ffn * shape.active * tokens / tp


def closed_form(shape: Shape, layout: Layout, sequence: int, index: int) -> dict[str, float]:
    """Bytes of stage `index` at its fullest, by part, if nothing were lost to the allocator."""
    stage = stages(shape, layout.pp, layout.cut)[index]
    tokens = layout.micro_batch * sequence / layout.cp
    flying = layout.flying(index)
    parts = state_bytes(sum(stage_parameters(shape, stage, layout.tp, layout.ep)), layout)
    layer = layer_activation_bytes(shape, tokens, layout.tp)
    mlp = mlp_activation_bytes(shape, tokens, layout.tp)
    kept, again = {  # and what one layer makes again
        "": (layer, 0.0),
        "mlp": (layer - mlp, mlp),
        "layer": (2 * tokens * shape.hidden / layout.tp, layer),
    }[layout.recompute]
    parts["activations"] = flying * stage.layers * kept + again
    logits = tokens * shape.vocabulary / layout.tp
    parts["logits"] = 8 * logits * stage.loss  # twice in fp32: logits and what the loss makes
    return parts


# --8<-- [end:closed]


# --8<-- [start:Replay]
class Replay:
    """Three steps of one rank under 1F1B, allocation by allocation."""

    def __init__(self, shape: Shape, layout: Layout, sequence: int, index: int) -> None:
        self.pool = Allocator()
        self.new = self.pool.malloc
        self.shape, self.layout, self.t = shape, layout, layout.tp
        self.stage = stages(shape, layout.pp, layout.cut)[index]
        self.flying = math.ceil(layout.flying(index) - 1)
        tokens = layout.micro_batch * sequence / layout.cp
        self.whole = 2 * tokens * shape.hidden  # the residual stream, not cut by TP
        self.x = self.whole / self.t
        self.q = 2 * tokens * shape.attention_width / self.t
        self.kv = 4 * tokens * shape.kv_width / self.t
        self.f = 2 * tokens * shape.ffn * shape.active / self.t
        self.small = 4 * tokens / self.t
        self.logits = 2 * tokens * shape.vocabulary / self.t
        self.ends = shape.vocabulary * shape.hidden / self.t
        self.buffers: dict[str, Block] = {}
        self.leaving: Block | None = None
        self.gradient = 0 if layout.frozen else 2  # bytes of an element, in bf16
        self.tensors = stage_parameters(shape, self.stage, self.t, layout.ep)
        self.layer = stage_parameters(
            shape, Stage(1, False, False, False, 1), self.t, layout.ep
        )

    def drop(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                self.pool.free(block)

    def instead(self, size: float, *old: Block | None) -> Block:
        """Make a tensor, and only then let go of what it was made of."""
        made = self.new(size)
        self.drop(*old)
        return made

    def gathered(self, name: str) -> None:
        """TP with SP gathers into one buffer of each kind, which stays."""
        if self.t > 1 and name not in self.buffers:
            self.buffers[name] = self.new(self.whole)

    def scattered(self, whole: Block) -> Block:
        return self.instead(self.x, whole) if self.t > 1 else whole

    def bucket(self, elements: float, made: list[Block]) -> list[Block]:
        """ZeRO-2: gradients leave for their owners as soon as they are there, as a flat copy in
        fp32, which stays until the next bucket is full (04, "Stage 2").
        """
        if self.layout.zero != 2:
            return made
        self.drop(self.leaving)
        self.leaving = self.new(2 * self.gradient * elements)
        self.drop(*made)
        return []

    def weights(self) -> list[Block]:
        """A layer's bf16 parameters that exist only while it runs: FSDP, quantized weights."""
        guests = self.layout.zero == 3 or self.layout.parameter_bytes < 2
        return [self.new(2 * n) for n in self.layer] if guests else []

    def layer_forward(self, x: Block) -> tuple[list[Block], Block]:
        guests = self.weights()
        normed, deviation = self.new(self.x), self.new(self.small)
        self.gathered("gather")
        qkv = self.new(self.q + self.kv)
        split = self.new(self.q + self.kv)
        keys = self.new(self.kv)
        keys = self.instead(self.kv, keys)
        query = self.instead(self.q, split)  # rotated
        out, sums = self.new(self.q), self.new(self.small * self.shape.heads)
        copy = self.new(self.q) if self.layout.micro_batch > 1 else None
        product = self.new(self.whole)
        self.drop(copy)
        product = self.scattered(product)
        self.drop(qkv)
        middle = self.instead(self.x, product)  # with the residual
        normed2, deviation2 = self.new(self.x), self.new(self.small)
        inner, product = self.mlp_forward()
        if self.layout.recompute == "mlp":
            self.drop(*inner)
            inner = []
        after = self.instead(self.x, product)
        self.drop(*guests)
        kept = [x, normed, deviation, keys, query, out, sums]
        return [*kept, middle, normed2, deviation2, *inner], after

    def mlp_forward(self) -> tuple[list, Block]:
        merged = self.new((2 if self.shape.gated else 1) * self.f)
        act = self.new(self.f)
        gated = self.new(self.f) if self.shape.gated else None
        return [merged, act, gated], self.scattered(self.new(self.whole))

    def layer_backward(self, kept: list, gradient: Block) -> tuple[Block, list[Block]]:
        x, normed, deviation, keys, query, out, sums, *second = kept
        middle, normed2, deviation2, *inner = second
        weights = iter(reversed([*self.layer[1:3], *self.layer[4:]]))  # but for two norms
        guests, made = self.weights(), []
        if not inner:
            inner, product = self.mlp_forward()
            self.drop(product)
        merged, act, gated = inner
        self.gathered("scatter")
        down = self.new(self.f)
        made.append(self.new(self.gradient * next(weights)))
        if gated is not None:
            self.drop(gated)
            left, right = self.new(self.f), self.new(self.f)
            self.drop(down, act)
            left = self.instead(self.f, left)
            wide = self.instead(2 * self.f, left, right, merged)
        else:
            self.drop(act)
            wide = self.instead(self.f, down, merged)
        whole = self.new(self.whole)
        part = self.new(self.x) if self.t > 1 else None
        made.append(self.new(self.gradient * next(weights)))
        self.drop(wide, normed2)
        if part is not None:
            self.drop(whole)
        back = self.instead(self.x, part if part is not None else whole, deviation2)
        gradient = self.instead(self.x, back, gradient, middle)
        attention = self.new(self.q)
        made.append(self.new(self.gradient * next(weights)))
        d_query, d_keys = self.new(self.q), self.new(self.kv)
        self.drop(attention, out, sums)
        d_query = self.instead(self.q, d_query, query, keys)
        d_keys = self.instead(self.kv, d_keys)
        joined = self.instead(self.q + self.kv, d_query, d_keys)
        joined = self.instead(self.q + self.kv, joined)
        whole = self.new(self.whole)
        part = self.new(self.x) if self.t > 1 else None
        made.append(self.new(self.gradient * next(weights)))
        made += [self.new(self.gradient * n) for n in weights]  # of further experts
        self.drop(joined, normed)
        if part is not None:
            self.drop(whole)
        back = self.instead(self.x, part if part is not None else whole, deviation)
        gradient = self.instead(self.x, back, gradient, x)
        self.drop(*guests)
        return gradient, made

    def forward(self) -> tuple:
        if not self.stage.head and self.stage.loss:
            return [], None, (None, self.softmax(self.new(self.logits)))
        x = self.new(self.whole if self.stage.embedding else self.x)
        if self.stage.embedding and self.t > 1:
            x = self.scattered(self.instead(self.whole, x))
        layers = []
        for _ in range(self.stage.layers):
            kept, after = self.layer_forward(x)
            if self.layout.recompute == "layer":
                self.drop(*kept[1:])
                kept = [x]
            layers.append(kept)
            x = after
        loss = None
        if self.stage.head:
            normed = self.new(self.x)
            self.gathered("gather")
            logits = self.new(self.logits)
            if self.stage.loss:
                loss = (normed, self.softmax(logits))
            else:
                self.drop(logits)  # sent on
                loss = (normed, None)
        return layers, x, loss

    def softmax(self, logits: Block) -> Block:
        """In fp32, in place of the logits in fp32."""
        return self.instead(2 * self.logits, self.instead(2 * self.logits, logits))

    def backward(self, state: tuple) -> None:
        layers, x, loss = state
        made: list[Block] = []
        if loss:
            normed, softmax = loss
            d_logits = self.instead(self.logits, softmax)
            if not self.stage.head:
                return self.drop(d_logits)  # sent back
            whole = self.new(self.whole)
            made.append(self.new(self.gradient * self.ends))
            self.drop(d_logits, normed)
            gradient = self.instead(self.x, whole, x)
            made = self.bucket(self.ends, made)
        else:
            gradient = self.instead(self.x, x)  # from the next stage
        for kept in reversed(layers):
            if self.layout.recompute == "layer":
                kept, after = self.layer_forward(kept[0])
                self.drop(after)
            gradient, ours = self.layer_backward(kept, gradient)
            if self.layout.zero == 3:
                self.drop(*ours)  # scattered into the shards
            else:
                made += self.bucket(sum(self.layer), ours)
        if self.stage.embedding:
            if self.t > 1:
                gradient = self.instead(self.whole, gradient)
            last = self.new(self.gradient * self.ends)
            made += self.bucket(self.ends, [last])
        self.drop(gradient, self.leaving, *made)
        self.leaving = None

    def run(self) -> Allocator:
        frozen = self.layout.frozen
        ddp = self.layout.zero == 0 and self.layout.dp > 1 and not frozen
        ranks, shard = self.layout.dp * self.layout.cp, self.layout.shards(1)
        for n in self.tensors:
            self.new(self.layout.parameter_bytes * n / self.layout.shards(3))
        buckets = [self.new(2 * n) for n in self.tensors] if ddp else []
        # gradients and masters: one buffer each
        self.new(self.layout.gradient_bytes * sum(self.tensors) / self.layout.shards(2))
        self.new(self.layout.master_bytes * sum(self.tensors) / shard)
        for step in range(3 if self.layout.zero else 2):
            queue = [self.forward() for _ in range(self.flying)]
            for _ in range(min(self.layout.micro_batches - self.flying, 3)):
                queue.append(self.forward())
                self.backward(queue.pop(0))
            for state in queue:
                self.backward(state)
            if step == 0:
                if ddp:  # rebuilt in the order in which gradients came
                    self.drop(*buckets)
                    buckets = [self.new(2 * n) for n in reversed(self.tensors)]
                for n in self.tensors:  # Adam's moments come with its first step
                    self.new(self.layout.moment_bytes * n / shard)
                    self.new(self.layout.moment_bytes * n / shard)
            if self.layout.zero == 1 and ranks > 1 and not frozen:
                # the new parameters: flat on this rank, gathered from all ranks, and copied
                part = 2 * sum(self.tensors) / ranks
                flat = [self.new(part), *(self.new(part) for _ in range(ranks))]
                flat.append(self.new(part * ranks))
                self.drop(*flat)
        return self.pool


# --8<-- [end:Replay]


def replay(shape: Shape, layout: Layout, sequence: int, index: int) -> tuple[float, float]:
    """Bytes that stage `index` reserves, and the most it has allocated."""
    pool = Replay(shape, layout, sequence, index).run()
    return pool.reserved, pool.peak_allocated


def with_unseen(replayed: float, c: dict) -> float:
    """Bytes that a rank takes, by those of a replay."""
    return (1 + c["unseen"]) * replayed + c["workspaces"] * 2**30


def main() -> None:
    gib = 2**30
    # ZeRO's own table: 7.5B parameters over 64 ranks (04, "Where the memory goes"), where a
    # gradient has two bytes
    for zero, theirs in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.88)):
        state = state_bytes(7.5e9, Layout(dp=64, zero=zero))
        total = (sum(state.values()) - state["gradients"] / 2) / 1e9
        print(f"ZeRO {zero}: {total:.3g} GB of state for 7.5B parameters on 64 ranks")
        assert abs(total / theirs - 1) < 0.01
    # 34 sbh of Korthikanti et al. (2022) are 32 here: no dropout, whose masks make 2, and
    # a plain MLP whose activation keeps what they count
    plain = Shape(1, 4096, 32, 32, 4 * 4096, 1, gated=False)
    per = layer_activation_bytes(plain, 1, 1) - 4 * 32 - 8
    print(f"a layer keeps {per / 4096:.0f} bytes for each element of s b h")
    assert per == 32 * 4096

    eight = Shape(32, 4096, 32, 32, 14336, 131072)
    print("8B, s = 4,096, first stage, GiB: closed form, allocated at most, reserved")
    for layout in (
        Layout(dp=4, pp=2, tp=1, micro_batches=64),
        Layout(dp=2, pp=4, tp=1, micro_batches=128),
        Layout(dp=4, pp=2, tp=2, micro_batches=64),
        Layout(dp=2, pp=1, tp=8, micro_batches=128),
        Layout(dp=8, zero=2, micro_batches=32, recompute="layer"),
        Layout(dp=8, zero=3, micro_batches=32, recompute="layer"),
        Layout(dp=8, zero=3, micro_batches=32, recompute="mlp"),
    ):
        form = sum(closed_form(eight, layout, 4096, 0).values())
        reserved, allocated = replay(eight, layout, 4096, 0)
        assert 0.85 * allocated < form < 1.05 * allocated and allocated <= reserved < 1.3 * form
        name = f"DP {layout.dp} PP {layout.pp} TP {layout.tp} ZeRO-{layout.zero}"
        name += f" {layout.recompute} again" * (layout.recompute > "")
        print(f"  {name:33} {form / gib:6.1f} {allocated / gib:6.1f} {reserved / gib:6.1f}")
    # ZeRO-2's buckets are a layer each: as bf16 gradients, and as the flat copy that is sent
    wide, sharded = Shape(8, 8192, 64, 64, 28672, 1), Layout(dp=64, zero=2)
    held = sum(stage_parameters(wide, stages(wide, 1)[0], 1))
    passing = replay(wide, sharded, 1, 0)[1] - sum(state_bytes(held, sharded).values())
    print(f"ZeRO 2, one token: {passing / held * 8:.2f} bytes pass for an element of a layer")
    assert abs(passing / held * 8 / 6 - 1) < 0.01
    # DDP builds its buckets in the order of the parameters, and later in the order of gradients
    made, ddp = [], Replay(wide, Layout(dp=2, zero=0), 1, 0)
    ddp.new = lambda size: made.append(size) or ddp.pool.malloc(size)
    ddp.run()
    first, n = [2 * elements for elements in ddp.tensors], len(ddp.tensors)
    assert made[n : 2 * n] == first != first[::-1]
    assert [made[i : i + n] for i in range(len(made))].count(first[::-1]) == 1
    # two micro-batches in flight, not sixty-four; and more only up to the depth of the pipe
    one = Layout(dp=1, pp=2, tp=2, micro_batches=64)
    few = replace(one, micro_batches=1)
    parts = [closed_form(eight, each, 4096, 0)["activations"] for each in (one, few)]
    assert parts[0] == 2 * parts[1]
    assert sum(s.layers for s in stages(eight, 4)) == 32
    assert Layout(dp=2, pp=3, tp=4, cp=2).gpus == 48
    both = sum(sum(stage_parameters(eight, s, 1)) for s in stages(eight, 4))
    assert both == parameters(eight)


if __name__ == "__main__":
    main()
