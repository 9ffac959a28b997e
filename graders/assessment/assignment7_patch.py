"""The steps of assignment 7: samples, a comparison, a bisection, and a patch."""

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
    """Return a patch with one mistake, which is a key of CHANGES, or a right patch for ""."""

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
    """Return whether an object is a pair of a list of tensors and a number."""
    if not isinstance(each, (tuple, list)) or len(each) != 2:
        return False
    tensors, limit = each
    has_tensors = isinstance(tensors, (tuple, list)) and all(map(torch.is_tensor, tensors))
    return has_tensors and isinstance(limit, (int, float))


@LAB.alone(1, "samples", "they accept a right patch, and reject eight wrong patches", "samples",
           crashes=CRASHES)  # fmt: skip
def samples(submission, reference, lesson):
    def new_samples() -> list:
        return list(submission.samples())

    calls = [new_samples(), new_samples()]
    bad = [i for i, each in enumerate(calls[0]) if not is_sample(each)]
    require_equal("indices of samples that are not (list of tensors, limit)", bad, [], "form")
    pointers = [
        {g.data_ptr() for tensors, _ in samples for g in tensors if g.numel()}
        for samples in calls
    ]
    require_equal("tensors that two calls share", len(pointers[0] & pointers[1]), 0, "shared")
    first, second = ([g for tensors, _ in samples for g in tensors] for samples in calls)
    pairs = zip(first, second, strict=False)
    different = sum(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)
    different = different if all(g.isfinite().all() for g in first) else 0
    require_equal("tensors that are different in two calls", different, 0, "random")
    for i, (tensors, limit) in enumerate(new_samples()):
        try:
            reference.slow_clip(tensors, limit)
        except RuntimeError as error:
            what = f"slow_clip fails for the sample with index {i}: {error}"
            raise Wrong(what.splitlines()[0], "slow_fails") from error

    def reject(clip: Callable) -> bool:
        """Return whether a comparison with the slow function fails for a sample."""
        for (found, limit), (true, _) in zip(new_samples(), new_samples(), strict=True):
            try:
                norm, true_norm = clip(found, limit), reference.slow_clip(true, limit)
                torch.testing.assert_close(norm, true_norm)
                torch.testing.assert_close(found, true)
            except (AssertionError, RuntimeError):
                return True
        return False

    require_equal("the samples reject a right patch", reject(patch("")), False, "good_refused")
    for change, words in CHANGES.items():
        fact = f"the samples reject a patch that {words}"
        require_equal(fact, reject(patch(change)), True, change)


# --- 2: a comparison ----------------------------------------------------------------------


