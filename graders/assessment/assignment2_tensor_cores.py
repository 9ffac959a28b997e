"""The steps of assignment 2: rounding, products, a convolution, tiles, a choice."""

import torch
from torch.nn import functional as F

from graders.tools import Lab, Passes, at_most, check

HINTS = {
    "truncated": "Bits that are cut off lose half a unit on the average, always towards zero. "
    "Add half of what goes before you mask.",
    "ties": "Halfway between two TF32 numbers the even one is taken, whose last bit is 0. "
    "Adding 0x1000 always rounds such a number away from zero.",
    "bits_left": "The result still has more than 10 bits of mantissa: 13 must be 0.",
    "too_coarse": "The result has fewer than 10 bits. TF32 has the mantissa of fp16, and not "
    "that of bf16.",
    "not_tf32": "mma was given numbers that are not TF32. On tensor cores it would drop the "
    "rest of their bits, and so lose what you meant to keep: round the small part, too.",
    "no_mma": "mma was not called: the product is that of the fp32 units.",
    "one_product": "The error is that of TF32: the small parts have to be multiplied, each "
    "with the other's large part.",
    "half_split": "Only one of the operands is split. Both lose bits.",
    "four_products": "Small times small is no more than the rounding of the sum: three are "
    "enough.",
    "wrong_product": "The product is far off: large·large + large·small + small·large.",
    "size": "ho = (h + 2·padding - dilation·(kernel - 1) - 1) // stride + 1, and wo likewise.",
    "rows": "The rows hold other numbers than x has in these places. They are not rounded yet.",
    "order": "The rows hold the right numbers in another order: c must vary fastest.",
    "weight_order": "The rows are right and the result is not: permute the weight, too, so "
    "that c varies fastest in it.",
    "dilation": "With dilation the places of the kernel lie `dilation` apart.",
    "format": "The product's rows are already the pixels, k numbers each. View them as "
    "[n, ho, wo, k] and permute: no contiguous().",
    "calls": "One call of mma does it, for the whole batch.",
    "waves": "The last wave takes as long as a full one, however few tiles it has: round the "
    "number of waves up.",
    "edge": "A tile over the edge costs as much as any: round the number of tiles up in each "
    "dimension.",
    "share": "A small tile fits better and reaches less of the peak: multiply by its share.",
    "again": "A case that was measured is measured again.",
    "key": "Two cases that deserve an answer each share one: shape, dtype, memory format, the "
    "weight's shape and whether it must be deterministic belong into the key.",
    "workspace": "The algorithm needs more workspace than the limit.",
    "nondeterministic": "It must be deterministic: skip what is not.",
    "cold": "The first run of an algorithm loads its kernel. Do not time it.",
    "slow_run": "One slow run decided. The smallest of three times counts.",
    "other": "The numbers fit no common mistake. Print what differs.",
}  # fmt: skip
LAB = Lab(HINTS)


@LAB.alone(1, "round to TF32", "half a unit at most, ties to even", "to_tf32")
def rounding(theirs, ours, lesson):
    unit = 2.0**-10
    x = torch.cat([torch.randn(4096), torch.tensor([3.0e38, 1e-30, 0.0])])
    found = theirs.to_tf32(x)
    left = bool((found.view(torch.int32) & 0x1FFF).any())
    check("bits below the tenth", left, False, "bits_left")
    low = theirs.to_tf32(torch.tensor([1 + 0.75 * unit, -1 - 0.75 * unit])).tolist()
    units = [(v - v / abs(v)) / unit for v in low]
    check("1 + ¾ unit, and its negative", units, [1.0, -1.0], "truncated")
    relative = ((found - x).abs() / x.abs().clamp(1e-37)).max().item()
    check("largest relative error", relative, at_most(2.0**-11), "too_coarse")
    ties = theirs.to_tf32(torch.tensor([1 + 0.5 * unit, 1 + 1.5 * unit, 1 + 2.5 * unit]))
    units = ((ties - 1) / unit).tolist()
    check("1 + ½, 1½, 2½ units round to these units", units, [0.0, 2.0, 2.0], "ties")


@LAB.alone(2, "fp32 from three products", "the error is that of fp32, by three calls of mma",
           "matmul_3xtf32")  # fmt: skip
def product(theirs, ours, lesson):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 128, generator=generator)
    b = torch.randn(128, 48, generator=generator)

    def error(a, b) -> float:
        truth = a.double() @ b.double()
        return ((theirs.matmul_3xtf32(a, b) - truth).norm() / truth.norm()).item()

    theirs.CALLS.clear()
    relative, calls = error(a, b), len(theirs.CALLS)
    check("calls of mma", calls, Passes("three", lambda calls: calls > 0), "no_mma")
    check("all operands were TF32", all(theirs.CALLS), True, "not_tf32")
    check("relative error", relative, at_most(0.1), "wrong_product")
    check("calls of mma", calls, at_most(3), "four_products")
    one = {"a": error(a, ours.to_tf32(b)), "b": error(ours.to_tf32(a), b)}
    lost = [name for name, e in one.items() if e > 2e-6]
    none = Passes("none", lambda lost: len(lost) != 1)
    check("small parts that are lost", lost, none, "half_split")
    check("relative error", relative, at_most(2e-6), "one_product")


def how_right(out: torch.Tensor, truth: torch.Tensor) -> str:
    """Whether a tensor is another, or has its numbers in other places."""
    if out.shape == truth.shape and (out - truth).abs().max() < 0.05:
        return "right"
    ours, theirs = (t.flatten().sort().values for t in (truth, out))
    alike = out.numel() == truth.numel() and (ours - theirs).abs().max() < 0.05
    return "elsewhere" if alike else "wrong"


