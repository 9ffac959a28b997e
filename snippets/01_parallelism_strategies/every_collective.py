"""Draws the chunks of each rank after every collective, from real results of the library.

Each rank starts with four chunks. One element of a chunk is 1, and the position of this
element is the number of the source rank and of the chunk. A sum of chunks therefore lists its
summands. The last element of a chunk is a signed amount, so that a sum differs from a maximum.
The program calls each operation on four ranks, compares the result with the definition of the
operation, and draws the picture. A column is a rank. A colour is the rank from which the data
came. Four stripes are the sum over all four ranks.
"""

import os
import re
import sys
from unittest import mock

import torch
import torch.distributed as dist

N = 4
ROOT = 0
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK, MUTED = "#1f2937", "#52525b"

Cell = list[
    tuple[int, int]
]  # the (source rank, source chunk) pairs of which a chunk is the sum
State = list[list[Cell]]  # [rank][slot]


def amount(rank: int, chunk: int) -> int:
    """The last element of this chunk: different in each chunk, and negative in half of them."""
    return (-1) ** (rank + chunk) * (10 * rank + chunk + 1)


def marked_chunks(rank: int) -> torch.Tensor:
    """The chunks of this rank, [slot, N * N marks and an amount]."""
    x = torch.zeros(N, N * N + 1)
    for chunk in range(N):
        x[chunk, rank * N + chunk] = 1
        x[chunk, -1] = amount(rank, chunk)
    return x


def run(name: str, x: torch.Tensor) -> torch.Tensor:
    """Call one operation. Return the chunks of this rank afterwards. Zeros mean no chunk."""
    rank, out = dist.get_rank(), torch.zeros_like(x)
    at_root = rank == ROOT
    if name == "send / recv":
        if rank == 0:
            dist.send(x, dst=2)
        elif rank == 2:
            dist.recv(x, src=0)
        return x
    if name == "broadcast":
        dist.broadcast(x, src=ROOT)
        return x
    if name == "scatter":
        dist.scatter(out[rank], list(x) if at_root else None, src=ROOT)
    elif name == "gather":
        dist.gather(x[rank], list(out) if at_root else None, dst=ROOT)
    elif name == "reduce":
        dist.reduce(x, dst=ROOT)
        return x if at_root else out
    elif name == "all-gather":
        dist.all_gather(list(out), x[rank].clone())
    elif name == "reduce-scatter":
        dist.reduce_scatter(out[rank], list(x))
    elif name == "all-reduce":
        dist.all_reduce(x)
        return x
    elif name == "all-to-all":
        dist.all_to_all_single(out, x)
    return out


def shown_before(name: str, rank: int) -> torch.Tensor:
    """The chunks of this rank that the operation uses, and zeros for all other chunks."""
    x = marked_chunks(rank)
    if rank != ROOT and name in ("broadcast", "scatter", "send / recv"):
        return torch.zeros_like(x)
    if name in ("gather", "all-gather"):
        keep = torch.zeros(N, 1)
        keep[rank] = 1
        return x * keep
    return x


def expected(name: str) -> State:
    """The chunks that each rank must have, from the definition of the operation."""
    mine = [[[(r, c)] for c in range(N)] for r in range(N)]
    sums = [[(r, c) for r in range(N)] for c in range(N)]
    gathered = [[(c, c)] for c in range(N)]
    return {
        "send / recv": [mine[0] if r in (0, 2) else mine[r] for r in range(N)],
        "broadcast": [mine[ROOT]] * N,
        "scatter": [[mine[ROOT][c] if c == r else [] for c in range(N)] for r in range(N)],
        "gather": [gathered if r == ROOT else [[]] * N for r in range(N)],
        "reduce": [sums if r == ROOT else [[]] * N for r in range(N)],
        "all-gather": [gathered] * N,
        "reduce-scatter": [[sums[c] if c == r else [] for c in range(N)] for r in range(N)],
        "all-reduce": [sums] * N,
        "all-to-all": [[[(c, r)] for c in range(N)] for r in range(N)],
    }[name]


def decode(chunk: torch.Tensor) -> Cell:
    """The summands of a chunk. Fails if a summand was added twice, or the sum is wrong."""
    marks = chunk[:-1]
    assert set(marks.tolist()) <= {0, 1}, "a chunk was added more than once"
    cell = [divmod(int(i), N) for i in marks.nonzero()]
    assert chunk[-1].item() == sum(amount(*source) for source in cell), "this is not a sum"
    return cell


