"""Explicit rules choose a layout: of all layouts that fit into memory, one with low overhead.

A layout consists of TP × PP × DP, of the states that DP shards, and of the decision whether
layers are recomputed. Its memory follows from the formulas of this chapter. Its overhead is the
additional time, as a fraction of the time for the FLOPs of the model. This time is needed for
recomputation, for the bubble of the pipeline, and for communication that is not hidden. The
memory formula is also compared with layouts that were really used: seven rows of Table 1 in
Narayanan et al. (2021), and the first row of Table 4 in the Llama 3 paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

GPUS_PER_NODE = 8
REACHED = 0.5  # fraction of the peak, while a GPU computes
LINK = 0.8  # fraction of the datasheet's rate, in a collective
STEP, STEP_BETWEEN = 3.4e-6, 14e-6  # seconds per ring step in a node, between nodes (NCCL)
CHUNKS = 4  # number of chunks of layers on each pipeline stage, interleaved
ROOM = 0.9  # fraction of the memory: the rest is for logits, buffers, fragments


@dataclass
class Gpu:
    memory: float  # bytes
    peak: float  # dense 16-bit FLOP/s
    nvlink: float  # bytes/s one way
    network: float  # bytes/s one way


H100 = Gpu(80e9, 989e12, 450e9, 50e9)
A100 = Gpu(80e9, 312e12, 300e9, 25e9)


@dataclass
class Model:
    name: str
    parameters: float
    layers: int
    hidden: int
    sequence: int
    batch: int  # sequences per step


@dataclass
class Layout:
    tp: int
    pp: int
    dp: int
    shards: str  # what DP shards: "nothing", "optimizer" (ZeRO-1), "everything" (ZeRO-3, FSDP)
    recompute: bool

    def __str__(self) -> str:
        sharding = {"nothing": "", "optimizer": ", ZeRO-1", "everything": ", FSDP"}[self.shards]
        again = ", recompute" if self.recompute else ""
        return f"TP {self.tp} PP {self.pp} DP {self.dp}{sharding}{again}"


def chunks(model: Model, layout: Layout) -> int:
    """Number of chunks of layers on one stage. More chunks make the bubble smaller."""
    return max(1, min(CHUNKS, model.layers // layout.pp)) if layout.pp > 1 else 1


def state_bytes(model: Model, layout: Layout) -> float:
    """2 + 2 + 12 bytes for each parameter of a rank. DP divides the bytes that it shards."""
    held = model.parameters / (layout.tp * layout.pp)
    if layout.shards == "everything":
        two_layers = 2 * 2 * model.parameters / model.layers / layout.tp  # gathered at once
        return 16 * held / layout.dp + two_layers
    optimizer = 12 * held / (layout.dp if layout.shards == "optimizer" else 1)
    return 4 * held + optimizer


def activation_bytes(model: Model, layout: Layout) -> float:
    """Bytes on the first stage, the largest: one sequence per micro-batch, TP with SP."""
    layer = 34 * model.sequence * model.hidden / layout.tp
    layer_input = 2 * model.sequence * model.hidden / layout.tp
    in_flight = layout.pp + (layout.pp - 1) / chunks(model, layout)  # interleaved 1F1B
    kept = model.layers / layout.pp * min(in_flight, model.batch // layout.dp)
    return kept * layer_input + layer if layout.recompute else kept * layer


def fits(model: Model, layout: Layout, gpu: Gpu) -> bool:
    return state_bytes(model, layout) + activation_bytes(model, layout) <= ROOM * gpu.memory


def overhead(model: Model, layout: Layout, gpu: Gpu) -> float:
    """The extra time of a step, as a fraction of the time that 6ΨT FLOPs need."""
    gpus = layout.tp * layout.pp * layout.dp
    micro_batches = model.batch // layout.dp
    tokens = model.batch * model.sequence
    compute = 6 * model.parameters * tokens / gpus / (REACHED * gpu.peak)  # seconds
    activation = 2 * model.sequence * model.hidden  # bytes of [1, s, h] in 16 bits
    held = model.parameters / (layout.tp * layout.pp)
    nvlink, network = LINK * gpu.nvlink, LINK * gpu.network
    between = nvlink if gpus <= GPUS_PER_NODE else network
    # TP is innermost, then DP: the DP ranks of a node need the same bytes and share its cards
    sharing = min(layout.dp, GPUS_PER_NODE // layout.tp)
    replicas = min(nvlink, sharing * between)
    nodes = layout.dp // sharing if gpus > GPUS_PER_NODE else 1
    ring = (layout.dp - nodes) * STEP + (nodes - 1) * STEP_BETWEEN  # α of one collective
    ring *= model.layers / layout.pp  # one collective for each layer

    recompute = 1 / 3 if layout.recompute else 0.0
    runs = chunks(model, layout)
    filled = micro_batches + (layout.pp - 1) / runs  # unit: time of a micro-batch on a stage
    trip = layout.pp + (micro_batches - 1) / runs  # longer if micro-batches < stages
    bubble = max(filled, trip) / micro_batches - 1
    tp_bytes = 4 * 2 * (layout.tp - 1) / layout.tp * activation
    tp = tp_bytes * model.layers / layout.pp * micro_batches / nvlink
    pp = 2 * activation / layout.tp * micro_batches / between if layout.pp > 1 else 0.0
    if layout.shards == "everything":  # two gathers and a scatter per micro-batch
        dp = micro_batches * (6 * held / replicas + 3 * ring)
        dp = max(0.0, dp - compute)
    else:
        # the backward pass of the last micro-batch hides the reduction of gradients, and the
        # next forward pass hides the gather of parameters
        dp = 4 * held * (layout.dp - 1) / layout.dp / replicas + 2 * ring
        dp = max(0.0, dp - 2 / 3 * compute / micro_batches)
    return (1 + recompute) * (1 + bubble) - 1 + (tp + pp + dp) / compute


def layouts(model: Model, gpus: int) -> Iterator[Layout]:
    """All layouts that the rules allow."""
    for tp in (1, 2, 4, GPUS_PER_NODE):  # rule 1: TP stays inside a node
        for pp in (1, 2, 4, 8, 16, 32, 64):
            dp = gpus // (tp * pp)
            if dp == 0 or gpus % (tp * pp) or pp > model.layers:
                continue
            if model.batch % dp:  # rule 2: every replica gets the same number of sequences
                continue
            for shards in ("nothing", "optimizer", "everything"):
                # rule 3: PP with ZeRO-1. FSDP would gather every stage for each micro-batch
                if shards == "everything" and pp > 1:
                    continue
                for recompute in (False, True):
                    yield Layout(tp, pp, dp, shards, recompute)


def choose(model: Model, gpus: int, gpu: Gpu) -> Layout | None:
    """The simplest layout within five points of the least overhead, or None if none fits."""
    cost = {
        str(layout): (overhead(model, layout, gpu), layout)
        for layout in layouts(model, gpus)
        if fits(model, layout, gpu)
    }
    if not cost:
        return None
    least = min(extra for extra, _ in cost.values())
    near = [(extra, layout) for extra, layout in cost.values() if extra <= least + 0.05]
    simple = ("nothing", "optimizer", "everything")

    def complexity(entry: tuple[float, Layout]) -> tuple:
        extra, layout = entry
        return layout.tp * layout.pp, layout.recompute, simple.index(layout.shards), extra

    return min(near, key=complexity)[1]


def table() -> None:
    models = [
        Model("8B", 8e9, 32, 4096, 8192, 512),
        Model("70B", 70e9, 80, 8192, 8192, 512),
        Model("405B", 405e9, 126, 16384, 8192, 2048),
    ]
    print("H100 80 GB, s = 8,192, 4M tokens a step (16M for 405B); GB per GPU")
    print("model   GPUs  layout                             state  activ.  overhead")
    for model in models:
        for gpus in (8, 64, 512, 8192):
            layout = choose(model, gpus, H100)
            print(f"{model.name:5} {gpus:6}  ", end="")
            if layout is None:
                least = 16 * model.parameters / gpus / 1e9
                print(f"none: {least:.0f} GB of state per GPU even if all is sharded")
                continue
            state, activations = state_bytes(model, layout), activation_bytes(model, layout)
            extra = 100 * overhead(model, layout, H100)
            print(f"{layout!s:34} {state / 1e9:5.1f}  {activations / 1e9:6.1f}  {extra:7.0f}%")


def published() -> None:
    print("published layouts, GB per GPU (A100 80 GB, every layer recomputed)")
    rows = [  # parameters, hidden, layers, TP, PP, GPUs, batch
        (1.7e9, 2304, 24, 1, 1, 32, 512),
        (3.6e9, 3072, 30, 2, 1, 64, 512),
        (7.5e9, 4096, 36, 4, 1, 128, 512),
        (18.4e9, 6144, 40, 8, 1, 256, 1024),
        (76.1e9, 10240, 60, 8, 4, 1024, 1792),
        (310.1e9, 16384, 96, 8, 16, 1920, 2160),
        (1008e9, 25600, 128, 8, 64, 3072, 3072),
    ]
    for parameters, hidden, layers, tp, pp, gpus, batch in rows:
        name = f"{parameters / 1e9:.1f}B"
        model = Model(name, parameters, layers, hidden, 2048, batch)
        layout = Layout(tp, pp, gpus // (tp * pp), "nothing", recompute=True)
        state, activations = state_bytes(model, layout), activation_bytes(model, layout)
        assert fits(model, layout, A100)
        print(
            f"  {name:>7} on {gpus:4}: {layout!s:30} state {state / 1e9:4.1f}, "
            f"activations {activations / 1e9:4.1f}: fits"
        )

    print("Llama 3 405B, TP 8 PP 16 DP 64 with ZeRO-1, H100 80 GB")
    llama = Model("405B", 405e9, 126, 16384, 8192, 2048)
    for recompute in (True, False):
        layout = Layout(8, 16, 64, "optimizer", recompute)
        state, activations = state_bytes(llama, layout), activation_bytes(llama, layout)
        verdict = "fits" if fits(llama, layout, H100) else "does not fit by this formula"
        print(
            f"  recomputed: {recompute!s:5} state {state / 1e9:.1f}, "
            f"activations {activations / 1e9:.1f}: {verdict}"
        )
    chosen = choose(llama, 8192, H100)
    assert chosen is not None
    for name, layout in {
        "published, kept": Layout(8, 16, 64, "optimizer", recompute=False),
        "published, recomputed": Layout(8, 16, 64, "optimizer", recompute=True),
        "chosen by the rules": chosen,
    }.items():
        print(f"  overhead {name}: {100 * overhead(llama, layout, H100):.0f}%")


def check_nvlink() -> None:
    """One token for each GPU of a node hides nothing: FSDP's bytes take NVLink's time."""
    tiny, compute = Model("tiny", 8e9, 32, 4096, 1, batch=8), 6 * 8e9 / (REACHED * H100.peak)
    seconds = (1 + overhead(tiny, Layout(1, 1, 8, "everything", False), H100)) * compute
    assert 6 * 8e9 / H100.nvlink <= seconds <= 2 * 6 * 8e9 / H100.nvlink


def check_rules() -> None:
    """With twice the micro-batches FSDP sends twice as much, and ZeRO-1 sends the same."""
    model = Model("8B", 8e9, 32, 4096, 64, batch=8)

    def seconds(shards: str, batch: int) -> float:
        layout, more = Layout(1, 1, 8, shards, False), replace(model, batch=batch)
        return (1 + overhead(more, layout, H100)) * batch

    assert seconds("everything", 16) == 2 * seconds("everything", 8)
    assert seconds("optimizer", 16) < 2 * seconds("optimizer", 8)
    # all layouts obey the three rules, and use all 64 GPUs
    for x in layouts(replace(model, batch=24), 64):
        assert x.tp <= 8 and 24 % x.dp == 0 and x.tp * x.pp * x.dp == 64
        assert x.shards != "everything" or x.pp == 1


def main() -> None:
    check_nvlink()
    check_rules()
    table()
    print()
    published()


if __name__ == "__main__":
    main()
