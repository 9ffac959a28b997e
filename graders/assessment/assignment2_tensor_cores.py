"""The steps of assignment 2: rounding, products, a convolution, tiles, a choice."""

import functools

import torch
from torch.nn import functional as F

from graders.dsl import Lab, at_most, require, require_equal

LAB = Lab()
NO_RETURN = {"'NoneType'|cannot unpack non-iterable NoneType": "no_return"}
step = functools.partial(LAB.alone, crashes=NO_RETURN)


@step(1, "round to TF32", "half a unit at most, ties to even", "to_tf32")
def rounding(submission, reference, lesson):
    unit = 2.0**-10

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        given = numbers.clone()
        found = submission.to_tf32(given)
        require(found is not None, "to_tf32 returned None", "no_return")
        require(torch.equal(given, numbers), "the call changed the numbers in x", "changes_x")
        what = f"x has the shape {list(numbers.shape)}, and the result has {list(found.shape)}"
        require(found.shape == numbers.shape, what, "shape")
        return found

    x = torch.randn(64, 64)
    found = rounded(x)
    fp32 = found.dtype == torch.float32
    wide = ((found - x).abs() / x.abs()).max().item() if fp32 else torch.inf
    what = f"the result is {found.dtype}, and its largest relative error is {wide:.3g}"
    require(wide < 2.0**-6, what, "not_viewed")
    extreme = torch.tensor([3.0e38, 1e-30, 0.0])
    error = (rounded(extreme) - extreme).abs() / extreme.clamp(1e-37)
    what = "the largest relative error for the numbers 3e38, 1e-30 and 0"
    require_equal(what, error.max().item(), at_most(2.0**-6), "range")
    left = (found.view(torch.int32) & 0x1FFF).bool().sum().item()
    require_equal(
        "number of the 4096 results that have more than 10 bits", left, 0, "bits_left"
    )
    exact = x.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)
    off = (rounded(exact) != exact).sum().item()
    require_equal("number of the 4096 numbers with 10 bits that change", off, 0, "too_coarse")

    def units(*steps: float) -> list[float]:
        """What 1 + this many units of the tenth bit become, in the same units."""
        given = torch.tensor([1 + abs(n) * unit for n in steps])
        signs = torch.tensor([-1.0 if n < 0 else 1.0 for n in steps])
        return ((rounded(signs * given) * signs - 1) / unit * signs).tolist()

    low = units(0.75, -0.75)
    require_equal(
        "1 + 0.75 units and its negative, in units from ±1", low, [1.0, -1.0], "truncated"
    )
    ties = units(0.5, 1.5, 2.5)
    require_equal("1 + 0.5, 1.5 and 2.5 units, in units from 1", ties, [0.0, 2.0, 2.0], "ties")