class Machine:
    """A simulated machine with a clock, on which functions have chosen durations.

    `slowdown(i)` is the factor by which call i of any function lasts longer.
    """

    def __init__(self, slowdown: Callable[[int], float]) -> None:
        self.now, self.calls, self.slowdown = 0.0, 0, slowdown

    def function(self, seconds: Callable[[int], float], extra: float) -> Callable[[], None]:
        """Return a function whose call i lasts `seconds(i)`, and call 0 lasts `extra` longer.

        All these times are in seconds.
        """
        indices = iter(range(10**6))

        def call() -> None:
            i = next(indices)
            self.now += seconds(i) * self.slowdown(self.calls) + extra * (i == 0)
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
        old: Seconds, new: Seconds, slowdown=lambda call: 1.0, extra=(0.0, 0.0), **rounds: int
    ) -> tuple[str, float]:
        """Return the word and the ratio that the learner's function returns."""
        machine, functions = Machine(slowdown), []
        for seconds, more in zip((old, new), extra, strict=True):
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
    fact = "number of calls for 9 rounds, minus the number of calls for 5 rounds"
    several = Condition("at least 8", lambda more: more >= 8)
    require_equal(fact, calls[1] - calls[0], several, "rounds")
    for old, new, wanted, right in ((1.0, 2.0, "slower", 0.5), (2.0, 1.0, "faster", 2.0)):
        word, ratio = verdict(old, new)
        case = f"{old:g} s before and {new:g} s after the patch"
        require_equal(f"ratio for {case}", ratio, right, "ratio")
        require_equal(
            f"verdict for {case}", word, wanted, "missed" if word == "same" else "words"
        )
    _, ratio = verdict(1.0, 1.0, extra=(100.0, 50.0), rounds=2)
    fact = "ratio for 1 s and 1 s, if the first calls last 100 s and 50 s longer"
    require_equal(fact, ratio, 1.0, "cold")
    word, _ = verdict(1, 1, lambda call: 1.5 if call > 31 else 1.0)
    require_equal("verdict for 1 s and 1 s while the machine slows down", word, "same", "order")
    word, _ = verdict(2.0, 1.0, lambda call: 10.0 if call > 41 else 1.0)
    fact = "verdict for 2 s and 1 s while the machine becomes ten times slower"
    require_equal(fact, word, "faster", "by_round")
    _, ratio = verdict(2.0, 1.0, lambda call: 50.0 if call == 20 else 1.0)
    fact = "ratio for 2 s and 1 s, if one call lasts 50 times as long"
    require_equal(fact, ratio, 2.0, "outlier")
    uneven = [2.0] * 2 + [3.5] * 8 + [1.2] * 10 + [2.0] * 100
    _, ratio = verdict(lambda call: uneven[call], 1.0)
    fact = "ratio for 2 s and 1 s, if old needs 3.5 s in eight calls and 1.2 s in ten calls"
    require_equal(fact, ratio, 2.0, "outlier")
    for count, wanted, hint in ((3, "faster", "agreement"), (4, "same", "noise")):
        slow_calls = [10, 13, 16, 19][:count]
        word, _ = verdict(1.0, lambda call, slow=slow_calls: 2.0 if call in slow else 0.5)
        fact = f"verdict if new is slower than old in {count} of 30 rounds"
        require_equal(fact, word, wanted, hint)
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
    def search(n: int, bad: int, has_noise: bool = False) -> tuple[object, Counter]:
        """Return the commit that bisect finds if the commits from `bad` on are slow.

        Also returns the number of measurements of each commit. With noise, two of three
        measurements of a commit are too slow.
        """
        measurements: Counter[str] = Counter()

        def measure(commit: str) -> float:
            is_disturbed = has_noise and (measurements[commit] - int(commit)) % 3 != 0
            measurements[commit] += 1
            return (12.0 if int(commit) >= bad else 10.0) + 5.0 * is_disturbed

        commits = [str(i) for i in range(n)]
        found = submission.bisect(commits, measure, 11.0)
        require_equal("bisect changed its list of commits", len(commits) != n, False, "commits")
        is_name = found is not None and found in commits
        wanted = Condition(f"one of the names of {n} commits", lambda _: is_name)
        require_equal("bisect returns", repr(found), wanted, "not_a_commit")
        return found, measurements

    most_commits, most_repeats = 0, 0
    for n, bad in ((2, 1), (3, 1), (100, 1), (100, 99), (100, 37), (101, 64)):
        found, measurements = search(n, bad)
        fact = f"the first slow commit of 0 to {n - 1}, if {bad} and all later commits are slow"
        require_equal(fact, found, str(bad), "wrong_commit")
        most_commits = max(most_commits, len(measurements))
        most_repeats = max([most_repeats, *measurements.values()])
    require_equal("commits of 101 that were measured", most_commits, at_most(9), "too_many")
    require_equal("measurements of one commit", most_repeats, at_most(3), "too_often")
    found, _ = search(100, 60, has_noise=True)
    require_equal("the first slow commit of 0 to 99, with noise", found, "60", "noisy_bisect")


# --- 4: the patch -------------------------------------------------------------------------

# the operators for which the host waits
HOST_READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
CASES = (  # the samples of the finished program, and one more case
    "a norm above the limit", "a norm below the limit", "no gradients",
    "an empty and a normal gradient", "a transposed gradient and a slice",
    "fp16, fp32 and bf16 gradients", "fp16 numbers up to 400", "gradients of zero",
    "a norm of 2e-06 and a limit of 1e-06",
)  # fmt: skip


