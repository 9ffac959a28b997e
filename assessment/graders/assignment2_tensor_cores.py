"""The steps of assignment 2: rounding, products, a convolution, tiles, a choice."""

import functools

import torch
from graders._compare import alone, below, borrow, finished, that
from graders.runner import Lesson
from torch.nn import functional as F

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
NAME = "assignment2_tensor_cores"
OURS = finished(NAME)
SOLVED = "to_tf32 matmul_3xtf32 im2col conv2d best_tile Chooser.choose"


def probe_rounding(lesson: Lesson) -> None:
    rounded = lesson.module.to_tf32
    unit = 2.0**-10
    x = torch.cat([torch.randn(4096), torch.tensor([3.0e38, 1e-30, 0.0])])
    found = rounded(x)
    lesson.fact("bits below the tenth", bool((found.view(torch.int32) & 0x1FFF).any()))
    relative = ((found - x).abs() / x.abs().clamp(1e-37)).max().item()
    lesson.fact("largest relative error", relative)
    low = rounded(torch.tensor([1 + 0.75 * unit, -1 - 0.75 * unit])).tolist()
    lesson.fact("1 + ¾ unit, and its negative", [(v - v / abs(v)) / unit for v in low])
    ties = rounded(torch.tensor([1 + 0.5 * unit, 1 + 1.5 * unit, 1 + 2.5 * unit]))
    lesson.fact("1 + ½, 1½, 2½ units round to these units", ((ties - 1) / unit).tolist())


def probe_product(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "matmul_3xtf32")
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 128, generator=generator)
    b = torch.randn(128, 48, generator=generator)
    coarse_a, coarse_b = OURS.to_tf32(a), OURS.to_tf32(b)

    def error(a, b) -> float:
        truth = a.double() @ b.double()
        return ((module.matmul_3xtf32(a, b) - truth).norm() / truth.norm()).item()

    module.CALLS.clear()
    lesson.fact("relative error", error(a, b))
    lesson.fact("all operands were TF32", all(module.CALLS))
    lesson.fact("calls of mma", len(module.CALLS))
    lost = {"a": error(a, coarse_b), "b": error(coarse_a, b)}
    lesson.fact("small parts that are lost", [name for name, e in lost.items() if e > 2e-6])


def how_right(out: torch.Tensor, truth: torch.Tensor) -> str:
    """Whether a tensor is another, or has its numbers in other places."""
    if out.shape == truth.shape and (out - truth).abs().max() < 0.05:
        return "right"
    ours, theirs = (t.flatten().sort().values for t in (truth, out))
    alike = out.numel() == truth.numel() and (ours - theirs).abs().max() < 0.05
    return "elsewhere" if alike else "wrong"


CASES = ((1, 0, 1), (1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2))


def probe_convolution(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "im2col conv2d")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 8, 9, generator=generator).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3, generator=generator)
    sizes, rows_right, sorted_right, right = [], [], [], []
    for case in CASES:
        rows, *size = module.im2col(x, 3, *case)
        wanted, *_ = OURS.im2col(x, 3, *case)
        sizes.append(size)
        same = rows.shape == wanted.shape
        rows_right.append(same and torch.equal(rows, wanted))
        alike = same and torch.equal(rows.sort(1).values, wanted.sort(1).values)
        sorted_right.append(alike)
    lesson.fact("ho and wo of five cases", sizes)
    lesson.fact("rows hold the right numbers, without dilation", all(sorted_right[:3]))
    lesson.fact("rows hold the right numbers, with dilation", all(sorted_right[3:]))
    lesson.fact("rows are in order", all(rows_right))
    borrow(module, OURS, SOLVED, "conv2d")
    for case in CASES:
        module.CALLS.clear()
        out, truth = module.conv2d(x, weight, *case), F.conv2d(x, weight, None, *case)
        right.append(how_right(out, truth))
    lesson.fact("the convolution is", next((how for how in right if how != "right"), "right"))
    lesson.fact("operands are TF32", all(module.CALLS))
    lesson.fact("products", len(module.CALLS))
    last = out.is_contiguous(memory_format=torch.channels_last)
    lesson.fact("the result is channels_last", last)


def probe_tiles(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "best_tile")
    tile = module.Tile
    lesson.fact("rate of one tile of 100 by a tile of 100 on 10 multiprocessors",
                round(module.best_tile(100, 100, [tile(100, 100, 1.0)], 10)[1], 3))  # fmt: skip
    lesson.fact("rate of 101 × 100 by tiles of 100 on 1 multiprocessor",
                round(module.best_tile(101, 100, [tile(100, 100, 1.0)], 1)[1], 3))  # fmt: skip
    large, small = tile(256, 128, 0.9), tile(64, 64, 0.5)
    rates = [module.best_tile(n, n, [small, large], 132) for n in (4096, 512)]
    lesson.fact("tiles for 4096 and 512", [t.m for t, _ in rates])
    lesson.fact("rates for 4096 and 512", [round(r, 3) for _, r in rates])


