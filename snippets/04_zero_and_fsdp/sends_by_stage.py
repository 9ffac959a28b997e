"""A picture of one step with DDP and with the three stages of ZeRO: what is sent, and when.

The model has three equal layers, and time goes from left to right. Each strategy has two rows:
what a GPU computes, and what the link sends. A gather or a reduce-scatter of one layer lasts as
long as the forward of one layer. An all-reduce is a reduce-scatter and a gather, so it lasts
twice as long. Adam is drawn shorter for ZeRO, because each rank updates only its shard.

The output adds up what the link sends, in units of Ψ elements and without the factor (N - 1)/N.
Plain Python writes sends_by_stage.svg, so the program runs without any package.
"""

LAYERS = 3
FORWARD, BACKWARD, MESSAGE = 1.0, 2.0, 1.0  # durations for one layer
ADAM, ADAM_SHARD = 1.0, 0.5

LEFT, SCALE, TOP, ROW = 66, 39, 34, 82  # pixels; the last is the height of a strategy
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"
COLOURS = {"F": BLUE, "B": VIOLET, "Adam": MUTED, "gather": ORANGE, "reduce": GREEN}

Bar = tuple[str, str, int, float, float]  # row, what, layer (0 for all), start, end


class Step:
    """One step of one strategy: bars on the rows "GPU" and "link", each in order."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self.free = {"GPU": 0.0, "link": 0.0}

    def add(self, row: str, what: str, layer: int, not_before: float, duration: float) -> float:
        """Add a bar as early as possible, and return its end."""
        start = max(self.free[row], not_before)
        self.free[row] = start + duration
        self.bars.append((row, what, layer, start, start + duration))
        return start + duration

    def forward(self) -> None:
        for layer in range(1, LAYERS + 1):
            self.add("GPU", "F", layer, 0, FORWARD)


def ddp() -> Step:
    step = Step()
    step.forward()
    for layer in range(LAYERS, 0, -1):
        ready = step.add("GPU", "B", layer, 0, BACKWARD)
        step.add("link", "reduce", layer, ready, MESSAGE)  # the two halves of an all-reduce
        step.add("link", "gather", layer, ready, MESSAGE)
    step.add("GPU", "Adam", 0, step.free["link"], ADAM)
    return step


def zero1() -> Step:
    step = Step()
    step.forward()
    for layer in range(LAYERS, 0, -1):
        step.add("GPU", "B", layer, 0, BACKWARD)
    reduced = step.add("link", "reduce", 0, step.free["GPU"], LAYERS * MESSAGE)
    updated = step.add("GPU", "Adam", 0, reduced, ADAM_SHARD)
    step.add("link", "gather", 0, updated, LAYERS * MESSAGE)
    return step


def zero2() -> Step:
    step = Step()
    step.forward()
    for layer in range(LAYERS, 0, -1):
        ready = step.add("GPU", "B", layer, 0, BACKWARD)
        step.add("link", "reduce", layer, ready, MESSAGE)
    updated = step.add("GPU", "Adam", 0, step.free["link"], ADAM_SHARD)
    step.add("link", "gather", 0, updated, LAYERS * MESSAGE)
    return step


def zero3() -> Step:
    step = Step()
    order = [*range(1, LAYERS + 1), *range(LAYERS, 0, -1)]
    arrived = step.add("link", "gather", 1, 0, MESSAGE)
    for place, layer in enumerate(order):
        begin = max(step.free["GPU"], arrived)
        if place + 1 < len(order):  # prefetch the next layer
            not_before = begin if order[place + 1] != layer else begin + FORWARD  # freed first
            arrived = step.add("link", "gather", order[place + 1], not_before, MESSAGE)
        if place < LAYERS:
            step.add("GPU", "F", layer, begin, FORWARD)
        else:
            ready = step.add("GPU", "B", layer, begin, BACKWARD)
            step.add("link", "reduce", layer, ready, MESSAGE)
    step.add("GPU", "Adam", 0, step.free["link"], ADAM_SHARD)
    return step


def check(step: Step, name: str) -> None:
    """Gradients leave after their backward, and all but ZeRO-1 send them during backward.

    DDP gathers gradients before Adam, and ZeRO-1 and ZeRO-2 gather parameters after it. With
    ZeRO-3 each pass is after its own gather, and the next layer's gather starts before it ends.
    """
    end = {(what, layer): last for _, what, layer, _, last in step.bars}
    for row, what, layer, start, _ in step.bars:
        if what == "reduce":
            produced = [end["B", one] for one in range(1, LAYERS + 1) if layer in (0, one)]
            assert start >= max(produced)
        if row == "GPU" and what in "FB" and name == "ZeRO-3":
            gathers = [b for b in step.bars if b[1] == "gather" and b[2] == layer]
            assert len(gathers) == 2 and gathers["FB".index(what)][4] <= start
    reduces = [bar for bar in step.bars if bar[1] == "reduce"]
    gathers = [bar for bar in step.bars if bar[1] == "gather"]
    during_backward = [start < end["B", 1] for _, _, _, start, _ in reduces]
    # the gradient of layer 1 is ready only when backward ends
    assert during_backward == ([False] if name == "ZeRO-1" else [True] * (LAYERS - 1) + [False])
    ends = {"DDP": 12.0, "ZeRO-1": 15.5, "ZeRO-2": 13.5, "ZeRO-3": 12.5}  # counted by hand
    assert max(step.free.values()) == ends[name]
    (adam,) = (bar for bar in step.bars if bar[1] == "Adam")
    assert (adam[4] - adam[3] < FORWARD) == (name != "DDP")
    assert adam[3] >= reduces[-1][4]
    for _, _, _, start, last in gathers:
        assert start >= adam[4] if name in ("ZeRO-1", "ZeRO-2") else last <= adam[3]
    if name == "ZeRO-3":
        passes = [bar for bar in step.bars if bar[1] in ("F", "B")]
        for now, following, gather in zip(passes[:-1], passes[1:], gathers[1:], strict=True):
            assert gather[2] == following[2]
            # the last forward frees its layer, and the first backward gathers it again
            assert (gather[3] < now[4]) == (following[2] != now[2])


def draw(steps: dict[str, Step]) -> str:
    height = TOP + ROW * len(steps) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    legend = (
        ("F", "forward"),
        ("B", "backward"),
        ("reduce", "reduce-scatter gradients"),
        ("gather", "gather"),
    )
    x = LEFT
    for what, words in legend:
        parts.append(
            f'<rect x="{x}" y="6" width="12" height="12" fill="{COLOURS[what]}" '
            f'fill-opacity="0.15" stroke="{COLOURS[what]}"/>'
            f'<text x="{x + 18}" y="17" fill="{COLOURS[what]}">{words}</text>'
        )
        x += 42 + 7 * len(words)
    for place, (name, step) in enumerate(steps.items()):
        top = TOP + place * ROW
        parts.append(f'<text x="2" y="{top + 20}" fill="{INK}">{name}</text>')
        parts.append(f'<text x="2" y="{top + 50}" fill="{MUTED}">link</text>')
        sent = sum(bar[4] - bar[3] for bar in step.bars if bar[0] == "link")
        parts.append(
            f'<text x="716" y="{top + 50}" fill="{INK}" text-anchor="end">'
            f"{sent / (LAYERS * MESSAGE):g}Ψ</text>"
        )
        for row, what, layer, start, end in step.bars:
            y = top + (4 if row == "GPU" else 34)
            left, width = LEFT + SCALE * start, SCALE * (end - start)
            words = f"{what if row == 'GPU' else ''}{layer or ''}"
            if not layer and row == "link":
                words = "all layers"
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="24" rx="4" '
                f'fill="{COLOURS[what]}" fill-opacity="0.15" stroke="{COLOURS[what]}"/>'
            )
            if words != "Adam" or width > 36:
                parts.append(
                    f'<text x="{left + width / 2:.1f}" y="{y + 17}" fill="{COLOURS[what]}" '
                    f'text-anchor="middle">{words}</text>'
                )
            else:
                parts.append(
                    f'<text x="{left + width + 4:.1f}" y="{y + 17}" '
                    f'fill="{COLOURS[what]}">{words}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    steps = {"DDP": ddp(), "ZeRO-1": zero1(), "ZeRO-2": zero2(), "ZeRO-3": zero3()}
    for name, step in steps.items():
        check(step, name)
        sent = {"reduce": 0.0, "gather": 0.0}
        for row, what, _, start, end in step.bars:
            if row == "link":
                sent[what] += end - start
        sent = {what: duration / (LAYERS * MESSAGE) for what, duration in sent.items()}
        assert sent["reduce"] == 1 and sent["gather"] == (2 if name == "ZeRO-3" else 1)
        print(
            f"{name:6} sends {sum(sent.values()):g}Ψ: {sent['reduce']:g}Ψ reduce-scattered, "
            f"{sent['gather']:g}Ψ gathered"
        )
    with open("sends_by_stage.svg", "w", encoding="utf-8") as file:
        file.write(draw(steps))


if __name__ == "__main__":
    main()
