"""The steps of assignment 6: a generator, its numbers, dropout, rounding, and int8."""

import re
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graders.dsl import (
    Condition,
    Lab,
    OperatorRecorder,
    at_most,
    import_late_parts,
    require_equal,
)
from graders.protocol import Wrong

import_late_parts()
LAB = Lab()
CRASHES = {"NoneType": "none", "incorrect number of gradients": "grad_count"}
LOW_BITS = 2**32 - 1


def words_of(counters: torch.Tensor, keys: list, multiply: Callable, multipliers: tuple):
    """Return the words of Philox for counters and for one pair of keys in each round."""
    a, b, c, d = counters.unbind(-1)
    for k0, k1 in keys:
        (hi0, lo0), (hi1, lo1) = map(multiply, multipliers, (a, c))
        a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0
    return torch.stack([a, b, c, d], -1)


def variants(
    reference, counters: torch.Tensor, key: tuple
) -> dict[str, tuple[torch.Tensor, str]]:
    """Return the words that common mistakes compute, and the hints, under their names.

    The first entry, "10 rounds", contains the right words.
    """
    w0, w1 = reference.WEYL

    def of(
        rounds: int,
        step: Callable = lambda n: (n * w0, n * w1),
        mask: int = LOW_BITS,
        **options,
    ):
        increments = map(step, range(rounds))
        keys = [(key[0] + k0 & mask, key[1] + k1 & mask) for k0, k1 in increments]
        options = {
            "keys": keys, "multiply": reference.multiply, "multipliers": reference.MULTIPLIERS
        } | options  # fmt: skip
        return words_of(counters, **options)

    found = {f"{n} rounds": (of(n), "rounds") for n in (10, *range(1, 10), *range(11, 21))}
    found |= {
        "a key that does not change": (of(10, lambda n: (0, 0)), "key"),
        "a key that changes too early": (of(10, lambda n: ((n + 1) * w0, (n + 1) * w1)), "key"),
        "a key of more than 32 bits": (of(10, mask=-1), "key"),
        "exchanged constants WEYL": (of(10, lambda n: (n * w1, n * w0)), "key"),
        "a key of which one word does not change": (of(10, lambda n: (n * w0, 0)), "key"),
        "an exclusive or of the key and WEYL": (
            of(10, keys=[(key[0] ^ w0 * (n % 2), key[1] ^ w1 * (n % 2)) for n in range(10)]),
            "key",
        ),
        "exchanged words of the key": (
            of(
                10,
                keys=[
                    (key[1] + n * w1 & LOW_BITS, key[0] + n * w0 & LOW_BITS) for n in range(10)
                ],
            ),
            "key",
        ),
        "exchanged multipliers": (
            of(10, multipliers=reference.MULTIPLIERS[::-1]),
            "multipliers",
        ),
        "exchanged halves of the products": (
            of(10, multiply=lambda m, x: reference.multiply(m, x)[::-1]),
            "halves",
        ),
    }
    return found


@LAB.alone(
    1, "Philox", "the words are those of Random123, after ten rounds", "philox", crashes=CRASHES
)
def philox(submission, reference, lesson):
    draw = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (8, 4), generator=draw)
    before, key = counters.clone(), (0xA4093822, 0x299F31D0)
    found = submission.philox(counters, key)
    kind = type(found).__name__
    if torch.is_tensor(found):
        kind = f"{list(found.shape)} of {found.dtype}"
    fact = "shape and dtype for counters of shape [8, 4]"
    require_equal(fact, kind, "[8, 4] of torch.int64", "dimensions")
    require_equal(
        "philox changed the counters", not torch.equal(counters, before), False, "in_place"
    )
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    known = torch.equal(submission.philox(zeros, (0, 0)), reference.philox(zeros, (0, 0)))
    if not (known and torch.equal(found, reference.philox(counters, key))):
        candidates = variants(reference, counters, key)
        equal = (name for name, (words, _) in candidates.items() if torch.equal(found, words))
        name = next(equal, "a different function")
        hint = candidates[name][1] if name in candidates else "words"
        require_equal("the words are those of", name, "10 rounds", hint)
        require_equal("the words for zeros are right", known, True, "words")
    for argument, wanted in (
        (counters[0], found[0]),
        (counters.view(2, 4, 4), found.view(2, 4, 4)),
    ):
        case = f"for counters of shape {list(argument.shape)}"
        try:
            words = submission.philox(argument, key)
        except (IndexError, RuntimeError, ValueError) as error:
            raise Wrong(f"{case}: {error}", "dimensions") from error
        require_equal(
            f"the words {case} are right", torch.equal(words, wanted), True, "dimensions"
        )


