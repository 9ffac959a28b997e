"""The steps of assignment 6: a generator, its numbers, dropout, rounding, int8."""

import functools
import re

import torch
from graders._compare import Watch, alone, below, borrow, finished, import_late_parts, that
from graders.runner import Lesson
from torch import nn
from torch.utils._pytree import tree_leaves

HINTS = {
    "rounds": "Philox4x32-10 has ten rounds.",
    "key": "The first round takes the key as it is, each later one that of the round before "
    "plus WEYL, in 32 bits.",
    "words": "The words change places in each round: hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0.",
    "range": "Take the 24 high bits, for fp32 has no more, and divide by 2^24: else a number "
    "can be 1, or below 0.",
    "low_bits": "The numbers are not those of the high bits: shift by 8.",
    "counter": "The numbers come from other counters: (i // 4, offset), each of 64 bits, the "
    "low word first. The key is the seed.",
    "position": "An element's number depends on where the call begins: element i has word "
    "i % 4 of the counter i // 4, also if `first` is no multiple of 4.",
    "offset": "The offset plays no part, or only 32 bits of it.",
    "seed": "A seed has 64 bits, and its high word is not used.",
    "not_scaled": "What is kept must be divided by 1 - p, so that the mean stays.",
    "share": "The share of zeros is not p: keep where the number is >= p.",
    "stored": "Something as large as x is stored for backward. Draw the mask again.",
    "other_mask": "The gradient has another mask than the output: draw it from the same seed, "
    "offset and place.",
    "first": "A part of the tensor gets another mask than it has in the whole: `first`.",
    "biased": "The mean is not x: up where a uniform number is below the fraction, else down.",
    "moves_integers": "An integer must stay what it is, a large one too: x + u is rounded to "
    "fp32, so compare u with the fraction instead.",
    "one_scale": "One scale for all rows: a row of small numbers becomes zero.",
    "unused": "The largest of a row must become ±127, not less.",
    "wraps": "A number became its opposite: ±128 does not fit. The largest becomes 127.",
    "zero_row": "A row of zeros was divided by zero.",
    "int8_sums": "The sums wrapped around: products of int8 are added up in int32.",
    "dequantized": "The product is computed in floating point. Multiply integers, and scale "
    "afterwards.",
    "scales": "The result has the wrong scale: a row's times a column's, and then the bias.",
    "other": "The numbers fit no common mistake. Compare with the known answers of Random123.",
}  # fmt: skip
OURS = finished("assignment6_random_bits")
import_late_parts()
SOLVED = "philox uniform Dropout.forward Dropout.backward round_by_chance quantize_rows"


def probe_philox(lesson: Lesson) -> None:
    module = lesson.module
    draw = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (8, 4), generator=draw)
    keys = (0, 0), (0xA4093822, 0x299F31D0)
    found = torch.cat([module.philox(counters, key) for key in keys])

    def words(rounds: int, weyl: tuple[int, int] = OURS.WEYL, **how) -> torch.Tensor:
        return torch.cat([_philox(counters, key, rounds, weyl, **how) for key in keys])

    kinds = {f"{n} rounds": words(n) for n in (10, *range(1, 10), *range(11, 21))}
    kinds["a key that stays"] = words(10, (0, 0))
    kinds["a key that changes too early"] = words(10, first=1)
    kinds["a key of more than 32 bits"] = words(10, mask=-1)
    same = (kind for kind, wanted in kinds.items() if torch.equal(found, wanted))
    lesson.fact("the words are those of", next(same, "another function"))


def _philox(counters, key, rounds: int, weyl, first: int = 0, mask: int = OURS.MASK):
    a, b, c, d = counters.unbind(-1)
    for n in range(first, first + rounds):
        (hi0, lo0), (hi1, lo1) = map(OURS.multiply, OURS.MULTIPLIERS, (a, c))
        k0, k1 = ((k + n * step) & mask for k, step in zip(key, weyl, strict=True))
        a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0
    return torch.stack([a, b, c, d], -1)