CASES = ((1, 0, 1), (1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2))
SIZES = [[6, 7], [8, 9], [4, 5], [8, 9], [2, 3]]


@LAB.alone(3, "a convolution as a product", "five cases equal torch's, in channels_last",
           "im2col conv2d")  # fmt: skip
def convolution(theirs, ours, lesson):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 8, 9, generator=generator).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3, generator=generator)
    sizes, equal, sorted_equal = [], [], []
    for case in CASES:
        rows, *size = theirs.im2col(x, 3, *case)
        wanted, *_ = ours.im2col(x, 3, *case)
        sizes.append(size)
        alike = rows.shape == wanted.shape
        equal.append(alike and torch.equal(rows, wanted))
        alike = alike and torch.equal(rows.sort(1).values, wanted.sort(1).values)
        sorted_equal.append(alike)
    near, wide = all(sorted_equal[:3]), all(sorted_equal[3:])
    check("ho and wo of five cases", sizes, SIZES, "size")
    check("rows hold the right numbers, without dilation", near, True, "rows")
    check("rows hold the right numbers, with dilation", wide, True, "dilation")
    check("rows are in order", all(equal), True, "order")
    theirs.im2col = ours.im2col
    right = []
    for case in CASES:
        theirs.CALLS.clear()
        out, truth = theirs.conv2d(x, weight, *case), F.conv2d(x, weight, None, *case)
        right.append(how_right(out, truth))
    check("operands are TF32", all(theirs.CALLS), True, "not_tf32")
    check("products", len(theirs.CALLS), 1, "calls")
    how = next((how for how in right if how != "right"), "right")
    in_place = Passes("right", lambda found: found != "elsewhere")
    check("the convolution is", how, in_place, "format")
    check("the convolution is", how, "right", "weight_order")
    last = out.is_contiguous(memory_format=torch.channels_last)
    check("the result is channels_last", last, True, "format")


@LAB.alone(4, "tiles and waves", "the larger tile where it fills the device, else the smaller",
           "best_tile")  # fmt: skip
def tiles(theirs, ours, lesson):
    def rate(m: int, sms: int) -> float:
        return round(theirs.best_tile(m, 100, [theirs.Tile(100, 100, 1.0)], sms)[1], 3)

    one = "rate of one tile of 100 by a tile of 100 on 10 multiprocessors"
    check(one, rate(100, 10), 0.1, "waves")
    two = "rate of 101 × 100 by tiles of 100 on 1 multiprocessor"
    check(two, rate(101, 1), 0.505, "edge")
    both = [theirs.Tile(64, 64, 0.5), theirs.Tile(256, 128, 0.9)]
    found = [theirs.best_tile(n, n, both, 132) for n in (4096, 512)]
    check("tiles for 4096 and 512", [tile.m for tile, _ in found], [256, 64], "share")
    check("rates for 4096 and 512", [round(r, 3) for _, r in found], [0.873, 0.242], "share")


@LAB.alone(5, "the fastest that is permitted", "one measurement for each case, and no more",
           "Chooser")  # fmt: skip
def choice(theirs, ours, lesson):
    now, runs = [0.0], []

    def algorithm(name: str, *times: float, workspace: int = 0, deterministic: bool = True):
        """An algorithm whose runs take these times, the last of them from then on."""
        left = list(times)

        def run() -> None:
            runs.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return theirs.Algorithm(name, workspace, deterministic, run)

    def chooser(**options):
        return theirs.Chooser(lambda: now[0], limit=100, **options)

    x, weight = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)
    plain, quick = algorithm("plain", 3.0), algorithm("quick", 2.0)
    chancy = algorithm("quick", 2.0, deterministic=False)

    def chosen(other, **options) -> str:
        best = chooser(**options).choose(x, weight, [plain, other])
        return best.name if best else "none"

    found = chosen(algorithm("quick", 2.0, workspace=101))
    check("if the quick one wants 101 bytes of 100", found, "plain", "workspace")
    found = chosen(chancy, deterministic=True)
    check("if it must be deterministic", found, "plain", "nondeterministic")
    found = chosen(algorithm("quick", 9.0, 2.9, 2.8, 2.9))
    check("if the quick one's first run takes 9 s", found, "quick", "cold")
    found = chosen(algorithm("quick", 2.0, 2.0, 9.0, 2.0))
    check("if one of its runs takes 9 s", found, "quick", "slow_run")
    check("of 3 s and 2 s", chosen(quick), "quick", "other")

    one = chooser()
    one.choose(x, weight, [plain, quick])
    runs.clear()
    one.choose(x.clone(), weight, [plain, quick])
    check("runs for a case that is known", len(runs), 0, "again")
    new = {
        "shape": (x[:1], weight), "dtype": (x.double(), weight),
        "format": (x.to(memory_format=torch.channels_last), weight),
        "weight": (x, weight[:2]),
    }  # fmt: skip
    measured = []
    for name, case in new.items():
        runs.clear()
        one.choose(*case, [plain, quick])
        measured += [name] if runs else []
    check("measured anew for another", measured, list(new), "key")
    flag, found = chooser(), []
    for flag.deterministic in (False, True, False):
        found.append(flag.choose(x, weight, [plain, chancy]).name)
    check("not deterministic, deterministic, not", found, ["quick", "plain", "quick"], "key")
