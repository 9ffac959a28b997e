"""Memory of every pipeline stage by part, and what one change of the layout would do to it.

    python rank_memory.py --model llama-3-8b --dp 64 --zero 1 --micro-batches 8

The parts are those that memory.py adds up. "temporary" is the part of the replay's peak that
exceeds their sum, and what the planner adds for memory outside the replay. A stage fits if it
leaves the share of the GPU's memory free that the planner leaves. Changes keep the number of
GPUs and the batch, and are timed by step_time.py: the fastest that fits is the one to try
first. With --view step, the program also prints the fullest moment of every forward and
backward pass. Without arguments the program also compares its state with the formulas. The
page "Training memory calculator" has the same numbers.
"""

import argparse
import math
import sys
from dataclasses import replace
from decimal import ROUND_HALF_UP, Context

from memory import Layout, closed_form, replay, stages, with_unseen
from plan import CONSTANTS, fullest, the_gpu, the_model, why_not
from step_memory import moments, parts_at, passes, words
from step_time import Gpu, step_time
from transformer import Shape, parameters

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BYTES = {"fp32": 4, "bf16": 2}
AGAIN = {"no": "", "mlp": "mlp", "yes": "layer"}
COLOURS = ["#0b6e99", "#5b6770", "#8b5cf6", "#c2410c", "#a16207", "#15803d"]


def digits(x: float) -> str:
    """Three significant digits, and all of those before the point."""
    if x >= 1000:
        return str(math.floor(x + 0.5))
    return f"{float(Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(x)):.12g}"


def in_bytes(x: float) -> str:
    unit = next((u for u in ("GiB", "MiB", "KiB") if x >= UNITS[u]), None)
    return f"{digits(x / UNITS[unit])} {unit}" if unit else f"{digits(x)} B"


def in_seconds(x: float) -> str:
    unit, scale = next((u for u in (("s", 1), ("ms", 1e3)) if x * u[1] >= 1), ("µs", 1e6))
    return f"{digits(x * scale)} {unit}"


# --8<-- [start:parts]
def parts_of(shape: Shape, layout: Layout, sequence: int, index: int) -> dict[str, float]:
    """Bytes of one stage by part, at its fullest moment."""
    parts = closed_form(shape, layout, sequence, index)
    _, allocated = replay(shape, layout, sequence, index)
    more = with_unseen(allocated, CONSTANTS["memory"]) - sum(parts.values())
    return parts | {"temporary": max(0.0, more)}


def needed(shape: Shape, layout: Layout, sequence: int) -> float:
    """Of the fullest stage: the first, the second, which may have a layer more, or the last."""
    some = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max(sum(parts_of(shape, layout, sequence, index).values()) for index in some)


# --8<-- [end:parts]


