"""The steps of assignment 7: samples, a comparison, a bisection, a patch."""

import random
from collections.abc import Callable
from itertools import count

import torch

from graders.tools import Lab, Passes, Watch, at_most, check, import_late_parts

HINTS = {
    "good_refused": "These samples refuse a patch that is right: compare with a tolerance in "
    "mind, and keep infinities out of them.",
    "always_clips": "A patch that makes short gradients longer passes: a sample whose norm is "
    "below the limit.",
    "never_clips": "A patch that never clips passes: a sample whose norm is above the limit.",
    "none": "A patch that fails without gradients passes: an empty list.",
    "empty": "A patch that fails for a tensor without elements passes.",
    "strides": "A patch that scales a copy passes: a transposed or cut gradient.",
    "dtypes": "A patch that takes all gradients for one dtype passes: fp16 beside fp32.",
    "overflow": "A patch that squares in fp16 passes: values of some hundreds in fp16.",
    "zeros": "A patch that divides by the norm passes: gradients that are all zero.",
    "shared": "Calls of samples() return the same tensors, and a patch in place has changed "
    "them: make them anew.",
    "order": "The machine became slower between the two, and you blame the patch: let old and "
    "new take turns.",
    "noise": "Noise was called a difference: nine of ten rounds must agree.",
    "small": "A difference below 2% is none that a benchmark of this kind can show.",
    "missed": "The patch is twice as fast, and you do not see it.",
    "outlier": "A single slow round moved the ratio: take the median.",
    "cold": "The first call is slow for both, and was measured: warm up.",
    "ratio": "The ratio is old over new: 2 for a patch that is twice as fast.",
    "wrong_commit": "This is not the first slow commit: keep one bound known to be fast, the "
    "other known to be slow, and stop when they are neighbours.",
    "noisy_bisect": "One slow measurement misled you: the smallest of three.",
    "too_many": "More commits were measured than halving needs.",
    "not_same": "The patch gives something else than the slow function.",
    "not_in_place": "The gradients of the caller are as they were: scale them in place.",
    "launches": "The number of launches grows with the number of gradients: foreach operators "
    "take the whole list.",
    "host": "The host waits for a value: no item(), no `if` on a tensor. clamp does without.",
    "copies": "Something as large as all gradients together is made.",
    "other": "The numbers fit no common mistake. Compare with slow_clip.",
}  # fmt: skip
import_late_parts()
LAB = Lab(HINTS)


# --- 1: samples ---------------------------------------------------------------------------


def patch(change: str) -> Callable:
    """A right patch, or one with one fault."""

    def clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
        if not gradients:
            if change == "none":
                raise RuntimeError("torch.cat(): expected a non-empty list")
            return torch.zeros(())
        if change == "empty" and any(g.numel() == 0 for g in gradients):
            raise RuntimeError("max(): expected a tensor with elements")
        if change == "dtypes" and len({g.dtype for g in gradients}) > 1:
            raise RuntimeError("expected all tensors to have one dtype")
        squares = [
            (g.square().sum() if change == "overflow" else g.float().square().sum()).float()
            for g in gradients
        ]
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


CHANGES = "never_clips always_clips none empty strides dtypes overflow zeros"


@LAB.alone(1, "samples", "they let a right patch pass, and refuse eight wrong ones", "samples")
def samples(theirs, ours, lesson):
    kept = [theirs.samples(), theirs.samples()]
    ids = [{g.data_ptr() for some, _ in each for g in some if g.numel()} for each in kept]
    check("tensors that two calls share", len(ids[0] & ids[1]), 0, "shared")

    def refused(clip: Callable) -> bool:
        """Whether a test that compares with the slow function refuses the patch."""
        for (mine, limit), (truth, _) in zip(theirs.samples(), theirs.samples(), strict=True):
            try:
                found, wanted = clip(mine, limit), ours.slow_clip(truth, limit)
                torch.testing.assert_close(found, wanted)
                torch.testing.assert_close(mine, truth)
            except (AssertionError, RuntimeError):
                return True
        return False

    check("a right patch is refused", refused(patch("")), False, "good_refused")
    for change in CHANGES.split():
        check(f"fault {change} is refused", refused(patch(change)), True, change)


# --- 2: a comparison ----------------------------------------------------------------------


