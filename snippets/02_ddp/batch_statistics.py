"""A picture of synchronized batch normalization: every rank gets the same statistics.

Each rank adds up its values, their squares, and the number of its values. One all-reduce adds
these three numbers over the ranks. Every rank then computes the mean and the variance of the
whole batch. With plain BatchNorm, each rank would use the statistics of its own shard instead.

The numbers are compared with `torch.nn.functional.batch_norm`. Plain Python writes the SVG.
"""

import torch
import torch.nn.functional as F

SHARDS = ((1.0, 2.0, 3.0), (6.0, 10.0))  # one channel; the ranks have unequal numbers of values

TOP, ROW = 44, 92
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def sums(values: tuple[float, ...]) -> tuple[float, float, int]:
    """Return what a rank gives to the all-reduce: the sum, the sum of squares, the count."""
    return sum(values), sum(value**2 for value in values), len(values)


def statistics(total: float, total_square: float, count: int) -> tuple[float, float]:
    """Return the mean and the variance."""
    mean = total / count
    return mean, total_square / count - mean**2


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def lines_in_box(
    x: float, y: float, width: int, lines: list[str], colour: str, height: int = 68
) -> str:
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    ]
    first = y + height / 2 + 5 - 10 * (len(lines) - 1)
    for number, words in enumerate(lines):
        parts.append(caption(x + width / 2, first + 20 * number, words, colour))
    return "".join(parts)


def draw(whole: tuple[float, float, int]) -> str:
    mean, variance = statistics(*whole)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 256" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(127, 26, "shard", MUTED),
        caption(256, 26, "three sums", MUTED),
        caption(407, 26, "of all ranks", MUTED),
        caption(622, 26, "normalized values", MUTED),
    ]
    for rank, values in enumerate(SHARDS):
        y = TOP + ROW * rank
        parts.append(caption(2, y + 39, f"rank {rank}", INK, "start"))
        parts.append(
            lines_in_box(70, y, 114, [", ".join(f"{value:g}" for value in values)], BLUE)
        )
        total, square, count = sums(values)
        parts.append(
            lines_in_box(
                200, y, 112, [f"sum {total:g}", f"squares {square:g}", f"count {count}"], BLUE
            )
        )
        normalized = [f"{(value - mean) / variance**0.5:.2f}" for value in values]
        parts.append(
            lines_in_box(526, y, 192, [", ".join(normalized).replace("-", "−")], GREEN)
        )
        for left, right in ((184, 200), (312, 328), (486, 526)):
            parts.append(
                f'<path d="M{left} {y + 34} H{right}" stroke="{MUTED}" stroke-width="1.5"/>'
            )
    lines = ["one all-reduce", f"sum {whole[0]:g}", f"squares {whole[1]:g}"]
    lines += [f"count {whole[2]}", f"mean {mean:.1f}", f"variance {variance:.1f}"]
    parts.append(lines_in_box(328, TOP, 158, lines, ORANGE, ROW + 68))
    own = [f"{statistics(*sums(values))[0]:.0f}" for values in SHARDS]
    words = f"Plain BatchNorm would use the mean {own[0]} on rank 0 and {own[1]} on rank 1."
    parts.append(caption(360, 238, words, MUTED))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    rows = torch.tensor([value for values in SHARDS for value in values], dtype=torch.float64)
    total, total_square, count = zip(*(sums(values) for values in SHARDS), strict=True)
    whole = sum(total), sum(total_square), sum(count)
    mean, variance = statistics(*whole)
    theirs = F.batch_norm(rows[:, None], None, None, training=True, eps=1e-12)[:, 0]
    torch.testing.assert_close((rows - mean) / variance**0.5, theirs)
    print(f"sum {whole[0]:g}, squares {whole[1]:g}, count {whole[2]}")
    print(f"whole batch: mean {mean:.2f}, variance {variance:.2f}, equal to torch's batch_norm")
    for rank, values in enumerate(SHARDS):
        own_mean, own_variance = statistics(*sums(values))
        print(f"shard of rank {rank}: mean {own_mean:.2f}, variance {own_variance:.2f}")
    own = [statistics(*sums(values)) for values in SHARDS]
    wrong_mean, wrong_variance = (
        sum(column) / len(SHARDS) for column in zip(*own, strict=True)
    )
    assert wrong_mean != mean and wrong_variance < variance
    print(f"means of the two rows above: {wrong_mean:.2f} and {wrong_variance:.2f}")
    with open("batch_statistics.svg", "w", encoding="utf-8") as file:
        file.write(draw(whole))


if __name__ == "__main__":
    main()
