"""A picture of one FSDP step: gather, compute, free and reduce-scatter, for each layer.

Every layer is a unit. Its parameters are gathered before each use and freed after it. The
network gathers the next layer while the GPU computes the current one, so at most two layers are
whole at the same time. The GPU waits three times: for the first gather, for one gather between
forward and backward, and for the last reduce-scatter.

The times come from a small simulation. A formula that uses none of its results must give the
same end of the step. Plain Python writes the SVG, so the program runs without any package.
"""

from itertools import pairwise

LAYERS = 4
GATHER, FORWARD, BACKWARD, REDUCE = 2, 3, 6, 2  # units of time for one layer

LEFT, SCALE, ROW = 74, 15, 46  # pixels: the start of the axis, one unit of time, one row
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"G": "#c2410c", "F": "#0b6e99", "B": "#7c3aed", "R": "#15803d"}
NAMES = {"G": "gather", "F": "forward", "B": "backward", "R": "reduce-scatter"}
NETWORK = "GR"  # the GPU computes F and B

Box = tuple[str, int, int, int]  # kind, layer, start, end


def simulate(reshard: bool = True) -> tuple[list[Box], list[tuple[int, int, int]]]:
    """Return all boxes of a step, and an interval (layer, start, end) for each whole layer.

    The network does one thing at a time, and so does the GPU, in the order of the calls.
    """
    boxes: list[Box] = []
    whole: list[tuple[int, int, int]] = []
    free = {"network": 0, "gpu": 0}  # the time at which each becomes free

    def run(kind: str, layer: int, ready: int) -> tuple[int, int]:
        name = "network" if kind in NETWORK else "gpu"
        duration = {"G": GATHER, "F": FORWARD, "B": BACKWARD, "R": REDUCE}[kind]
        start = max(ready, free[name])
        free[name] = start + duration
        boxes.append((kind, layer, start, start + duration))
        return start, start + duration

    gathers = {0: run("G", 0, 0)}  # start and end of the gather of each layer
    for layer in range(LAYERS):
        now = max(free["gpu"], gathers[layer][1])
        if layer + 1 < LAYERS:
            gathers[layer + 1] = run("G", layer + 1, now)  # while this layer computes
        _, end = run("F", layer, now)
        if reshard:
            whole.append((layer, gathers[layer][0], end))
    if reshard:
        gathers[LAYERS - 1] = run("G", LAYERS - 1, free["gpu"])
    for layer in reversed(range(LAYERS)):
        now = max(free["gpu"], gathers[layer][1])
        if reshard and layer > 0:
            gathers[layer - 1] = run("G", layer - 1, now)
        _, end = run("B", layer, now)
        whole.append((layer, gathers[layer][0], end))
        run("R", layer, end)
    return boxes, whole


def end_of_step(reshard: bool) -> int:
    """Return the end of a step if computation hides all messages except the exposed ones."""
    exposed = GATHER + (GATHER if reshard else 0) + REDUCE
    return exposed + LAYERS * (FORWARD + BACKWARD)


def whole_layers(whole: list[tuple[int, int, int]], time: float) -> int:
    return sum(start <= time < end for _, start, end in whole)


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {style}/>'


def draw(boxes: list[Box], whole: list[tuple[int, int, int]]) -> str:
    end = max(box[3] for box in boxes)
    top, bottom = 44, 44 + LAYERS * ROW
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 312" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    x = LEFT
    for kind, name in NAMES.items():  # the legend
        style = f'fill="{COLOURS[kind]}" fill-opacity="0.16" stroke="{COLOURS[kind]}"'
        parts.append(rectangle(x, 8, 22, 20, style))
        parts.append(caption(x + 11, 23, kind, COLOURS[kind]))
        parts.append(caption(x + 28, 23, name, INK, "start"))
        x += 56 + 8 * len(name)
    parts.append(rectangle(x, 8, 22, 20, f'fill="{MUTED}" fill-opacity="0.12"'))
    parts.append(caption(x + 28, 23, "layer is whole", INK, "start"))
    for layer in range(LAYERS):
        y = top + layer * ROW
        parts.append(caption(2, y + 27, f"layer {layer + 1}", INK, "start"))
        for number, start, finish in whole:
            if number == layer:
                style = f'fill="{MUTED}" fill-opacity="0.12"'
                width = SCALE * (finish - start)
                parts.append(rectangle(LEFT + SCALE * start, y, width, ROW - 4, style))
        for kind, number, start, finish in boxes:
            if number == layer:
                style = (
                    f'fill="{COLOURS[kind]}" fill-opacity="0.16" stroke="{COLOURS[kind]}" '
                    'stroke-width="1.5"'
                )
                left, width = LEFT + SCALE * start, SCALE * (finish - start)
                parts.append(rectangle(left + 1, y + 6, width - 2, ROW - 16, style))
                parts.append(caption(left + width / 2, y + 26, kind, COLOURS[kind]))
    base = bottom + 62  # the number of whole layers, as a curve
    parts.append(caption(2, base - 26, "layers", INK, "start"))
    parts.append(caption(2, base - 8, "whole", INK, "start"))
    path, level = f"M{LEFT} {base}", 0
    for time in range(end + 1):
        height = base - 20 * whole_layers(whole, time + 0.5)
        if height != level:
            path += f" H{LEFT + SCALE * time} V{height}"
            level = height
    parts.append(f'<path d="{path} H{LEFT + SCALE * end}" fill="none" stroke="{INK}"/>')
    for count in (1, 2):
        parts.append(caption(LEFT - 8, base - 20 * count + 5, str(count), MUTED, "end"))
    forward = max(finish for kind, _, _, finish in boxes if kind == "F")
    middle = LEFT + SCALE * forward
    parts.append(
        f'<path d="M{middle} {top - 6} V{base + 6}" stroke="{MUTED}" stroke-dasharray="4 4"/>'
    )
    parts.append(caption(middle - 6, base + 22, "forward", MUTED, "end"))
    parts.append(caption(middle + 6, base + 22, "backward", MUTED, "start"))
    parts.append(caption(LEFT + SCALE * end, base + 22, f"end: {end}", MUTED, "end"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    for reshard in (True, False):
        boxes, whole = simulate(reshard)
        end = max(box[3] for box in boxes)
        assert end == end_of_step(reshard)
        for kind, layer, start, finish in boxes:  # a layer computes only while it is whole
            if kind in "FB":
                assert any(n == layer and a < start and finish <= b for n, a, b in whole)
        for names in ("GR", "FB"):  # the network and the GPU do one thing at a time
            spans = sorted((start, finish) for kind, _, start, finish in boxes if kind in names)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
        messages = sum(kind in NETWORK for kind, *_ in boxes) / LAYERS
        most = max(whole_layers(whole, time + 0.5) for time in range(end))
        assert (messages, most) == ((3, 2) if reshard else (2, LAYERS))
        busy = sum(finish - start for kind, _, start, finish in boxes if kind in "FB")
        print(f"reshard_after_forward={reshard}: the step takes {end} units of time")
        print(f"  the GPU computes for {busy} of them and waits for {end - busy}")
        print(
            f"  {messages:.0f} messages per layer, at most {most} of {LAYERS} layers are whole"
        )
        if reshard:
            alone = sum(finish - start for _, _, start, finish in boxes)
            assert alone == LAYERS * (2 * GATHER + FORWARD + BACKWARD + REDUCE) > end
            print(f"  without any overlap it would take {alone}")
            with open("fsdp_timeline.svg", "w", encoding="utf-8") as file:
                file.write(draw(boxes, whole))


if __name__ == "__main__":
    main()
