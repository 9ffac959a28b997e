"""Count the plans of Fourier transforms that signals of many lengths need.

torch caches the plans of cuFFT. The key has the sizes with the batch, the strides, the kind and
the dtype. Signals of many lengths need many plans, unless the lengths are rounded up. A loop
over one shape more than the cache can store never finds a plan. The program counts keys, and on
a GPU it compares its count with the size of cuFFT's cache.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

SIGNALS = 120


class Plans:
    """A cache that removes the least recently used plan when it has more than `size`."""

    def __init__(self, size: int = 4096) -> None:
        self.size, self.kept, self.hits, self.misses = size, OrderedDict(), 0, 0

    def look_up(self, *key: object) -> None:
        if key in self.kept:
            self.kept.move_to_end(key)
            self.hits += 1
            return
        self.kept[key] = True
        self.misses += 1
        if len(self.kept) > self.size:
            self.kept.popitem(last=False)


# --8<-- [start:rules]
def exact(n: int) -> int:
    return n


def smooth(n: int) -> int:
    """Return the next number without a prime factor above 7."""
    rest = n
    for p in (2, 3, 5, 7):
        while rest % p == 0:
            rest //= p
    return n if rest == 1 else smooth(n + 1)


def coarse(n: int) -> int:
    """Return the next number of the form 2^k or 3 · 2^(k - 1). At most half is added."""
    power = 1 << (n - 1).bit_length()
    return 3 * power // 4 if n <= 3 * power // 4 else power


# --8<-- [end:rules]


def convolve(x: torch.Tensor, kernel: torch.Tensor, length: int, plans: Plans) -> torch.Tensor:
    """Convolve x [n] and kernel [k] -> [n + k - 1], by three transforms of `length`."""
    spectra = []
    for signal in (x, kernel):  # both have the same length after padding
        padded = F.pad(signal, (0, length - len(signal)))
        plans.look_up("real to complex", len(padded))
        spectra.append(torch.fft.rfft(padded))
    y = torch.fft.irfft(spectra[0] * spectra[1], length)
    plans.look_up("complex to real", len(y))
    return y[: len(x) + len(kernel) - 1]


def walk(shapes: Iterable[int], plans: Plans, device: torch.device) -> None:
    for n in shapes:
        y = torch.fft.fft(torch.zeros(n, dtype=torch.complex64, device=device))
        plans.look_up(len(y))


def filters(rule: Callable[[int], int], device: torch.device) -> tuple[Plans, float, float]:
    """Filter and check many signals. Return the plans, points / needed points, and seconds."""
    torch.manual_seed(0)
    # drawn on the CPU before anything else, so the lengths are the same on every machine
    lengths = torch.randint(1000, 2000, (SIGNALS,)).tolist()
    kernel, plans, took, needed, points = torch.randn(101, device=device), Plans(), 0.0, 0, 0
    for n in lengths:
        x, length = torch.randn(n, device=device), rule(n + 100)
        needed, points = needed + n + 100, points + length
        before = time.perf_counter()
        y = convolve(x, kernel, length, plans)
        y.sum().item()  # wait
        took += time.perf_counter() - before
        wide, taps = x.double()[None, None], kernel.double().flip(0)[None, None]  # no tf32
        direct = F.conv1d(wide, taps, padding=100)[0, 0]
        torch.testing.assert_close(y.double(), direct, rtol=1e-4, atol=1e-4)
    return plans, points / needed, took


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    cache = torch.backends.cuda.cufft_plan_cache[0] if gpu else None
    print(f"{SIGNALS} convolutions of {SIGNALS} signals by FFT, equal to the direct ones")
    print("length     plans  found again  points" + ("  cuFFT's plans      ms" if gpu else ""))
    found = {}
    for rule in (exact, smooth, coarse):
        if gpu:
            cache.clear()
        plans, points, took = filters(rule, device)
        found[rule] = len(plans.kept)
        assert plans.hits + plans.misses == 3 * SIGNALS and plans.misses == len(plans.kept)
        share = plans.hits / (3 * SIGNALS)
        print(f"{rule.__name__:9}{len(plans.kept):7}{share:13.0%}{points:8.2f}", end="")
        print(f"{cache.size:15}  ≈{1e3 * took:.0f}" if gpu else "")
        assert not gpu or cache.size == len(plans.kept)
    assert found[exact] > 2 * found[smooth] > 10 * found[coarse] == 10 * 2 * 3

    two = Plans(2)
    for n in (1, 2, 1, 3, 1):
        two.look_up(n)
    assert two.hits == 2 and (2,) not in two.kept  # not used for longest

    print("\nfour rounds through 8 and through 9 shapes, with room for 8 plans")
    if gpu:
        before, cache.max_size = cache.max_size, 8
    for count in (8, 9):
        plans = Plans(8)
        walk(4 * list(range(1024, 1024 + count)), plans, device)
        print(f"{count} shapes: {plans.hits} of {4 * count} found")
        assert plans.hits == (24 if count == 8 else 0)
        assert not gpu or cache.size == len(plans.kept)
    if gpu:
        cache.max_size = before


if __name__ == "__main__":
    main()