@LAB.alone(2, "uniform numbers", "the numbers depend only on seed, offset and place", "uniform",
           crashes=CRASHES)  # fmt: skip
def uniform(submission, reference, lesson):
    def right(*arguments: int) -> bool:
        return torch.equal(submission.uniform(*arguments), reference.uniform(*arguments))

    for first in range(5):
        for n in (1, 2, 50):
            shape = list(submission.uniform(1, 2, first, n).shape)
            require_equal(f"the shape for first = {first} and n = {n}", shape, [n], "length")
    long, wanted = submission.uniform(1, 2, 0, 4000), reference.uniform(1, 2, 0, 4000)
    require_equal("the shape for first = 0 and n = 4000", list(long.shape), [4000], "length")
    require_equal("dtype", str(long.dtype), "torch.float32", "dtype")
    outside = int(((long < 0) | (long >= 1)).sum())
    require_equal("numbers outside of [0, 1)", outside, 0, "range")
    counters = torch.zeros(1000, 4, dtype=torch.int64)
    counters[:, 0], counters[:, 2] = torch.arange(1000), 2
    low = (reference.philox(counters, (1, 0)).flatten() & 0xFFFFFF).float() / 2**24
    kind, hint = "wrong", "counter"
    if torch.equal(long, wanted):
        kind = "right"
    elif torch.equal(long, low):
        kind, hint = "made from the low bits", "low_bits"
    elif torch.allclose(long, wanted, 0, 1e-6):
        kind, hint = "almost equal to the right numbers", "range"
    require_equal("the numbers of the elements 0 to 3999", kind, "right", hint)
    starts = [torch.equal(submission.uniform(1, 2, k, 50), long[k : k + 50]) for k in range(9)]
    wrong = [k for k, good in enumerate(starts) if not good]
    fact = "the values of `first` from 0 to 8 for which the numbers are different"
    require_equal(fact, wrong, [], "position")
    large, fact = 2**40, "the numbers from element 2^40 + 1 on are right"
    require_equal(fact, right(1, 2, large + 1, 9), True, "counter")
    differ = not torch.equal(submission.uniform(1, 3, 0, 9), long[:9])
    fact = "a different offset gives different numbers, which are right"
    require_equal(fact, differ and right(1, large, 0, 9), True, "offset")
    fact = "the numbers for a seed of 41 bits are right"
    require_equal(fact, right(large + 1, 2, 0, 9), True, "seed")


@LAB.alone(3, "dropout without a mask",
           "backward draws the mask again, and all ranks draw the same mask",
           "Dropout", crashes=CRASHES)  # fmt: skip
