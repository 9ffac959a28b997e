"""The steps of assignment 2: rounding, products, a convolution, tiles, and an algorithm."""

import functools

import torch
from torch.nn import functional as F

from graders.dsl import Lab, at_most, require, require_equal

LAB = Lab()
NO_RETURN = {"'NoneType'|cannot unpack non-iterable NoneType": "no_return"}
step = functools.partial(LAB.alone, crashes=NO_RETURN)


@step(1, "round to TF32", "the error is at most half a unit, and ties go to even", "to_tf32")
def rounding(submission, reference, lesson):
    unit = 2.0**-10

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        """Return the result of to_tf32, or raise `Wrong` if it has the wrong form."""
        argument = numbers.clone()
        found = submission.to_tf32(argument)
        require(found is not None, "to_tf32 returned None", "no_return")
        unchanged = torch.equal(argument, numbers)
        require(unchanged, "the call changed the numbers in x", "changes_x")
        what = f"x has the shape {list(numbers.shape)}, and the result has {list(found.shape)}"
        require(found.shape == numbers.shape, what, "shape")
        return found

    x = torch.randn(64, 64)
    found = rounded(x)
    is_fp32 = found.dtype == torch.float32
    error = ((found - x).abs() / x.abs()).max().item() if is_fp32 else torch.inf
    what = f"the result is {found.dtype}, and its largest relative error is {error:.3g}"
    require(error < 2.0**-6, what, "not_viewed")
    extreme = torch.tensor([3.0e38, 1e-30, 0.0])
    error = (rounded(extreme) - extreme).abs() / extreme.clamp(1e-37)
    what = "the largest relative error for the numbers 3e38, 1e-30 and 0"
    require_equal(what, error.max().item(), at_most(2.0**-6), "range")
    count = (found.view(torch.int32) & 0x1FFF).bool().sum().item()
    require_equal(
        "number of the 4096 results that have more than 10 bits", count, 0, "bits_left"
    )
    exact = x.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)
    count = (rounded(exact) != exact).sum().item()
    require_equal("number of the 4096 numbers with 10 bits that change", count, 0, "too_coarse")

    def units(*steps: float) -> list[float]:
        """Return the results for 1 + n units of the tenth bit, as a number of units above 1.

        A negative n stands for the negative number -(1 + |n| units).
        """
        numbers = torch.tensor([1 + abs(n) * unit for n in steps])
        signs = torch.tensor([-1.0 if n < 0 else 1.0 for n in steps])
        return ((rounded(signs * numbers) * signs - 1) / unit * signs).tolist()

    found = units(0.75, -0.75)
    fact = "1 + 0.75 units and its negative are rounded; the results, in units from ±1"
    require_equal(fact, found, [1.0, -1.0], "truncated")
    ties = units(0.5, 1.5, 2.5)
    fact = "1 + 0.5, 1 + 1.5 and 1 + 2.5 units are rounded; the results, in units from 1"
    require_equal(fact, ties, [0.0, 2.0, 2.0], "ties")


@step(2, "fp32 from three products", "three calls of mma have the same error as fp32",
      "matmul_3xtf32")  # fmt: skip
def product(submission, reference, lesson):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 128, generator=generator)
    b = torch.randn(128, 48, generator=generator)

    def error(a, b) -> float:
        truth = a.double() @ b.double()
        found = submission.matmul_3xtf32(a, b)
        require(found is not None, "matmul_3xtf32 returned None", "no_return")
        return ((found - truth).norm() / truth.norm()).item()

    submission.CALLS.clear()
    relative, calls = error(a, b), len(submission.CALLS)
    require(calls, "matmul_3xtf32 did not call mma", "no_mma")
    wrong_calls = submission.CALLS.count(False)
    require_equal("calls of mma with numbers that are not TF32", wrong_calls, 0, "not_tf32")
    require_equal("relative error", relative, at_most(0.1), "wrong_product")
    require_equal("calls of mma", calls, at_most(3), "four_products")
    if relative > 2e-6:  # which of the matrices loses its small part?
        # in each of the two cases, only one of the matrices has a small part
        errors = error(a, reference.to_tf32(b)), error(reference.to_tf32(a), b)
        lost = sum(each > 2e-6 for each in errors)
        require_equal("relative error", relative, at_most(2e-6),
              "half_split" if lost == 1 else "one_product")  # fmt: skip


def verdict_on(out: torch.Tensor, truth: torch.Tensor) -> str:
    """Return "right", "wrong", or "permuted" if the right numbers are in the wrong places."""
    if (out - truth).abs().max() < 0.05:
        return "right"
    out, truth = (t.flatten().sort().values for t in (out, truth))
    return "permuted" if (out - truth).abs().max() < 0.05 else "wrong"


# stride, padding, dilation
CASES = (1, 0, 1), (1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)


