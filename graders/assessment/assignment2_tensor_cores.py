"""The steps of assignment 2: rounding, products, a convolution, tiles, a choice."""

import functools

import torch
from torch.nn import functional as F

from graders.dsl import Lab, at_most, require, require_equal

HINTS = {
    "no_return": "The function returned None. Does every path of it reach a `return`?",
    "changes_x": "to_tf32 changed the numbers that it was given. A view shares the memory of "
    "x, so do not use operations in place (+=, &=) on it.",
    "shape": "The result must be an fp32 tensor that has the same shape as x.",
    "not_viewed": "The result is not close to x. `view(dtype)` keeps the bits and interprets "
    "them in another way, while `to(dtype)` converts the number. You need view twice, and the "
    "mask must keep the high bits.",
    "range": "TF32 has the exponent of fp32, so large and small numbers must keep their "
    "magnitude. Only bits of the mantissa may be lost.",
    "too_coarse": "The result has fewer than 10 bits of mantissa. TF32 has the mantissa of "
    "fp16, which is longer than that of bf16.",
    "bits_left": "The result has more than 10 bits of mantissa. fp32 has 23 bits, so the "
    "lowest 13 bits must be 0.",
    "truncated": "Your function cuts the low bits off, so every number moves towards zero. To "
    "round to the nearest, add half a unit before you apply the mask.",
    "ties": "A number in the middle between two TF32 numbers must become the even one, whose "
    "last bit is 0. The number that you add before the mask must therefore depend on the last "
    "bit that stays.",
    "not_tf32": "mma was given numbers that are not TF32. Tensor cores would ignore their low "
    "bits. Pass every operand through to_tf32 before mma, also the rest that is left after the "
    "first rounding.",
    "no_mma": "mma was not called, so the product does not use the tensor cores.",
    "one_product": "The error is as large as the error of a single TF32 product. To reduce "
    "it, multiply each small part by the large part of the other matrix.",
    "half_split": "One of the two mixed products is missing. You need the small part of `a` "
    "times the large part of `b`, and the large part of `a` times the small part of `b`.",
    "four_products": "mma was called more than three times. Leave out the product of the two "
    "small parts, because it is no larger than the rounding error of the sum. Three calls of "
    "mma are enough.",
    "wrong_product": "The result is far from a @ b. Most of the value comes from the product "
    "of the two large parts. Check that your code adds this product.",
    "three": "im2col must return three values: the rows, ho and wo.",
    "size": "ho or wo is wrong. With padding, the image has h + 2·padding rows, and a dilated "
    "kernel covers dilation·(kernel - 1) + 1 rows. Count the positions of the kernel if it "
    "moves by `stride` rows. The columns work in the same way. Both results must be ints.",
    "kernel": "The function is right for kernels of 3 × 3 and wrong for another size. Use the "
    "argument `kernel`.",
    "rows": "The rows contain other numbers than x has in these places. Padding must be zero, "
    "and im2col must not round anything.",
    "pixels": "Each row is right, but the rows are in the wrong order. The order of the "
    "pixels must be image, row, column, and the column changes fastest.",
    "order": "Each row contains the right numbers, but in the wrong order. The order within a "
    "row must be kernel row, kernel column, channel, and the channel changes fastest.",
    "dilation": "The rows are right without dilation. With dilation, neighbouring places of "
    "the kernel are `dilation` pixels apart.",
    "arguments": "The result has another shape than that of torch's convolution. Pass the size "
    "of the kernel, stride, padding and dilation to im2col in the order of its parameters.",
    "weight_order": "The rows are right, but the result is wrong. Permute the weight, so that "
    "its numbers have the same order as those of a row: kernel row, kernel column, channel.",
    "format": "Each row of the product is one pixel with its k channels. View the product as "
    "[n, ho, wo, k], and permute it to [n, k, ho, wo] without a copy.",
    "copied": "The result is a copy of the product. If each row of the product is a pixel, a "
    "view and a permutation already give channels_last.",
    "calls": "conv2d must call mma exactly once, for the whole batch.",
    "pair": "best_tile must return two values: the tile, and then its rate as a number.",
    "full": "If one tile of share 1 covers the whole product, and there is one multiprocessor, "
    "the rate is 1. A rate is a fraction, and not a percentage.",
    "waves": "The last wave lasts as long as a full one, even if it has few tiles. Round the "
    "number of waves up, and count all multiprocessors in each wave.",
    "edge": "A tile that extends over the edge costs as much as any other. Round the number of "
    "tiles up in each dimension.",
    "sides": "Divide m by the height of the tile, tile.m, and n by its width, tile.n.",
    "share": "A small tile fits better, but it reaches a smaller share of the peak. Multiply "
    "the rate by tile.share, and choose the tile that has the highest rate.",
    "no_algorithm": "choose must return one of the candidates, which are Algorithm objects, or "
    "None.",
    "none_permitted": "If no candidate is permitted, choose must return None.",
    "again": "choose measured the same case twice. Store the choice for each key, and keep it "
    "while other cases are measured.",
    "key": "Two different cases got the same stored choice. The key must contain the shape, "
    "the dtype and the memory format of x, the shape of the weight, and whether the choice "
    "must be deterministic.",
    "workspace": "An algorithm is permitted if its workspace is at most the limit. A larger "
    "one must neither be chosen nor run.",
    "nondeterministic": "If self.deterministic is set, skip every algorithm that is not "
    "deterministic.",
    "clock": "choose does not measure with self.clock(). Call self.clock() before and after "
    "each timed run.",
    "runs": "A candidate must run four times: once without a measurement, because the first "
    "run loads its kernel, and then three times with a measurement.",
    "slow_run": "One slow run changed the choice. The smallest of the three times counts, and "
    "not their sum or their median.",
    "slower": "The slower algorithm was chosen. Keep the candidate with the smallest time.",
}  # fmt: skip
LAB = Lab(HINTS)
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
