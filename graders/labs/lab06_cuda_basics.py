"""The steps of lab 06: what each kernel must do, how that is found, and the hint for a symptom.

Kernels in CUDA C++ are compiled and run by the finished lab's `Kernels`, through the emulator
that lies beside it; of the learner's file only the sources are taken. What the emulator says of
a fault, which wrong result came out, or what memory had to do names the hint.
"""

import os
import re
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch

from graders.tools import Lab, Wrong, ask, same

HINTS = {
    "compile": "This is the compiler's first complaint; those after it often follow from "
    "it. A missing semicolon shows in the line below.",
    "signature": "Keep the kernel's name and its parameters: the checker launches it.",
    "kernel_endless": "A loop in the kernel never ends. Look at what changes its variable, "
    "and whether the condition can become false.",
    "guard": "The grid has more threads than there are elements: those from n on must do "
    "nothing. The last valid index is n - 1.",
    "block_offset": "Every block has a thread 0. Count through the whole grid: blockIdx.x "
    "* blockDim.x + threadIdx.x.",
    "blocks_down": "n / threads rounded down leaves the last elements to nobody: round up.",
    "blocks_more": "If n is a multiple of threads, there is nothing to round up: one block "
    "is launched in vain. Add threads - 1 before you divide, not 1 behind it.",
    "step_of_loop": "Two threads did the same element. The loop's step is the number of "
    "all threads in the grid, gridDim.x * blockDim.x.",
    "no_loop": "Elements beyond the first gridDim.x * blockDim.x were left: a thread has "
    "to go on, in a loop up to n.",
    "own_pieces": "The sums are right, but the lanes of a warp read far from each other. "
    "Let neighbouring threads take neighbouring elements, and step by all threads.",
    "sectors_few": "From a stride of 8 floats on, each lane has a sector of its own, and "
    "there are 32 lanes: it cannot be more.",
    "sectors_bytes": "A float has 4 bytes: lane l reads the byte 4 * l * stride.",
    "sectors_between": "A sector that lies between two lanes' addresses is not fetched: "
    "count those that are touched.",
    "zero_fill": "A place in shared memory is read that nobody has written. Threads "
    "without an element put a 0 there, and no thread leaves early.",
    "tree_barrier": "Two threads touch the same place of part, and no barrier stands "
    "between. There is one after the numbers are put there, and one after every round.",
    "divergent_barrier": "Some threads wait at a barrier to which others do not come. Move "
    "__syncthreads() out of the `if`: all threads of the block must reach the same one.",
    "one_writes": "Several threads write the sum of their block, most of them the wrong "
    "one. Only thread 0 writes.",
    "sum_place": "Each block has a place of its own in sums: blockIdx.x.",
    "rounds": "The sum lacks numbers. half runs from blockDim.x / 2 down to 1, 1 included.",
    "lanes_missing": "A shuffle waits for lanes that its mask names and that do not come. "
    "All 32 lanes call it, those without an element with a 0.",
    "shuffle_rounds": "The warp's sum lacks lanes. The distances are 16, 8, 4, 2, 1.",
    "warps_barrier": "part is read before all warps have put their number there: a barrier "
    "belongs between.",
    "warps_unwritten": "The block may have fewer than 32 warps, and what no warp has "
    "written is undefined: lanes from blockDim.x / 32 on take a 0.",
    "one_warp": "This is the sum of one warp. The other warps' numbers come through part, "
    "and the first warp adds them.",
    "still_shared": "The sums are right, but most of the work still goes through shared "
    "memory. It takes one write for each warp, and one read by the first.",
    "four_rows": "A block has 8 rows of threads for 32 rows of a tile: each thread moves "
    "four elements, 8 rows apart.",
    "tile_barrier": "A thread reads from the tile what another has put there: between "
    "reading x and writing y stands a barrier.",
    "edge": "At the edges of a matrix that is no multiple of 32 something is left out or "
    "too much. Reads are guarded by rows and columns of x; y has them exchanged.",
    "block_not_swapped": "The tile itself is turned, but it lands where x had it. y's tile "
    "begins at row 32 * blockIdx.x and column 32 * blockIdx.y.",
    "uncoalesced": "The result is right, but neighbouring lanes touch numbers that lie a "
    "row apart. threadIdx.x must run along a row both of x and of y; only the tile is read "
    "by column.",
    "banks": "The result is right, but a column of the tile lies in one bank: give the "
    "tile's rows one element more.",
    "not_atomic": "Two threads read the same old count, and one of the increments is lost: "
    "use atomicAdd.",
    "not_zeroed": "Shared memory begins with whatever was there. Set all bins to 0 first; "
    "there may be more bins than threads, so in a loop.",
    "histogram_barrier": "One barrier belongs between zeroing and counting, another "
    "between counting and adding.",
    "bins_left": "There may be more bins than threads in a block: add them in a loop, too.",
    "overwritten": "Every block adds its counts to those of the others, and to what was "
    "there: atomicAdd on counts, not an assignment.",
    "global_atomics": "The counts are right, but each element costs an atomic in global "
    "memory. Count in shared memory, and add each bin once for each block.",
    "power_of_two": "tl.arange takes a power of two: "
    "BLOCK=triton.next_power_of_2(columns), and a mask for what is beyond the row.",
    "load_mask": "The program reads beyond its row, where other numbers lie: mask the load.",
    "mask_other": "What the mask cuts off must change neither maximum nor sum: "
    'other=-float("inf"), for exp(-inf) = 0.',
    "no_maximum": "exp overflows. Subtract the row's maximum first; the quotient stays the "
    "same.",
    "not_divided": "A row's sum is not 1: divide by the sum of the exponentials.",
    "row_stride": "The first row is right, the others are not: a row begins stride "
    "elements after the one before, and x and y have a stride each.",
    "store_mask": "The program wrote beyond its row, over numbers of somebody else: mask "
    "the store.",
    "programs": "Some rows were not written: launch one program for each row.",
    "tile_loads": "Part of a tile was never written. All 256 threads load, each one "
    "element of both tiles, a zero where it is outside of the matrix; none leaves early.",
    "outside": "A load is outside of its matrix. a has m rows and k columns, b has k rows "
    "and n columns: both indices need a guard.",
    "product_barriers": "A tile is read while it is being written. One barrier after the "
    "loads, and one after the multiply-adds, before the next loads.",
    "last_tile": "k is no multiple of 16: the last step along k is a part of a tile, and "
    "belongs to the sum.",
    "not_tiled": "The product is right, but every thread loads its own rows and columns. "
    "One element of each tile for each thread and step, the rest from shared memory.",
    "other": "The numbers fit no common mistake. Take the smallest size that fails, and do "
    "by hand what thread 0 of block 0 does.",
}