# --8<-- [start:changes]
def changes(shape: Shape, layout: Layout, sequence: int, gpu: Gpu) -> dict[str, Layout | str]:
    """Layouts that differ in one respect, for the same GPUs and batch; or why not."""
    fewer = replace(
        layout,
        dp=layout.dp // 2,
        micro_batches=2 * layout.micro_batches,
        ep=math.gcd(layout.ep, layout.dp // 2),
    )
    smaller = replace(
        layout,
        micro_batch=layout.micro_batch // 2,
        micro_batches=2 * layout.micro_batches,
    )
    already = "is so already"
    made: dict[str, Layout | str] = {
        "ZeRO-1": replace(layout, zero=1) if layout.zero == 0 else already,
        "ZeRO-2": replace(layout, zero=2) if layout.zero < 2 else already,
        "FSDP": replace(layout, zero=3) if layout.zero < 3 else already,
        "gradients in bf16": replace(layout, gradient_bytes=2),
        "moments in bf16": replace(layout, moment_bytes=2),
        "MLPs recomputed": already if layout.recompute else replace(layout, recompute="mlp"),
        "layers recomputed": replace(layout, recompute="layer"),
        "half the micro-batch": "has one sequence" if layout.micro_batch % 2 else smaller,
    }
    for name in ("tp", "pp", "cp"):
        twice = 2 * getattr(layout, name)
        if name == "tp" and twice > gpu.node:
            made["twice the TP"] = f"TP {twice} leaves the node"
        elif layout.dp % 2:
            made[f"twice the {name.upper()}"] = f"DP {layout.dp} gives none away"
        else:
            made[f"twice the {name.upper()}"] = replace(fewer, **{name: twice})
    for name, each in made.items():
        if isinstance(each, Layout):
            made[name] = already if each == layout else why_not(shape, each, sequence) or each
    return {"as it is": layout} | made


# --8<-- [end:changes]


def compared(shape: Shape, layout: Layout, sequence: int, gpu: Gpu) -> dict:
    """What each change makes of the fullest stage and of a step."""
    room, others, seconds = CONSTANTS["memory"]["room"] * gpu.memory, {}, {}
    for name, each in changes(shape, layout, sequence, gpu).items():
        if isinstance(each, str):
            others[name] = [each]
            continue
        size = needed(shape, each, sequence)
        time = step_time(shape, each, sequence, gpu, CONSTANTS["time"]).seconds
        if size <= room:
            seconds[name] = time
        verdict = "fits" if size <= room else f"{in_bytes(size - room)} too much"
        others[name] = [in_bytes(size), in_seconds(time), verdict]
    return {"others": others, "best": min(seconds, key=seconds.__getitem__, default="")}


def facts(shape: Shape, layout: Layout, sequence: int, gpu: Gpu) -> dict[str, str]:
    """What is said about one layout."""
    every = [parts_of(shape, layout, sequence, index) for index in range(layout.pp)]
    totals = [sum(parts.values()) for parts in every]
    index, room = totals.index(max(totals)), CONSTANTS["memory"]["room"] * gpu.memory
    layers, most = stages(shape, layout.pp)[index].layers, max(totals)
    where = f"stage {index} of {layout.pp}; layers: {layers}"
    return {
        "gpus": f"{layout.gpus}",
        "batch": f"{layout.dp * layout.micro_batch * layout.micro_batches}",
        "fullest": f"{where}; live micro-batches: {digits(layout.flying(index))}",
        "needs": " + ".join(
            f"{name} {in_bytes(size)}" for name, size in every[index].items() if size
        )
        + f" = {in_bytes(most)}",
        "room": f"{in_bytes(room)} of {in_bytes(gpu.memory)}",
        "verdict": "fits" if most <= room else f"{in_bytes(most - room)} too much",
        "stages": ", ".join(map(in_bytes, totals)),
    }


def sums(parts: dict[str, float]) -> str:
    each = " + ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size)
    return f"{each} = {in_bytes(sum(parts.values()))}"


def step_facts(
    shape: Shape, layout: Layout, sequence: int, index: int
) -> dict[str, str | list[str]]:
    """The fullest moment of a step, and of each of its passes."""
    every = moments(shape, layout, sequence, index)
    most = max(every, key=lambda each: each[-1])
    pieces = {
        words(each): parts_at(each, shape, layout, sequence, index) for each in passes(every)
    }
    return {
        "moment": words(most),
        "contains": sums(pieces[words(most)]),
        "passes": [f"{name}: {sums(parts)}" for name, parts in pieces.items()],
    }


def draw(shape: Shape, layout: Layout, sequence: int, gpu: Gpu) -> str:
    """The stages' parts as bars, and the line of the GPU's memory."""
    every = [parts_of(shape, layout, sequence, index) for index in range(layout.pp)]
    widest = 1.1 * max(gpu.memory, *(sum(parts.values()) for parts in every))
    parts, left, scale = [], 60, 430 / widest
    for index, sizes in enumerate(every):
        y, x = 26 * index + 26, float(left)
        parts.append(f'<text x="0" y="{y + 15}" fill="#52525b">stage {index}</text>')
        for colour, size in zip(COLOURS, sizes.values(), strict=True):
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="20" '
                f'fill="{colour}"/>'
            )
            x += size * scale
    bottom = 26 * len(every) + 26
    for share, text in ((CONSTANTS["memory"]["room"], "room"), (1, in_bytes(gpu.memory))):
        x = left + share * gpu.memory * scale
        dashes = ' stroke-dasharray="4 3"' if share < 1 else ""
        parts.append(
            f'<path d="M{x:.1f} 20V{bottom}" stroke="#1f2937" stroke-width="1.5"{dashes}/>'
            f'<text x="{x:.1f}" y="14" fill="#1f2937" text-anchor="middle">{text}</text>'
        )
    for at, (name, colour) in enumerate(zip(every[0], COLOURS, strict=True)):
        x, y = left + at % 3 * 130, bottom + 16 + at // 3 * 18
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 17}" y="{y}" fill="#52525b">{name}</text>'
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 {bottom + 40}" '
    style = 'font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head + style, *parts, "</svg>", ""])


