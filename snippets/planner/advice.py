"""What would make a training fit into memory: fewer bytes for each parameter, host memory,
adapters, or more GPUs, each with the bytes that it needs.

    python advice.py

`plan.py` prints this list when no layout fits. Each option changes how many bytes a rank keeps
for a parameter, and memory.py replays the training with that change. "fits" means that the
replay of the named layout stays below the limit. The program does not predict the speed, but
everything in host memory is copied over PCIe in every step. The numbers of bytes come from
ZeRO-Offload (Ren et al., 2021), from torchao's AdamW8bit, from LoRA (Hu et al., 2021) and from
QLoRA (Dettmers et al., 2023, section 3).
"""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from memory import RECOMPUTED, Layout, closed_form, replay, with_unseen
from transformer import Shape, parameters

GIB = 2**30
RANK = 16  # of the adapters
TRIES = 8  # so many of the fastest layouts are replayed before the smallest ones


# --8<-- [start:options]
@dataclass(frozen=True)
class Option:
    name: str
    changes: dict = field(default_factory=dict)  # of Layout's bytes for each parameter
    host: float = 0.0  # bytes of host memory for each parameter
    adapters: bool = False


EIGHT = {"moment_bytes": 1 + 4 / 256}  # and a scale in fp32 for every 256 elements
PLAIN = {"gradient_bytes": 2, "master_bytes": 0}  # bf16 alone, without an fp32 copy
FROZEN = {"gradient_bytes": 0, "moment_bytes": 0, "master_bytes": 0, "frozen": True}
OPTIONS = (
    Option("Adam's moments in 8 bits", EIGHT),
    Option("Adam's moments paged to host memory", {"moment_bytes": 0}, host=8),
    Option(
        "master weights and moments offloaded to host memory",
        {"moment_bytes": 0, "master_bytes": 0}, host=12,
    ),
    Option("bf16 without master weights, moments in 8 bits", PLAIN | EIGHT),
    Option("bf16 without master weights, moments paged", PLAIN | {"moment_bytes": 0}, host=8),
    Option(f"LoRA of rank {RANK}", FROZEN, adapters=True),
    Option(
        f"LoRA of rank {RANK} over 4-bit weights (QLoRA)",
        FROZEN | {"parameter_bytes": 0.5 + 4 / 64}, adapters=True,
    ),
)  # fmt: skip

AGAIN = {
    "mlp": Option("MLPs recomputed", {"recompute": "mlp"}),
    "layer": Option("whole layers recomputed", {"recompute": "layer"}),
}


def options_for(layout: Layout, state: bool) -> list[Option]:
    """Options of one layout: more recomputation, and a smaller state if `state` is true."""
    more = [AGAIN[each] for each in RECOMPUTED[RECOMPUTED.index(layout.recompute) + 1 :]]
    return [*more, *(OPTIONS if state else ())]


def adapter_parameters(shape: Shape) -> int:
    """Elements of the adapters on all matrices of all layers: rank times (inputs + outputs)."""
    h, a, kv, f = shape.hidden, shape.attention_width, shape.kv_width, shape.ffn
    sides = 2 * (h + a) + 2 * (h + kv) + (3 if shape.gated else 2) * shape.experts * (h + f)
    return shape.layers * RANK * sides


def changed(option: Option, shape: Shape, layout: Layout) -> Layout:
    """The layout with the option's bytes. Embedding and head stay in bf16 in any case."""
    changes = dict(option.changes)
    if "parameter_bytes" in changes:
        ends = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden / parameters(shape)
        changes["parameter_bytes"] = 2 * ends + changes["parameter_bytes"] * (1 - ends)
    return replace(layout, **changes)


def adapter_bytes(option: Option, shape: Shape, layout: Layout) -> float:
    """The bytes of the adapters on one rank: weights in bf16; gradients, master weights and
    Adam's moments in fp32. PP, TP and ZeRO-3 divide the adapters as they divide the layers.
    """
    size = 18 * adapter_parameters(shape) if option.adapters else 0
    return size / layout.pp / layout.tp / layout.shards(3)


# --8<-- [end:options]


@dataclass
class Finding:
    option: Option
    layout: Layout
    needed: float  # bytes of the fullest stage
    fits: bool


def find(
    option: Option, shape: Shape, layouts: list[Layout], sequence: int, limit: float,
    weigh: Callable[[Layout], float],
) -> Finding:  # fmt: skip
    """Return the fastest layout that fits with this option. If none fits, return the layout
    that needs the fewest bytes. `layouts` is sorted, fastest first. `weigh` returns the bytes
    of a replay.
    """
    made = [changed(option, shape, layout) for layout in layouts]
    rest = {each: adapter_bytes(option, shape, each) for each in made}

    def least(layout: Layout) -> float:
        ends = {0, layout.pp - 1}
        return rest[layout] + max(
            sum(closed_form(shape, layout, sequence, i).values()) for i in ends
        )

    bound = {each: least(each) for each in made}
    possible = [each for each in made if bound[each] <= limit]
    for layout in possible[:TRIES]:
        if (needed := weigh(layout) + rest[layout]) <= limit:
            return Finding(option, layout, needed, True)
    smallest = sorted(made, key=bound.__getitem__)[:3]
    needed, at = min((weigh(each) + rest[each], i) for i, each in enumerate(smallest))
    return Finding(option, smallest[at], needed, needed <= limit)


