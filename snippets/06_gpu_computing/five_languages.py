"""Who decides what in seven languages for kernels, and what their compilers made of softmax.

The picture shows for each decision whether the programmer states it. The table compares the
machine code for rows of 4096 columns on an H200, which it reads from the transcripts of the
other programs. It assumes that each kernel runs at the speed of the copy in softmax.cuda.txt.
Look at the last column: no kernel needs all the instructions that an H200 can issue, so the
memory can be the limit in every language. Look also at the second column: a block requests its
whole row at the beginning, so few blocks mean few bytes on their way.
"""

import re
from pathlib import Path

# --8<-- [start:decisions]
LANGUAGES = "CUDA C++", "CuTe DSL", "Gluon", "TileLang", "Triton", "cuTile", "Helion"
YOU, MAY, COMPILER, SEARCH = "you", "you may", "compiler", "search"
DECISIONS = {
    "which rows a block computes": (YOU, YOU, YOU, YOU, YOU, YOU, SEARCH),
    "number of threads in a block": (YOU, YOU, YOU, MAY, MAY, MAY, SEARCH),
    "which thread has which element": (YOU, YOU, YOU, COMPILER, COMPILER, COMPILER, COMPILER),
    "bytes of one load": (YOU, YOU, MAY, COMPILER, COMPILER, COMPILER, COMPILER),
    "value beyond the end of a row": (YOU, YOU, YOU, YOU, YOU, YOU, COMPILER),
    "shared memory and barriers": (YOU, YOU, COMPILER, COMPILER, COMPILER, COMPILER, COMPILER),
    "asynchronous copies, TMA": (YOU, YOU, YOU, MAY, MAY, MAY, SEARCH),
    "search for the best sizes": (YOU, MAY, MAY, MAY, MAY, MAY, SEARCH),
}
# --8<-- [end:decisions]
COLOURS = {YOU: "#c2410c", MAY: "#7c3aed", COMPILER: "#15803d", SEARCH: "#0b6e99"}
INK = "#1f2937"
COLUMNS = 4096  # of a row
SMS, LANES, CLOCK = 132, 128, 1.98e9  # of an H200: instructions of a thread per SM and clock


def draw() -> str:
    """A table of coloured cells: a row for each decision, a column for each language."""
    left, cell, height = 246, 86, 34
    width, bottom = left + cell * len(LANGUAGES), 44 + height * len(DECISIONS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 12}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for column, name in enumerate(LANGUAGES):
        x = left + cell * (column + 0.5)
        parts.append(
            f'<text x="{x}" y="30" fill="{INK}" text-anchor="middle" '
            f'font-weight="bold">{name}</text>'
        )
    for row, (decision, who) in enumerate(DECISIONS.items()):
        y = 44 + height * row
        parts.append(f'<text x="4" y="{y + 22}" fill="{INK}">{decision}</text>')
        for column, decides in enumerate(who):
            x, colour = left + cell * column, COLOURS[decides]
            parts.append(
                f'<rect x="{x + 2}" y="{y + 2}" width="{cell - 4}" height="{height - 4}" '
                f'rx="4" fill="{colour}" fill-opacity="{0.2 if decides == YOU else 0.08}" '
                f'stroke="{colour}"/><text x="{x + cell / 2}" y="{y + 22}" fill="{colour}" '
                f'text-anchor="middle">{decides}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


TRANSCRIPTS = (
    "softmax_cuda.cpu.txt",
    "softmax_cute.cpu.txt",
    "softmax_gluon.cpu.txt",
    "softmax_tilelang.cpu.txt",
    "softmax_triton.cpu.txt",
    "softmax_cutile.cpu.txt",
    "softmax_helion.cpu.txt",
)


# --8<-- [start:read]
def kernels() -> dict[str, dict[str, str]]:
    """Read the lines of the table for rows of 4096 columns from the transcripts."""
    found = {}
    for name in TRANSCRIPTS:
        text = Path(name).read_text("utf-8")
        for kernel, row in re.findall(rf"^(\S.*), {COLUMNS}  +(\d.*)$", text, re.M):
            cells = re.split(r"\s{2,}", row.replace("≈", ""))
            keys = (
                "threads",
                "registers",
                "shared",
                "blocks",
                "loads",
                "stores",
                "exact",
                "code",
            )
            found[kernel] = dict(zip(keys, cells, strict=True))
    return found


# --8<-- [end:read]
def main() -> None:
    Path("five_languages.svg").write_text(draw(), "utf-8")
    counts = [[who[i] for who in DECISIONS.values()].count(YOU) for i in range(len(LANGUAGES))]
    assert counts == sorted(counts, reverse=True)  # the columns are ordered by this number
    print("you state:", ", ".join(map("{} {}".format, LANGUAGES, counts)))

    rate = int(re.search(r"a copy moves ≈(\d+) GB/s", Path("softmax.cuda.txt").read_text())[1])
    elements = rate * 1e9 / 8  # per second: each is read and written, 4 bytes each time
    issued = SMS * LANES * CLOCK  # instructions of a thread per second
    print(f"\nat {rate} GB/s, {issued / elements:.0f} instructions per element can be issued")
    print("             KiB requested  exact   instructions  of those that")
    print("kernel           in an SM    x / y   per element   can be issued")
    found = kernels()
    for kernel, row in found.items():
        requested = int(row["blocks"]) * COLUMNS * 4 / 1024
        used = int(row["code"]) * elements / issued
        elements_of_a_thread = int(row["threads"].split(" x ")[1])
        assert row["loads"] == f"{elements_of_a_thread // 4} x 16 B" and used < 0.7
        print(
            f"{kernel:12} {requested:10.0f} {row['exact']:>11} {row['code']:>10} {used:16.0%}"
        )
    assert len(found) == len(LANGUAGES) + 1  # cuTile has two lines
    code = {kernel: int(row["code"]) for kernel, row in found.items()}
    exact = {kernel for kernel, row in found.items() if row["exact"] == "yes"}
    assert min(code[kernel] for kernel in exact) > max(
        code[kernel] for kernel in code if kernel not in exact
    )  # the exact quotient costs more than every other difference between the languages


if __name__ == "__main__":
    main()