@step(2, "fp32 from three products", "the error is that of fp32, by three calls of mma",
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
    rest = submission.CALLS.count(False)
    require_equal("calls of mma with numbers that are not TF32", rest, 0, "not_tf32")
    require_equal("relative error", relative, at_most(0.1), "wrong_product")
    require_equal("calls of mma", calls, at_most(3), "four_products")
    if relative > 2e-6:  # which of the matrices loses its small part?
        one = error(a, reference.to_tf32(b)), error(reference.to_tf32(a), b)
        lost = sum(each > 2e-6 for each in one)
        require_equal("relative error", relative, at_most(2e-6),
              "half_split" if lost == 1 else "one_product")  # fmt: skip


def how_right(out: torch.Tensor, truth: torch.Tensor) -> str:
    """Whether a tensor is right, has the right numbers in other places, or is wrong."""
    if (out - truth).abs().max() < 0.05:
        return "right"
    reference, submission = (t.flatten().sort().values for t in (truth, out))
    return "elsewhere" if (reference - submission).abs().max() < 0.05 else "wrong"


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
        """Raise `Wrong` unless im2col gives the rows for this case."""
        found = submission.im2col(x, kernel, *case)
        where = words(kernel, case)
        good = isinstance(found, (tuple, list)) and len(found) == 3
        require(good, f"im2col returned {type(found).__name__}", "three")
        (rows, *size), (wanted, *true) = found, reference.im2col(x, kernel, *case)
        what = f"ho and wo for {where}, and x of 8 × 9: {size}; they should be {true}"
        require(size == true and all(isinstance(each, int) for each in size), what, "size")
        shape = list(wanted.shape)
        what = f"the shape of the rows for {where}: {list(rows.shape)}; it should be {shape}"
        require(list(rows.shape) == shape, what, "rows")
        if torch.equal(rows, wanted):
            return
        what = f"the rows for {where} are not those of x"
        ours_sorted, sorted_rows = (each.sort(1).values for each in (wanted, rows))
        if torch.equal(sorted_rows, ours_sorted):
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
        require(all(submission.CALLS), "mma was given numbers that are not TF32", "not_tf32")
        require_equal(f"calls of mma {where}", len(submission.CALLS), 1, "calls")
        shape, wanted = list(out.shape), list(truth.shape)
        if sorted(shape) == sorted(wanted):
            require_equal(f"the shape of the result {where}", shape, wanted, "format")
        require_equal(f"the shape of the result {where}", shape, wanted, "arguments")
        how = how_right(out, truth)
        require(how != "elsewhere", f"{where}, the pixels are in other places", "format")
        require(how == "right", f"{where}, the result is not that of torch", "weight_order")
        last = out.is_contiguous(memory_format=torch.channels_last)
        require(last, f"{where}, the result is not in channels_last", "format")
        same = out.untyped_storage().data_ptr() == products[0].untyped_storage().data_ptr()
        require(same, f"{where}, the result is not the memory that mma returned", "copied")


@step(4, "tiles and waves", "the larger tile where it fills the device, else the smaller",
      "best_tile")  # fmt: skip
def tiles(submission, reference, lesson):
    def best(m: int, n: int, tiles: list, sms: int) -> tuple:
        found = submission.best_tile(m, n, tiles, sms)
        good = isinstance(found, (tuple, list)) and len(found) == 2 and found[0] in tiles
        good = good and isinstance(found[1], (int, float))
        require(good, f"best_tile returned {found}", "pair")
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


@step(5, "the fastest that is permitted", "one measurement for each case, and no more",
      "Chooser", crashes=NO_RETURN | {r"min\(\)": "none_permitted"})  # fmt: skip
def choice(submission, reference, lesson):
    now, runs, looks = [0.0], [], []

    def clock() -> float:
        looks.append(len(runs))
        return now[0]

    def algorithm(name: str, *times: float, workspace: int = 0, deterministic: bool = True):
        """An algorithm whose runs take these times, the last of them from then on."""
        left = list(times)

        def run() -> None:
            runs.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return reference.Algorithm(name, workspace, deterministic, run)

    def choose(chooser, x, weight, candidates: list) -> str:
        found = chooser.choose(x, weight, candidates)
        good = found is None or any(found is each for each in candidates)
        require(good, f"choose returned {found!r}", "no_algorithm")
        return "None" if found is None else found.name

    def chooser(**options):
        return submission.Chooser(clock, limit=100, **options)

    x, weight = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)
    plain, quick = algorithm("plain", 3.0), algorithm("quick", 2.0)
    chancy = algorithm("quick", 2.0, deterministic=False)

    def chosen(other, **options) -> str:
        runs.clear(), looks.clear()
        return choose(chooser(**options), x, weight, [plain, other])

    fact = "the choice between plain, 3 s, and quick, "
    found = chosen(quick)
    require(found != "None", f"{fact}2 s: None; it should be quick", "no_return")
    require(looks, f"{fact}2 s, was made without a call of self.clock()", "clock")
    require_equal(f"{fact}2 s", found, "quick", "slower")
    times = {name: runs.count(name) for name in ("plain", "quick")}
    require_equal("the number of runs of each", times, {"plain": 4, "quick": 4}, "runs")
    found = chosen(algorithm("quick", 2.0, workspace=101))
    require_equal(f"{fact}2 s, which needs 101 bytes of 100", found, "plain", "workspace")
    forbidden = runs.count("quick")
    require_equal(
        "the number of runs of quick, which needs 101 bytes of 100", forbidden, 0, "workspace"
    )
    found = chosen(algorithm("quick", 2.0, workspace=100))
    require_equal(f"{fact}2 s, which needs 100 bytes of 100", found, "quick", "workspace")
    found = chosen(chancy, deterministic=True)
    require_equal(
        f"{fact}2 s, not deterministic, which it must be", found, "plain", "nondeterministic"
    )
    for first, last in ((2.0, 9.0), (9.0, 2.0)):
        found = chosen(algorithm("quick", 2.0, first, 9.0, last))
        require_equal(
            f"{fact}whose runs take 2, {first:g}, 9 and {last:g} s", found, "quick", "slow_run"
        )
    found = choose(chooser(deterministic=True), x, weight, [chancy])
    require_equal("the choice if no candidate is permitted", found, "None", "none_permitted")

    one = chooser()
    choose(one, x, weight, [plain, quick])
    runs.clear()
    choose(one, x.clone(), weight, [plain, quick])
    require_equal("runs for a case that is known", len(runs), 0, "again")
    new = {
        "shape of x": (x.reshape(2, 4, 4, 16), weight), "dtype of x": (x.double(), weight),
        "memory format of x": (x.to(memory_format=torch.channels_last), weight),
        "shape of the weight": (x, weight[:2]),
    }  # fmt: skip
    for name, case in new.items():
        runs.clear()
        choose(one, *case, [plain, quick])
        require(runs, f"another {name} was not measured", "key")
    flag, found = chooser(), []
    for flag.deterministic in (False, True, False):
        runs.clear()
        found.append(choose(flag, x, weight, [plain, chancy]))
    what = "the choices if deterministic is False, then True, then False"
    require_equal(what, found, ["quick", "plain", "quick"], "key")
    require_equal("runs for the third of these, which is known", len(runs), 0, "again")