def collect(x: torch.Tensor) -> State:
    """The decoded chunks of all ranks, on every rank."""
    tensors = [torch.empty_like(x) for _ in range(N)]
    dist.all_gather(tensors, x)
    return [[decode(chunk) for chunk in tensor] for tensor in tensors]


def text(x: float, y: float, words: str, colour: str, size: int, anchor: str = "middle") -> str:
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def grid(left: float, top: float, state: State, cell: float = 23, pitch: float = 25) -> str:
    """Draw four columns of four squares, with the number of the rank above each column."""
    parts = []
    for rank, slots in enumerate(state):
        x = left + rank * pitch
        parts.append(text(x + cell / 2, top - 5, str(rank), MUTED, 12))
        for slot, summands in enumerate(slots):
            y = top + slot * pitch
            for i, (source, _) in enumerate(summands):
                width = cell / len(summands)
                parts.append(
                    f'<rect x="{x + i * width:g}" y="{y:g}" width="{width:g}" '
                    f'height="{cell}" fill="{COLOURS[source]}"/>'
                )
            if summands:
                label = f"{'Σ' if len(summands) > 1 else ''}{summands[0][1]}"
                parts.append(text(x + cell / 2, y + 16, label, "#ffffff", 13))
            else:
                parts.append(
                    f'<rect x="{x:g}" y="{y:g}" width="{cell}" height="{cell}" fill="none" '
                    f'stroke="{MUTED}" stroke-opacity="0.45" stroke-dasharray="2 3"/>'
                )
    return "\n".join(parts)


def draw(panels: dict[str, tuple[State, State]]) -> str:
    width, across, panel_width, panel_height = 484, 2, 260, 154
    rows = -(-(len(panels) + 1) // across)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * panel_height}" '
        'font-family="system-ui, sans-serif">'
    ]
    for index, (name, (before, after)) in enumerate(panels.items()):
        left, top = index % across * panel_width, index // across * panel_height
        parts.append(text(left + 1, top + 16, name, INK, 16, "start"))
        parts.append(grid(left + 1, top + 42, before))
        parts.append(text(left + 112, top + 96, "→", MUTED, 18))
        parts.append(grid(left + 124, top + 42, after))
    left, top = len(panels) % across * panel_width, len(panels) // across * panel_height
    parts.append(text(left + 1, top + 16, "barrier", INK, 16, "start"))
    for line, words in enumerate(
        ("moves no data: no rank", "continues before all", "ranks have called it")
    ):
        parts.append(text(left + 1, top + 50 + 20 * line, words, MUTED, 14, "start"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) != N:
        sys.exit("start this program with: torchrun --nproc-per-node=4 every_collective.py")
    dist.init_process_group("gloo")  # the picture is the same on every backend
    rank = dist.get_rank()

    names = ["send / recv", "broadcast", "scatter", "gather", "reduce", "all-gather"]
    names += ["reduce-scatter", "all-reduce", "all-to-all"]
    functions = {"send / recv": "send", "all-to-all": "all_to_all_single"}
    panels = {}
    for name in names:
        before = collect(shown_before(name, rank))
        function = functions.get(name, name.replace("-", "_"))
        with mock.patch.object(dist, function, wraps=getattr(dist, function)) as call:
            result = run(name, marked_chunks(rank))
        assert call.call_count == (name != "send / recv" or rank == 0), name
        after = collect(result)
        assert after == expected(name), name
        if name == "send / recv":  # do not draw the chunks of ranks 1 and 3
            after = [slots if r in (0, 2) else [[]] * N for r, slots in enumerate(after)]
        shown = [{p for r in state for slot in r for p in slot} for state in (before, after)]
        assert shown[0] == shown[1], f"{name}: the picture loses or adds a chunk"
        panels[name] = (before, after)
    assert grid(0, 0, expected("broadcast")).count(COLOURS[ROOT]) == N * N  # colour of the root
    # After an all-to-all, all chunks of rank r have the number r, like the column.
    numbers = re.findall(r"(\d)</text>", grid(0, 0, expected("all-to-all")))
    assert numbers == [str(r) for r in range(N) for _ in range(N + 1)]

    if rank == 0:
        with open("every_collective.svg", "w", encoding="utf-8") as file:
            file.write(draw(panels))
        print(f"{len(panels)} operations on {N} ranks: every result equals its definition")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
