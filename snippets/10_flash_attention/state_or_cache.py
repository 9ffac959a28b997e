"""The state of a Qwen3-Next layer needs as many bytes as a cache of about 1,000 tokens.

Qwen3-Next-80B-A3B has 48 layers. 36 of them use the gated delta rule and store a state of fixed
size. The other 12 use attention and store keys and values of every token. The program counts
the bytes for one sequence and compares them with the bytes of a model whose 48 layers all use
attention. The sizes are the defaults of Qwen3NextConfig in Transformers 5.23. Plain Python
draws state_or_cache.svg.
"""

import math

LAYERS, ATTENTION = 48, 12
KV_HEADS, HEAD = 2, 256  # of a layer with attention
KEY_HEADS, HEADS, WIDTH, CONV = 16, 32, 128, 4  # of a layer with the delta rule
BF16, FP32 = 2, 4

FIRST, LAST = 7, 18  # the picture shows 2^7 to 2^18 tokens
LEFT, TOP, X_STEP, Y_STEP, LOW, HIGH = 92, 24, 54, 22, 21, 35  # bytes from 2^21 to 2^35
INK, MUTED = "#1f2937", "#52525b"


# --8<-- [start:bytes]
def cache_bytes(tokens: int, layers: int) -> int:
    """The bytes of the keys and values of all `layers` in bf16."""
    return layers * tokens * 2 * KV_HEADS * HEAD * BF16


def state_bytes(layers: int) -> int:
    """The bytes of the states in fp32 and of the last inputs of the short convolutions."""
    channels = 2 * KEY_HEADS * WIDTH + HEADS * WIDTH
    return layers * (HEADS * WIDTH * WIDTH * FP32 + channels * CONV * BF16)


# --8<-- [end:bytes]


def readable(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


def place(log_tokens: float, size: float) -> str:
    x = LEFT + (log_tokens - FIRST) * X_STEP
    y = TOP + (HIGH - math.log2(size)) * Y_STEP
    return f"{x:.1f},{y:.1f}"


def draw(curves: dict) -> str:
    right, bottom = LEFT + (LAST - FIRST) * X_STEP, TOP + (HIGH - LOW) * Y_STEP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 24} {bottom + 58}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for power in range(FIRST, LAST + 1):
        x = LEFT + (power - FIRST) * X_STEP
        label = f"{2**power}" if power < 10 else f"{2 ** (power - 10)} Ki"
        parts.append(f'<path d="M{x} {TOP} V{bottom}" stroke="{MUTED}" stroke-opacity="0.25"/>')
        parts.append(
            f'<text x="{x}" y="{bottom + 20}" fill="{MUTED}" '
            f'text-anchor="middle">{label}</text>'
        )
    for power in range(LOW, HIGH + 1, 2):
        y = TOP + (HIGH - power) * Y_STEP
        label = f"{2 ** (power - 20)} MiB" if power < 30 else f"{2 ** (power - 30)} GiB"
        parts.append(f'<path d="M{LEFT} {y} H{right}" stroke="{MUTED}" stroke-opacity="0.25"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 5}" fill="{MUTED}" text-anchor="end">{label}</text>'
        )
    middle = (LEFT + right) / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 46}" fill="{INK}" text-anchor="middle">'
        "tokens in the sequence</text>"
    )
    for name, (colour, dash, at, shift, function) in curves.items():
        points = [
            (p / 4, function(round(2 ** (p / 4)))) for p in range(4 * FIRST, 4 * LAST + 1)
        ]
        line = " ".join(place(*point) for point in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5" '
            f'stroke-dasharray="{dash}"/>'
        )
        x, y = place(at, function(2**at)).split(",")
        parts.append(
            f'<text x="{x}" y="{float(y) + shift}" fill="{colour}" '
            f'text-anchor="end">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    linear = LAYERS - ATTENTION
    assert cache_bytes(1, 1) == 2048 and LAYERS // ATTENTION == 4
    crossing = HEADS * WIDTH * WIDTH * FP32 // cache_bytes(1, 1)
    assert cache_bytes(crossing, 1) < state_bytes(1) < cache_bytes(crossing + 64, 1)
    print(f"36 states: {readable(state_bytes(linear))} for each sequence, at every length")
    print(f"one layer: the state is as large as a cache of {crossing:,} tokens,")
    print(f"  with its convolution {state_bytes(1) // cache_bytes(1, 1):,} tokens")
    print("tokens   48 x attention   12 x attention + 36 states   ratio")
    for power in (8, 10, 12, 15, 18):
        n = 2**power
        dense, hybrid = cache_bytes(n, LAYERS), cache_bytes(n, ATTENTION) + state_bytes(linear)
        print(f"{n:7,}{readable(dense):>14}{readable(hybrid):>22}{dense / hybrid:>18.2f}")
    # in the longest row, the ratio almost reaches the limit that the attention layers set
    assert 0.98 * LAYERS / ATTENTION < dense / hybrid < LAYERS / ATTENTION
    curves = {
        "48 layers with attention": ("#c2410c", "", 15, -8, lambda n: cache_bytes(n, LAYERS)),
        "12 layers with attention, 36 states": (
            "#0b6e99",
            "7 4",
            18,
            112,
            lambda n: cache_bytes(n, ATTENTION) + state_bytes(linear),
        ),
        "36 states alone": ("#15803d", "2 4", 18, 20, lambda n: state_bytes(linear)),
    }
    with open("state_or_cache.svg", "w", encoding="utf-8") as file:
        file.write(draw(curves))


if __name__ == "__main__":
    main()