def probe_choice(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "Chooser.choose")
    now, runs = [0.0], []

    def algorithm(name: str, *times: float, workspace: int = 0, deterministic: bool = True):
        """An algorithm whose runs take these times, the last of them from then on."""
        left = list(times)

        def run() -> None:
            runs.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return module.Algorithm(name, workspace, deterministic, run)

    def chooser(**options):
        return module.Chooser(lambda: now[0], limit=100, **options)

    x, weight = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)

    def choice(*candidates, **options) -> str:
        best = chooser(**options).choose(x, weight, list(candidates))
        return best.name if best else "none"

    plain = algorithm("plain", 3.0)
    lesson.fact("of 3 s and 2 s", choice(plain, algorithm("quick", 2.0)))
    lesson.fact("if the quick one wants 101 bytes of 100",
                choice(plain, algorithm("quick", 2.0, workspace=101)))  # fmt: skip
    quick = algorithm("quick", 2.0, deterministic=False)
    lesson.fact("if it must be deterministic", choice(plain, quick, deterministic=True))
    lesson.fact("if the quick one's first run takes 9 s",
                choice(plain, algorithm("quick", 9.0, 2.9, 2.8, 2.9)))  # fmt: skip
    lesson.fact("if one of its runs takes 9 s",
                choice(plain, algorithm("quick", 2.0, 2.0, 9.0, 2.0)))  # fmt: skip
    one = chooser()
    candidates = [plain, algorithm("quick", 2.0)]
    one.choose(x, weight, candidates)
    runs.clear()
    one.choose(x.clone(), weight, candidates)
    lesson.fact("runs for a case that is known", len(runs))
    new = {
        "shape": (x[:1], weight), "dtype": (x.double(), weight),
        "format": (x.to(memory_format=torch.channels_last), weight),
        "weight": (x, weight[:2]),
    }  # fmt: skip
    measured = []
    for name, case in new.items():
        runs.clear()
        one.choose(*case, candidates)
        measured += [name] if runs else []
    lesson.fact("measured anew for another", measured)
    flag, candidates = chooser(), [plain, quick]
    found = []
    for flag.deterministic in (False, True, False):
        found.append(flag.choose(x, weight, candidates).name)
    lesson.fact("not deterministic, deterministic, not", found)


step = functools.partial(alone, HINTS)
STEPS = [
    step(
        1, "round to TF32", "half a unit at most, ties to even", probe_rounding, "to_tf32",
        ("bits below the tenth", False, "bits_left"),
        ("1 + ¾ unit, and its negative", [1.0, -1.0], "truncated"),
        ("largest relative error", below(2.0**-11), "too_coarse"),
        ("1 + ½, 1½, 2½ units round to these units", [0.0, 2.0, 2.0], "ties"),
    ),
    step(
        2, "fp32 from three products", "the error is that of fp32, by three calls of mma",
        probe_product, "matmul_3xtf32",
        ("calls of mma", that("three", lambda calls: calls > 0), "no_mma"),
        ("all operands were TF32", True, "not_tf32"),
        ("relative error", below(0.1), "wrong_product"),
        ("calls of mma", below(3), "four_products"),
        ("small parts that are lost", that("none", lambda lost: len(lost) != 1), "half_split"),
        ("relative error", below(2e-6), "one_product"),
    ),
    step(
        3, "a convolution as a product", "five cases equal torch's, in channels_last",
        probe_convolution, "im2col conv2d",
        ("ho and wo of five cases", [[6, 7], [8, 9], [4, 5], [8, 9], [2, 3]], "size"),
        ("rows hold the right numbers, without dilation", True, "rows"),
        ("rows hold the right numbers, with dilation", True, "dilation"),
        ("rows are in order", True, "order"),
        ("operands are TF32", True, "not_tf32"),
        ("products", 1, "calls"),
        ("the convolution is", that("right", lambda found: found != "elsewhere"), "format"),
        ("the convolution is", "right", "weight_order"),
        ("the result is channels_last", True, "format"),
    ),
    step(
        4, "tiles and waves", "the larger tile where it fills the device, else the smaller",
        probe_tiles, "best_tile",
        ("rate of one tile of 100 by a tile of 100 on 10 multiprocessors", 0.1, "waves"),
        ("rate of 101 × 100 by tiles of 100 on 1 multiprocessor", 0.505, "edge"),
        ("tiles for 4096 and 512", [256, 64], "share"),
        ("rates for 4096 and 512", [0.873, 0.242], "share"),
    ),
    step(
        5, "the fastest that is permitted", "one measurement for each case, and no more",
        probe_choice, "Chooser",
        ("if the quick one wants 101 bytes of 100", "plain", "workspace"),
        ("if it must be deterministic", "plain", "nondeterministic"),
        ("if the quick one's first run takes 9 s", "quick", "cold"),
        ("if one of its runs takes 9 s", "quick", "slow_run"),
        ("of 3 s and 2 s", "quick", "other"),
        ("runs for a case that is known", 0, "again"),
        ("measured anew for another", ["shape", "dtype", "format", "weight"], "key"),
        ("not deterministic, deterministic, not", ["quick", "plain", "quick"], "key"),
    ),
]  # fmt: skip