def probe_uniform(lesson: Lesson) -> None:
    borrow(lesson.module, OURS, SOLVED, "uniform")
    uniform = lesson.module.uniform
    long = uniform(1, 2, 0, 4000)
    lesson.fact("numbers outside of [0, 1)", int(((long < 0) | (long >= 1)).sum()))
    wanted = OURS.uniform(1, 2, 0, 4000)
    words = OURS.philox(_counters(4000, 2), (1, 0)).flatten()
    kinds = {
        "right": torch.equal(long, wanted),
        "of the low bits": torch.equal(long, (words & 0xFFFFFF).float() / 2**24),
        "of more than 24 bits": torch.allclose(long, wanted, 0, 1e-6),
    }
    kind = next((kind for kind, holds in kinds.items() if holds), "others")
    lesson.fact("numbers of elements 0 to 3999", kind)
    starts = [torch.equal(uniform(1, 2, k, 50), long[k : k + 50]) for k in range(9)]
    lesson.fact("the same if a call begins at 0 to 8", starts)
    far = 2**40
    there = torch.equal(uniform(1, 2, far + 1, 9), OURS.uniform(1, 2, far + 1, 9))
    lesson.fact("numbers from element 2^40 + 1 on are right", there)
    lesson.fact("another offset gives others", not torch.equal(uniform(1, 3, 0, 9), long[:9])
                and torch.equal(uniform(1, far, 0, 9), OURS.uniform(1, far, 0, 9)))  # fmt: skip
    lesson.fact(
        "a seed of 41 bits",
        torch.equal(uniform(far + 1, 2, 0, 9), OURS.uniform(far + 1, 2, 0, 9)),
    )


