"""Draws block tables: three sequences in one pool, a shared prompt, and a copied block.

Sequences A and B are two answers to one prompt. A block stores four characters here, in place
of the keys and values of four tokens. The program reads each text back through its block table
and counts the users of each block. Plain Python writes block_tables.svg.
"""

BLOCK, BLOCKS = 4, 10
INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"


# --8<-- [start:pool]
class TextPool:
    """A pool of blocks with BLOCK characters each, and how many sequences use each block."""

    def __init__(self) -> None:
        self.blocks = [""] * BLOCKS
        self.users = [0] * BLOCKS
        self.free = [2, 9, 7, 3, 5, 8, 0, 6, 4, 1]  # in the order of earlier requests
        self.copied: list[tuple[int, int]] = []  # (original, copy)

    def allocate(self) -> int:
        block = self.free.pop()
        self.blocks[block], self.users[block] = "", 1
        return block

    def fork(self, table: list[int]) -> list[int]:
        """A second table with the same blocks. No block is copied."""
        for block in table:
            self.users[block] += 1
        return list(table)

    def write(self, table: list[int], text: str) -> None:
        """Append `text` to the sequence of `table`, one character at a time."""
        for character in text:
            if not table or len(self.blocks[table[-1]]) == BLOCK:
                table.append(self.allocate())
            elif self.users[table[-1]] > 1:  # copy on write
                original, table[-1] = table[-1], self.allocate()
                self.blocks[table[-1]] = self.blocks[original]
                self.users[original] -= 1
                self.copied.append((original, table[-1]))
            self.blocks[table[-1]] += character

    def read(self, table: list[int]) -> str:
        return "".join(self.blocks[block] for block in table)


# --8<-- [end:pool]


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


def draw_table(x: float, y: float, name: str, text: str, table: list[int], colour: str):
    """The block table of one sequence, with arrows to the blocks of the pool."""
    down = y < 150
    label = y - 10 if down else y + 44
    parts = [draw_text(x, label, f"{name}: “{text}”", colour)]
    for n, block in enumerate(table):
        left = x + 34 * n
        parts += [box(left, y, 30, 26, colour), draw_text(left + 10, y + 18, str(block))]
        shift = {"A": 16, "B": 40, "C": 28}[name]
        ends = (y + 26, 152) if down else (y, 222)
        parts.append(arrow(left + 15, ends[0], 27 + 67 * block + shift, ends[1], colour))
    return parts


def draw(pool: TextPool, texts: dict[str, str], tables: dict[str, list[int]]) -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 466" '
        'font-family="system-ui, sans-serif"><defs><marker id="head" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    ]
    for block, content in enumerate(pool.blocks):
        x, shared = 27 + 67 * block, pool.users[block] > 1
        colour = MUTED if not pool.users[block] else GREEN if shared else BLUE
        parts.append(box(x, 156, 60, 62, colour, dashed=not pool.users[block]))
        parts.append(draw_text(x + 5, 172, f"block {block}", MUTED, 12))
        for n in range(BLOCK if pool.users[block] else 0):
            character = content[n : n + 1].replace(" ", "␣")
            parts.append(box(x + 4 + 13 * n, 182, 13, 28, colour))
            parts.append(draw_text(x + 6.5 + 13 * n, 201, character, INK, 14))
    places = {"A": (27, 50, BLUE), "B": (420, 50, ORANGE), "C": (190, 272, MUTED)}
    for name, (x, y, colour) in places.items():
        parts += draw_table(x, y, name, texts[name], tables[name], colour)
    original, copy = pool.copied[0]
    both = tables["A"][0]
    marked = (both, copy, tables["C"][-1], pool.free[0])
    parts.append(badge(16, 50, 1))
    parts += [badge(75 + 67 * block, 226, number) for number, block in enumerate(marked, 2)]
    lines = [
        "The block table of sequence A: the numbers of its blocks, in order.",
        "A and B share blocks {} and {}, which their prompt fills.".format(*tables["B"]),
        f"Block {copy} is a copy of block {original}. B wrote into the copy only.",
        "Only the last block of a sequence can have empty places.",
        "A free block.",
    ]
    for n, line in enumerate(lines):
        parts += [badge(40, 352 + 24 * n, n + 1), draw_text(60, 357 + 24 * n, line)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    pool, tables = TextPool(), {"A": [], "C": []}
    prompt = "one, two, "
    pool.write(tables["A"], prompt)
    pool.write(tables["C"], "red or")
    tables["B"] = pool.fork(tables["A"])
    pool.write(tables["B"], "3, 4")
    pool.write(tables["A"], "three")
    texts = {"A": prompt + "three", "B": prompt + "3, 4", "C": "red or"}
    for name, text in texts.items():
        assert pool.read(tables[name]) == text, f"{name} reads another text"
        print(f"{name}: {text!r:18} blocks {tables[name]}")
    for block, users in enumerate(pool.users):
        assert users == sum(block in table for table in tables.values())
        assert (users == 0) == (block in pool.free)
    shared = [block for block, users in enumerate(pool.users) if users == 2]
    assert shared == sorted(tables["A"][: len(prompt) // BLOCK]), (
        "the full blocks of the prompt"
    )
    assert len(pool.copied) == 1, "the block that the prompt fills in part is copied once"
    separate = sum(-(-len(text) // BLOCK) for text in texts.values())
    print(f"{BLOCKS - len(pool.free)} blocks in use; {separate} without sharing")
    with open("block_tables.svg", "w", encoding="utf-8") as file:
        file.write(draw(pool, texts, tables))


if __name__ == "__main__":
    main()
