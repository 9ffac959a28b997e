"""Which rows each trainer rank sends to each sampler rank, and what three ways of syncing cost.

The trainer cuts every parameter by rows (FSDP). The sampler cuts it by heads, rows or columns
(tensor parallelism). The plan is the intersection of both cuts, for each pair of ranks. Draws
the plan of three matrices to sync_plan.svg, and counts the bytes for Llama 3 70B.
"""

from typing import NamedTuple

MIDDLE = 'text-anchor="middle"'
INK, MUTED = "#1f2937", "#52525b"
COLOURS = ["#0b6e99", "#c2410c"]  # of the sampler ranks
NETWORK = 50e9  # bytes per second and direction of the network card of one GPU, 400 Gb/s


class Box(NamedTuple):
    """The rows top to bottom - 1 and the columns left to right - 1 of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    def elements(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def overlap(self, other: "Box") -> "Box":
        """The part that both boxes contain. It may have no elements."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom, right = min(self.bottom, other.bottom), min(self.right, other.right)
        return Box(top, max(top, bottom), left, max(left, right))


Shapes = dict[str, tuple[int, int]]  # the name of each parameter -> its rows and columns
Plan = dict[tuple[int, int], list[tuple[str, Box]]]  # trainer and sampler rank -> pieces


def fsdp_box(shape: tuple[int, int], rank: int, ranks: int) -> Box:
    """The rows of a trainer rank: ceil(rows / ranks), or fewer at the end."""
    size = -(-shape[0] // ranks)
    top = min(rank * size, shape[0])
    return Box(top, min(top + size, shape[0]), 0, shape[1])


def tp_boxes(cut: str, shape: tuple[int, int], rank: int, ranks: int) -> list[Box]:
    """The boxes of a tensor-parallel rank. `cut` is rows, columns, whole, or 8+8+8."""
    rows, columns = shape
    if cut == "whole":
        return [Box(0, rows, 0, columns)]
    if cut == "columns":
        return [Box(0, rows, columns * rank // ranks, columns * (rank + 1) // ranks)]
    parts = [rows] if cut == "rows" else [int(part) for part in cut.split("+")]
    boxes, start = [], 0
    for part in parts:  # a fused matrix has several parts, and every part is cut
        boxes.append(
            Box(start + part * rank // ranks, start + part * (rank + 1) // ranks, 0, columns)
        )
        start += part
    return boxes


def make_plan(has: list[dict[str, list[Box]]], needs: list[dict[str, list[Box]]]) -> Plan:
    """The pieces from each trainer rank to each sampler rank. No piece is sent twice."""
    plan: Plan = {}
    for receiver, boxes in enumerate(needs):
        for name in boxes:
            for need in boxes[name]:
                missing = need.elements()
                for turn in range(len(has)):  # receivers start with different senders
                    sender = (receiver + turn) % len(has)
                    for own in has[sender][name]:
                        piece = own.overlap(need)
                        if missing and piece.elements():
                            plan.setdefault((sender, receiver), []).append((name, piece))
                            missing -= piece.elements()
                    if not missing:
                        break
                assert missing == 0, f"no trainer rank has all rows of {name}"
    return plan


def llama_70b() -> tuple[Shapes, dict[str, str]]:
    """The matrices of Llama 3 70B, and how an engine with 8 ranks or fewer cuts them."""
    h, ffn, vocabulary, layers, kv = 8192, 28672, 128256, 80, 1024
    block = {
        "qkv": ((h + 2 * kv, h), f"{h}+{kv}+{kv}"),
        "out": ((h, h), "columns"),
        "gate_up": ((2 * ffn, h), f"{ffn}+{ffn}"),
        "down": ((h, ffn), "columns"),
        "norm1": ((h, 1), "whole"),
        "norm2": ((h, 1), "whole"),
    }
    rest = {"embedding": ((vocabulary, h), "rows"), "head": ((vocabulary, h), "rows")}
    named = rest | {"norm": ((h, 1), "whole")}
    named |= {
        f"{layer}.{name}": value for layer in range(layers) for name, value in block.items()
    }
    return {n: shape for n, (shape, _) in named.items()}, {
        n: cut for n, (_, cut) in named.items()
    }


def traffic(trainers: int, engines: int, degree: int) -> tuple[float, float, float]:
    """Return GB: the model, the most that a trainer rank sends and a sampler rank receives."""
    shapes, cuts = llama_70b()
    has = [
        {n: [fsdp_box(s, rank, trainers)] for n, s in shapes.items()}
        for rank in range(trainers)
    ]
    needs = [
        {n: tp_boxes(cuts[n], s, rank, degree) for n, s in shapes.items()}
        for rank in range(degree)
    ]
    plan = make_plan(has, needs)
    sent, received = [0] * trainers, [0] * degree
    for (sender, receiver), pieces in plan.items():
        size = 2 * sum(piece.elements() for _, piece in pieces)  # bf16
        sent[sender] += engines * size
        received[receiver] += size
    # the lower bound: a rank that has nothing must receive what it needs, and nothing more
    assert received == [
        2 * sum(box.elements() for boxes in need.values() for box in boxes) for need in needs
    ]
    assert sum(sent) == engines * sum(received)
    model = 2 * sum(rows * columns for rows, columns in shapes.values())
    return model / 1e9, max(sent) / 1e9, max(received) / 1e9


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw(trainers: int, samplers: int) -> tuple[str, list[int]]:
    """A panel for each kind of cut. Also returns the number of pieces in each panel."""
    panels = {
        "up: the sampler cuts rows": ((24, 12), "rows"),
        "down: the sampler cuts columns": ((24, 12), "columns"),
        "qkv: the sampler cuts q, k and v": ((24, 12), "8+8+8"),
    }
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 744 300" '
        'font-family="system-ui, sans-serif">'
    ]
    counts = []
    for index, (title, (shape, cut)) in enumerate(panels.items()):
        left, top, unit = 2 + 250 * index, 62, 8
        has = [{"w": [fsdp_box(shape, rank, trainers)]} for rank in range(trainers)]
        needs = [{"w": tp_boxes(cut, shape, rank, samplers)} for rank in range(samplers)]
        parts.append(draw_text(left, 18, title))
        for x, name in ((left + 32, "trainer"), (left + 176, "sampler")):
            parts.append(draw_text(x + 24, 40, name, MUTED, 14, MIDDLE))
        for rank, boxes in enumerate(has):
            box = boxes["w"][0]
            y, height = top + unit * box.top, unit * (box.bottom - box.top)
            parts.append(
                f'<rect x="{left + 32}" y="{y}" width="48" height="{height}" fill="{MUTED}" '
                f'fill-opacity="0.12" stroke="{MUTED}"/>'
            )
            parts.append(draw_text(left + 14, y + height / 2 + 5, f"T{rank}", INK, 14, MIDDLE))
        start = left + 168
        for rank, boxes in enumerate(needs):
            for box in boxes["w"]:
                x, y = start + 4 * box.left, top + unit * box.top
                width, height = 4 * (box.right - box.left), unit * (box.bottom - box.top)
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{width}" height="{height}" '
                    f'fill="{COLOURS[rank]}" fill-opacity="0.2" stroke="{COLOURS[rank]}"/>'
                )
                where = (
                    (x + width / 2, top - 4)
                    if cut == "columns"
                    else (x + 62, y + height / 2 + 5)
                )
                parts.append(draw_text(*where, f"S{rank}", COLOURS[rank], 14, MIDDLE))
        plan = make_plan(has, needs)
        for (_, receiver), pieces in sorted(plan.items()):
            for _, piece in pieces:
                y = top + unit * (piece.top + piece.bottom) / 2 + 6 * receiver - 3
                end = start + 4 * piece.left
                parts.append(
                    f'<path d="M{left + 82} {y:g} H{end - 8}" stroke="{COLOURS[receiver]}" '
                    f'stroke-width="2"/><path d="M{end} {y:g} l-9 -4 v8 z" '
                    f'fill="{COLOURS[receiver]}"/>'
                )
        counts.append(sum(len(pieces) for pieces in plan.values()))
        parts.append(draw_text(left, 284, f"{counts[-1]} pieces"))
    return "\n".join([*parts, "</svg>", ""]), counts


def main() -> None:
    picture, counts = draw(trainers=3, samplers=2)
    with open("sync_plan.svg", "w", encoding="utf-8") as file:
        file.write(picture)
    print("pieces for up, down and qkv with 3 trainer ranks and 2 sampler ranks:", *counts)
    assert counts == [4, 6, 6]

    print("\nLlama 3 70B in bf16, 50 GB/s for each GPU and direction")
    print("trainers   engines  sent by a trainer  received  by broadcast  by rows  relayed")
    for trainers, engines, degree in (
        (8, 1, 8),
        (16, 1, 8),
        (16, 4, 8),
        (16, 16, 8),
        (64, 16, 8),
    ):
        model, sent, received = traffic(trainers, engines, degree)
        broadcast = 1e9 * model / NETWORK
        rows = 1e9 * max(sent, received) / NETWORK
        relayed = 1e9 * max(sent / engines, received) / NETWORK  # engines forward rows
        print(
            f"{trainers:8}  {engines:2} x TP {degree}  {sent:13.1f} GB  {received:5.1f} GB"
            f"  {broadcast:10.2f} s  {rows:5.2f} s  {relayed:5.2f} s"
        )
        assert (
            abs(received * degree / model - 1) < 1e-3
        )  # only the norms are whole on each rank
        assert abs(sent * trainers / (engines * model) - 1) < 1e-2  # FSDP splits evenly
    print("\nTrainer and sampler in turn on the same 8 GPUs, GB that each GPU receives")
    shapes, cuts = llama_70b()
    needs = [{n: tp_boxes(cuts[n], s, rank, 8) for n, s in shapes.items()} for rank in range(8)]
    fsdp = [{n: [fsdp_box(s, rank, 8)] for n, s in shapes.items()} for rank in range(8)]
    for name, has in (("FSDP to TP 8", fsdp), ("TP 8 to TP 8", needs)):
        plan = make_plan(has, needs)
        arrives = [0] * 8
        for (sender, receiver), pieces in plan.items():
            if sender != receiver:  # a GPU already has its own rows
                arrives[receiver] += 2 * sum(piece.elements() for _, piece in pieces)
        print(f"{name}: {min(arrives) / 1e9:.1f} to {max(arrives) / 1e9:.1f} GB")
        assert (name == "TP 8 to TP 8") == (max(arrives) == 0)
    # query heads 8 to 15 of rank 1 use the same head of keys and of values, which is head 1
    assert [(box.top, box.bottom) for box in needs[1]["0.qkv"]] == [
        (1024, 2048),
        (8192 + 128, 8192 + 256),
        (9216 + 128, 9216 + 256),
    ]
    # FSDP cuts 10 rows into 3, 3, 3 and 1, and 2 rows into 1, 1, 0 and 0
    for rows, sizes in ((10, [3, 3, 3, 1]), (2, [1, 1, 0, 0])):
        boxes = [fsdp_box((rows, 1), rank, 4) for rank in range(4)]
        assert [box.elements() for box in boxes] == sizes
        assert [box.top for box in boxes] == [sum(sizes[:rank]) for rank in range(4)]
    assert f"{model / 2:.2f}" == "70.55"  # billion parameters, as in the planner's table


if __name__ == "__main__":
    main()
