"""The steps of assignment 7: samples, a comparison, a bisection, a patch."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
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
CRASHES = {"NoneType": "none"}


# --- 1: samples ---------------------------------------------------------------------------


def patch(change: str) -> Callable:
    """A right patch, or one with one fault."""

    def clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
        if not gradients:
            if change == "none_given":
                raise RuntimeError("torch.cat(): expected a non-empty list")
            return torch.zeros(())
        if change == "empty" and any(g.numel() == 0 for g in gradients):
            raise RuntimeError("max(): expected a tensor with elements")
        if change == "dtypes" and len({g.dtype for g in gradients}) > 1:
            raise RuntimeError("expected all tensors to have one dtype")
        squares = [g.float().square().sum() for g in gradients]
        if change == "overflow" and any(g.square().isinf().any() for g in gradients):
            squares = [torch.tensor(torch.inf)]
        norm = torch.stack(squares).sum().sqrt()
        scale = limit / norm if change == "zeros" else limit / (norm + 1e-6)
        if change != "always_clips":
            scale = scale.clamp(max=1.0)
        if change == "zeros":
            scale = torch.where(norm == 0, torch.nan, scale)
        for g in gradients:
            target = g.contiguous() if change == "strides" else g
            target.mul_(1.0 if change == "never_clips" else scale.to(g.dtype))
        return norm

    return clip


CHANGES = {
    "never_clips": "never clips",
    "always_clips": "always scales to the limit",
    "none_given": "fails without gradients",
    "empty": "fails for a tensor without elements",
    "strides": "scales a contiguous copy of a gradient",
    "dtypes": "needs all gradients in one dtype",
    "overflow": "computes the squares of fp16 numbers in fp16",
    "zeros": "divides by a norm of 0",
}


def is_sample(each: object) -> bool:
    """Whether something is a pair of a list of tensors and a number."""
    if not isinstance(each, (tuple, list)) or len(each) != 2:
        return False
    some, limit = each
    tensors = isinstance(some, (tuple, list)) and all(map(torch.is_tensor, some))
    return tensors and isinstance(limit, (int, float))


@LAB.alone(1, "samples", "a right patch passes them, and eight wrong ones do not", "samples",
           crashes=CRASHES)  # fmt: skip
def samples(submission, reference, lesson):
    def new() -> list:
        return list(submission.samples())

    kept = [new(), new()]
    bad = [i for i, each in enumerate(kept[0]) if not is_sample(each)]
    require_equal("indices of samples that are not (list of tensors, limit)", bad, [], "form")
    ids = [{g.data_ptr() for some, _ in each for g in some if g.numel()} for each in kept]
    require_equal("tensors that two calls share", len(ids[0] & ids[1]), 0, "shared")
    pairs = zip(*([g for some, _ in each for g in some] for each in kept), strict=False)
    other = sum(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)
    finite = all(g.isfinite().all() for some, _ in kept[0] for g in some)
    require_equal(
        "tensors that are different in two calls", other if finite else 0, 0, "random"
    )
    for i, (some, limit) in enumerate(new()):
        try:
            reference.slow_clip(some, limit)
        except RuntimeError as error:
            what = f"slow_clip fails for the sample with index {i}: {error}"
            raise Wrong(what.splitlines()[0], "slow_fails") from error

    def refused(clip: Callable) -> bool:
        """Whether a test that compares with the slow function refuses the patch."""
        for (mine, limit), (truth, _) in zip(new(), new(), strict=True):
            try:
                found, wanted = clip(mine, limit), reference.slow_clip(truth, limit)
                torch.testing.assert_close(found, wanted)
                torch.testing.assert_close(mine, truth)
            except (AssertionError, RuntimeError):
                return True
        return False

    require_equal("the samples refuse a right patch", refused(patch("")), False, "good_refused")
    for change, words in CHANGES.items():
        fact = f"the samples refuse a patch that {words}"
        require_equal(fact, refused(patch(change)), True, change)


# --- 2: a comparison ----------------------------------------------------------------------


class Machine:
    """A clock, and functions that take a time times what the machine adds to it."""

    def __init__(self, slowdown: Callable[[int], float]) -> None:
        self.now, self.calls, self.slowdown = 0.0, 0, slowdown

    def function(self, seconds: Callable[[int], float], first: float) -> Callable[[], None]:
        """A function: `seconds` are those of each of its own calls, `first` is added once."""
        numbers = iter(range(10**6))

        def call() -> None:
            number = next(numbers)
            self.now += seconds(number) * self.slowdown(self.calls) + first * (number == 0)
            self.calls += 1

        return call

    def clock(self) -> float:
        return self.now


WORDS = {"faster", "slower", "same"}
Seconds = float | Callable[[int], float]


@LAB.alone(2, "faster, slower or the same",
           "the verdict is right on quiet and on noisy machines", "compare")  # fmt: skip
def compare(submission, reference, lesson):
    calls = []

    def verdict(
        old: Seconds, new: Seconds, slowdown=lambda call: 1.0, first=(0.0, 0.0), **rounds: int
    ) -> tuple[str, float]:
        machine, functions = Machine(slowdown), []
        for seconds, more in ((old, first[0]), (new, first[1])):
            times = seconds if callable(seconds) else lambda call, seconds=seconds: seconds
            functions.append(machine.function(times, more))
        found = submission.compare(*functions, machine.clock, **rounds)
        kind = type(found).__name__
        if isinstance(found, (tuple, list)):
            kind = "two values" if len(found) == 2 else f"{len(found)} values"
        require_equal("compare returns", kind, "two values", "pair")
        known = Condition("faster, slower or same", lambda word: word in WORDS)
        require_equal("the word that compare returns", str(found[0]), known, "words")
        calls.append(machine.calls)
        return found[0], round(float(found[1]), 2)

    verdict(1.0, 1.0, rounds=5), verdict(1.0, 1.0, rounds=9)
    require_equal("calls for 9 rounds, more than for 5", calls[1] - calls[0],
          Condition("at least 8", lambda more: more >= 8), "rounds")  # fmt: skip
    for old, new, wanted, right in ((1.0, 2.0, "slower", 0.5), (2.0, 1.0, "faster", 2.0)):
        word, ratio = verdict(old, new)
        case = f"{old:g} s before and {new:g} s after the patch"
        require_equal(f"ratio for {case}", ratio, right, "ratio")
        require_equal(
            f"verdict for {case}", word, wanted, "missed" if word == "same" else "words"
        )
    _, ratio = verdict(1.0, 1.0, first=(100.0, 50.0), rounds=2)
    require_equal(
        "ratio of 1 s to 1 s, the first calls 100 and 50 s slower", ratio, 1.0, "cold"
    )
    word, _ = verdict(1, 1, lambda call: 1.5 if call > 31 else 1.0)
    require_equal("verdict for 1 s and 1 s while the machine slows down", word, "same", "order")
    word, _ = verdict(2.0, 1.0, lambda call: 10.0 if call > 41 else 1.0)
    fact = "verdict for 2 s and 1 s while the machine becomes ten times slower"
    require_equal(fact, word, "faster", "by_round")
    _, ratio = verdict(2.0, 1.0, lambda call: 50.0 if call == 20 else 1.0)
    require_equal(
        "ratio for 2 s and 1 s with one call of 50 times the time", ratio, 2.0, "outlier"
    )
    uneven = [2.0] * 2 + [3.5] * 8 + [1.2] * 10 + [2.0] * 100
    _, ratio = verdict(lambda call: uneven[call], 1.0)
    fact = "ratio for 2 s and 1 s, if old takes 3.5 s in eight calls and 1.2 s in ten"
    require_equal(fact, ratio, 2.0, "outlier")
    for late, wanted, hint in ((3, "faster", "agreement"), (4, "same", "noise")):
        times = [10, 13, 16, 19][:late]
        word, _ = verdict(1.0, lambda call, times=times: 2.0 if call in times else 0.5)
        require_equal(
            f"verdict if new is slower than old in {late} of 30 rounds", word, wanted, hint
        )
    noise = random.Random(1)
    word, _ = verdict(1, 1, lambda call: noise.uniform(1, 1.2))
    require_equal("verdict for 1 s and 1 s with noise of 20%", word, "same", "noise")
    word, _ = verdict(1.1, 1, lambda call: noise.uniform(1, 1.6))
    require_equal("verdict for 1.1 s and 1 s with noise of 60%", word, "same", "noise")
    for old, new, wanted in ((1.01, 1, "same"), (1, 1.01, "same"), (1.03, 1, "faster"),
                             (1, 1.03, "slower")):  # fmt: skip
        word, ratio = verdict(old, new)
        hint = "small" if wanted == "same" else "missed"
        require_equal(f"verdict for {old:g} s and {new:g} s", word, wanted, hint)
        require_equal(f"ratio for {old:g} s and {new:g} s", ratio, round(old / new, 2), "ratio")


# --- 3: a bisection -----------------------------------------------------------------------


@LAB.alone(
    3, "which commit", "it is found in about log2(n) builds, in spite of noise", "bisect"
)
def bisect(submission, reference, lesson):
    def search(n: int, bad: int, noise: bool = False) -> tuple[object, Counter]:
        """What is found if the commits from `bad` on are slow, and how often each is measured.

        With noise only one of three measurements of a commit is not too slow.
        """
        tried: Counter[str] = Counter()

        def measure(commit: str) -> float:
            late = noise and (tried[commit] - int(commit)) % 3 != 0
            tried[commit] += 1
            return (12.0 if int(commit) >= bad else 10.0) + 5.0 * late

        commits = [str(i) for i in range(n)]
        found = submission.bisect(commits, measure, 11.0)
        require_equal("bisect changed its list of commits", len(commits) != n, False, "commits")
        name = Condition(f"one of the names of {n} commits", lambda found: found in commits)
        require_equal("bisect returns", repr(found), Condition(name.words, lambda _: name(found)),
              "not_a_commit")  # fmt: skip
        return found, tried

    most, often = 0, 0
    for n, bad in ((2, 1), (3, 1), (100, 1), (100, 99), (100, 37), (101, 64)):
        found, tried = search(n, bad)
        fact = f"the first slow commit of 0 to {n - 1}, if {bad} and all later ones are slow"
        require_equal(fact, found, str(bad), "wrong_commit")
        most, often = max(most, len(tried)), max([often, *tried.values()])
    require_equal("commits measured of 101", most, at_most(9), "too_many")
    require_equal("measurements of one commit", often, at_most(3), "too_often")
    found, _ = search(100, 60, noise=True)
    require_equal("the first slow commit of 0 to 99, with noise", found, "60", "noisy_bisect")


# --- 4: the patch -------------------------------------------------------------------------

HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
NAMES = (
    "a norm above the limit", "a norm below the limit", "no gradients",
    "an empty gradient and another", "a transposed gradient and a slice",
    "fp16, fp32 and bf16 gradients", "fp16 numbers up to 400", "gradients of zero",
    "a norm of 2e-06 and a limit of 1e-06",
)  # fmt: skip


class Launches(OperatorRecorder):
    """What is launched, how often the host waits, and what one launch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func.overloadpacket.__name__ in HOST
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        made = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        self.made = max(self.made, sum(t.numel() for t in made if t.data_ptr() not in given))
        return result

    @contextlib.contextmanager
    def with_host(self):
        """Also count what reads a value on a GPU, and asks no operator on the CPU."""

        def counted(name: str) -> Callable:
            real = getattr(torch.Tensor, name)

            def call(*args, **kwargs):
                self.waits += 1
                return real(*args, **kwargs)

            return call

        names = ("tolist", "numpy", "cpu")
        with self, mock.patch.multiple(torch.Tensor, **{n: counted(n) for n in names}):
            yield self


