"""Seconds of a step: products, memory-bound rest, links, bubble, optimizer.

A layer's forward, and its backward, take the longer of what the GPU needs and of what it
costs the CPU to launch them. The GPU needs FLOPs over what it reaches of its peak, in products
and in attention, bytes of the operations without products over what it reaches of its memory,
and the traffic of TP, which nothing hides (03 Tensor parallelism, "The bill, with a pencil"); a
ring that leaves its node pays a latency for each of its steps (01 Communication costs,
"Latency or bandwidth: ring against tree"). Stages differ, since the head is cut like layers, so
1F1B takes (m - 1) of the slowest and one of each: with equal ones that is (m + p - 1) (03,
"Micro-batches fill the pipe"; "Uneven stages"). Gradients of ZeRO 0 hide behind the
last backward and those of ZeRO 1 do not (02, "From scratch, in four steps"; 04, "What the
stages send").
Those of ZeRO 2 hide behind the backward of their own micro-batch.
FSDP's gathers hide behind products or are waited for (04, "When the gathers hide"). Constants
are those of constants.toml.
"""

import math
from dataclasses import dataclass

from memory import RECOMPUTED, Layout, Stage, stage_parameters, stages
from traffic import Sent, in_node, traffic
from transformer import Shape, layer_matrices


@dataclass(frozen=True)
class Gpu:
    flops: float  # dense, bf16, per second
    memory: float  # bytes
    bandwidth: float  # of its memory, bytes/s
    link: float  # to the GPUs of its node, bytes/s one way
    network: float  # its own card, bytes/s one way
    node: int  # GPUs that the fast links join
    watts: float = 0.0


# --8<-- [start:layer]
def layer_flops(
    shape: Shape, tokens: float, sequence: int, layout: Layout
) -> tuple[float, float]:
    """Forward and backward of one layer on one rank: in products, in the scores of attention.
    Recomputation is another forward, of the layer or of its MLP.
    """
    products = 6 * tokens * layer_matrices(shape, shape.active)
    scores = 7 * tokens * sequence * shape.attention_width  # 2 forward, 5 backward, causal
    if layout.recompute == "layer":
        products, scores = products * 4 / 3, scores * 9 / 7
    elif layout.recompute == "mlp":
        attention = layer_matrices(shape, 0)
        products += 2 * tokens * (layer_matrices(shape, shape.active) - attention)
    return products / layout.tp, scores / layout.tp


def layer_bytes(shape: Shape, tokens: float, layout: Layout) -> float:
    """Read and written outside products, forward and backward: norms, residuals, rotation and
    transposition of queries, keys and values, 60 of h; activation and gate, 17 of f; bf16.
    """
    moved, mlp = 2 * tokens * 60 * shape.hidden, 2 * tokens * 17 * shape.ffn * shape.active
    again = {"": 0, "mlp": mlp, "layer": moved + mlp}[layout.recompute]  # a forward is a third
    return (moved + mlp + again / 3) / layout.tp


def head_seconds(
    shape: Shape, tokens: float, layout: Layout, gpu: Gpu, c: dict
) -> tuple[float, float]:
    """Of the head's product, and of its logits: in bf16 and fp32, softmax, loss and back, 54
    bytes for each.
    """
    logits = tokens * shape.vocabulary / layout.tp
    product = 6 * logits * shape.hidden / (c["products"] * gpu.flops)
    return product, 54 * logits / (c["memory"] * gpu.bandwidth)


# --8<-- [end:layer]


# --8<-- [start:links]
def link_rate(sent: Sent, gpu: Gpu, c: dict) -> float:
    """Bytes/s of a rank in a ring: inside a node the link; else the cards of the ranks that
    share the node, since they carry the same bytes (01 Layouts, "Choosing").
    """
    if sent.in_node == sent.ranks:
        return c["link"] * gpu.link
    return min(c["link"] * gpu.link, c["network"] * gpu.network * sent.in_node)


def latency(sent: Sent, c: dict) -> float:
    """Seconds of a ring between nodes, whatever it carries: each step is its slowest hop's."""
    between = sent.in_node < sent.ranks and sent.name != "EP"
    return c["hop"] * sent.messages * (sent.ranks - 1) * between


def launch_seconds(layout: Layout, gpu: Gpu, c: dict) -> float:
    """Below this a layer is not pushed, however little it computes."""
    between = layout.pp > 1 and layout.tp > 1 and layout.gpus > gpu.node
    return c["launch"] + c["launch_between"] * layout.tp * between


def layer_seconds(on_gpu: float, launch: float) -> float:
    """Forward is a third of a GPU's work, and half of a CPU's; backward is the rest."""
    return max(on_gpu / 3, launch / 2) + max(on_gpu * 2 / 3, launch / 2)


# --8<-- [end:links]


@dataclass
class Step:
    seconds: float
    layer_gpu: float  # of one layer and micro-batch, without the floor of launching
    layer_launch: float
    parts: dict[str, float]  # on the slowest stage