def check() -> None:
    """The state by the formulas of chapter 04, and stages by those of chapter 03."""
    for name in ("llama-3-8b", "llama-3-70b", "llama-3-405b"):
        shape = the_model(name)
        for pp in (1, 2, 4, 8, 16):
            layout = Layout(pp=pp, micro_batches=64, zero=0)
            if why_not(shape, layout, 8192):
                continue
            every = [closed_form(shape, layout, 8192, index) for index in range(pp)]
            state = sum(
                parts["parameters"] + parts["gradients"] + parts["optimizer"] for parts in every
            )
            assert state == 18 * parameters(shape), (name, pp)
            if shape.layers % pp == 0:
                assert every[0]["activations"] == pp * every[-1]["activations"]
    shape, lean = the_model("llama-3-8b"), Layout(dp=64, gradient_bytes=2, moment_bytes=2)
    parts = closed_form(shape, lean, 8192, 0)
    assert parts["gradients"] == 2 * parameters(shape)
    assert parts["optimizer"] == 8 * parameters(shape) / 64
    # what the replay keeps for good is less by as much
    less = sum(closed_form(shape, Layout(dp=64), 8192, 0).values()) - sum(parts.values())
    spared = replay(shape, Layout(dp=64), 8192, 0)[1] - replay(shape, lean, 8192, 0)[1]
    assert abs(spared / less - 1) < 0.01
    # no proposed layout has a different number of GPUs or batch size, also with experts
    for name, many in (
        ("llama-3-70b", Layout(16, 4, 4, micro_batch=2, micro_batches=32, zero=0)),
        ("mixtral-8x7b", Layout(8, 2, 2, ep=8, micro_batch=2, micro_batches=32, zero=0)),
    ):
        made = changes(the_model(name), many, 8192, the_gpu("h100"))
        others = [each for each in made.values() if isinstance(each, Layout)]
        assert len(others) > 9 and any(each.micro_batch == 1 for each in others)
        for each in others:
            batch = each.dp * each.micro_batch * each.micro_batches
            assert (each.gpus, batch) == (many.gpus, 64 * many.dp), each
            assert each.dp % each.ep == 0, each
    # the planner replays no stage that cannot be the fullest, and that one
    shape, deep = the_model("llama-3-405b"), Layout(pp=16, tp=8, micro_batches=32)
    most = max(replay(shape, deep, 8192, index)[1] for index in range(16))
    assert most == max(allocated for _, allocated in fullest(shape, deep, 8192).values())
    print("state: 18 bytes for each parameter, over all stages together")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3-70b", help="name, file.toml, or layers=…,…")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens")
    for name, first in (("dp", 16), ("tp", 4), ("pp", 4), ("cp", 1), ("ep", 1)):
        parser.add_argument(f"--{name}", type=int, default=first)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences")
    parser.add_argument("--micro-batches", type=int, default=32, help="of a step and replica")
    parser.add_argument("--chunks", type=int, default=1, help="of a stage: interleaved 1F1B")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="3: FSDP")
    parser.add_argument("--recompute", choices=AGAIN, default="no", help="yes: layers")
    parser.add_argument("--gradients", choices=BYTES, default="fp32")
    parser.add_argument("--moments", choices=BYTES, default="fp32")
    parser.add_argument("--view", choices=["stages", "step"], default="stages")
    parser.add_argument(
        "--stage", default="fullest", help="for --view step: the number of a stage, or fullest"
    )
    args = parser.parse_args()
    shape, gpu = the_model(args.model), the_gpu(args.gpu)
    layout = Layout(
        args.dp, args.pp, args.tp, args.cp, args.ep, args.micro_batch, args.micro_batches,
        zero=args.zero, recompute=AGAIN[args.recompute], virtual=args.chunks,
        gradient_bytes=BYTES[args.gradients], moment_bytes=BYTES[args.moments],
    )  # fmt: skip
    for name in ("sequence", "dp", "tp", "pp", "cp", "ep", "micro_batch", "micro_batches"):
        if getattr(args, name) < 1:
            sys.exit(f"--{name.replace('_', '-')}: at least 1")
    if args.chunks < 1 or math.gcd(layout.dp, shape.experts) % layout.ep:
        sys.exit("--chunks is at least 1, and --ep divides --dp and the experts")
    if reason := why_not(shape, layout, args.sequence):
        sys.exit(reason)
    said = facts(shape, layout, args.sequence, gpu)
    stage = said["fullest"].split()[1] if args.stage == "fullest" else args.stage
    if not stage.isdecimal() or int(stage) >= layout.pp:
        sys.exit(f"--stage must be `fullest` or a number from 0 to {layout.pp - 1}")
    index = int(stage)
    table = compared(shape, layout, args.sequence, gpu)
    print(f"{args.model}; GPUs: {said['gpus']}; ", end="")
    print(f"sequences of {args.sequence:,} tokens a step: {said['batch']}")
    print(f"fullest: {said['fullest']}")
    print(f"  {said['needs']}")
    print(f"room: {said['room']}: {said['verdict']}")
    print(f"by stage: {said['stages']}")
    if args.view == "step":
        step = step_facts(shape, layout, args.sequence, index)
        print(f"fullest moment: stage {index}, {step['moment']}")
        print(f"  {step['contains']}")
        print("\n".join(step["passes"]))
    for name, cells in table["others"].items():
        mark = ", the fastest that does" * (name == table["best"])
        words = "  ".join([*(f"{each:>8}" for each in cells[:-1]), cells[-1]])
        print(f"{name:21} {words}{mark}")
    if len(sys.argv) == 1:
        check()
        with open("rank_memory.svg", "w", encoding="utf-8") as file:
            file.write(draw(shape, layout, args.sequence, gpu))


if __name__ == "__main__":
    main()
