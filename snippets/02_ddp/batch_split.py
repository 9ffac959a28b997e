"""A picture of how one data set becomes the batches of several ranks.

`DistributedSampler` deals the samples out to the ranks like cards. If the number of ranks does
not divide the number of samples, some samples are dealt twice. Each rank then computes its
samples in micro-batches. With `no_sync`, only the last micro-batch starts an all-reduce.

Plain Python writes the SVG. The dealing is compared with torch's `DistributedSampler`.
"""

from torch.utils.data import DistributedSampler

SAMPLES, RANKS = 10, 4

TOP, ROW, LEFT, COLUMN = 118, 52, 150, 92
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def deal(samples: int, ranks: int) -> list[list[int]]:
    """Deal until all ranks have the same number of samples; return the samples of each rank."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    dealt = 0
    while dealt < samples or len(hands[-1]) < len(hands[0]):
        hands[dealt % ranks].append(dealt % samples)
        dealt += 1
    return hands


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def card(x: float, y: float, width: int, height: int, words: str, colour: str, dash="") -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def draw(hands: list[list[int]]) -> str:
    rounds, bottom = len(hands[0]), TOP + RANKS * ROW
    end = LEFT + rounds * COLUMN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {bottom + 74}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(2, 34, "data set", INK, "start"),
    ]
    for sample in range(SAMPLES):
        parts.append(card(LEFT - 30 + 46 * sample, 12, 36, 34, str(sample), BLUE))
    for number in range(rounds):
        middle = LEFT + number * COLUMN + 18
        parts.append(caption(middle, 74, "micro-batch", MUTED))
        parts.append(caption(middle, 94, f"{number + 1} of {rounds}", MUTED))
    for rank, hand in enumerate(hands):
        y = TOP + rank * ROW
        parts.append(caption(2, y + 23, f"rank {rank}", INK, "start"))
        for number, sample in enumerate(hand):
            repeated = number * RANKS + rank >= SAMPLES
            colour, dash = (ORANGE, "5 3") if repeated else (BLUE, "")
            parts.append(card(LEFT + number * COLUMN, y, 36, 34, str(sample), colour, dash))
        parts.append(card(end + 164, y, 126, 34, "optimizer step", GREEN))
        for left, right in ((end - COLUMN + 36, end - 14), (end + 136, end + 164)):
            parts.append(
                f'<path d="M{left} {y + 17} H{right}" stroke="{MUTED}" stroke-width="1.5"/>'
            )
    height = bottom - TOP - ROW + 34
    parts.append(card(end - 14, TOP, 150, height, "", ORANGE))
    middle = TOP + height / 2
    parts.append(caption(end + 61, middle - 4, "one all-reduce", ORANGE))
    parts.append(caption(end + 61, middle + 18, "of the gradients", ORANGE))
    under, right = bottom - 4, LEFT + (rounds - 2) * COLUMN + 46
    parts += [
        f'<path d="M{LEFT - 10} {under} v8 H{right} v-8" fill="none" stroke="{MUTED}" '
        'stroke-width="1.5"/>',
        caption((LEFT - 10 + right) / 2, under + 27, "in no_sync, nothing is sent", MUTED),
        caption(LEFT - 10, under + 56, "dashed: samples that are dealt twice", ORANGE, "start"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    hands = deal(SAMPLES, RANKS)
    for samples in range(1, 13):
        for ranks in range(1, 6):
            for rank, hand in enumerate(deal(samples, ranks)):
                theirs = DistributedSampler(range(samples), ranks, rank, shuffle=False)
                assert hand == list(theirs), (samples, ranks, rank)
    with open("batch_split.svg", "w", encoding="utf-8") as file:
        file.write(draw(hands))
    dealt = [sample for hand in hands for sample in hand]
    twice = sorted({sample for sample in dealt if dealt.count(sample) > 1})
    print(f"{SAMPLES} samples are dealt to {RANKS} ranks; each rank gets {len(hands[0])}")
    print(f"dealt twice: samples {', '.join(map(str, twice))}")
    print("equal to torch's DistributedSampler for 1 to 12 samples and 1 to 5 ranks")


if __name__ == "__main__":
    main()