@step(3, "a convolution as a product", "five cases equal torch's, in channels_last",
      "im2col conv2d")  # fmt: skip
def convolution(submission, reference, lesson):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 8, 9, generator=generator)
    x_last = x.to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3, generator=generator)

    def words(kernel: int, case: tuple[int, int, int]) -> str:
        names = zip(("stride", "padding", "dilation"), case, strict=True)
        return f"kernel {kernel}, " + ", ".join(f"{name} {value}" for name, value in names)

    def compare(x: torch.Tensor, kernel: int, case: tuple[int, int, int]) -> None:
        """Raise `Wrong` unless im2col returns the right rows and sizes for this case."""
        found = submission.im2col(x, kernel, *case)
        where = words(kernel, case)
        is_triple = isinstance(found, (tuple, list)) and len(found) == 3
        require(is_triple, f"im2col returned {type(found).__name__}", "three")
        (rows, *size), (wanted, *true) = found, reference.im2col(x, kernel, *case)
        what = f"ho and wo for {where}, and x of 8 × 9: {size}; they should be {true}"
        require(size == true and all(isinstance(each, int) for each in size), what, "size")
        shape = list(wanted.shape)
        what = f"the shape of the rows for {where}: {list(rows.shape)}; it should be {shape}"
        require(list(rows.shape) == shape, what, "rows")
        if torch.equal(rows, wanted):
            return
        what = f"the rows for {where} do not contain the right numbers of x"
        sorted_wanted, sorted_rows = (each.sort(1).values for each in (wanted, rows))
        if torch.equal(sorted_rows, sorted_wanted):
            require(False, what, "order")
        if torch.equal(rows.unique(dim=0), wanted.unique(dim=0)):
            require(False, what, "pixels")
        require(False, what, "dilation" if case[2] > 1 else "rows")

    for case in CASES:
        compare(x_last, 3, case)
    try:
        compare(x, 2, (2, 1, 1))
    except Exception as error:
        what = f"the rows for {words(2, (2, 1, 1))} are wrong: {error}"
        require(False, what, "kernel")

    submission.im2col = reference.im2col
    submission.mma = real = reference.mma
    products = []

    def mma(*args, **kwargs) -> torch.Tensor:
        products.append(real(*args, **kwargs))
        return products[-1]

    submission.mma = mma
    for case in CASES:
        submission.CALLS.clear(), products.clear()
        out, truth = submission.conv2d(x_last, weight, *case), F.conv2d(x, weight, None, *case)
        where = f"for {words(3, case)}"
        require(out is not None, "conv2d returned None", "no_return")
        what = "mma was called with numbers that are not TF32"
        require(all(submission.CALLS), what, "not_tf32")
        require_equal(f"calls of mma {where}", len(submission.CALLS), 1, "calls")
        shape, wanted = list(out.shape), list(truth.shape)
        if sorted(shape) == sorted(wanted):
            require_equal(f"the shape of the result {where}", shape, wanted, "format")
        require_equal(f"the shape of the result {where}", shape, wanted, "arguments")
        verdict = verdict_on(out, truth)
        require(verdict != "permuted", f"{where}, the pixels are in wrong places", "format")
        what = f"{where}, the result differs from the result of torch"
        require(verdict == "right", what, "weight_order")
        is_last = out.is_contiguous(memory_format=torch.channels_last)
        require(is_last, f"{where}, the result is not in channels_last", "format")
        is_view = out.untyped_storage().data_ptr() == products[0].untyped_storage().data_ptr()
        what = f"{where}, the result is not in the memory of the tensor that mma returned"
        require(is_view, what, "copied")


@step(4, "tiles and waves", "the larger tile if it fills the device, and otherwise the smaller",
      "best_tile")  # fmt: skip
def tiles(submission, reference, lesson):
    def best(m: int, n: int, tiles: list, sms: int) -> tuple:
        found = submission.best_tile(m, n, tiles, sms)
        is_pair = isinstance(found, (tuple, list)) and len(found) == 2 and found[0] in tiles
        is_pair = is_pair and isinstance(found[1], (int, float))
        require(is_pair, f"best_tile returned {found}", "pair")
        return found[0].m, round(found[1], 3)

    def rate(m: int, n: int, tile: tuple, sms: int, wanted: float, hint: str) -> None:
        found = best(m, n, [reference.Tile(*tile)], sms)[1]
        what = f"the rate of a product of {m} × {n} on {sms} multiprocessor{'s' * (sms > 1)}, "
        what += f"with a tile of {tile[0]} × {tile[1]} whose share is {tile[2]:g}"
        require_equal(what, found, wanted, hint)

    rate(100, 100, (100, 100, 1.0), 1, 1.0, "full")
    rate(100, 100, (100, 100, 1.0), 10, 0.1, "waves")
    rate(1500, 100, (100, 100, 1.0), 10, 0.75, "waves")
    rate(101, 1000, (100, 100, 1.0), 5, 0.505, "edge")
    rate(1000, 101, (100, 100, 1.0), 5, 0.505, "edge")
    rate(200, 100, (200, 100, 1.0), 1, 1.0, "sides")
    both = [
        reference.Tile(64, 64, 0.5),
        reference.Tile(256, 128, 0.9),
        reference.Tile(256, 32, 0.6),
    ]
    found = [best(n, n, both, 132) for n in (4096, 512)]
    heights, rates = zip(*found, strict=True)
    require_equal("heights of the best tiles for 4096 and 512", heights, (256, 64), "share")
    require_equal("rates of the best tiles for 4096 and 512", rates, (0.873, 0.242), "share")