class Machine:
    """A clock, and functions that take a time times what the machine adds to it."""

    def __init__(self, slowdown: Callable[[int], float]) -> None:
        self.now, self.calls, self.slowdown = 0.0, 0, slowdown

    def function(self, seconds: float, first: float = 0.0) -> Callable[[], None]:
        left = [first]

        def call() -> None:
            self.now += seconds * self.slowdown(self.calls) + left[0]
            left[0] = 0.0
            self.calls += 1

        return call

    def clock(self) -> float:
        return self.now


@LAB.alone(2, "faster, slower or the same", "eight machines, two of them noisy", "compare")
def compare(theirs, ours, lesson):
    def verdict(old: float, new: float, slowdown=lambda call: 1.0, first: float = 0.0) -> list:
        machine = Machine(slowdown)
        word, ratio = theirs.compare(
            machine.function(old, first), machine.function(new), machine.clock
        )
        return [word, round(ratio, 2)]

    check("1 s against 2 s", verdict(1.0, 2.0), ["slower", 0.5], "ratio")
    check("2 s against 1 s", verdict(2.0, 1.0), ["faster", 2.0], "missed")
    slower, _ = verdict(1, 1, lambda call: 1.5 if call > 31 else 1.0)
    check("1 s against 1 s while the machine slows down", slower, "same", "order")
    _, ratio = verdict(1.0, 1.0, first=100.0)
    check("1 s against 1 s, the first call 100 s slow", ratio, 1.0, "cold")
    outlier = verdict(2.0, 1.0, lambda call: 50.0 if call == 20 else 1.0)
    check("2 s against 1 s with one call of 50", outlier, ["faster", 2.0], "outlier")
    noise = random.Random(1)
    noisy, _ = verdict(1, 1, lambda call: noise.uniform(1, 1.2))
    check("1 s against 1 s with noise of 20%", noisy, "same", "noise")
    noisy, _ = verdict(1.1, 1, lambda call: noise.uniform(1, 1.6))
    check("1.1 s against 1 s with noise of 60%", noisy, "same", "noise")
    check("1.01 s against 1 s", verdict(1.01, 1.0)[0], "same", "small")


# --- 3: a bisection -----------------------------------------------------------------------


@LAB.alone(3, "which commit", "found in log2(n) builds, in spite of noise", "bisect")
def bisect(theirs, ours, lesson):
    right, most = [], 0
    for n, bad in ((2, 1), (3, 1), (100, 1), (100, 99), (100, 37), (101, 64)):
        tried: set[str] = set()

        def measure(commit: str, bad=bad, tried=tried) -> float:
            tried.add(commit)
            return 2.0 if int(commit) >= bad else 1.0

        found = theirs.bisect([str(i) for i in range(n)], measure, 1.5)
        right.append(found == str(bad))
        most = max(most, len(tried))
    check("found in six histories", right, [True] * 6, "wrong_commit")
    check("commits measured of 101, at most", most, at_most(9), "too_many")
    calls = count()

    def noisy(commit: str) -> float:
        return (2.0 if int(commit) >= 60 else 1.0) + (next(calls) % 3 == 0)

    found = theirs.bisect([str(i) for i in range(100)], noisy, 1.5)
    check("the first slow commit of 60, with noise", found, "60", "noisy_bisect")


# --- 4: the patch -------------------------------------------------------------------------

HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}


@LAB.alone(4, "the patch", "the same on every sample, by a few launches for all", "fast_clip")
def fast_clip(theirs, ours, lesson):
    clip = theirs.fast_clip
    mine = [torch.full((4,), 3.0)]
    clip(mine, 1.0)
    changed = Passes("0.5", lambda value: value != 3.0)
    check("a gradient of 3 becomes", round(mine[0][0].item(), 3), changed, "not_in_place")
    wrong = []
    pairs = zip(ours.samples(), ours.samples(), strict=True)
    for i, ((mine, limit), (truth, _)) in enumerate(pairs):
        try:
            torch.testing.assert_close(clip(mine, limit), ours.slow_clip(truth, limit))
            torch.testing.assert_close(mine, truth)
        except (AssertionError, RuntimeError, IndexError, ValueError) as error:
            wrong.append(f"{i}: {str(error).splitlines()[0][:40]}")
    check("samples on which it differs", wrong, [], "not_same")
    gradients = [torch.ones(100) for _ in range(150)]
    with Watch() as watch:
        clip(gradients, 1.0)
    waits = sum(name in HOST for name, _ in watch.launched)
    check("times the host waits", waits, 0, "host")
    check("the most numbers in a new tensor", watch.largest, at_most(1000), "copies")
    lesson.fact("scores", {"launches": len(watch.launched)})
    check("launches for 150 gradients", len(watch.launched), at_most(8), "launches")