LAB = Lab(HINTS)
NAN = float("nan")

# what the emulator says, by kind
BEYOND = r"behind \d+ bytes of|no memory|out of bounds|of the host|pointer index"
UNWRITTEN = r"nobody has written"
RACE = r"no barrier orders"
DIVERGED = r"waits at"


class Case(NamedTuple):
    """One launch: what it must give, and by hint what known mistakes give."""

    what: str
    grid: Any
    block: Any
    arguments: tuple
    output: torch.Tensor  # one of the arguments
    right: torch.Tensor
    mistakes: dict[str, torch.Tensor | list[torch.Tensor]]


def filled(look: Callable[[Any], Any], at: Any) -> None:
    """Say so, with the line, if a kernel still has its blank."""
    try:
        look(at)
    except NotImplementedError as blank:
        raise NotImplementedError(f"{blank}, line {blank.line}") from None


def place(fault: BaseException) -> str:
    return f", line {fault.line}" if hasattr(fault, "line") else ""


def launch(
    theirs: ModuleType, name: str, cases: Sequence[Case], faults: dict[str, str],
    unwritten: str = "other", other: str = "other", barriers: int = 0, early: str = "other",
) -> Generator[str, None, Any]:  # fmt: skip
    """Run a kernel up to the first case that goes wrong; return the last one's counts.

    `faults`: what the case, the emulator's words and the line of the source that they name
    match, and the hint. `unwritten`, `other`: the hints if numbers are missing or of no known
    mistake. `barriers`: how many there must be; `early`: the hint if there are fewer and memory
    is read before it is written.
    """
    lab, function = LAB.finished, getattr(theirs, name)
    filled(lab.source_of, function)
    tempfile.tempdir = os.getcwd()  # the runner's, which it empties
    try:
        kernels = lab.Kernels(function)
    except lab.Fault as fault:
        raise Wrong(f"it does not compile: {fault}{place(fault)}", "compile") from None
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", kernels.source, flags=re.S)
    own = {"t", "i", "row", "column", "lane", "warp", "threadIdx"}  # differ between threads
    for counter, start in re.findall(r"\bfor\s*\(\s*\w+\s+(\w+)\s*=([^;]*)", code):
        if not own & {*re.findall(r"\w+", start)}:
            own.discard(counter)  # all threads count alike
    condition = rf"\bif\s*(\([^{{}};]*\b(?:{'|'.join(sorted(own))})\b[^{{}};]*\))"
    inside = re.search(condition + r"\s*(?:\{[^{}]*)?__syncthreads\(", code)
    general = {"there is no kernel": "signature", "did not end": "kernel_endless"}
    if inside:
        general[UNWRITTEN] = "divergent_barrier"
    elif code.count("__syncthreads()") < barriers:
        general[UNWRITTEN] = early
    for case in cases:
        try:
            counts = kernels.run(name, case.grid, case.block, *case.arguments)
        except lab.Fault as fault:
            what = f"{case.what}: {fault}{place(fault)}"
            lines = Path(function.__code__.co_filename).read_text("utf-8").splitlines()
            line = dict(enumerate(lines, 1)).get(getattr(fault, "line", 0), "")
            known = f"{what} code: {line.partition('//')[0]}"
            patterns = [*general.items(), *faults.items(), ("", "other")]
            hint = next(hint for pattern, hint in patterns if re.search(pattern, known))
            raise Wrong(what, hint) from None
        if wrong := int((case.output != case.right).sum()):
            what = f"{case.what}: {wrong} of the numbers are wrong"
            raise Wrong(what, mistake(case, unwritten, other))
    if inside:
        what = f"a barrier stands inside of if {' '.join(inside[1].split())}"
        raise Wrong(what, "divergent_barrier")
    yield "; ".join(case.what for case in cases)
    return counts