@step(5, "the fastest algorithm that is permitted", "each case is measured only once",
      "Chooser", crashes=NO_RETURN | {r"min\(\)": "none_permitted"})  # fmt: skip
def choice(submission, reference, lesson):
    now, runs, clock_calls = [0.0], [], []

    def clock() -> float:
        clock_calls.append(len(runs))
        return now[0]

    def algorithm(name: str, *times: float, workspace: int = 0, deterministic: bool = True):
        """Return an algorithm whose runs last these times. Further runs last the last time."""
        remaining = list(times)

        def run() -> None:
            runs.append(name)
            now[0] += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return reference.Algorithm(name, workspace, deterministic, run)

    def choose(chooser, x, weight, candidates: list) -> str:
        found = chooser.choose(x, weight, candidates)
        is_known = found is None or any(found is each for each in candidates)
        require(is_known, f"choose returned {found!r}", "no_algorithm")
        return "None" if found is None else found.name

    def chooser(**options):
        return submission.Chooser(clock, limit=100, **options)

    x, weight = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)
    plain, quick = algorithm("plain", 3.0), algorithm("quick", 2.0)
    random_quick = algorithm("quick", 2.0, deterministic=False)

    def chosen(other, **options) -> str:
        runs.clear(), clock_calls.clear()
        return choose(chooser(**options), x, weight, [plain, other])

    fact = "the choice between plain, 3 s, and quick, "
    found = chosen(quick)
    require(found != "None", f"{fact}2 s: None; it should be quick", "no_return")
    require(clock_calls, f"{fact}2 s, was made without a call of self.clock()", "clock")
    require_equal(f"{fact}2 s", found, "quick", "slower")
    counts = {name: runs.count(name) for name in ("plain", "quick")}
    runs_fact = "the number of runs of each algorithm"
    require_equal(runs_fact, counts, {"plain": 4, "quick": 4}, "runs")
    found = chosen(algorithm("quick", 2.0, workspace=101))
    require_equal(f"{fact}2 s, which needs 101 bytes of 100", found, "plain", "workspace")
    count = runs.count("quick")
    require_equal(
        "the number of runs of quick, which needs 101 bytes of 100", count, 0, "workspace"
    )
    found = chosen(algorithm("quick", 2.0, workspace=100))
    require_equal(f"{fact}2 s, which needs 100 bytes of 100", found, "quick", "workspace")
    found = chosen(random_quick, deterministic=True)
    what = f"{fact}2 s, which is not deterministic although it must be"
    require_equal(what, found, "plain", "nondeterministic")
    for first, last in ((2.0, 9.0), (9.0, 2.0)):
        found = chosen(algorithm("quick", 2.0, first, 9.0, last))
        require_equal(
            f"{fact}whose runs take 2, {first:g}, 9 and {last:g} s", found, "quick", "slow_run"
        )
    found = choose(chooser(deterministic=True), x, weight, [random_quick])
    require_equal("the choice if no candidate is permitted", found, "None", "none_permitted")

    one = chooser()
    choose(one, x, weight, [plain, quick])
    runs.clear()
    choose(one, x.clone(), weight, [plain, quick])
    require_equal("runs for a case that was measured before", len(runs), 0, "again")
    new = {
        "shape of x": (x.reshape(2, 4, 4, 16), weight), "dtype of x": (x.double(), weight),
        "memory format of x": (x.to(memory_format=torch.channels_last), weight),
        "shape of the weight": (x, weight[:2]),
    }  # fmt: skip
    for name, case in new.items():
        runs.clear()
        choose(one, *case, [plain, quick])
        require(runs, f"a different {name} was not measured", "key")
    flag, found = chooser(), []
    for flag.deterministic in (False, True, False):
        runs.clear()
        found.append(choose(flag, x, weight, [plain, random_quick]))
    what = "the choices if deterministic is False, then True, then False"
    require_equal(what, found, ["quick", "plain", "quick"], "key")
    fact = "runs for the third choice, whose case was measured before"
    require_equal(fact, len(runs), 0, "again")
