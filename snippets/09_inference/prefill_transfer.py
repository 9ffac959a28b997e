"""Draws disaggregated serving: a prompt runs on one GPU and its answer on another.

The times are computed from data sheets, for Llama 3 8B on H100s that reach half of their peak.
The cache is sent either after the whole prompt, or layer by layer while the prompt still runs.
A loop over the layers is compared with a closed form. Draws prefill_transfer.svg.
"""

import itertools

MULTIPLIED, LAYERS, CACHE = 7.50e9, 32, 128 * 2**10  # Ψ; layers; bytes of a cached token
FLOPS, PROMPT = 0.5 * 989e12, 2000
LINKS = {"400 Gbit/s": 50e9, "10 Gbit/s": 1.25e9}  # bytes/s
INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"


# --8<-- [start:transfer]
def arrival(link: float, by_layer: bool) -> tuple[float, list[tuple[float, float]]]:
    """When the whole cache has arrived, and the start and end of each message; in seconds."""
    compute = 2 * MULTIPLIED * PROMPT / FLOPS / LAYERS  # one layer of the prompt
    send = CACHE * PROMPT / LAYERS / link  # its keys and values
    if not by_layer:
        start = LAYERS * compute
        return start + LAYERS * send, [(start, start + LAYERS * send)]
    messages, free = [], 0.0
    for layer in range(1, LAYERS + 1):
        start = max(layer * compute, free)  # the layer is ready, and the link is free
        free = start + send
        messages.append((start, free))
    return free, messages


# --8<-- [end:transfer]


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, dashed=False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"{dash}/>'
    )


def draw() -> str:
    """Two prompts, A and B, and the steps of the decode GPU; the times are not to scale."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 250" '
        'font-family="system-ui, sans-serif"><defs><marker id="head" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    ]
    for y, name, note in (
        (30, "prefill GPU", "compute-bound"),
        (96, "link", "cache of a layer"),
        (150, "decode GPU", "memory-bound"),
    ):
        parts += [draw_text(4, y + 16, name), draw_text(4, y + 34, note, MUTED, 12)]
    for x, width, name, colour in ((110, 200, "A", BLUE), (318, 250, "B", GREEN)):
        parts += [box(x, 26, width, 40, colour)]
        parts += [draw_text(x + 8, 51, f"prompt {name}, all tokens at once", INK, 13)]
        layers = 5
        for n in range(layers):
            end = x + width * (n + 1) / layers
            parts += [box(end, 94, 16, 30, colour)]
    ready = {"A": 110 + 200 + 16, "B": 318 + 250 + 16}
    for x in range(110, 700, 40):
        rows = ["old"] + [name for name, when in ready.items() if x >= when]
        for row, name in enumerate(rows):
            colour = {"old": MUTED, "A": BLUE, "B": GREEN}[name]
            parts.append(box(x, 150 + 20 * row, 36, 16, colour))
            if name != "old":
                parts.append(draw_text(x + 14, 163 + 20 * row, name, INK, 12))
    parts += [
        f'<line x1="110" y1="224" x2="700" y2="224" stroke="{MUTED}" stroke-width="1.8" '
        'marker-end="url(#head)"/>',
        draw_text(660, 242, "time", MUTED, 13),
        draw_text(110, 242, "each column of boxes is one decode step", MUTED, 13),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    compute = 2 * MULTIPLIED * PROMPT / FLOPS
    size = PROMPT * CACHE / 1e9
    print(f"{PROMPT:,} tokens: prefill {1e3 * compute:.1f} ms, cache {size:.2f} GB")
    print("the cache arrives after the end of the prefill by")
    print("link         sent at the end   layer by layer")
    later = {}
    for name, link in LINKS.items():
        whole, one = arrival(link, by_layer=False)
        layered, messages = arrival(link, by_layer=True)
        later[name] = whole - compute, layered - compute
        first, second = (1e3 * seconds for seconds in later[name])
        print(f"{name:10} {first:14.1f} ms {second:17.2f} ms")
        seconds = PROMPT * CACHE / link  # the closed forms
        assert abs(whole - (compute + seconds)) < 1e-9 and len(one) == 1
        last = max(compute + seconds / LAYERS, compute / LAYERS + seconds)
        assert abs(layered - last) < 1e-9, "the slower of layers and messages sets the end"
        assert len(messages) == LAYERS
        assert abs(sum(end - start for start, end in messages) - seconds) < 1e-9
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(messages))
        assert all(s >= (n + 1) * compute / LAYERS - 1e-9 for n, (s, _) in enumerate(messages))
    assert later["400 Gbit/s"][1] < later["400 Gbit/s"][0] / 30
    assert later["10 Gbit/s"][1] > 0.5 * later["10 Gbit/s"][0], "a slow link cannot be hidden"
    with open("prefill_transfer.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