def mistake(case: Case, unwritten: str, other: str) -> str:
    """The hint whose mistake gives these numbers."""
    found = case.output.nan_to_num(7e7)
    for hint, known in case.mistakes.items():
        known = known if isinstance(known, list) else [known]
        if any(torch.equal(found, each.nan_to_num(7e7)) for each in known):
            return hint
    return unwritten if case.output.isnan().any() else other


# --- step 1 -------------------------------------------------------------------------------


def addition(n: int, grid: int, block: int, hint: str, reached: int) -> Case:
    """The sum of two vectors; the hint is for when only so many elements are reached."""
    lab = LAB.finished
    a, b, c = lab.numbers(n), lab.numbers(n).flip(0), lab.nothing(n)
    few, short = (torch.where(torch.arange(n) < end, a + b, NAN) for end in (reached, n - 1))
    what = f"n = {n} in {grid} blocks of {block}"
    return Case(what, grid, block, (a, b, c, n), c, a + b, {hint: few, "guard": short})


@LAB.alone(
    1, "which thread does which element",
    "every element is done once, by a thread that exists, in as many blocks as needed",
    "vector_add blocks_for",
)  # fmt: skip
def index(theirs, ours, lesson):
    filled(ours.source_of, theirs.vector_add)
    for n, threads in ((1, 128), (128, 128), (129, 128), (1000, 32)):
        found = theirs.blocks_for(n, threads)
        what = f"blocks_for({n}, {threads}) is {found!r}"
        ask(isinstance(found, int), f"{what}, not a whole number", "blocks_down")
        ask(found * threads >= n, what, "blocks_down")
        ask(found == ours.blocks_for(n, threads), what, "blocks_more")
    yield "the numbers of blocks"
    sizes = ((40, 2, 32), (1, 1, 128), (1000, 8, 128))
    cases = [addition(*size, "block_offset", reached=size[2]) for size in sizes]
    faults = {BEYOND: "guard", RACE: "block_offset"}
    yield from launch(theirs, "vector_add", cases, faults, unwritten="block_offset")


