"""The steps of assignment 6: a generator, its numbers, dropout, rounding, int8."""

import re

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graders.tools import Lab, Passes, Watch, at_most, check, import_late_parts

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
import_late_parts()
LAB = Lab(HINTS)


def words_of(ours, counters, key, rounds: int, weyl, first: int = 0, mask: int = 2**32 - 1):
    """Philox with so many rounds, from this one on, and the key's steps and bits as given."""
    a, b, c, d = counters.unbind(-1)
    for n in range(first, first + rounds):
        (hi0, lo0), (hi1, lo1) = map(ours.multiply, ours.MULTIPLIERS, (a, c))
        k0, k1 = ((k + n * step) & mask for k, step in zip(key, weyl, strict=True))
        a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0
    return torch.stack([a, b, c, d], -1)


@LAB.alone(1, "Philox", "the words of Random123, by ten rounds", "philox")
def philox(theirs, ours, lesson):
    draw = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (8, 4), generator=draw)
    keys = (0, 0), (0xA4093822, 0x299F31D0)
    found = torch.cat([theirs.philox(counters, key) for key in keys])

    def words(rounds: int, weyl: tuple[int, int] = ours.WEYL, **how) -> torch.Tensor:
        return torch.cat([words_of(ours, counters, key, rounds, weyl, **how) for key in keys])

    kinds = {f"{n} rounds": words(n) for n in (10, *range(1, 10), *range(11, 21))}
    kinds["a key that stays"] = words(10, (0, 0))
    kinds["a key that changes too early"] = words(10, first=1)
    kinds["a key of more than 32 bits"] = words(10, mask=-1)
    alike = (kind for kind, wanted in kinds.items() if torch.equal(found, wanted))
    kind = next(alike, "another function")
    hint = "key" if "key" in kind else "words" if "another" in kind else "rounds"
    check("the words are those of", kind, "10 rounds", hint)


@LAB.alone(2, "uniform numbers", "a function of seed, offset and place alone", "uniform",
           crashes={"size|shape|index": "position"})  # fmt: skip
def uniform(theirs, ours, lesson):
    def right(*where: int) -> bool:
        return torch.equal(theirs.uniform(*where), ours.uniform(*where))

    long, wanted = theirs.uniform(1, 2, 0, 4000), ours.uniform(1, 2, 0, 4000)
    outside = int(((long < 0) | (long >= 1)).sum())
    check("numbers outside of [0, 1)", outside, 0, "range")
    counters = torch.zeros(1000, 4, dtype=torch.int64)
    counters[:, 0], counters[:, 2] = torch.arange(1000), 2
    low = (ours.philox(counters, (1, 0)).flatten() & 0xFFFFFF).float() / 2**24
    kind, hint = "others", "counter"
    if torch.equal(long, wanted):
        kind = "right"
    elif torch.equal(long, low):
        kind, hint = "of the low bits", "low_bits"
    elif torch.allclose(long, wanted, 0, 1e-6):
        kind, hint = "of more than 24 bits", "range"
    check("numbers of elements 0 to 3999", kind, "right", hint)
    starts = [torch.equal(theirs.uniform(1, 2, k, 50), long[k : k + 50]) for k in range(9)]
    check("the same if a call begins at 0 to 8", starts, [True] * 9, "position")
    far, there = 2**40, "numbers from element 2^40 + 1 on are right"
    check(there, right(1, 2, far + 1, 9), True, "counter")
    others = not torch.equal(theirs.uniform(1, 3, 0, 9), long[:9])
    check("another offset gives others", others and right(1, far, 0, 9), True, "offset")
    check("a seed of 41 bits", right(far + 1, 2, 0, 9), True, "seed")


@LAB.alone(3, "dropout without a mask", "drawn again in backward, alike on every rank",
           "Dropout")  # fmt: skip
