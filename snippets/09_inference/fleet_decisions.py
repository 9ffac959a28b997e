"""Draws a fleet of GPUs, and the five decisions that a serving policy makes.

The same five decisions are the sections of the page. The program checks that each field of
`Fleet` that a policy can change belongs to exactly one of them. Plain Python writes the SVG.
"""

import textwrap
from dataclasses import fields

from fleet import Fleet

INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
DECISIONS = {  # question: the fields of Fleet that answer it
    "Which GPU gets a request?": ["routing"],
    "Where does an unused cache wait?": [
        "prefix_caching",
        "tiers",
        "always_load",
        "reserved_bytes",
    ],
    "Which GPUs prefill, and which decode?": ["prefill_gpus", "decode_hardware", "link"],
    "What does a step contain, and what does it cost?": [
        *("token_budget", "max_step", "interleave", "max_sequences", "cache_bytes"),
        *("drafts", "acceptance", "draft_cost", "host", "host_per_sequence", "overlap"),
        *("launch", "graph_sizes"),
    ],
    "How many GPUs run?": [
        *("gpus", "max_gpus", "cold_start", "requests_per_gpu", "scale_down_delay"),
    ],
}
NOT_A_DECISION = ["hardware", "count_attention"]


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


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = MUTED) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.8" '
        'marker-end="url(#head)"/>'
    )


def badge(x: float, y: float, number: int) -> str:
    middle = 'text-anchor="middle" font-weight="600"'
    return f'<circle cx="{x}" cy="{y}" r="11" fill="{ORANGE}"/>' + draw_text(
        x, y + 5, str(number), "#ffffff", 14, middle
    )


def gpu(x: float, y: float, name: str, colour: str, dashed: bool = False) -> list[str]:
    """A GPU with its queue and its cache."""
    parts = [box(x, y, 132, 66, colour, dashed), draw_text(x + 9, y + 20, name)]
    parts += [box(x + 9 + 12 * n, y + 34, 9, 22, colour) for n in range(3)]
    parts += [
        box(x + 62, y + 34, 61, 22, colour),
        draw_text(x + 73, y + 50, "cache", MUTED, 13),
    ]
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 452" '
        'font-family="system-ui, sans-serif"><defs><marker id="head" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    ]
    parts += [draw_text(4, 124, "requests"), arrow(66, 119, 98, 119)]
    parts += [box(102, 94, 74, 50, ORANGE), draw_text(117, 124, "router"), badge(102, 94, 1)]
    for n in range(2):
        y = 40 + 92 * n
        parts += [arrow(178, 119, 214, y + 34), *gpu(218, y, f"prefill GPU {n}", BLUE)]
        parts += [*gpu(420, y, f"decode GPU {n}", GREEN)]
    parts += [arrow(352, 73, 416, 73), arrow(352, 165, 416, 165), badge(384, 119, 3)]
    parts += [draw_text(353, 60, "prompt's", MUTED, 12), draw_text(353, 92, "cache", MUTED, 12)]
    parts += [*gpu(576, 86, "another GPU?", MUTED, dashed=True), badge(708, 86, 5)]
    parts += [badge(552, 40, 4), draw_text(420, 28, "drafts, 8 bits, graphs", MUTED, 13)]
    for n, name in enumerate(("host memory", "disk", "shared pool")):
        x = 218 + 114 * n
        parts += [box(x, 250, 104, 34, MUTED), draw_text(x + 9, 272, name, INK, 13)]
    parts += [arrow(262, 200, 262, 246), arrow(302, 246, 302, 202), badge(218, 250, 2)]
    parts += [draw_text(318, 230, "caches of conversations that pause", MUTED, 13)]
    for n, question in enumerate(DECISIONS):
        parts += [
            badge(16, 320 + 29 * n, n + 1),
            draw_text(36, 325 + 29 * n, question, INK, 15),
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("fleet_decisions.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    assigned = [name for names in DECISIONS.values() for name in names] + NOT_A_DECISION
    assert sorted(assigned) == sorted(field.name for field in fields(Fleet))
    for number, (question, names) in enumerate(DECISIONS.items(), 1):
        print(f"{number} {question}")
        print(textwrap.indent(textwrap.fill(", ".join(names), 80), "    "))


if __name__ == "__main__":
    main()