def allclose(clip: Callable, slow: Callable, mine: list, truth: list, limit: float, name: str):
    """Raise `Wrong` unless both functions do the same to the same gradients."""
    try:
        found = clip(list(mine), limit)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        hint = "not_same" if mine else "no_gradients"
        text = str(error).partition("\n")[0]
        raise Wrong(f"with {name}: {type(error).__name__}: {text}", hint) from error
    wanted = slow(truth, limit)
    kind = type(found).__name__
    if torch.is_tensor(found):
        kind = f"{list(found.shape)} in {found.dtype}"
    require_equal(
        f"shape and dtype of the norm, with {name}", kind, "[] in torch.float32", "norm"
    )
    close = torch.isclose(found, wanted, 1e-5, 0)
    require_equal(f"the norm is right, with {name}", bool(close), True, "not_same")
    for one, other in zip(mine, truth, strict=True):
        least = {torch.float32: 1e-5, torch.float16: 1e-3}.get(one.dtype, 0.016)
        close = torch.allclose(one, other, least, 0)
        require_equal(f"the gradients are right, with {name}", close, True, "not_same")


@LAB.alone(4, "the patch", "it does the same on all samples, by a few launches", "fast_clip")
def fast_clip(submission, reference, lesson):
    clip, mine = submission.fast_clip, torch.full((4,), 3.0)
    clip([mine], 1.0)
    changed = Condition("0.5", lambda value: value != 3.0)
    require_equal("the numbers of a gradient of 3 become", round(mine[0].item(), 3), changed,
          "not_in_place")  # fmt: skip
    cases = [[*reference.samples(), ([torch.full((4,), 1e-6)], 1e-6)] for _ in range(2)]
    for (mine, limit), (truth, _), name in zip(*cases, NAMES, strict=True):
        allclose(clip, reference.slow_clip, mine, truth, limit, name)

    def launches(*some: torch.Tensor) -> Launches:
        with Launches().with_host() as watch:
            clip(list(some), 1.0)
        return watch

    singles = [torch.ones(100) for _ in range(150)]
    halves = [torch.ones(100).half() for _ in range(75)]
    watch, mixed = launches(*singles), launches(*singles[:75], *halves)
    require_equal("times the host waits", watch.waits + mixed.waits, 0, "host")
    made = max(watch.made, mixed.made)
    require_equal("numbers in the new tensors of one launch", made, at_most(1000), "copies")
    count = len(watch.operators)
    lesson.fact("scores", {"launches": count})
    fewer = len(launches(*singles[:30]).operators) if count > 12 else count
    hint = "launches" if fewer < count else "many_launches"
    require_equal("launches for 150 gradients", count, at_most(12), hint)
    count = len(mixed.operators)
    require_equal(
        "launches for 75 gradients in fp32 and 75 in fp16", count, at_most(24), "launches"
    )