# --8<-- [start:step]
def step_time(shape: Shape, layout: Layout, sequence: int, gpu: Gpu, c: dict) -> Step:
    tokens = layout.micro_batch * sequence / layout.cp
    cut, m = stages(shape, layout.pp, layout.cut), layout.micro_batches
    sent = {each.name: each for each in traffic(shape, layout, sequence, gpu.node)}
    layers = max(stage.layers for stage in cut)

    products, scores = layer_flops(shape, tokens, sequence, layout)
    compute = products / (c["products"] * gpu.flops)
    attention = scores / (c["attention"] * gpu.flops)
    rest = layer_bytes(shape, tokens, layout) / (c["memory"] * gpu.bandwidth)
    waiting = 0.0
    for name in ("TP", "CP", "EP"):
        if name in sent:
            each = sent[name]
            once = each.bytes / link_rate(each, gpu, c) + latency(each, c)
            waiting += once / layers / m
    on_gpu, launch = compute + attention + rest + waiting, launch_seconds(layout, gpu, c)
    product, softmax = head_seconds(shape, tokens, layout, gpu, c)
    held = [sum(stage_parameters(shape, stage, layout.tp, layout.ep)) for stage in cut]

    def accumulate(held: int) -> float:  # fp32 += bf16
        return 10 * held / (c["memory"] * gpu.bandwidth)

    def head(stage: Stage) -> float:
        return stage.head * product + stage.loss * softmax

    def micro_batches(layer: float) -> list[float]:
        some = zip(cut, held, strict=True)
        return [each.layers * layer + head(each) + accumulate(n) for each, n in some]

    alone = layer_seconds(on_gpu, c["launch"])
    layer = max(alone, launch)
    times = micro_batches(layer)
    slowest, most = max(times), max(held)
    at = times.index(slowest)
    filling = micro_batches(alone)  # and draining: no stage waits for the others' launching
    busy, bubble = m * slowest, (sum(filling) - filling[at]) / layout.virtual
    crossing = 0.0
    if "PP" in sent:
        crossing = (layout.pp - 1) * sent["PP"].bytes / m / link_rate(sent["PP"], gpu, c)
    if layout.stalls:
        # while it fills and drains, a stage waits for one of its neighbours
        crossing += c["stall"] * min(layout.pp - 1, 2) * (m + (layout.pp - 1) / 2)

    exposed = 0.0
    if "DP" in sent:
        dp = sent["DP"]
        late = latency(dp, c) if layout.zero < 3 else 0.0  # FSDP asks for each layer early
        sending = dp.bytes / link_rate(dp, gpu, c)
        scatters = (
            sending * 2 * m / (2 * m + 1)
        )  # of ZeRO-2; its gather waits for the optimizer
        backward = slowest * 2 / 3
        hidden = (backward, 0.0, min(m * backward, scatters), busy)[layout.zero]
        # the last gradients have nothing to hide behind
        exposed = max(late, sending + late - hidden)
    optimizer = (34 * most / layout.shards(1) + 16 * most) / (c["memory"] * gpu.bandwidth)

    turns = m * cut[at].layers
    parts = {
        "products": turns * compute,
        "attention": turns * attention,
        "memory-bound": turns * rest + m * accumulate(held[at]),
        "TP, CP, EP": turns * waiting,
        "launching": turns * (layer - on_gpu),
        "head": m * head(cut[at]),
        "bubble": bubble + crossing,
        "DP": exposed,
        "optimizer": optimizer + c["fixed"],
    }
    total = busy + bubble + crossing + exposed + optimizer + c["fixed"]
    assert math.isclose(sum(parts.values()), total)
    return Step(total, on_gpu, launch, parts)


# --8<-- [end:step]


