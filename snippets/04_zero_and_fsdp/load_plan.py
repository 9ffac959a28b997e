"""Two ranks load a checkpoint that four ranks wrote. The metadata shows where each row is.

The program writes a small matrix as four files and one metadata file. The metadata records
which rows are in which file. A rank that loads compares these rows with the rows that it needs,
and reads the overlaps. The number of ranks that wrote the files does not matter.

In the table, compare the rows that a rank needs with the rows that it reads from the disk. The
reader of torch.distributed.checkpoint reads a whole piece and then selects the rows, so it may
read more rows than it needs. The program draws load_plan.svg.
"""

import json
import tempfile
from array import array
from pathlib import Path
from typing import NamedTuple

ROWS, COLUMNS, WRITERS = 10, 4, 4
WIDTH, CELL, GAP, TOP = 760, 26, 14, 96
INK, MUTED = "#1f2937", "#52525b"
COLOURS = "#0b6e99", "#c2410c"  # one for each rank that loads


class Read(NamedTuple):
    """Rows of one file that a rank needs."""

    file: str
    first: int  # row of the whole matrix
    last: int  # one more than the number of the last row
    offset: int  # number of rows in the file before the first row


def cut(n: int) -> list[range]:
    """Return the rows of each of n ranks. As with torch.chunk, the last may have fewer rows."""
    size = -(-ROWS // n)
    return [range(min(r * size, ROWS), min((r + 1) * size, ROWS)) for r in range(n)]


def row(number: int) -> array:
    """A row of the matrix. Each element has a different value."""
    return array("i", [COLUMNS * number + column for column in range(COLUMNS)])


def save(folder: Path) -> None:
    """Every rank writes its rows to one file. The metadata is written last."""
    pieces = []
    for rank, rows in enumerate(cut(WRITERS)):
        name = f"__{rank}_0.distcp"
        (folder / name).write_bytes(b"".join(row(number).tobytes() for number in rows))
        pieces.append({"file": name, "first": rows.start, "last": rows.stop})
    metadata = {"shape": [ROWS, COLUMNS], "pieces": pieces}
    (folder / ".metadata").write_text(json.dumps(metadata))


# --8<-- [start:plan]
def plan(metadata: dict, wanted: range) -> list[Read]:
    """Return the rows that a rank needs from each piece of the checkpoint."""
    reads = []
    for piece in metadata["pieces"]:
        first = max(piece["first"], wanted.start)
        last = min(piece["last"], wanted.stop)
        if first < last:
            reads.append(Read(piece["file"], first, last, first - piece["first"]))
    return reads


def load(folder: Path, wanted: range) -> dict[int, array]:
    """Read the rows of one rank."""
    metadata, rows = json.loads((folder / ".metadata").read_text()), {}
    for read in plan(metadata, wanted):
        values = array("i", (folder / read.file).read_bytes())
        for number in range(read.first, read.last):
            start = (number - read.first + read.offset) * COLUMNS
            rows[number] = values[start : start + COLUMNS]
    return rows


# --8<-- [end:plan]


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def arrow(path: str, colour: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    end = f'marker-end="url(#end{colour[1:]})"'
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes} {end}/>'


def draw(metadata: dict, readers: list[range]) -> str:
    """The picture as SVG: files on the left, ranks on the right, one arrow for each row."""
    files, ranks = 104, 520  # left edges of the rows
    height = TOP + ROWS * CELL + (WRITERS - 1) * GAP + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for colour in (*COLOURS, MUTED):
        parts.append(
            f'<defs><marker id="end{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker></defs>'
        )
    parts.append(caption(files + 85, 20, "the checkpoint, written by 4 ranks"))
    parts.append(caption(ranks + 110, 20, "2 ranks load it"))
    parts.append(box(files, 34, 170, 36, ".metadata", MUTED))
    parts.append(caption(408, 46, "1. read which rows are in which file", MUTED))
    parts.append(caption(398, TOP + 8, "2. read these rows", MUTED))

    left, y = {}, TOP
    for rank, piece in enumerate(metadata["pieces"]):
        numbers = range(piece["first"], piece["last"])
        tall = CELL * len(numbers)
        parts.append(caption(2, y + tall / 2 + 5, f"by rank {rank}", INK, "start"))
        parts.append(box(files, y, 110, tall, piece["file"], MUTED))
        for number in numbers:
            left[number] = y
            y += CELL
        y += GAP
    y = TOP + (WRITERS - 1) * GAP / 2 - GAP / 2
    for rank, numbers in enumerate(readers):
        colour, tall = COLOURS[rank], CELL * len(numbers)
        parts.append(box(ranks + 66, y, 90, tall, f"rank {rank}", colour))
        parts.append(
            arrow(f"M{files + 172} 52 H{ranks + 186} V{y + tall / 2} h-26", MUTED, True)
        )
        for number in numbers:
            parts.append(box(files + 114, left[number], 56, CELL, f"row {number}", colour))
            parts.append(box(ranks, y, 62, CELL, f"row {number}", colour))
            start, end = left[number] + CELL / 2, y + CELL / 2
            parts.append(arrow(f"M{files + 172} {start} L{ranks - 2} {end}", colour))
            y += CELL
        y += GAP
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder)
        metadata = json.loads((folder / ".metadata").read_text())
        size = {piece["file"]: piece["last"] - piece["first"] for piece in metadata["pieces"]}
        print(
            f"{ROWS} rows, written by {WRITERS} ranks: {list(size.values())} rows in the files"
        )
        for n in (4, 2, 3, 1):
            needed, from_disk, whole = [], [], {}
            for wanted in cut(n):
                rows = load(folder, wanted)
                assert list(rows) == list(wanted)  # neither fewer nor more rows
                whole |= rows
                needed.append(len(rows))
                from_disk.append(sum(size[read.file] for read in plan(metadata, wanted)))
            assert whole == {number: row(number) for number in range(ROWS)}
            ranks = "1 rank " if n == 1 else f"{n} ranks"
            print(f"{ranks} need {needed} rows, and DCP reads {from_disk} rows from the disk")
            assert n not in (1, WRITERS) or needed == from_disk
    with open("load_plan.svg", "w", encoding="utf-8") as file:
        file.write(draw(metadata, cut(2)))
    print("drew load_plan.svg: 4 files, 2 ranks that load")


if __name__ == "__main__":
    main()
