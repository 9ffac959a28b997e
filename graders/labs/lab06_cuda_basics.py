"""Grade lab 06: test each kernel, and choose the hint that fits the mistake.

Kernels in CUDA C++ are compiled by `Kernels` of the finished lab, and run on its emulator. Only
the sources of the kernels come from the learner's file. A hint is chosen by the error message
of the emulator, by the wrong result, or by the number of memory accesses.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch

from graders.dsl import Lab, Wrong, allclose, require

LAB = Lab()
NAN = float("nan")

# patterns for the error messages of the emulator
BEYOND = r"behind \d+ bytes of|no memory|out of bounds|of the host|pointer index"
UNWRITTEN = r"nobody has written"
RACE = r"no barrier orders"
DIVERGED = r"waits at"


class Case(NamedTuple):
    """One launch of a kernel, with the right output and the outputs of known mistakes."""

    what: str
    grid: Any
    block: Any
    arguments: tuple
    output: torch.Tensor  # one of the arguments
    right: torch.Tensor
    # by hint: the outputs that the mistake gives. None fits every output.
    mistakes: dict[str, torch.Tensor | list[torch.Tensor] | None]


def check_blank(get_code: Callable[[Any], Any], kernel: Any) -> None:
    """Raise `NotImplementedError` with the line if a kernel still has its blank."""
    try:
        get_code(kernel)
    except NotImplementedError as blank:
        raise NotImplementedError(f"{blank}, line {blank.line}") from None


def line_of(fault: BaseException) -> str:
    """Return the line of a fault as ", line 7", or "" if it is unknown."""
    return f", line {fault.line}" if hasattr(fault, "line") else ""


def source(function: Callable[[], str]) -> str:
    """Return the text that a function returns, without comments, or raise `Wrong`."""
    found = function()
    require(found is not None, f"{function.__name__}() returns None", "returns_none")
    what = f"{function.__name__}() returns a {type(found).__name__} and not a text"
    require(isinstance(found, str), what, "signature")
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", found, flags=re.S)


def launch(
    submission: ModuleType, name: str, cases: Sequence[Case], faults: dict[str, str],
    unwritten: str = "other", other: str | Callable[[Case], str] = "other", barriers: int = 0,
    early: str = "other",
) -> Generator[str, None, Any]:  # fmt: skip
    """Run a kernel for each case, and return the counts of the last case.

    Raise `Wrong` for the first case that fails. `faults` maps patterns to hints. A pattern is
    searched in the description of the case, followed by the message of the emulator and the
    line of code that it names. `unwritten` is the hint if numbers are missing. `other` is the
    hint, or a function that returns the hint for a case, if no known mistake fits. `barriers`
    is the necessary number of barriers. If there are fewer, and memory is read before it is
    written, `early` is the hint.
    """
    reference, function = LAB.finished, getattr(submission, name)
    code = source(function)
    check_blank(reference.source_of, function)
    tempfile.tempdir = os.getcwd()  # the folder of this group, which the supervisor removes
    try:
        kernels = reference.Kernels(function)
    except reference.Fault as fault:
        raise Wrong(
            f"the kernel does not compile: {fault}{line_of(fault)}", "compile"
        ) from None
    # names of variables that differ between threads
    own = {"t", "i", "row", "column", "lane", "warp", "threadIdx"}
    for counter, start in re.findall(r"\bfor\s*\(\s*\w+\s+(\w+)\s*=([^;]*)", code):
        if not own & {*re.findall(r"\w+", start)}:
            own.discard(counter)  # the counter is equal in all threads
    condition = rf"\bif\s*(\([^{{}};]*\b(?:{'|'.join(sorted(own))})\b[^{{}};]*\))"
    in_branch = re.search(condition + r"\s*(?:\{[^{}]*)?__syncthreads\(", code)
    in_loop = re.search(r"\bfor\s*\([^;]*\bthreadIdx[^{}]*\{[^{}]*__syncthreads\(", code)
    general = {"there is no kernel": "signature", "did not end": "kernel_endless"}
    if in_loop:
        general |= dict.fromkeys((UNWRITTEN, RACE, DIVERGED), "divergent_barrier")
    if in_branch:
        general[UNWRITTEN] = "divergent_barrier"
    elif code.count("__syncthreads()") < barriers:
        general[UNWRITTEN] = early
    for case in cases:
        try:
            counts = kernels.run(name, case.grid, case.block, *case.arguments)
        except reference.Fault as fault:
            what = f"{case.what}: {fault}{line_of(fault)}"
            lines = Path(function.__code__.co_filename).read_text("utf-8").splitlines()
            line = dict(enumerate(lines, 1)).get(getattr(fault, "line", 0), "")
            description = f"{what} code: {line.partition('//')[0]}"
            patterns = [*general.items(), *faults.items(), ("", "other")]
            hint = next(hint for pattern, hint in patterns if re.search(pattern, description))
            raise Wrong(what, hint) from None
        if wrong := int((case.output != case.right).sum()):
            what = f"{case.what}: {wrong} of {case.output.numel()} numbers are wrong"
            index = next(i for i, each in enumerate(case.arguments) if each is case.output)
            output = kernels.kernels[name][index].split()[-1].strip("*&")
            adds = rf"\b{output}\[[^\]]*\]\s*\+=|atomicAdd\(\s*&?\s*{output}\b"
            if case.output.isnan().all() and re.search(adds, code):
                raise Wrong(what, "reads_output")
            raise Wrong(what, hint_for(case, unwritten, other))
    if in_branch:
        what = f"a barrier is inside of if {' '.join(in_branch[1].split())}"
        raise Wrong(what, "divergent_barrier")
    yield "; ".join(case.what for case in cases)
    return counts


def hint_for(case: Case, unwritten: str, other: str | Callable[[Case], str]) -> str:
    """Return the hint whose mistake gives the output of this case."""
    found = case.output.nan_to_num(7e7)
    for hint, known in case.mistakes.items():
        known = known if isinstance(known, list) or known is None else [known]
        if known is None or any(torch.equal(found, each.nan_to_num(7e7)) for each in known):
            return hint
    if case.output.isnan().any():
        return unwritten
    return other(case) if callable(other) else other


# --- step 1 -------------------------------------------------------------------------------


def addition(n: int, grid: int, block: int, hint: str, reached: int) -> Case:
    """Return a case for a sum of vectors. `hint` fits if only `reached` elements are added."""
    reference = LAB.finished
    a, b = reference.numbers(n), reference.numbers(n).flip(0)
    c = reference.nothing(n)
    few, short = (torch.where(torch.arange(n) < end, a + b, NAN) for end in (reached, n - 1))
    what = f"n = {n} in {grid} blocks of {block}"
    return Case(what, grid, block, (a, b, c, n), c, a + b, {hint: few, "guard": short})


def require_number(found: Any, what: str) -> None:
    """Raise `Wrong` unless a function of the learner has returned a whole number."""
    require(found is not None, what, "returns_none")
    require(isinstance(found, int), f"{what}, not a whole number", "whole_number")


@LAB.alone(
    1, "which thread does which element",
    "every element is done once, and no block more than necessary is launched",
    "vector_add blocks_for",
)  # fmt: skip
def index(submission, reference, lesson):
    source(submission.vector_add)
    check_blank(reference.source_of, submission.vector_add)
    for n, threads in ((1, 128), (128, 128), (129, 128), (1000, 32)):
        found = submission.blocks_for(n, threads)
        what = f"blocks_for({n}, {threads}) is {found!r}"
        require_number(found, what)
        require(found * threads >= n, what, "blocks_down")
        require(found == reference.blocks_for(n, threads), what, "blocks_more")
    yield "the numbers of blocks"
    sizes = ((40, 2, 32), (1, 1, 128), (1000, 8, 128))
    cases = [addition(*size, "block_offset", reached=size[2]) for size in sizes]
    faults = {BEYOND: "guard", RACE: "block_offset"}
    counts = yield from launch(
        submission, "vector_add", cases, faults, unwritten="block_offset"
    )
    what = f"8 blocks of 128 threads load 2 × 1000 floats in {counts.load_requests} requests"
    require(counts.load_requests <= 64, f"{what}, and 64 are enough", "one_element")


# --- step 2 -------------------------------------------------------------------------------


def sectors_of_lanes(stride: int, number: int) -> int:
    """Return the number of sectors that the first `number` lanes touch."""
    return len({4 * lane * stride // 32 for lane in range(number)})


def sectors_mistake(found: dict[int, Any]) -> str:
    """Return the hint for wrong numbers of sectors, which are given by stride."""
    if found[1] != 4:
        return "sectors_bytes"
    if all(number == sectors_of_lanes(stride, 31) for stride, number in found.items()):
        return "sectors_lanes"
    far = {stride: number for stride, number in found.items() if stride > 8}
    if all(number == 31 * 4 * stride // 32 + 1 for stride, number in far.items()):
        return "sectors_between"
    return "sectors_few" if any(number > 32 for number in far.values()) else "sectors_between"


@LAB.alone(
    2, "a grid that strides",
    "a grid of any size does all elements, and the numbers of sectors are right",
    "add_in_strides sectors",
)  # fmt: skip
def strides(submission, reference, lesson):
    source(submission.add_in_strides)
    check_blank(reference.source_of, submission.add_in_strides)
    found = {stride: submission.sectors(stride) for stride in (1, 2, 3, 5, 8, 32, 100)}
    for stride, number in found.items():
        require_number(number, f"sectors({stride}) is {number!r}")
        if number != (true := reference.sectors(stride)):
            what = f"sectors({stride}) is {number}, but {true} are touched"
            raise Wrong(what, sectors_mistake(found))
    yield "the number of sectors is right for every stride"
    sizes = ((1000, 3, 64), (1, 2, 32), (512, 2, 64))
    cases = [addition(*size, "no_loop", reached=size[1] * size[2]) for size in sizes]
    faults = {BEYOND: "guard", RACE: "step_of_loop"}
    counts = yield from launch(submission, "add_in_strides", cases, faults, unwritten="no_loop")
    each = counts.load_sectors / counts.load_requests
    what = f"a load of a warp touches {each:g} sectors, and 4 are enough"
    require(each <= 4, what, "own_pieces")
    what = f"2 blocks of 64 threads load 2 × 512 floats in {counts.load_requests} requests"
    require(counts.load_requests <= 32, f"{what}, and 32 are enough", "idle_threads")


# --- steps 3 and 4 ------------------------------------------------------------------------


def sums_cases(hint: str) -> list[Case]:
    """Return cases for sums of blocks. `hint` fits if only the first warp is in each sum."""
    reference, cases = LAB.finished, []
    for n, block in ((256, 64), (1, 64), (700, 256)):
        grid = reference.blocks_for(n, block)
        x, sums = reference.numbers(n), reference.nothing(grid)
        full = torch.nn.functional.pad(x, (0, grid * block - n)).view(grid, block)
        blocks = f"{grid} block{'s' * (grid > 1)} of {block}"
        what = f"{n} number{'s' * (n > 1)} in {blocks}"
        known = {hint: full[:, :32].sum(1), "block_offset": full[:1].sum(1).repeat(grid)}
        cases.append(Case(what, grid, block, (x, sums, n), sums, full.sum(1), known))
    return cases


@LAB.alone(
    3, "shared memory and barriers",
    "the sums of all blocks are right, in whatever order the threads run", "block_sum",
)  # fmt: skip
def tree(submission, reference, lesson):
    faults = {
        r"writes device memory that block|writes \d+ bytes .* of device": "sum_place",
        r"writes device memory that .*" + RACE: "one_writes",
        r"bytes of device memory": "guard",
        r"^256 numbers.*" + UNWRITTEN: "tree_index",
        RACE: "tree_barrier",
        DIVERGED: "divergent_barrier",
        BEYOND: "rounds",
        UNWRITTEN: "zero_fill",
    }
    hints = {"unwritten": "sum_place", "other": "rounds", "early": "tree_barrier"}
    cases = sums_cases("rounds")
    counts = yield from launch(submission, "block_sum", cases, faults, barriers=2, **hints)
    what = f"3 blocks of 256 need {counts.load_requests} requests of global memory"
    require(counts.load_requests <= 24, f"{what}, and 22 are enough", "serial_sum")
    what = f"3 blocks of 256 need {counts.shared_requests} requests of shared memory"
    require(counts.shared_requests <= 600, f"{what}, and 135 are enough", "serial_sum")


@LAB.alone(
    4, "warp shuffles", "the same sums, with one number for each warp in shared memory",
    "warp_sum",
)  # fmt: skip
def shuffles(submission, reference, lesson):
    body = re.search(r"\bsum_of_warp\([^)]*\)\s*\{(.*?)\n\}", source(submission.warp_sum), re.S)
    if body and "#error" not in body[1]:
        require("return" in body[1], "sum_of_warp has no return statement", "returns_none")
    faults = {
        r"writes device memory that block|writes \d+ bytes .* of device": "sum_place",
        r"writes device memory that .*" + RACE: "one_writes",
        r"bytes of device memory": "guard",
        r"writes shared memory that thread \d+ writes|out of bounds": "warp_place",
        RACE: "warps_barrier",
        r"warp operation|own mask": "lanes_missing",
        DIVERGED: "divergent_barrier",
        UNWRITTEN: "warps_unwritten",
    }
    hints = {"unwritten": "lanes_missing", "other": "shuffle_rounds", "early": "warps_barrier"}
    cases = sums_cases("one_warp")
    counts = yield from launch(submission, "warp_sum", cases, faults, barriers=1, **hints)
    # the limit is twice the necessary number; a sum in shared memory needs many more
    what = f"{counts.shared_requests} requests of shared memory in 3 blocks of 8 warps"
    what = f"{what}, and 3 * (8 + 1) are enough"
    require(counts.shared_requests <= 3 * 18, what, "still_shared")


# --- step 5 -------------------------------------------------------------------------------


@LAB.alone(
    5, "a transpose, and the banks",
    "every shape is transposed, with 4 sectors and 1 pass for each request", "transpose",
)  # fmt: skip
def transposed(submission, reference, lesson):
    cases = []
    for rows, columns in ((32, 32), (64, 64), (45, 70), (64, 96)):
        x, y = reference.numbers(rows, columns), reference.nothing(columns, rows)
        mistakes = {}
        if rows % 32 == columns % 32 == 0:
            tiles = x.view(rows // 32, 32, columns // 32, 32).transpose(1, 3)
            not_swapped = tiles.reshape(columns, rows)
            part_of_rows = torch.where(torch.arange(rows) % 32 < 8, x.T, NAN)
            part_of_columns = torch.where((torch.arange(columns) % 32 < 8)[:, None], x.T, NAN)
            not_transposed = tiles.transpose(1, 3).permute(2, 1, 0, 3).reshape(columns, rows)
            mistakes = {
                "block_not_swapped": not_swapped,
                "four_rows": [part_of_rows, part_of_columns],
            }
            mistakes["tile_not_turned"] = not_transposed
        if rows != columns:
            mistakes["edge"] = None
        grid = (reference.blocks_for(columns, 32), reference.blocks_for(rows, 32))
        launched = (f"{rows} × {columns}", grid, (32, 8), (x, y, rows, columns))
        cases.append(Case(*launched, y, x.T.contiguous(), mistakes))
    faults = {
        r"shared memory that .*" + RACE: "tile_barrier",
        r"writes device memory that .*" + RACE: "block_not_swapped",
        DIVERGED: "divergent_barrier",
        # only 8 of the 32 rows of a tile were written, and all rows are read
        r"^32 × 32: .*" + UNWRITTEN: "four_rows",
        r"out of bounds": "tile_size",
        UNWRITTEN: "edge",
        BEYOND: "edge",
    }
    hints = {"unwritten": "edge", "early": "tile_barrier"}
    counts = yield from launch(submission, "transpose", cases, faults, barriers=1, **hints)
    load = counts.load_sectors / counts.load_requests
    store = counts.store_sectors / counts.store_requests
    what = f"a load of a warp touches {load:g} sectors, a store {store:g}, and 4 are enough"
    require(max(load, store) <= 4, what, "uncoalesced")
    passes = counts.shared_passes / max(counts.shared_requests, 1)
    what = f"an access of a warp to the tile needs {passes:g} passes on average, 1 is enough"
    require(passes <= 1, what, "banks")


# --- step 6 -------------------------------------------------------------------------------


@LAB.alone(
    6, "atomics",
    "no count is lost, and each block adds each of its bins once to global memory",
    "histogram",
)  # fmt: skip
def atomics(submission, reference, lesson):
    cases = []
    for n, bins, grid, block in ((200, 16, 1, 64), (777, 9, 2, 64), (1500, 100, 3, 64)):
        x = reference.numbers(n).int().remainder(bins)
        before = torch.arange(bins, dtype=torch.int32)  # the kernel adds to these counts
        right = before + torch.bincount(x, minlength=bins).int()
        left = torch.where(torch.arange(bins) < block, right, before)
        mistakes = {"overwritten": right - before, "bins_left": left}
        what = f"{n} numbers, {bins} bins, {grid} block{'s' * (grid > 1)} of {block}"
        counts = before.clone()
        cases.append(Case(what, grid, block, (x, counts, n, bins), counts, right, mistakes))
    increment = r".* code: .*(\]\s*(\+\+|\+=)|\+\+\s*\w+\[|\]\s*=.*\]\s*\+)"
    few = source(submission.histogram).count("atomicAdd") < 2
    faults = {
        r"(shared|device) memory that .*" + RACE + increment: "not_atomic",
        r"device memory that .*" + RACE: "overwritten",
        RACE: "not_atomic" if few else "histogram_barrier",
        UNWRITTEN: "not_zeroed",
        DIVERGED: "divergent_barrier",
        BEYOND: "guard",
    }

    def other(case: Case) -> str:
        return "counts_less" if case.output.sum() < case.right.sum() else "counts_more"

    hints = {"early": "histogram_barrier", "other": other}
    counts = yield from launch(submission, "histogram", cases, faults, barriers=2, **hints)
    number = counts.global_atomics
    what = f"{number} atomics in global memory, and 3 blocks × 100 bins are enough"
    require(number <= 300, what, "global_atomics")


# --- step 7 -------------------------------------------------------------------------------


class SpyKernel:
    """A Triton kernel that counts its programs, and allows at most one for each row."""

    def __init__(self, kernel: Any, rows: int):
        self.kernel, self.rows, self.programs = kernel, rows, 0

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **settings: Any) -> Any:
            size = grid(settings) if callable(grid) else grid
            what = f"softmax_kernel is launched with the grid {size!r}"
            require(isinstance(size, (tuple, list)), what, "grid_kind")
            self.programs += math.prod(size)
            what = f"for {self.rows} rows, {self.programs} programs are launched"
            require(self.programs <= self.rows, what, "programs")
            return self.kernel[tuple(size)](*arguments, **settings)

        return launch

    def __call__(self, *_: Any, **__: Any) -> None:
        raise Wrong("softmax_kernel is called without a grid", "grid_kind")


@LAB.alone(
    7, "softmax in Triton",
    "rows of any length and stride get the softmax of torch, and nothing else is written",
    "softmax_kernel softmax", crashes={"power of 2": "power_of_two"},
)  # fmt: skip
def softmax(submission, reference, lesson):
    check_blank(reference.no_blank, submission.softmax_kernel)
    kernel = reference.softmax_kernel = submission.softmax_kernel
    for rows, columns in ((1, 32), (3, 33), (4, 200)):
        judge_softmax(reference.softmax, rows, columns)  # the learner's kernel, with our launch
        submission.softmax_kernel = SpyKernel(kernel, rows)
        judge_softmax(submission.softmax, rows, columns, submission.softmax_kernel)
    yield "rows of 32, 33 and 200 numbers have the right softmax"


def judge_softmax(
    function: Callable, rows: int, columns: int, spy: SpyKernel | None = None
) -> None:
    """Raise `Wrong` unless this function writes the softmax of rows, and nothing else."""
    # x and y are inside larger tensors, so a wrong access does no harm and can be detected
    around_x = torch.full((rows + 4, 300), 300.0)
    around_y = torch.full((rows + 4, 270), 7.0)
    x, y = around_x[1 : rows + 1, :columns], around_y[1 : rows + 1, :columns]
    # high and low rows alternate: in a high row, exp overflows without the maximum; in a
    # low row, a 0 behind its end would be the maximum
    numbers = LAB.finished.numbers(rows, columns)
    x.copy_(3 * numbers + 200 * (-1) ** torch.arange(rows)[:, None])
    y.fill_(-1.0)
    given = around_x.clone()
    function(x, y)
    found, right = y.clone(), given[1 : rows + 1, :columns].softmax(1)
    y.fill_(7.0)
    outside = int((around_y != 7.0).sum())
    require(torch.equal(around_x, given), f"{rows} × {columns}: x has changed", "x_changed")
    if spy is not None:
        what = f"for {rows} rows, {spy.programs} programs are launched"
        require(spy.programs == rows, what, "programs")

    power = 1 << (columns - 1).bit_length()
    wide = torch.nn.functional.pad(x, (0, power - columns))
    known = {
        "right": right,
        "mask_other": wide.softmax(1)[:, :columns],
        "load_mask": around_x[1 : rows + 1, :power].softmax(1)[:, :columns],
        "not_divided": (x - x.amax(1, keepdim=True)).exp(),
    }
    fits = (hint for hint in known if allclose(found, known[hint], 1e-4, 1e-30))
    hint = next(fits, "softmax_formula")
    unwritten = found == -1.0
    if hint == "softmax_formula" and unwritten[0].any() and not unwritten[0, 0]:
        hint = "block_small"
    elif hint == "softmax_formula" and unwritten.all(1).any() and not outside:
        hint = "rows_left"
    elif hint == "softmax_formula" and found.isnan().any():
        hint = "no_maximum"
    elif hint == "softmax_formula" and rows > 1 and allclose(found[0], right[0], 1e-4, 1e-30):
        hint = "row_stride"
    what = f"{rows} × {columns}: the result is not the softmax of the rows"
    require(hint == "right", what, hint)
    what = f"{rows} × {columns}: {outside} numbers outside of y were overwritten"
    require(not outside, what, "store_mask")


# --- step 8 -------------------------------------------------------------------------------


@LAB.alone(
    8, "a tiled matrix product",
    "products of any shape are right, and each loaded number is used 16 times", "matmul",
)  # fmt: skip
def product(submission, reference, lesson):
    cases = []
    for m, n, k in ((16, 16, 16), (16, 32, 32), (17, 20, 18), (32, 32, 32)):
        a, b, c = reference.numbers(m, k), reference.numbers(k, n), reference.nothing(m, n)
        parts = [a[:, :end] @ b[:end] for end in (k // 16 * 16, 16)]
        grid = (reference.blocks_for(n, 16), reference.blocks_for(m, 16))
        launched = (f"{m} × {k} times {k} × {n}", grid, (16, 16), (a, b, c, m, n, k))
        known = {"last_tile": parts, "sum_kept": a[:, -16:] @ b[-16:]}
        known["row_lengths" if m < n else "tile_indices"] = None
        cases.append(Case(*launched, c, a @ b, known))
    faults = {
        r"shared memory that .*" + RACE: "product_barriers",
        r"writes device memory that .*" + RACE: "row_lengths",
        DIVERGED: "divergent_barrier",
        UNWRITTEN: "tile_loads",
        r"out of bounds": "tile_size",
        r"writes \d+ bytes": "store_guard",
        BEYOND: "outside",
    }
    early = "product_barriers"
    counts = yield from launch(submission, "matmul", cases, faults, barriers=2, early=early)
    what = f"{counts.loads} loads for 32 × 32 times 32 × 32, and 2MNK/16 = 4096 are enough"
    require(counts.loads <= 4096, what, "not_tiled")
    what = f"{counts.store_requests} requests store 32 × 32 numbers, and 32 are enough"
    require(counts.store_requests <= 32, what, "store_once")