def _counters(n: int, offset: int) -> torch.Tensor:
    quarters = torch.arange(n // 4)
    rest = torch.tensor([0, offset, 0]).expand(len(quarters), 3)
    return torch.cat([quarters[:, None], rest], 1)


def probe_dropout(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "Dropout.forward Dropout.backward")
    x = torch.ones(40, 50, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        y = module.Dropout.apply(x, 0.25, 5, 1)
    held = [v for v in tree_leaves(list(vars(y.grad_fn).values())) if torch.is_tensor(v)]
    lesson.fact("numbers stored for backward", sum(saved) + sum(t.numel() for t in held))
    truth = OURS.Dropout.apply(x, 0.25, 5, 1)
    lesson.fact("share of zeros", (y == 0).float().mean().item())
    lesson.fact("zeros are where they should be", torch.equal(y == 0, truth == 0))
    lesson.fact("what is kept of 1", y.max().item())
    (grad,) = torch.autograd.grad(y.sum(), x)
    lesson.fact("the gradient's zeros are those of the output", torch.equal(grad == 0, y == 0))
    lesson.fact("what is kept of a gradient of 1", grad.max().item())
    part = module.Dropout.apply(x[10:20], 0.25, 5, 1, 500)
    (grad,) = torch.autograd.grad(part.sum(), x)
    lesson.fact(
        "rows 10 to 19 alone have the mask they have in the whole",
        torch.equal(part == 0, truth[10:20] == 0),
    )
    lesson.fact("and their gradient, too", torch.equal(grad[10:20] == 0, truth[10:20] == 0))


def probe_chance(lesson: Lesson) -> None:
    borrow(lesson.module, OURS, SOLVED, "round_by_chance")
    chance = lesson.module.round_by_chance
    means = []
    for value in (0.25, -0.25, 3.9, -7.5):
        found = chance(torch.full((4000,), value), 3, 0)
        means.append(abs(found.mean().item() - value))
        lesson.fact("fractions in the result", bool((found != found.round()).any()))
    lesson.fact("largest distance of four means", max(means))
    whole = torch.cat([torch.arange(-8.0, 8.0), torch.tensor([2.0**22, -(2.0**22)])]).repeat(64)
    lesson.fact("integers that were changed", int((chance(whole, 3, 1) != whole).sum()))


def probe_int8(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "quantize_rows")
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-4
    x[2] = 0
    x[3, :2] = torch.tensor([-9.0, 9.0])
    numbers, scale = module.quantize_rows(x)
    lesson.fact(
        "scale of a row of zeros is finite",
        bool(torch.isfinite(scale).all() and (scale > 0).all()),
    )
    lesson.fact("largest number of each row", numbers.int().abs().amax(1).tolist())
    back = numbers.float() * scale
    lesson.fact("signs that changed", int((back * x < 0).sum()))
    wrong = (back - x).abs().amax(1) / x.abs().amax(1).clamp(1e-30)
    lesson.fact("largest error of a row, of its largest number", wrong.max().item())

    linear = nn.Linear(2048, 8)
    with torch.no_grad():
        linear.weight.fill_(0.5)
        linear.bias.fill_(3.0)
    module.quantize_rows = OURS.quantize_rows
    layer = module.Int8Linear(linear)
    with Watch() as watch:
        out = layer(torch.full((2, 2048), 2.0))
    kinds = [dtype for name, dtype in watch.launched if re.search("mm|mv|dot|conv", name)]
    lesson.fact("2048 products of 0.5 and 2, plus 3", [round(v, 1) for v in out[:, 0].tolist()])
    lesson.fact("the product is of integers", not any("float" in kind for kind in kinds))
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2048, generator=draw) * torch.tensor([[1.0], [10.0], [0.1], [1.0]])
    error = (layer(x) - linear(x)).norm(dim=1) / linear(x).norm(dim=1)
    lesson.fact("largest error of four rows", error.max().item())


step = functools.partial(alone, HINTS)
STEPS = [
    step(
        1, "Philox", "the words of Random123, by ten rounds", probe_philox, "philox",
        ("the words are those of", that("10 rounds", lambda of: "key" not in of), "key"),
        ("the words are those of", that("10 rounds", lambda of: "another" not in of), "words"),
        ("the words are those of", "10 rounds", "rounds"),
    ),
    step(
        2, "uniform numbers", "a function of seed, offset and place alone", probe_uniform,
        "uniform",
        ("numbers outside of [0, 1)", 0, "range"),
        ("numbers of elements 0 to 3999",
         that("right", lambda found: found != "of the low bits"), "low_bits"),
        ("numbers of elements 0 to 3999",
         that("right", lambda found: "more" not in found), "range"),
        ("numbers of elements 0 to 3999", "right", "counter"),
        ("the same if a call begins at 0 to 8", [True] * 9, "position"),
        ("numbers from element 2^40 + 1 on are right", True, "counter"),
        ("another offset gives others", True, "offset"),
        ("a seed of 41 bits", True, "seed"),
        crashes=(("size|shape|index", HINTS["position"]),),
    ),
    step(
        3, "dropout without a mask", "drawn again in backward, alike on every rank",
        probe_dropout, "Dropout",
        ("numbers stored for backward", 0, "stored"),
        ("share of zeros", that("about 0.25", lambda s: abs(s - 0.25) < 0.05), "share"),
        ("what is kept of 1", that("4/3", lambda v: abs(v - 4 / 3) < 1e-3), "not_scaled"),
        ("what is kept of a gradient of 1", that("4/3", lambda v: abs(v - 4 / 3) < 1e-3),
         "not_scaled"),
        ("the gradient's zeros are those of the output", True, "other_mask"),
        ("rows 10 to 19 alone have the mask they have in the whole", True, "first"),
        ("and their gradient, too", True, "first"),
        ("zeros are where they should be", True, "other"),
    ),
    step(
        4, "rounding by chance", "right on the average, and exact for integers", probe_chance,
        "round_by_chance",
        ("integers that were changed", 0, "moves_integers"),
        ("fractions in the result", False, "biased"),
        ("largest distance of four means", below(0.05), "biased"),
    ),
    step(
        5, "a layer in int8", "rows and channels scaled, sums in int32", probe_int8,
        "quantize_rows Int8Linear",
        ("scale of a row of zeros is finite", True, "zero_row"),
        ("signs that changed", 0, "wraps"),
        ("largest error of a row, of its largest number", below(0.1), "one_scale"),
        ("largest number of each row", [127, 127, 0, 127, 127, 127], "unused"),
        ("the product is of integers", True, "dequantized"),
        ("2048 products of 0.5 and 2, plus 3",
         that("2051", lambda out: max(map(abs, out)) > 130), "int8_sums"),
        ("2048 products of 0.5 and 2, plus 3", [2051.0, 2051.0], "scales"),
        ("largest error of four rows", below(0.1), "scales"),
    ),
]  # fmt: skip