def dropout(theirs, ours, lesson):
    x = torch.ones(40, 50, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        y = theirs.Dropout.apply(x, 0.25, 5, 1)
    held = [v for v in tree_leaves(list(vars(y.grad_fn).values())) if torch.is_tensor(v)]
    stored = sum(saved) + sum(t.numel() for t in held)
    check("numbers stored for backward", stored, 0, "stored")
    quarter = Passes("about 0.25", lambda share: abs(share - 0.25) < 0.05)
    check("share of zeros", (y == 0).float().mean().item(), quarter, "share")
    more = Passes("4/3", lambda value: abs(value - 4 / 3) < 1e-3)
    check("what is kept of 1", y.max().item(), more, "not_scaled")
    (grad,) = torch.autograd.grad(y.sum(), x)
    check("what is kept of a gradient of 1", grad.max().item(), more, "not_scaled")
    alike = torch.equal(grad == 0, y == 0)
    check("the gradient's zeros are those of the output", alike, True, "other_mask")
    part = theirs.Dropout.apply(x[10:20], 0.25, 5, 1, 500)
    (grad,) = torch.autograd.grad(part.sum(), x)
    fact, alike = "rows 10 to 19 alone have the mask they have in the whole", y[10:20] == 0
    check(fact, torch.equal(part == 0, alike), True, "first")
    check("and their gradient, too", torch.equal(grad[10:20] == 0, alike), True, "first")
    truth = ours.Dropout.apply(x, 0.25, 5, 1)
    check("zeros are where they should be", torch.equal(y == 0, truth == 0), True, "other")


@LAB.alone(4, "rounding by chance", "right on the average, and exact for integers",
           "round_by_chance")  # fmt: skip
def chance(theirs, ours, lesson):
    whole = torch.cat([torch.arange(-8.0, 8.0), torch.tensor([2.0**22, -(2.0**22)])]).repeat(64)
    changed = int((theirs.round_by_chance(whole, 3, 1) != whole).sum())
    values = 0.25, -0.25, 3.9, -7.5
    found = [theirs.round_by_chance(torch.full((4000,), value), 3, 0) for value in values]
    check("integers that were changed", changed, 0, "moves_integers")
    fractions = bool((found[-1] != found[-1].round()).any())
    check("fractions in the result", fractions, False, "biased")
    off = max(abs(f.mean().item() - value) for f, value in zip(found, values, strict=True))
    check("largest distance of four means", off, at_most(0.05), "biased")


@LAB.alone(5, "a layer in int8", "rows and channels scaled, sums in int32",
           "quantize_rows Int8Linear")  # fmt: skip
def int8(theirs, ours, lesson):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-4
    x[2] = 0
    x[3, :2] = torch.tensor([-9.0, 9.0])
    numbers, scale = theirs.quantize_rows(x)
    finite = bool(torch.isfinite(scale).all() and (scale > 0).all())
    check("scale of a row of zeros is finite", finite, True, "zero_row")
    back = numbers.float() * scale
    check("signs that changed", int((back * x < 0).sum()), 0, "wraps")
    wrong = ((back - x).abs().amax(1) / x.abs().amax(1).clamp(1e-30)).max().item()
    fact = "largest error of a row, of its largest number"
    check(fact, wrong, at_most(0.1), "one_scale")
    largest = numbers.int().abs().amax(1).tolist()
    wanted = [127, 127, 0, 127, 127, 127]
    check("largest number of each row", largest, wanted, "unused")

    linear = nn.Linear(2048, 8)
    with torch.no_grad():
        linear.weight.fill_(0.5)
        linear.bias.fill_(3.0)
    theirs.quantize_rows = ours.quantize_rows
    layer = theirs.Int8Linear(linear)
    with Watch() as watch:
        out = layer(torch.full((2, 2048), 2.0))
    kinds = [dtype for name, dtype in watch.launched if re.search("mm|mv|dot|conv", name)]
    integers = not any("float" in kind for kind in kinds)
    check("the product is of integers", integers, True, "dequantized")
    fact, sums = "2048 products of 0.5 and 2, plus 3", [round(v, 1) for v in out[:, 0].tolist()]
    check(fact, sums, Passes("2051", lambda out: max(map(abs, out)) > 130), "int8_sums")
    check(fact, sums, [2051.0, 2051.0], "scales")
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2048, generator=draw) * torch.tensor([[1.0], [10.0], [0.1], [1.0]])
    error = ((layer(x) - linear(x)).norm(dim=1) / linear(x).norm(dim=1)).max().item()
    check("largest error of four rows", error, at_most(0.1), "scales")
