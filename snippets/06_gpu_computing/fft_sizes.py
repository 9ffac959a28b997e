"""Show how the time of an FFT depends on the prime factors of its length.

First an FFT from scratch divides by the smallest factor (Cooley and Tukey, 1965) and counts its
multiplications: n times the sum of the prime factors of n. Then torch.fft.fft is timed for
neighbouring lengths. Look at the two levels for large factors. Draws fft_sizes.svg.
"""

import statistics
import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch


def factors(n: int) -> list[int]:
    """Return the prime factors of n, smallest first."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


# --8<-- [start:fft]
def fft(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the transform of a complex vector [n], and the number of multiplications."""
    n = len(x)
    if n == 1:
        return x, 0
    p = factors(n)[0]  # p transforms of length n/p, of every p-th element
    parts, counts = zip(*(fft(x[r::p]) for r in range(p)), strict=True)
    k = torch.arange(n)
    total, count = torch.zeros(n, dtype=x.dtype), sum(counts)
    for r, part in enumerate(parts):  # X[k] = sum over r of w^(rk) · part_r[k mod n/p]
        twiddle = torch.exp(-2j * torch.pi * (r * k % n).double() / n)  # the w^(rk)
        total += twiddle * part.repeat(p)
        count += len(twiddle)
    return total, count


# --8<-- [end:fft]


def milliseconds(n: int, batch: int = 8) -> float:
    """Return the least of five times of `batch` complex transforms of length n."""
    x = torch.randn(batch, n, dtype=torch.complex64)
    torch.fft.fft(x)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        y = torch.fft.fft(x)
        times.append(time.perf_counter() - begin)
    assert y.shape == (batch, n)
    return min(times) * 1e3


def draw(lengths: list[int], times: list[float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fft_sizes", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    points = [(max(factors(n)), n, t) for n, t in zip(lengths, times, strict=True)]
    kinds = {  # each colour and its lengths
        "#15803d": [(p, t) for p, n, t in points if p < 8],
        "#0b6e99": [(p, t) for p, n, t in points if p > 7 and n <= 8192],
        "#c2410c": [(p, t) for p, n, t in points if p > 7 and n > 8192],
    }
    for colour, chosen in kinds.items():
        axes.plot(*zip(*chosen, strict=True), "o", color=colour, markersize=6, alpha=0.8)
    axes.text(1.8, min(times) * 0.72, "factors 2, 3, 5, 7 alone", color="#15803d")
    for colour, name in [("#0b6e99", "n up to 8,192"), ("#c2410c", "n from 8,193")]:
        level = statistics.median(t for p, t in kinds[colour] if p > 200)
        axes.plot([1.8, 9000], [level, level], color=colour, linewidth=1, alpha=0.5)
        axes.text(1.8, level * 1.08, name, color=colour)
    axes.set(xscale="log", yscale="log", xlim=(1.6, 12000))
    axes.set_xlabel("largest prime factor of the length n", loc="left")
    axes.set_ylabel("time for 8 transforms, ms")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.set_ylim(min(times) * 0.6, max(times) * 1.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("fft_sizes.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("from scratch   factors            multiplications   of n²")
    for n in (96, 97, 125, 128, 210):
        x = torch.randn(n, dtype=torch.complex128)
        ours, count = fft(x)
        torch.testing.assert_close(ours, torch.fft.fft(x))
        assert count == n * sum(factors(n))
        text = "·".join(map(str, factors(n)))
        print(f"n = {n:<10} {text:18} {count:<17} {count / n**2:.0%}")
    print("equal to torch.fft.fft; the count is n times the sum of the factors")

    lengths = sorted({*range(8171, 8215), 8000, 8064, 8100, 8232, 8250, 8400, 8748})
    times = [milliseconds(n) for n in lengths]
    pairs = list(zip(lengths, times, strict=True))
    smooth = statistics.median(t for n, t in pairs if max(factors(n)) < 8)
    pairs = [(n, t / smooth) for n, t in pairs]
    assert abs(statistics.median(t for n, t in pairs if max(factors(n)) < 8) - 1) < 1e-9
    large = {n: t for n, t in pairs if max(factors(n)) > 200}
    below = {n: t for n, t in large.items() if n <= 8192}
    above = {n: t for n, t in large.items() if n > 8192}
    assert len(below) + len(above) == len(large) and (max(below), min(above)) == (8191, 8193)

    def level(group: dict[int, float]) -> float:
        return statistics.median(group.values())

    assert min(level(below), level(above)) > 1.5  # large factors are slower
    print(
        f"torch.fft.fft on this CPU, {len(lengths)} lengths from {lengths[0]} to {lengths[-1]}:"
    )
    print("  with a prime factor above 200, and with 2, 3, 5 and 7 as 1:")
    print(f"  up to 8192 ≈{level(below):.1f}, from 8193 ≈{level(above):.1f}")
    n = 8209
    padded = next(m for m in range(n, 2 * n) if max(factors(m)) < 8)
    print(f"  pad {n} (prime) to {padded} = {'·'.join(map(str, factors(padded)))}")
    draw(lengths, times)


if __name__ == "__main__":
    main()