def lines(
    options: Sequence[Option], shape: Shape, layouts: list[Layout], sequence: int, limit: float,
    node: int, weigh: Callable[[Layout], float], called: Callable[[Layout], str],
) -> Iterator[str]:  # fmt: skip
    """The options as plan.py prints them, those that fit first."""
    found = [find(each, shape, layouts, sequence, limit, weigh) for each in options]
    for each in sorted(found, key=lambda finding: not finding.fits):
        line = f"  {'fits' if each.fits else 'too large':9} {each.needed / GIB:6.1f} GiB: "
        line += each.option.name
        if each.option.adapters:
            line += f", {adapter_parameters(shape) / 1e6:,.0f} M parameters"
        else:
            made = each.layout
            size = made.parameter_bytes + made.gradient_bytes + made.master_bytes
            line += f", {size + 2 * made.moment_bytes:.4g} bytes a parameter on GPUs"
        if each.option.host:
            nodes = max(1, each.layout.gpus / node)
            size = each.option.host * parameters(shape) / nodes / GIB
            line += f" and {size:,.0f} GiB in the host memory of a node"
        yield f"{line} ({called(each.layout)})"


def main() -> None:
    shape, sequence = Shape(80, 8192, 64, 8, 28672, 128256), 8192  # Llama 3 70B
    constants = tomllib.loads(Path(__file__).with_name("constants.toml").read_text("utf-8"))
    limit = constants["memory"]["room"] * 80 * GIB
    cuts = ({"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"tp": 4, "cp": 2})
    layouts = [Layout(**cut, zero=3, recompute="layer") for cut in cuts]

    def weigh(layout: Layout) -> float:
        return with_unseen(replay(shape, layout, sequence, 0)[1], constants["memory"])

    found = {
        each.name: find(each, shape, layouts, sequence, limit, weigh)
        for each in (Option("nothing changed"), *OPTIONS)
    }
    print(f"Llama 3 70B on 8 GPUs, limit {limit / GIB:.1f} GiB;", end=" ")
    print("columns: an eighth of the state, and the total, in GiB")
    for name, each in found.items():
        # by hand, without a layout: the state of 70.6 B parameters on each of eight GPUs
        option, made = each.option, each.layout
        if option.adapters:
            kept = made.parameter_bytes * parameters(shape) + 18 * adapter_parameters(shape)
        else:
            of = {"gradient_bytes": 4, "master_bytes": 4, "moment_bytes": 4} | option.changes
            each_bytes = 2 + of["gradient_bytes"] + of["master_bytes"] + 2 * of["moment_bytes"]
            kept = each_bytes * parameters(shape)
            # host memory has what the GPUs no longer have; bf16 alone has no fp32 copy at all
            moved = 8 if of["moment_bytes"] == 0 else 0
            moved += 4 if of["master_bytes"] == 0 and of["gradient_bytes"] == 4 else 0
            assert option.host == moved
        state, needed = kept / 8 / GIB, each.needed / GIB
        verdict = "fits" if each.fits else "too large"
        ranks = f"DP {made.dp} TP {made.tp} CP {made.cp}"
        print(f"{name:52} {state:6.1f} {needed:6.1f}  {verdict:9} {ranks}")
        # the state is a lower bound; recomputation adds the inputs of all layers, the
        # activations of one layer, and temporary tensors
        assert state < needed < 1.05 * state + 28, name
        assert each.fits == (each.needed <= limit)
    assert not found["nothing changed"].fits
    assert not found["Adam's moments in 8 bits"].fits  # 12 bytes in place of 18 are too many
    assert found["master weights and moments offloaded to host memory"].fits
    assert found["bf16 without master weights, moments in 8 bits"].fits
    fewer, bits = (weigh(changed(each, shape, layouts[0])) for each in OPTIONS[-2:])
    print(f"frozen weights in 4 bits save {(fewer - bits) / GIB:.1f} GiB of {fewer / GIB:.1f}")
    assert bits < fewer < found["nothing changed"].needed
    # the adapters of Llama 3 8B at rank 16 are known: 41,943,040 parameters
    count = adapter_parameters(Shape(32, 4096, 32, 8, 14336, 128256))
    print(f"adapters of Llama 3 8B at rank {RANK}: {count:,} parameters")
    assert count == 41_943_040


if __name__ == "__main__":
    main()