def main() -> None:
    gpu = Gpu(989e12, 80e9, 3.35e12, 450e9, 50e9, 8)
    free = {  # all is reached, nothing costs to launch
        "products": 1.0, "attention": 1.0, "memory": 1e9, "link": 1e9, "network": 1e9,
        "hop": 0.0, "launch": 0.0, "launch_between": 0.0, "stall": 0.0, "fixed": 0.0,
    }  # fmt: skip
    even = Shape(32, 4096, 32, 32, 14336, 1)  # next to no head, so that layers are all
    one = step_time(even, Layout(micro_batches=8), 4096, gpu, free).seconds / 8
    for p, m, v, cut in (
        (4, 8, 1, "even"),
        (8, 8, 1, "even"),
        (8, 8, 1, "reached"),
        (8, 2, 1, "even"),
        (8, 8, 4, "even"),
    ):
        layout = Layout(pp=p, micro_batches=m, virtual=v, cut=cut)
        piped = step_time(even, layout, 4096, gpu, free).seconds
        layers = [stage.layers for stage in stages(even, p, layout.cut)]
        slots = (m - 1) * max(layers) + max(layers) + (sum(layers) - max(layers)) / v
        idle, formula = 1 - one * m / p / piped, (p - 1) / (v * m + p - 1)
        print(
            f"p = {p}, m = {m}, v = {v}, {max(layers)} to {min(layers)} layers: ",
            f"idle {idle:.1%}; ",
            sep="",
            end="",
        )
        print(f"equal ones (p-1)/(vm+p-1) = {formula:.1%}")
        assert abs(piped / one - slots / 32) < 1e-3 * slots and idle > formula - 1e-3
    # chapter 03: eight H100s at 400 TFLOP/s and 80% of NVLink wait 42% at h = 4,096 for four
    # all-reduces a layer, by 24 bsh^2 FLOPs; a second gather is a quarter more
    slow = free | {"products": 400e12 / gpu.flops, "link": 0.8}
    plain = Shape(32, 4096, 32, 32, 4 * 4096, 1, gated=False)
    step = step_time(plain, Layout(tp=8), 4096, gpu, slow)
    flops = 72 * 4096 * 4096**2 * 32 / 8 / 400e12
    share = step.parts["TP, CP, EP"] / flops
    print(f"TP 8 waits {share:.1%} of its products: 1.25 of the pencil's 42%")
    assert abs(share / 1.25 - 0.42) < 0.005
    # a plain MLP of f = 4h is two thirds of the forward that is run again
    once, mlp, whole = (
        layer_flops(plain, 1, 4096, Layout(recompute=again))[0] for again in RECOMPUTED
    )
    mlp, whole = 3 * mlp / once, 3 * whole / once
    print(f"a step with MLPs recomputed: {mlp:.2f} forwards; with layers {whole:.2f}")
    assert math.isclose(mlp, 3 + 2 / 3) and math.isclose(whole, 4)
    # between nodes DP has the cards of all ranks of its node; TP 8 leaves it one
    for tp, cards in ((1, 8), (8, 1)):
        rate = link_rate(Sent("DP", 0, 64, in_node(64, tp, 8), 1), gpu, free | {"network": 0.5})
        print(f"TP {tp}: DP between nodes at {rate / 1e9:.0f} GB/s")
        assert rate == cards * 25e9
    # what waits, in units of one wait: ten collectives a layer of t - 1 steps each, if the ring
    # leaves its node, and two or three of d - 1 for the gradients; each of m slots for each
    # neighbour, and each that fills or drains for half of them, if the pipeline stalls
    nothing = dict.fromkeys(("products", "attention", "memory", "link", "network"), 1e99)
    counted = free | nothing | {"hop": 1, "stall": 1}
    for layout, waits in (
        (Layout(tp=8), 0),
        (Layout(tp=16), 10 * 15 * 32),
        (Layout(dp=8), 0),
        (Layout(dp=16, zero=0), 2 * 15),
        (Layout(dp=16), 3 * 15),
        (Layout(dp=16, zero=2, micro_batches=8), 2 * 15),
        (Layout(pp=4, micro_batches=8), 0),
        (Layout(pp=2, micro_batches=8, stalls=True), 8.5),
        (Layout(pp=4, micro_batches=8, stalls=True), 2 * 9.5),
    ):
        found = step_time(even, layout, 4096, gpu, counted)
        name = f"DP {layout.dp} ZeRO-{layout.zero} PP {layout.pp}{' stalling' * layout.stalls}"
        print(f"{name} TP {layout.tp}: {round(found.seconds, 1):g} waits")
        assert math.isclose(found.seconds, waits, abs_tol=1e-6)
    # what the last gradients wait has no backward to hide behind
    late = step_time(even, Layout(dp=16, zero=0), 4096, gpu, counted | {"launch": 1})
    assert math.isclose(late.seconds, 32 + 2 * 15)
    # ZeRO-2: the scatters hide behind backward, the gather does not
    layout = Layout(dp=16, zero=2, micro_batches=8)
    [dp] = traffic(even, layout, 4096, gpu.node)
    for network in (1, 0.05):
        c = free | {"network": network}
        sending = dp.bytes / link_rate(dp, gpu, c)
        found, alone = (
            step_time(even, each, 4096, gpu, c) for each in (layout, Layout(micro_batches=8))
        )
        shown = found.parts["DP"] / sending
        print(f"ZeRO-2, {network:g} of the network: {shown:.1%} of what is sent shows")
        backward = alone.seconds * 2 / 3
        expected = max(sending / 17, sending - backward)
        assert abs(found.parts["DP"] / expected - 1) < 1e-3
    # launching that takes as long as the GPU holds forward up, and not backward
    layer = [layer_seconds(1.0, launch) for launch in (0.5, 1, 2)]
    print(f"a layer of 1 s, launched in 0.5, 1 and 2: {', '.join(f'{s:.2f}' for s in layer)} s")
    assert layer[0] == 1 and math.isclose(layer[1], 7 / 6) and layer[2] == 2


if __name__ == "__main__":
    main()