def dropout(submission, reference, lesson):
    calls = []

    def with_counter(function: Callable) -> Callable:
        def call(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return call

    submission.uniform = with_counter(submission.uniform)
    submission.philox = with_counter(submission.philox)
    apply, saved = submission.Dropout.apply, []
    x = torch.ones(40, 50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        y = apply(x, 0.25, 5, 1)
    require_equal(
        "forward changed x", not torch.equal(x, torch.ones(40, 50)), False, "in_place"
    )
    attributes = tree_leaves(list(vars(y.grad_fn).values()))
    stored = sum(saved) + sum(t.numel() for t in attributes if torch.is_tensor(t))
    fact = "numbers in tensors that are stored for backward"
    require_equal(fact, stored, at_most(16), "stored")
    quarter = Condition("about 0.25", lambda fraction: abs(fraction - 0.25) < 0.05)
    fact = "fraction of zeros for p = 0.25"
    require_equal(fact, (y == 0).float().mean().item(), quarter, "share")
    scaled = Condition("4/3", lambda value: abs(value - 4 / 3) < 1e-3)
    fact = "for p = 0.25, a 1 that is not dropped becomes"
    require_equal(fact, y.max().item(), scaled, "not_scaled")
    truth = reference.Dropout.apply(x, 0.25, 5, 1)
    require_equal(
        "zeros are where they should be", torch.equal(y == 0, truth == 0), True, "mask"
    )
    exact = reference.uniform(5, 1, 0, 2000)[7].item()
    wrong = (apply(x, exact, 5, 1) == 0) != (reference.Dropout.apply(x, exact, 5, 1) == 0)
    fact = "wrong zeros if p is exactly one of the uniform numbers"
    is_repeatable = torch.equal(apply(x, 0.25, 5, 1), truth)
    require_equal(fact, int(wrong.sum()), 0, "share" if is_repeatable else "state")

    apply(x, 0.5, 6, 2)  # a second call before the gradient of the first one is computed
    calls.clear()
    (grad,) = torch.autograd.grad(y.sum(), x)
    count = len(calls)
    if not torch.equal(grad, truth):
        (alone,) = torch.autograd.grad(apply(x, 0.25, 5, 1).sum(), x)
        fact = "the gradient is right if forward was called again before backward"
        require_equal(fact, not torch.equal(alone, truth), True, "state")
    fact = "a gradient of 1 that is not dropped becomes"
    require_equal(fact, grad.max().item(), scaled, "not_scaled")
    same_mask = torch.equal(grad == 0, y == 0)
    fact = "the gradient has zeros at the same places as the output"
    require_equal(fact, same_mask, True, "other_mask")
    some = Condition("at least 1", lambda count: count > 0)
    require_equal("calls of uniform() in backward", count, some, "stored")
    part = apply(x[11:21], 0.25, 5, 1, 550)
    (grad,) = torch.autograd.grad(part.sum(), x)
    fact, mask = "rows 11 to 20 alone get the same mask as in the whole tensor", y[11:21] == 0
    require_equal(fact, torch.equal(part == 0, mask), True, "first")
    fact = "the gradient of rows 11 to 20 alone also has this mask"
    require_equal(fact, torch.equal(grad[11:21] == 0, mask), True, "first")
    wide = torch.ones(50, 40).t().requires_grad_()
    try:
        y = apply(wide, 0.25, 5, 1)
        (grad,) = torch.autograd.grad(y.sum(), wide)
    except RuntimeError as error:
        raise Wrong(f"for a transposed x: {error}", "strided") from error
    good = torch.equal(y == 0, truth == 0) and torch.equal(grad == 0, truth == 0)
    require_equal("the masks for a transposed x are right", good, True, "strided")


@LAB.alone(4, "rounding by chance", "the mean is right, and integers do not change",
           "round_by_chance", crashes=CRASHES)  # fmt: skip
def chance(submission, reference, lesson):
    arguments, real = set(), submission.uniform

    def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
        arguments.add(f"seed {seed} and offset {offset}")
        return real(seed, offset, first, n)

    submission.uniform = uniform
    whole = torch.cat([torch.arange(-8.0, 8.0), torch.tensor([2.0**22, -(2.0**22)])]).repeat(64)
    for value in (0.25, -0.25, 3.9, -7.5):
        x = torch.full((40, 100), value)
        found = submission.round_by_chance(x, 3, 5)
        require_equal("round_by_chance changed x", bool((x != value).any()), False, "in_place")
        kind = f"{list(found.shape)}, {found.dtype}"
        fact = "shape and dtype for an x of shape [40, 100]"
        require_equal(fact, kind, "[40, 100], torch.float32", "like_x")
        fractions = int((found != found.round()).sum())
        require_equal("numbers in the result that are not integers", fractions, 0, "fractions")
        several = Condition("2 or more", lambda count: count > 1)
        fact = f"different results for 4000 numbers {value}"
        require_equal(fact, len(found.unique()), several, "same_way")
        different = min(len(found.unique(dim=dim)) for dim in (0, 1))
        fact = "number of different rows, or of different columns, of the result"
        require_equal(fact, different, several, "same_way")
        close = Condition(f"about {value}", lambda mean, value=value: abs(mean - value) <= 0.05)
        fact = f"mean of the results for 4000 numbers {value}"
        require_equal(fact, found.mean().item(), close, "biased")
    # a submission that calls philox itself does not call uniform
    passed_on = ", ".join(arguments) or "seed 3 and offset 5"
    fact = "round_by_chance, with seed 3 and offset 5, called uniform with"
    require_equal(fact, passed_on, "seed 3 and offset 5", "draws")
    fact = "the same seed and offset give the same results"
    require_equal(fact, torch.equal(found, submission.round_by_chance(x, 3, 5)), True, "draws")
    for name, where in (("offset", (3, 1)), ("seed", (4, 5))):
        same = torch.equal(found, submission.round_by_chance(x, *where))
        require_equal(f"a different {name} gives the same results", same, False, "draws")
    changed = int((submission.round_by_chance(whole, 3, 1) != whole).sum())
    require_equal("integers that were changed", changed, 0, "moves_integers")
    submission.uniform = lambda seed, offset, first, n: torch.zeros(n)
    changed = int((submission.round_by_chance(whole, 3, 1) != whole).sum())
    fact = "integers that were changed while all uniform numbers were 0"
    require_equal(fact, changed, 0, "moves_integers")


class FloatRecorder(TorchDispatchMode):
    """Records the size of the largest new tensor with floating-point numbers."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return result


@LAB.alone(5, "a layer in int8", "rows and channels have scales, and the sums are integers",
           "quantize_rows Int8Linear", crashes={"values to unpack": "pair"} | CRASHES,
           )  # fmt: skip
def int8(submission, reference, lesson):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-4
    x[2] = 0
    x[3, :2] = torch.tensor([-9.0, 9.0])
    before = x.clone()
    numbers, scale = submission.quantize_rows(x)
    require_equal("quantize_rows changed x", not torch.equal(x, before), False, "in_place")
    kind = f"codes {list(numbers.shape)} of {numbers.dtype}, scales {list(scale.shape)}"
    wanted = "codes [6, 64] of torch.int8, scales [6, 1]"
    require_equal("the result for an x of shape [6, 64]", kind, wanted, "codes")
    several = Condition("2 or more", lambda count: count > 1)
    require_equal("different scales of six rows", len(scale.unique()), several, "one_scale")
    require_equal("scale of a row of zeros", scale[2].item(), 1.0, "zero_row")
    back = numbers.float() * scale
    require_equal("signs that changed", int((back * x < 0).sum()), 0, "wraps")
    nonzero = [0, 1, 3, 4, 5]  # the rows that are not zero
    largest, scales = x[nonzero].abs().amax(1), scale[nonzero, 0]
    quotients = [round(each, 1) for each in (largest / scales).tolist()]
    fact = "the largest number of each row, divided by the row's scale"
    require_equal(fact, quotients, [127.0] * 5, "unused")
    error = ((back - x).abs() / scale).max().item()
    fact = "largest difference between a number and its code, in units of the scale"
    require_equal(fact, error, at_most(0.501), "nearest")

    linear = nn.Linear(2048, 8)
    with torch.no_grad():
        linear.weight.fill_(0.5)
        linear.bias.fill_(3.0)
    submission.quantize_rows = reference.quantize_rows
    layer = submission.Int8Linear(linear)
    with OperatorRecorder() as recorder, FloatRecorder() as floats:
        out = layer(torch.full((2, 2048), 2.0))
    products = [
        dtype for name, dtype in recorder.operators if re.search("mm|mv|dot|conv", name)
    ]
    # if the weight is converted to fp32, there is a tensor of 16,384 floating-point numbers
    has_integers = not any("float" in dtype for dtype in products)
    fact = "the factors of the product are integers"
    require_equal(fact, has_integers and floats.largest <= 2 * 2048, True, "dequantized")
    fact, sums = "2048 products of 0.5 and 2, plus 3", [round(v, 1) for v in out[:, 0].tolist()]
    require_equal(
        fact, sums, Condition("2051", lambda out: max(map(abs, out)) > 130), "int8_sums"
    )
    require_equal(
        fact, sums, [2051.0, 2051.0], "bias" if sums == [2048.0, 2048.0] else "scales"
    )
    draw = torch.Generator().manual_seed(3)
    linear = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(8, 64, generator=draw) * torch.arange(1, 9)[:, None])
    x = torch.randn(4, 64, generator=draw) * torch.tensor([[1.0], [10.0], [0.1], [1.0]])
    layer, truth = submission.Int8Linear(linear), reference.Int8Linear(linear)
    try:
        found = layer(x)
    except TypeError as error:
        raise Wrong(f"for a layer without a bias: {error}", "no_bias") from error
    good = torch.allclose(found, truth(x), 1e-4, 1e-5)
    require_equal(
        "the outputs for four rows and eight channels are right", good, True, "scales"
    )
    good = torch.allclose(layer(3 * x), truth(3 * x), 1e-4, 1e-5)
    require_equal("the outputs of a second call are right", good, True, "state")