# --- step 2 -------------------------------------------------------------------------------


def sectors_mistake(found: dict[int, Any]) -> str:
    """The hint for sectors, by stride, that are not right."""
    if found[1] != 4:
        return "sectors_bytes"
    far = {stride: number for stride, number in found.items() if stride > 8}
    if all(number == 31 * 4 * stride // 32 + 1 for stride, number in far.items()):
        return "sectors_between"
    return "sectors_few" if any(number > 32 for number in far.values()) else "sectors_between"


@LAB.alone(
    2, "a grid that strides",
    "any grid does all elements, neighbours by neighbours, and sectors are foretold",
    "add_in_strides sectors",
)  # fmt: skip
def strides(theirs, ours, lesson):
    filled(ours.source_of, theirs.add_in_strides)
    found = {stride: theirs.sectors(stride) for stride in (1, 2, 3, 5, 8, 32, 100)}
    for stride, number in found.items():
        if number != (true := ours.sectors(stride)):
            what = f"sectors({stride}) is {number}, {true} are touched"
            raise Wrong(what, sectors_mistake(found))
    yield "the sectors of every stride"
    sizes = ((1000, 3, 64), (1, 2, 32), (512, 2, 64))
    cases = [addition(*size, "no_loop", reached=size[1] * size[2]) for size in sizes]
    faults = {BEYOND: "guard", RACE: "step_of_loop"}
    counts = yield from launch(theirs, "add_in_strides", cases, faults, unwritten="no_loop")
    each = counts.load_sectors / counts.load_requests
    ask(each <= 4, f"a load of a warp touches {each:g} sectors, 4 would do", "own_pieces")


# --- steps 3 and 4 ------------------------------------------------------------------------


def sums_cases(hint: str) -> list[Case]:
    """Sums of blocks; the hint is for when only the first warp's numbers are in them."""
    lab, cases = LAB.finished, []
    for n, block in ((256, 64), (1, 64), (700, 256)):
        grid = lab.blocks_for(n, block)
        x, sums = lab.numbers(n), lab.nothing(grid)
        full = torch.nn.functional.pad(x, (0, grid * block - n)).view(grid, block)
        what = f"{n} numbers in {grid} block{'s' * (grid > 1)} of {block}"
        first = {hint: full[:, :32].sum(1)}
        cases.append(Case(what, grid, block, (x, sums, n), sums, full.sum(1), first))
    return cases


@LAB.alone(
    3, "shared memory and barriers",
    "the sums of all blocks are right, in whatever order the threads run", "block_sum",
)  # fmt: skip
def tree(theirs, ours, lesson):
    faults = {
        r"writes device memory that block": "sum_place",
        r"writes device memory that .*" + RACE: "one_writes",
        r"bytes of device memory": "guard",
        RACE: "tree_barrier",
        DIVERGED: "divergent_barrier",
        BEYOND: "rounds",
        UNWRITTEN: "zero_fill",
    }
    hints = {"unwritten": "sum_place", "other": "rounds", "early": "tree_barrier"}
    yield from launch(theirs, "block_sum", sums_cases("rounds"), faults, barriers=2, **hints)


@LAB.alone(
    4, "warp shuffles", "the same sums, with one number for each warp in shared memory",
    "warp_sum",
)  # fmt: skip
def shuffles(theirs, ours, lesson):
    faults = {
        r"writes device memory that .*" + RACE: "one_writes",
        r"bytes of device memory": "guard",
        RACE: "warps_barrier",
        r"warp operation|own mask": "lanes_missing",
        DIVERGED: "divergent_barrier",
        UNWRITTEN: "warps_unwritten",
    }
    hints = {"other": "shuffle_rounds", "early": "warps_barrier"}
    cases = sums_cases("one_warp")
    counts = yield from launch(theirs, "warp_sum", cases, faults, barriers=1, **hints)
    # twice as many are still of another kind
    what = f"{counts.shared_requests} requests of shared memory in 3 blocks of 8 warps"
    ask(counts.shared_requests <= 3 * 18, f"{what}: 3 * (8 + 1) would do", "still_shared")


# --- step 5 -------------------------------------------------------------------------------


@LAB.alone(
    5, "a transpose, and the banks",
    "every shape is transposed, 4 sectors and 1 pass a request", "transpose",
)  # fmt: skip
def transposed(theirs, ours, lesson):
    cases = []
    for rows, columns in ((32, 32), (64, 64), (45, 70), (64, 96)):
        x, y = ours.numbers(rows, columns), ours.nothing(columns, rows)
        mistakes = {}
        if rows % 32 == columns % 32 == 0:
            tiles = x.view(rows // 32, 32, columns // 32, 32).transpose(1, 3)
            stays = tiles.reshape(columns, rows)
            few = torch.where(torch.arange(rows) % 32 < 8, x.T, NAN)
            more = torch.where((torch.arange(columns) % 32 < 8)[:, None], x.T, NAN)
            mistakes = {"block_not_swapped": stays, "four_rows": [few, more]}
        grid = (ours.blocks_for(columns, 32), ours.blocks_for(rows, 32))
        launched = (f"{rows} × {columns}", grid, (32, 8), (x, y, rows, columns))
        cases.append(Case(*launched, y, x.T.contiguous(), mistakes))
    faults = {
        r"shared memory that .*" + RACE: "tile_barrier",
        r"writes device memory that .*" + RACE: "block_not_swapped",
        DIVERGED: "divergent_barrier",
        # of 32 rows of a tile, 8 were filled: the rest of it is read and was never written
        r"^32 × 32: .*" + UNWRITTEN: "four_rows",
        UNWRITTEN: "edge",
        BEYOND: "edge",
    }
    hints = {"unwritten": "edge", "early": "tile_barrier"}
    counts = yield from launch(theirs, "transpose", cases, faults, barriers=1, **hints)
    load = counts.load_sectors / counts.load_requests
    store = counts.store_sectors / counts.store_requests
    what = f"a warp's load touches {load:g} sectors and its store {store:g}, 4 would do"
    ask(max(load, store) <= 4, what, "uncoalesced")
    passes = counts.shared_passes / max(counts.shared_requests, 1)
    what = f"an access of a warp to the tile takes {passes:g} passes on average, 1 would do"
    ask(passes <= 1, what, "banks")


# --- step 6 -------------------------------------------------------------------------------


@LAB.alone(
    6, "atomics", "nothing is lost in the histogram, and the blocks meet once for each bin",
    "histogram",
)  # fmt: skip
def atomics(theirs, ours, lesson):
    cases = []
    for n, bins, grid, block in ((200, 16, 1, 64), (777, 9, 2, 64), (1500, 100, 3, 64)):
        x = ours.numbers(n).int().remainder(bins)
        before = torch.arange(bins, dtype=torch.int32)  # counts go on from there
        right = before + torch.bincount(x, minlength=bins).int()
        left = torch.where(torch.arange(bins) < block, right, before)
        mistakes = {"overwritten": right - before, "bins_left": left}
        what = f"{n} numbers, {bins} bins, {grid} block{'s' * (grid > 1)} of {block}"
        counts = before.clone()
        cases.append(Case(what, grid, block, (x, counts, n, bins), counts, right, mistakes))
    increment = r".* code: .*(\]\s*(\+\+|\+=)|\+\+\s*\w+\[|\]\s*=.*\]\s*\+)"
    faults = {
        r"(shared|device) memory that .*" + RACE + increment: "not_atomic",
        r"device memory that .*" + RACE: "overwritten",
        RACE: "histogram_barrier",
        UNWRITTEN: "not_zeroed",
        DIVERGED: "divergent_barrier",
        BEYOND: "guard",
    }
    early = "histogram_barrier"
    counts = yield from launch(theirs, "histogram", cases, faults, barriers=2, early=early)
    number = counts.global_atomics
    what = f"{number} atomics in global memory, 3 blocks × 100 bins would do"
    ask(number <= 300, what, "global_atomics")


# --- step 7 -------------------------------------------------------------------------------


@LAB.alone(
    7, "softmax in Triton",
    "rows of any length and stride have torch's softmax, and nothing else is written",
    "softmax_kernel softmax", crashes={"power of 2": "power_of_two"},
)  # fmt: skip
def softmax(theirs, ours, lesson):
    filled(ours.no_blank, theirs.softmax_kernel)
    for rows, columns in ((1, 32), (3, 33), (4, 100)):
        # both lie within larger memory, so that nothing else is hit
        around_x = torch.full((rows + 4, 192), 300.0)
        around_y = torch.full((rows + 4, 160), 7.0)
        x, y = around_x[1 : rows + 1, :columns], around_y[1 : rows + 1, :columns]
        # high and low rows by turns: exp overflows, or a 0 beyond the row would be the maximum
        x.copy_(3 * ours.numbers(rows, columns) + 200 * (-1) ** torch.arange(rows)[:, None])
        y.fill_(NAN)
        theirs.softmax(x, y)
        found, right = y.clone(), x.softmax(1)
        y.fill_(7.0)
        outside = int((around_y != 7.0).sum())

        power = 1 << (columns - 1).bit_length()
        wide = torch.nn.functional.pad(x, (0, power - columns))
        known = {
            "right": right,
            "mask_other": wide.softmax(1)[:, :columns],
            "load_mask": around_x[1 : rows + 1, :power].softmax(1)[:, :columns],
            "not_divided": (x - x.amax(1, keepdim=True)).exp(),
        }
        fits = (hint for hint in known if same(found, known[hint], 1e-4, 1e-30))
        hint = next(fits, "other")
        if hint == "other" and rows > 1 and same(found[0], right[0], 1e-4, 1e-30):
            skipped = found.isnan().all(1).any() and not outside
            hint = "programs" if skipped else "row_stride"
        elif hint == "other" and found.isnan().any():
            hint = "no_maximum"
        what = f"{rows} × {columns}: this is not the softmax of the rows"
        ask(hint == "right", what, hint)
        what = f"{rows} × {columns}: {outside} numbers outside of y were overwritten"
        ask(not outside, what, "store_mask")
    yield "rows of 32, 33 and 100"


# --- step 8 -------------------------------------------------------------------------------


@LAB.alone(
    8, "a tiled matrix product",
    "products of any shape are right, and each number loaded is used 16 times", "matmul",
)  # fmt: skip
def product(theirs, ours, lesson):
    cases = []
    for m, n, k in ((16, 16, 16), (16, 32, 32), (17, 20, 18), (32, 32, 32)):
        a, b, c = ours.numbers(m, k), ours.numbers(k, n), ours.nothing(m, n)
        parts = [a[:, :end] @ b[:end] for end in (k // 16 * 16, 16)]
        grid = (ours.blocks_for(n, 16), ours.blocks_for(m, 16))
        launched = (f"{m} × {k} times {k} × {n}", grid, (16, 16), (a, b, c, m, n, k))
        cases.append(Case(*launched, c, a @ b, {"last_tile": parts}))
    faults = {
        r"shared memory that .*" + RACE: "product_barriers",
        DIVERGED: "divergent_barrier",
        UNWRITTEN: "tile_loads",
        BEYOND: "outside",
    }
    early = "product_barriers"
    counts = yield from launch(theirs, "matmul", cases, faults, barriers=2, early=early)
    what = f"{counts.loads} loads for 32 × 32 times 32 × 32, 2MNK/16 = 4096 would do"
    ask(counts.loads <= 4096, what, "not_tiled")
