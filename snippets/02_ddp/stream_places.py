"""A picture of a stream that is resumed by other readers: the saved place is rows per shard.

Plain Python writes the SVG. Two ranks with two workers each read a part of every shard. A
checkpoint saves how many rows of each shard were trained on. Three ranks without workers then
read the rest. Look at the shards that change their reader, and at the rows: each is read once.
"""

ROWS = [14 + 5 * shard % 7 for shard in range(8)]  # rows of each shard, as in stream.py
BEFORE = [f"rank {rank}, worker {worker}" for rank in range(2) for worker in range(2)]
AFTER = ["rank 0", "rank 1", "rank 2"]
ROWS_PER_READER = 24  # that each reader trains on before the checkpoint
WIDTH, LEFT, ROW, TOP = 720, 70, 30, 52
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN = "#0b6e99", "#15803d"

Segment = tuple[int, int, int, str]  # a shard, its first row, the row after its last, a reader


def read(done: list[int], readers: list[str], limit: int | None = None) -> list[Segment]:
    """Deal the unfinished shards to the readers, and let each train on up to `limit` rows."""
    unfinished = [shard for shard, rows in enumerate(ROWS) if done[shard] < rows]
    segments = []
    for number, name in enumerate(readers):
        left = sum(ROWS) if limit is None else limit
        for shard in unfinished[number :: len(readers)]:
            end = min(ROWS[shard], done[shard] + left)
            if end > done[shard]:
                segments.append((shard, done[shard], end, name))
            left -= end - done[shard]
    return segments


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def draw(before: list[Segment], after: list[Segment], saved: list[int]) -> str:
    """A line for each shard: who reads which rows, before and after the checkpoint."""
    scale = (WIDTH - LEFT - 120) / max(ROWS)
    height = TOP + len(ROWS) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(LEFT, 18, "before: 2 ranks with 2 workers each", BLUE, "start"),
        caption(LEFT, 40, "after the resume: 3 ranks without workers", GREEN, "start"),
        caption(WIDTH - 2, 40, "saved place", INK, "end"),
    ]
    for shard, rows in enumerate(saved):
        y = TOP + shard * ROW
        parts.append(caption(2, y + 17, f"shard {shard}", INK, "start"))
        parts.append(caption(WIDTH - 2, y + 17, f"{rows} of {ROWS[shard]} rows", INK, "end"))
    for segments, colour in ((before, BLUE), (after, GREEN)):
        for shard, first, end, name in segments:
            x, width = LEFT + first * scale, (end - first) * scale
            parts.append(
                box(round(x, 1), TOP + shard * ROW, round(width, 1), ROW - 6, name, colour)
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    before = read([0] * len(ROWS), BEFORE, ROWS_PER_READER)
    saved = [0] * len(ROWS)
    for shard, _, end, _ in before:
        saved[shard] = max(saved[shard], end)
    after = read(saved, AFTER)
    times = [[0] * rows for rows in ROWS]
    for shard, first, end, _ in before + after:
        for row in range(first, end):
            times[shard][row] += 1
    assert all(count == 1 for shard in times for count in shard)  # every row once
    changed = {s for s, *_ in after} & {s for s, *_ in before}
    print(f"rows of each shard that are done at the checkpoint: {saved}")
    print(f"shards that change their reader in the middle: {sorted(changed)}")
    assert changed and sum(saved) == ROWS_PER_READER * len(BEFORE)
    with open("stream_places.svg", "w", encoding="utf-8") as file:
        file.write(draw(before, after, saved))


if __name__ == "__main__":
    main()
