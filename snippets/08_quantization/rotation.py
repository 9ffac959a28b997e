"""Smoothing moves the range of outliers into the weights; a rotation spreads it over channels.

The program rounds a matrix product in which six of 512 channels are outliers and all weights
have the same distribution, with 8 bits and with 4 bits for the activations. A fast
Walsh–Hadamard transform computes the rotation in n·log₂ n additions. The output of an RMSNorm
can be rotated without any cost at run time.
"""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

TOKENS, N, OUT, OUTLIERS = 256, 512, 512, 6


# --8<-- [start:fwht]
def fwht(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dimension (a power of two) by the Hadamard matrix / √n.

    Each of log₂ n rounds replaces pairs (a, b) at distance `step` by (a + b, a - b).
    """
    n, step = x.shape[-1], 1
    while step < n:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return x / n**0.5


# --8<-- [end:fwht]


def fake(x: torch.Tensor, bits: int, dim: int | None) -> torch.Tensor:
    """Round to 2^bits - 1 levels: one scale for all (None) or one along `dim`."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / (2 ** (bits - 1) - 1)
    return (x / scale).round() * scale


def error(x: torch.Tensor, w: torch.Tensor, bits: int, dim: int | None) -> float:
    """Relative error of x·w with x in `bits`, w in 8 bits; x [tokens, n], w [n, out]."""
    wrong = fake(x, bits, dim) @ fake(w, 8, None if dim is None else 0)
    return ((wrong - x @ w).norm() / (x @ w).norm()).item()


def crest(x: torch.Tensor) -> float:
    """Largest magnitude over root mean square: large values make a uniform grid inaccurate."""
    return (x.abs().amax() / x.square().mean().sqrt()).item()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, w = torch.randn(TOKENS, N, dtype=torch.float64), torch.randn(N, OUT).double()
    x[:, torch.randperm(N)[:OUTLIERS]] *= 60

    torch.testing.assert_close(fwht(fwht(x)), x)  # symmetric and orthogonal: its own inverse
    torch.testing.assert_close(fwht(x) @ fwht(w.T).T, x @ w)
    spike = torch.zeros(N, dtype=torch.float64)
    spike[7] = 1
    torch.testing.assert_close(fwht(spike).abs(), torch.full_like(spike, N**-0.5))

    def numbers(*_: torch.Size, out_shape: torch.Size) -> int:
        return math.prod(out_shape)

    additions = dict.fromkeys((torch.ops.aten.add, torch.ops.aten.sub), numbers)
    with FlopCounterMode(display=False, custom_mapping=additions) as counter:
        fwht(spike)
    assert counter.get_total_flops() == N * math.log2(N)  # and no matrix product
    print("xR · Rᵀw = xw, and one spike becomes 512 equal magnitudes")
    print(f"largest / rms of x: {crest(x):.1f}, rotated {crest(fwht(x)):.1f}; "
          f"√(2 ln n) of a Gaussian's {x.numel():,} numbers: "
          f"{math.sqrt(2 * math.log(x.numel())):.1f}")  # fmt: skip

    # --8<-- [start:sweep]
    rows = {"as it is": (x, w)}
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        scale = x.abs().amax(0) ** alpha / w.abs().amax(1) ** (1 - alpha)
        rows[f"smoothed, α = {alpha}"] = (x / scale, w * scale[:, None])
    rows["rotated"] = (fwht(x), fwht(w.T).T)
    # --8<-- [end:sweep]
    print("relative error of the product   8 bits, per tensor   per token    x in 4, per token")
    errors = {}
    for name, (a, b) in rows.items():
        errors[name] = [error(a, b, 8, None), error(a, b, 8, -1), error(a, b, 4, -1)]
        print(f"{name:33}", *(f"{e:13.2%}" for e in errors[name]))
    plain, rotated, half = errors["as it is"], errors["rotated"], errors["smoothed, α = 0.5"]
    assert half[0] < min(errors["smoothed, α = 0.0"][0], errors["smoothed, α = 1.0"][0])
    assert half[0] < plain[0] / 2 and rotated[0] < plain[0] / 2 and rotated[2] < 0.7 * plain[2]
    assert rotated[0] == min(e[0] for e in errors.values())
    assert abs(half[1] / rotated[1] - 1) < 0.15  # equally good, with a scale per token
    for end in ("smoothed, α = 0.0", "smoothed, α = 1.0"):
        assert errors[end][0] > plain[0]  # worse than no smoothing
    assert min(errors.values(), key=lambda e: e[2]) == errors["smoothed, α = 0.75"]

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def off(x: torch.Tensor) -> torch.Tensor:
        return (layer_norm(fwht(x), (N,)) - fwht(layer_norm(x, (N,)))).abs().amax()

    torch.testing.assert_close(rms_norm(x), torch.nn.functional.rms_norm(x, (N,)))
    torch.testing.assert_close(rms_norm(fwht(x)), fwht(rms_norm(x)))
    layer_norm = torch.nn.functional.layer_norm
    centred = x - x.mean(-1, keepdim=True)
    centred[:, 1] += centred[:, 0]  # entry 0 / √n is the mean of the rotated row
    centred[:, 0] = 0
    assert off(x) > 0.01 and off(centred) < 1e-9  # the means are the reason
    print("an RMSNorm without gain commutes with the rotation; a LayerNorm does not")


if __name__ == "__main__":
    main()
