"""Four calibration methods choose a range for an activation with a tail.

Min-max covers all values, and a percentile cuts off a fixed share. Least squares and entropy
search for the best range. Entropy is the method that NVIDIA presented for TensorRT in 2017: it
divides the values into 2,048 bins and takes the range whose quantized histogram has the least
Kullback-Leibler divergence from the original one. Compare the clips and the two error columns.
"""

import torch


# --8<-- [start:simple]
def min_max(x: torch.Tensor, bits: int) -> float:
    return x.abs().max().item()


def percentile(x: torch.Tensor, bits: int, share: float = 0.999) -> float:
    return x.abs().kthvalue(int(share * x.numel())).values.item()


def error(x: torch.Tensor, clip: float, bits: int) -> float:
    """Return the mean square error of symmetric quantization to [-clip, clip]."""
    largest = 2 ** (bits - 1) - 1
    step = clip / largest
    return ((x / step).round().clamp(-largest, largest) * step - x).square().mean().item()


def least_squares(x: torch.Tensor, bits: int) -> float:
    widest = min_max(x, bits)
    candidates = [widest * i / 100 for i in range(1, 101)]
    return min(candidates, key=lambda clip: error(x, clip, bits))


# --8<-- [end:simple]


# --8<-- [start:entropy]
def entropy(x: torch.Tensor, bits: int, bins: int = 2048) -> float:
    levels = 2 ** (bits - 1)  # of one sign: 128 for int8
    width = min_max(x, bits) / bins
    counts = torch.histc(x.abs(), bins, 0, bins * width).double()
    best, clip = float("inf"), 0.0
    for kept in (*range(levels, bins, 16), bins):  # up to the full range
        p = counts[:kept].clone()
        p[-1] += counts[kept:].sum()  # clipped values move to the edge
        # Q: merge the bins to `levels`, then distribute each level over its bins in use
        level = torch.arange(kept) * levels // kept
        used = (counts[:kept] > 0).double()
        merged = torch.zeros(levels, dtype=torch.double).index_add_(0, level, counts[:kept])
        sharing = torch.zeros(levels, dtype=torch.double).index_add_(0, level, used)
        q = (merged / sharing.clamp(min=1))[level] * used
        p, q = p / p.sum(), q / q.sum()
        inside = p > 0
        divergence = (p[inside] * (p[inside] / q[inside]).log()).sum().item()  # inf if q is 0
        if divergence < best:
            best, clip = divergence, (kept + 0.5) * width
    return clip


# --8<-- [end:entropy]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**17, generator=generator)
    x[: 2**8] *= -12  # one in 512 comes from a much wider distribution
    assert 30 < -x.min() < 60 and x.max() < -x.min()  # the largest magnitude is negative
    lone = x[2**8 :].clone()
    lone[0] = 40  # one such value is given up: what is left is a Gaussian, see best_clip.py
    assert abs(least_squares(lone, 4) - 2.47) < 0.4
    even = torch.rand(2**17, generator=generator)  # no tail: entropy keeps the full range
    assert entropy(even, 8) > 0.995 * min_max(even, 8)
    even[0] = -16  # the others lie in 128 of 2,048 bins, so that 128 levels change nothing
    assert entropy(even, 8) == 128.5 / 128
    for bits in (8, 4):
        print(f"{bits} bits          clip   clipped   error of the rest   error of the clipped")
        totals = {}
        for method in (min_max, percentile, least_squares, entropy):
            clip = method(x, bits)
            outside = x.abs() > clip
            inner = error(x[~outside], clip, bits) * (1 - outside.float().mean().item())
            totals[method] = error(x, clip, bits)
            beyond = (x[outside].double().abs() - clip).square().sum().item() / len(x)
            assert abs(inner + beyond - totals[method]) < 2e-6  # a clipped value becomes ±clip
            assert bits == 4 or abs(12 * inner / (clip / 127) ** 2 - 1) < 0.02  # Δ²/12
            print(f"  {method.__name__:13}{clip:6.2f}   {outside.float().mean():7.3%}   "
                  f"{inner:17.5f}   {beyond:20.5f}")  # fmt: skip
        assert totals[least_squares] == min(totals.values())
        assert entropy(x, bits) < 0.8 * least_squares(x, bits)
        step = min_max(x, bits) / (2 ** (bits - 1) - 1)
        assert bits == 8 or (x.abs() < step / 2).float().mean() > 0.99
        bulk = {m: error(x[2**8 :], m(x, bits), bits) for m in totals}
        ratio = bulk[min_max] / bulk[entropy]
        print(
            f"  error of the 99.8% that are normal: min-max {ratio:.0f} times that of entropy"
        )
        assert ratio > 3


if __name__ == "__main__":
    main()
