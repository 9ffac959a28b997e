"""The steps of lab 06: what each kernel must do, how that is found, and the hint for a symptom.

Kernels in CUDA C++ are compiled and run by the finished lab's `Kernels`, through the emulator
that lies beside it; of the learner's file only the sources are taken. What the emulator says of
a fault, which wrong result came out, or what memory had to do names the hint.
"""

import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch

from graders.runner import Group, Lesson, Step, Wrong

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

NAN = float("nan")


@functools.lru_cache
def finished() -> ModuleType:
    """The lab with its solutions."""
    path = Path(__file__).parent.parent / "lab06_cuda_basics.py"
    spec = importlib.util.spec_from_file_location("finished_lab06", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case(NamedTuple):
    """One launch: what it must give, and what known mistakes give."""

    what: str
    grid: Any
    block: Any
    arguments: tuple
    output: torch.Tensor  # one of the arguments
    right: torch.Tensor
    candidates: dict[str, torch.Tensor]


def blocks(n: int, size: int) -> int:
    return -(-n // size)


def verdict(found: torch.Tensor, right: torch.Tensor, **candidates: torch.Tensor) -> str:
    """ "right", the name of the mistake that gives these numbers, "unwritten" or "other"."""
    if torch.equal(found, right):
        return "right"
    for name, candidate in candidates.items():
        if torch.equal(found.nan_to_num(7e7), candidate.nan_to_num(7e7)):
            return name
    return "unwritten" if found.isnan().any() else "other"


def filled(look: Callable[[Any], Any], at: Any) -> None:
    """Say so, with the line, if a kernel still has its blank."""
    try:
        look(at)
    except NotImplementedError as blank:
        raise NotImplementedError(f"{blank}, line {blank.line}") from None


def compiled(lesson: Lesson, function: Callable[[], str]) -> Any:
    """The learner's kernels; None if there are none, which is then reported."""
    filled(finished().source_of, function)
    tempfile.tempdir = os.getcwd()  # the runner's, which it empties
    try:
        return finished().Kernels(function)
    except finished().Fault as fault:
        lesson.fact("compile", f"{fault}{place(fault)}")


def place(fault: BaseException) -> str:
    return f", line {fault.line}" if hasattr(fault, "line") else ""


def launch(
    lesson: Lesson, function: Callable[[], str], name: str, cases: Sequence[Case]
) -> None:
    """Run the cases, up to the first that goes wrong; report what came of each."""
    kernels = compiled(lesson, function)
    if kernels is None:
        return
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", kernels.source, flags=re.S)
    lesson.fact("barriers", code.count("__syncthreads()"))
    own = r"\bif\s*(\([^{};]*\b(?:t|i|row|column|lane|warp|threadIdx)\b[^{};]*\))"
    inside = re.search(own + r"\s*(?:\{[^{}]*)?__syncthreads\(", code)
    lesson.fact("barrier inside", inside and " ".join(inside[1].split()))
    facts = []
    for case in cases:
        fact: dict[str, Any] = {"what": case.what, "fault": None, "verdict": ""}
        facts.append(fact)
        try:
            counts = kernels.run(name, case.grid, case.block, *case.arguments)
        except finished().Fault as fault:
            lines = Path(function.__code__.co_filename).read_text("utf-8").splitlines()
            line = getattr(fault, "line", 0)
            code = lines[line - 1] if 0 < line <= len(lines) else ""
            fact |= {"fault": f"{fault}{place(fault)}", "code": code.strip()}
            break
        fact["counts"] = counts._asdict()
        fact["verdict"] = verdict(case.output, case.right, **case.candidates)
        fact["number"] = int((case.output != case.right).sum())
        if fact["verdict"] != "right":
            break
    lesson.fact("cases", facts)


# what the emulator says, by kind
BEYOND = r"behind \d+ bytes of|no memory|out of bounds|of the host|pointer index"
UNWRITTEN = r"nobody has written"
RACE = r"no barrier orders"
DIVERGED = r"waits at"


def judge_cases(
    group: Group,
    faults: Sequence[tuple[str, str]],
    verdicts: dict[str, str],
    right: Callable[[str], None],
    barriers: tuple[int, str] = (0, ""),
) -> dict[str, Any]:
    """Raise `Wrong` for the first case that went wrong; return the last one's counts.

    `faults`: (what the emulator's words match, hint); behind " code:", what the line of the
    source matches that it names. `barriers`: how many there must be, and the hint if memory is
    read too early where there are fewer.
    """
    if said := group.facts("compile")[0]:
        raise Wrong(f"it does not compile: {said}", HINTS["compile"])
    for case in group.facts("cases")[0]:
        if fault := case["fault"]:
            what = f"{case['what']}: {fault}"
            if "there is no kernel" in fault:
                raise Wrong(what, HINTS["signature"])
            if "did not end" in fault:
                raise Wrong(what, HINTS["kernel_endless"])
            early = re.search(UNWRITTEN, fault) is not None
            if early and group.facts("barrier inside")[0]:
                raise Wrong(what, HINTS["divergent_barrier"])
            if early and group.facts("barriers")[0] < barriers[0]:
                raise Wrong(what, HINTS[barriers[1]])
            for pattern, hint in faults:
                both = pattern.split(" code:")
                if re.search(both[0], fault) and (
                    len(both) == 1 or re.search(both[1], case["code"])
                ):
                    raise Wrong(what, HINTS[hint])
            raise Wrong(what, HINTS["other"])
        if case["verdict"] != "right":
            what = f"{case['what']}: {case['number']} of the numbers are wrong"
            raise Wrong(what, HINTS[verdicts.get(case["verdict"], "other")])
    if condition := group.facts("barrier inside")[0]:
        what = f"a barrier stands inside of if {condition}"
        raise Wrong(what, HINTS["divergent_barrier"])
    right("; ".join(case["what"] for case in group.facts("cases")[0]))
    return case["counts"]


# --- step 1 -------------------------------------------------------------------------------


def probe_index(lesson: Lesson) -> None:
    sizes = ((1, 128), (128, 128), (129, 128), (1000, 32))
    filled(finished().source_of, lesson.module.vector_add)
    found = [[n, t, lesson.module.blocks_for(n, t)] for n, t in sizes]
    lesson.fact("blocks", found)
    if any(number != blocks(n, t) for n, t, number in found):
        return
    launch(lesson, lesson.module.vector_add, "vector_add", list(additions(one_each=True)))


def additions(one_each: bool) -> Any:
    lab = finished()
    sizes = (40, 32, 2), (1, 128, 1), (1000, 128, 8)
    for n, block, grid in sizes if one_each else ((1000, 64, 3), (1, 32, 2), (512, 64, 2)):
        a, b, c = lab.numbers(n), lab.numbers(n).flip(0), lab.nothing(n)
        sums = a + b
        first = torch.where(torch.arange(n) < block, sums, NAN)
        reached = torch.where(torch.arange(n) < grid * block, sums, NAN)
        what = f"n = {n} in {grid} blocks of {block}"
        short = torch.where(torch.arange(n) < n - 1, sums, NAN)
        candidates = {"first block": first} if one_each else {"no loop": reached}
        candidates["short"] = short
        yield Case(what, grid, block, (a, b, c, n), c, sums, candidates)


def judge_index(group: Group, right: Callable[[str], None]) -> None:
    for n, threads, found in group.facts("blocks")[0]:
        what = f"blocks_for({n}, {threads}) is {found!r}"
        if not isinstance(found, int):
            raise Wrong(f"{what}, not a whole number", HINTS["blocks_down"])
        if found * threads < n:
            raise Wrong(what, HINTS["blocks_down"])
        if found != blocks(n, threads):
            raise Wrong(what, HINTS["blocks_more"])
    right("the numbers of blocks")
    judge_cases(
        group,
        ((BEYOND, "guard"), (RACE, "block_offset")),
        {"first block": "block_offset", "unwritten": "block_offset", "short": "guard"},
        right,
    )


# --- step 2 -------------------------------------------------------------------------------

STRIDES = (1, 2, 3, 5, 8, 32, 100)
SECTORS = [len({4 * lane * stride // 32 for lane in range(32)}) for stride in STRIDES]


def probe_strides(lesson: Lesson) -> None:
    filled(finished().source_of, lesson.module.add_in_strides)
    found = [lesson.module.sectors(stride) for stride in STRIDES]
    lesson.fact("sectors", found)
    if found != SECTORS:
        return
    launch(
        lesson, lesson.module.add_in_strides, "add_in_strides", list(additions(one_each=False))
    )


def judge_strides(group: Group, right: Callable[[str], None]) -> None:
    found = group.facts("sectors")[0]
    wrong = [i for i, number in enumerate(SECTORS) if found[i] != number]
    if wrong:
        i = wrong[0]
        what = f"sectors({STRIDES[i]}) is {found[i]}, {SECTORS[i]} are touched"
        if found[0] != 4:
            raise Wrong(what, HINTS["sectors_bytes"])
        far = [i for i, stride in enumerate(STRIDES) if stride > 8]
        between = all(found[i] == 31 * 4 * STRIDES[i] // 32 + 1 for i in far)
        unbounded = any(found[i] > 32 for i in far) and not between
        raise Wrong(what, HINTS["sectors_few" if unbounded else "sectors_between"])
    right("the sectors of every stride")
    counts = judge_cases(
        group,
        ((BEYOND, "guard"), (RACE, "step_of_loop")),
        {"no loop": "no_loop", "unwritten": "no_loop", "short": "guard"},
        right,
    )
    each = counts["load_sectors"] / counts["load_requests"]
    if each > 4:
        what = f"a load of a warp touches {each:g} sectors, 4 would do"
        raise Wrong(what, HINTS["own_pieces"])


# --- steps 3 and 4 ------------------------------------------------------------------------


def sums_cases() -> list[Case]:
    lab, cases = finished(), []
    for n, block in ((256, 64), (1, 64), (700, 256)):
        grid = blocks(n, block)
        x, sums = lab.numbers(n), lab.nothing(grid)
        full = torch.nn.functional.pad(x, (0, grid * block - n)).view(grid, block)
        candidates = {"first warp": full[:, :32].sum(1)}
        what = f"{n} numbers in {grid} block{'s' * (grid > 1)} of {block}"
        cases.append(Case(what, grid, block, (x, sums, n), sums, full.sum(1), candidates))
    return cases


def probe_tree(lesson: Lesson) -> None:
    launch(lesson, lesson.module.block_sum, "block_sum", sums_cases())


def judge_tree(group: Group, right: Callable[[str], None]) -> None:
    faults = (
        (r"(writes) device memory that block", "sum_place"),
        (r"(writes) device memory that .*" + RACE, "one_writes"),
        (r"bytes of device memory", "guard"),
        (RACE, "tree_barrier"),
        (DIVERGED, "divergent_barrier"),
        (BEYOND, "rounds"),
        (UNWRITTEN, "zero_fill"),
    )
    judge_cases(
        group,
        faults,
        {"unwritten": "sum_place", "other": "rounds"} | ROUNDS,
        right,
        (2, "tree_barrier"),
    )


ROUNDS = {"first warp": "rounds"}


def probe_shuffles(lesson: Lesson) -> None:
    launch(lesson, lesson.module.warp_sum, "warp_sum", sums_cases())


def judge_shuffles(group: Group, right: Callable[[str], None]) -> None:
    faults = (
        (r"writes device memory that .*" + RACE, "one_writes"),
        (r"bytes of device memory", "guard"),
        (RACE, "warps_barrier"),
        (r"warp operation|own mask", "lanes_missing"),
        (DIVERGED, "divergent_barrier"),
        (UNWRITTEN, "warps_unwritten"),
    )
    verdicts = {"first warp": "one_warp", "other": "shuffle_rounds"}
    counts = judge_cases(group, faults, verdicts, right, (1, "warps_barrier"))
    if counts["shared_requests"] > 3 * 18:  # twice as many are still of another kind
        what = f"{counts['shared_requests']} requests of shared memory in 3 blocks of 8 warps"
        raise Wrong(f"{what}: 3 * (8 + 1) would do", HINTS["still_shared"])


# --- step 5 -------------------------------------------------------------------------------


def probe_transpose(lesson: Lesson) -> None:
    lab, cases = finished(), []
    for rows, columns in ((32, 32), (64, 64), (45, 70), (64, 96)):
        x, y = lab.numbers(rows, columns), lab.nothing(columns, rows)
        candidates = {}
        if rows % 32 == columns % 32 == 0:
            tiles = [
                x.view(rows // 32, 32, columns // 32, 32)[:, :, i].mT
                for i in range(columns // 32)
            ]
            stays = torch.stack(tiles, 2).reshape(rows, columns).flatten().view(columns, rows)
            few = torch.where(torch.arange(rows) % 32 < 8, x.T, NAN)
            more = torch.where((torch.arange(columns) % 32 < 8)[:, None], x.T, NAN)
            candidates = {"stays": stays, "one row": few, "one row ": more}
        what = f"{rows} × {columns}"
        grid = (blocks(columns, 32), blocks(rows, 32))
        cases.append(
            Case(what, grid, (32, 8), (x, y, rows, columns), y, x.T.contiguous(), candidates)
        )
    launch(lesson, lesson.module.transpose, "transpose", cases)


def judge_transpose(group: Group, right: Callable[[str], None]) -> None:
    first = (group.facts("cases")[0] or [{}])[0]
    # of 32 rows of a tile, 8 were filled: the rest of it is read and was never written
    rest = "four_rows" if first.get("fault") and "nobody" in first["fault"] else "edge"
    faults = (
        (r"shared memory that .*" + RACE, "tile_barrier"),
        (r"writes device memory that .*" + RACE, "block_not_swapped"),
        (DIVERGED, "divergent_barrier"),
        (UNWRITTEN, rest),
        (BEYOND, "edge"),
    )
    verdicts = {
        "stays": "block_not_swapped",
        "one row": "four_rows",
        "one row ": "four_rows",
        "unwritten": "edge",
    }
    counts = judge_cases(group, faults, verdicts, right, (1, "tile_barrier"))
    load = counts["load_sectors"] / counts["load_requests"]
    store = counts["store_sectors"] / counts["store_requests"]
    if max(load, store) > 4:
        what = f"a warp's load touches {load:g} sectors and its store {store:g}, 4 would do"
        raise Wrong(what, HINTS["uncoalesced"])
    passes = counts["shared_passes"] / max(counts["shared_requests"], 1)
    if passes > 1:
        what = f"an access of a warp to the tile takes {passes:g} passes on average, 1 would do"
        raise Wrong(what, HINTS["banks"])


# --- step 6 -------------------------------------------------------------------------------


def probe_histogram(lesson: Lesson) -> None:
    lab, cases = finished(), []
    for n, bins, grid, block in ((200, 16, 1, 64), (777, 9, 2, 64), (1500, 100, 3, 64)):
        x = lab.numbers(n).int().remainder(bins)
        before = torch.arange(bins, dtype=torch.int32)  # counts go on from there
        right = before + torch.bincount(x, minlength=bins).int()
        place = torch.arange(bins)
        candidates = {
            "overwritten": right - before,
            "bins left": torch.where(place < block, right, before),
        }
        what = f"{n} numbers, {bins} bins, {grid} block{'s' * (grid > 1)} of {block}"
        counts = before.clone()
        cases.append(Case(what, grid, block, (x, counts, n, bins), counts, right, candidates))
    launch(lesson, lesson.module.histogram, "histogram", cases)


def judge_histogram(group: Group, right: Callable[[str], None]) -> None:
    increment = r" code:\]\s*(\+\+|\+=)|\+\+\s*\w+\[|\]\s*=.*\]\s*\+"
    faults = (
        (r"shared memory that .*" + RACE + increment, "not_atomic"),
        (r"device memory that .*" + RACE + increment, "not_atomic"),
        (r"device memory that .*" + RACE, "overwritten"),
        (RACE, "histogram_barrier"),
        (UNWRITTEN, "not_zeroed"),
        (DIVERGED, "divergent_barrier"),
        (BEYOND, "guard"),
    )
    verdicts = {"overwritten": "overwritten", "bins left": "bins_left"}
    counts = judge_cases(group, faults, verdicts, right, (2, "histogram_barrier"))
    if counts["global_atomics"] > 300:
        what = (
            f"{counts['global_atomics']} atomics in global memory, 3 blocks × 100 bins would do"
        )
        raise Wrong(what, HINTS["global_atomics"])


# --- step 7 -------------------------------------------------------------------------------


def probe_softmax(lesson: Lesson) -> None:
    lab, facts = finished(), []
    filled(lab.no_blank, lesson.module.softmax_kernel)
    for rows, columns in ((1, 32), (3, 33), (4, 100)):
        # both lie within larger memory, so that nothing else is hit
        around_x = torch.full((rows + 4, 192), 300.0)
        around_y = torch.full((rows + 4, 160), 7.0)
        x, y = around_x[1 : rows + 1, :columns], around_y[1 : rows + 1, :columns]
        # high and low rows by turns: exp overflows, or a 0 beyond the row would be the maximum
        x.copy_(3 * lab.numbers(rows, columns) + 200 * (-1) ** torch.arange(rows)[:, None])
        y.fill_(NAN)
        lesson.module.softmax(x, y)
        right, power = x.softmax(1), 1 << (columns - 1).bit_length()
        wide = torch.zeros(rows, power)
        wide[:, :columns] = x
        candidates = {
            "right": right,
            "zeros": wide.softmax(1)[:, :columns],
            "beyond": around_x[1 : rows + 1, :power].softmax(1)[:, :columns],
            "not divided": (x - x.amax(1, keepdim=True)).exp(),
        }
        found = [
            k for k, v in candidates.items() if torch.allclose(y, v, rtol=1e-4, atol=1e-30)
        ]
        y_rows = [
            torch.allclose(a, b, rtol=1e-4, atol=1e-30) for a, b in zip(y, right, strict=True)
        ]
        nan = y.isnan()
        fact = {"what": f"{rows} × {columns}", "verdict": (found or ["other"])[0]}
        if not found:
            y.fill_(7.0)
            moved = bool((around_y != 7.0).any())
            if y_rows[0] and rows > 1:
                skipped = nan.all(1).any() and not moved
                fact["verdict"] = "programs" if skipped else "row stride"
            elif nan.any():
                fact["verdict"] = "nan"
        else:
            y.fill_(7.0)
            fact["outside"] = int((around_y != 7.0).sum())
        facts.append(fact)
        if fact["verdict"] != "right" or fact["outside"]:
            break
    lesson.fact("softmax", facts)


def judge_softmax(group: Group, right: Callable[[str], None]) -> None:
    facts = group.facts("softmax")[0]
    hints = {
        "zeros": "mask_other",
        "beyond": "load_mask",
        "not divided": "not_divided",
        "nan": "no_maximum",
        "row stride": "row_stride",
        "programs": "programs",
    }
    for fact in facts:
        if fact["verdict"] != "right":
            what = f"{fact['what']}: this is not the softmax of the rows"
            raise Wrong(what, HINTS[hints.get(fact["verdict"], "other")])
        if fact["outside"]:
            what = f"{fact['what']}: {fact['outside']} numbers outside of y were overwritten"
            raise Wrong(what, HINTS["store_mask"])
    right("rows of 32, 33 and 100")


# --- step 8 -------------------------------------------------------------------------------


def probe_matmul(lesson: Lesson) -> None:
    lab, cases = finished(), []
    for m, n, k in ((16, 16, 16), (16, 32, 32), (17, 20, 18), (32, 32, 32)):
        a, b, c = lab.numbers(m, k), lab.numbers(k, n), lab.nothing(m, n)
        cut = k // 16 * 16
        candidates = {"cut": a[:, :cut] @ b[:cut], "first": a[:, :16] @ b[:16]}
        grid = (blocks(n, 16), blocks(m, 16))
        what = f"{m} × {k} times {k} × {n}"
        cases.append(Case(what, grid, (16, 16), (a, b, c, m, n, k), c, a @ b, candidates))
    launch(lesson, lesson.module.matmul, "matmul", cases)


def judge_matmul(group: Group, right: Callable[[str], None]) -> None:
    faults = (
        (r"shared memory that .*" + RACE, "product_barriers"),
        (DIVERGED, "divergent_barrier"),
        (UNWRITTEN, "tile_loads"),
        (BEYOND, "outside"),
    )
    verdicts = {"cut": "last_tile", "first": "last_tile"}
    counts = judge_cases(group, faults, verdicts, right, (2, "product_barriers"))
    if counts["loads"] > 4096:
        what = f"{counts['loads']} loads for 32 × 32 times 32 × 32, 2MNK/16 = 4096 would do"
        raise Wrong(what, HINTS["not_tiled"])


def step(number: int, title: str, proves: str, probe, judge, *uses: str, crashes=()) -> Step:
    """A step of one process."""
    return Step(
        number, title, proves, probe, judge, uses, worlds=(1,), joins=False, crashes=crashes
    )


STEPS = [
    step(
        1,
        "which thread does which element",
        "every element is done once, by a thread that exists, in as many blocks as needed",
        probe_index,
        judge_index,
        "vector_add",
        "blocks_for",
    ),
    step(
        2,
        "a grid that strides",
        "any grid does all elements, neighbours by neighbours, and sectors are foretold",
        probe_strides,
        judge_strides,
        "add_in_strides",
        "sectors",
    ),
    step(
        3,
        "shared memory and barriers",
        "the sums of all blocks are right, in whatever order the threads run",
        probe_tree,
        judge_tree,
        "block_sum",
    ),
    step(
        4,
        "warp shuffles",
        "the same sums, with one number for each warp in shared memory",
        probe_shuffles,
        judge_shuffles,
        "warp_sum",
    ),
    step(
        5,
        "a transpose, and the banks",
        "every shape is transposed, 4 sectors and 1 pass a request",
        probe_transpose,
        judge_transpose,
        "transpose",
    ),
    step(
        6,
        "atomics",
        "nothing is lost in the histogram, and the blocks meet once for each bin",
        probe_histogram,
        judge_histogram,
        "histogram",
    ),
    step(
        7,
        "softmax in Triton",
        "rows of any length and stride have torch's softmax, and nothing else is written",
        probe_softmax,
        judge_softmax,
        "softmax_kernel",
        "softmax",
        crashes=(("power of 2", HINTS["power_of_two"]),),
    ),
    step(
        8,
        "a tiled matrix product",
        "products of any shape are right, and each number loaded is used 16 times",
        probe_matmul,
        judge_matmul,
        "matmul",
    ),
]
