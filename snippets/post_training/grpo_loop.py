"""Draws one step of GRPO: what each program keeps in memory, and which messages it sends.

The table computes the size of every message for one example: 64 prompts of 500 tokens, eight
answers of 2,000 tokens to each prompt, and a policy with 8 billion parameters in bf16. The
samples are small, and the weights are large. Plain Python writes grpo_loop.svg.
"""

PROMPTS, GROUP, PROMPT_TOKENS, ANSWER_TOKENS = 64, 8, 500, 2000
PARAMETERS, BF16, NUMBER = 8e9, 2, 4  # bytes of a weight; bytes of a token or a float32 number
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
BOXES = {  # title: x, y, width, height, colour, lines
    "prompts": (6, 62, 110, 62, MUTED, ["a data set"]),
    "sampler": (206, 30, 194, 126, BLUE, ["weights in bf16", "KV cache", "no gradients"]),
    "checker": (494, 62, 220, 62, MUTED, ["a program: reward 1 or 0"]),
    "advantages": (494, 190, 220, 62, MUTED, ["reward minus mean of group"]),
    "trainer": (
        206,
        230,
        194,
        126,
        ORANGE,
        ["weights, gradients", "optimizer state", "reference for KL"],
    ),
}
ARROWS = [  # number of the step, from, to, label, position of the label
    (1, (116, 93), (206, 93), "prompts", (122, 84)),
    (2, (400, 93), (494, 93), "answers", (412, 84)),
    (3, (604, 124), (604, 190), "rewards", (612, 162)),
    (4, (494, 240), (400, 272), "advantages", (430, 286)),
    (5, (340, 156), (340, 230), "tokens, log-probs", (348, 198)),
    (6, (252, 230), (252, 156), "new weights", (146, 198)),
]


ROUTES = {  # the sender and the receiver of each message
    "prompts": ("prompts", "sampler"),
    "answers": ("sampler", "checker"),
    "rewards": ("checker", "advantages"),
    "advantages": ("advantages", "trainer"),
    "tokens, log-probs": ("sampler", "trainer"),
    "new weights": ("trainer", "sampler"),
}


def on_edge(title: str, point: tuple[int, int]) -> bool:
    """Return whether a point is on the edge of a box."""
    x, y, width, height, *_ = BOXES[title]
    right, down = point[0] - x, point[1] - y
    inside = 0 <= right <= width and 0 <= down <= height
    return inside and (right in (0, width) or down in (0, height))


def message_bytes() -> dict[str, float]:
    """Bytes of each message of one step."""
    answers = PROMPTS * GROUP
    return {
        "prompts": PROMPTS * PROMPT_TOKENS * NUMBER,
        "tokens and log-probabilities": answers * ANSWER_TOKENS * 2 * NUMBER,
        "rewards": answers * NUMBER,
        "advantages": answers * NUMBER,
        "new weights": PARAMETERS * BF16,
    }


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 372" '
        'font-family="system-ui, sans-serif">',
        '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" '
        f'orient="auto"><path d="M0 0 L9 4 L0 8 z" fill="{INK}"/></marker></defs>',
    ]
    for title, (x, y, width, height, colour, lines) in BOXES.items():
        style = f'fill="{colour}" fill-opacity="0.12" stroke="{colour}" stroke-width="1.5"'
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" {style}/>'
        )
        parts.append(draw_text(x + 10, y + 24, title, INK, 16, 'font-weight="600"'))
        parts += [draw_text(x + 10, y + 48 + 22 * i, line, INK) for i, line in enumerate(lines)]
    for number, (x1, y1), (x2, y2), label, (x, y) in ARROWS:
        line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" '
        parts.append(line + 'stroke-width="1.8" marker-end="url(#tip)"/>')
        parts.append(draw_text(x, y, f"{number}. {label}", INK, 13))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    for _, start, end, label, _ in ARROWS:
        sender, receiver = ROUTES[label]
        assert on_edge(sender, start) and on_edge(receiver, end), label
    with open("grpo_loop.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    sizes = message_bytes()
    for name, size in sizes.items():
        print(f"{name:30} {size / 1e6:12,.3f} MB")
    samples = sum(size for name, size in sizes.items() if name != "new weights")
    print(
        f"the weights are {sizes['new weights'] / samples:,.0f} times as large as all samples"
    )
    assert samples == 64 * 500 * 4 + 512 * (2000 * 8 + 4 + 4) and sizes["new weights"] == 16e9


if __name__ == "__main__":
    main()