class LaunchRecorder(OperatorRecorder):
    """Also records how often the host waits, and how many numbers one operator creates."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.most_created = (
            0  # the largest number of elements in the new tensors of an operator
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func.overloadpacket.__name__ in HOST_READS
        result = super().__torch_dispatch__(func, types, args, kwargs)
        old = {t.data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        results = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        created = sum(t.numel() for t in results if t.data_ptr() not in old)
        self.most_created = max(self.most_created, created)
        return result

    @contextlib.contextmanager
    def with_methods(self):
        """Yield the recorder, which also counts the methods tolist, numpy and cpu as waits.

        The host waits for them on a GPU. On the CPU they call no operator.
        """

        def with_counter(name: str) -> Callable:
            real = getattr(torch.Tensor, name)

            def call(*args, **kwargs):
                self.waits += 1
                return real(*args, **kwargs)

            return call

        names = ("tolist", "numpy", "cpu")
        with self, mock.patch.multiple(torch.Tensor, **{n: with_counter(n) for n in names}):
            yield self


def require_same_result(
    clip: Callable, slow: Callable, gradients: list, copies: list, limit: float, case: str
) -> None:
    """Raise `Wrong` unless `clip` and `slow` have the same effect on equal gradients.

    `clip` changes `gradients`, and `slow` changes their `copies`.
    """
    try:
        found = clip(list(gradients), limit)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        hint = "not_same" if gradients else "no_gradients"
        text = str(error).partition("\n")[0]
        raise Wrong(f"with {case}: {type(error).__name__}: {text}", hint) from error
    wanted = slow(copies, limit)
    kind = type(found).__name__
    if torch.is_tensor(found):
        kind = f"{list(found.shape)} in {found.dtype}"
    require_equal(
        f"shape and dtype of the norm, with {case}", kind, "[] in torch.float32", "norm"
    )
    is_close = torch.isclose(found, wanted, 1e-5, 0)
    require_equal(f"the norm is right, with {case}", bool(is_close), True, "not_same")
    for gradient, copy in zip(gradients, copies, strict=True):
        rtol = {torch.float32: 1e-5, torch.float16: 1e-3}.get(gradient.dtype, 0.016)
        is_close = torch.allclose(gradient, copy, rtol, 0)
        require_equal(f"the gradients are right, with {case}", is_close, True, "not_same")


@LAB.alone(4, "the patch", "it has the same result for all samples, with few launches",
           "fast_clip")  # fmt: skip
def fast_clip(submission, reference, lesson):
    clip, gradient = submission.fast_clip, torch.full((4,), 3.0)
    clip([gradient], 1.0)
    changed = Condition("0.5", lambda value: value != 3.0)
    fact = "the numbers of a gradient of 3 become"
    require_equal(fact, round(gradient[0].item(), 3), changed, "not_in_place")
    samples = [[*reference.samples(), ([torch.full((4,), 1e-6)], 1e-6)] for _ in range(2)]
    for (gradients, limit), (copies, _), case in zip(*samples, CASES, strict=True):
        require_same_result(clip, reference.slow_clip, gradients, copies, limit, case)

    def launches(*gradients: torch.Tensor) -> LaunchRecorder:
        with LaunchRecorder().with_methods() as recorder:
            clip(list(gradients), 1.0)
        return recorder

    singles = [torch.ones(100) for _ in range(150)]
    halves = [torch.ones(100).half() for _ in range(75)]
    recorder, mixed = launches(*singles), launches(*singles[:75], *halves)
    require_equal("times the host waits", recorder.waits + mixed.waits, 0, "host")
    created = max(recorder.most_created, mixed.most_created)
    require_equal("numbers in the new tensors of one launch", created, at_most(1000), "copies")
    count = len(recorder.operators)
    lesson.fact("scores", {"launches": count})
    fewer = len(launches(*singles[:30]).operators) if count > 12 else count
    hint = "launches" if fewer < count else "many_launches"
    require_equal("launches for 150 gradients", count, at_most(12), hint)
    count = len(mixed.operators)
    require_equal(
        "launches for 75 gradients in fp32 and 75 in fp16", count, at_most(24), "launches"
    )
