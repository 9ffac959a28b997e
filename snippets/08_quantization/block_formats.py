"""Compares formats of 4 and 8 bits for weights: bits per weight, and error.

The bits include the scales. MXFP4 has E2M1 elements and a power of two for each 32. NVFP4 has
E2M1 elements, an E4M3 scale for each 16 and one fp32 factor for the tensor.
"""

import math

import torch

E2M1 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])


# --8<-- [start:levels]
def largest(w: torch.Tensor) -> torch.Tensor:
    return w.abs().amax(-1, keepdim=True)


def integer(w: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric integers, a scale in bf16 per group."""
    w, top = w.unflatten(1, (-1, group)), 2 ** (bits - 1) - 1
    scale = (largest(w) / top).bfloat16().float()
    return ((w / scale).round().clamp(-top, top) * scale).flatten(1)


def fp8(w: torch.Tensor, group: int) -> torch.Tensor:
    """E4M3, a scale in bf16 per group."""
    w = w.unflatten(1, (-1, group))
    scale = (largest(w) / 448).bfloat16().float()
    return ((w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(1)


def e2m1(w: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of the 15 values; larger magnitudes become 6."""
    return E2M1[torch.bucketize(w, (E2M1[1:] + E2M1[:-1]) / 2)]


# --8<-- [end:levels]


# --8<-- [start:formats]
def mxfp4(w: torch.Tensor) -> torch.Tensor:
    w = w.unflatten(1, (-1, 32))
    scale = torch.exp2(largest(w).log2().floor() - 2)  # 2 is the exponent of E2M1's largest
    return (e2m1(w / scale) * scale).flatten(1)


def nvfp4(w: torch.Tensor) -> torch.Tensor:
    factor = w.abs().amax() / 448 / 6  # so that the largest scale is E4M3's largest
    w = w.unflatten(1, (-1, 16))
    scale = (largest(w) / 6 / factor).to(torch.float8_e4m3fn).float() * factor
    return (e2m1(w / scale) * scale).flatten(1)


# --8<-- [end:formats]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n, k = 512, 1024
    column = torch.randn(n, k)
    column[:, 17] *= 20
    tensors = {
        "Gaussian": torch.randn(n, k),
        "Student t, 4": torch.distributions.StudentT(4.0).sample((n, k)),
        "an outlier column": column,
    }
    formats = {
        "int8, per channel": (8 + 16 / k, lambda w: integer(w, 8, k)),
        "E4M3, per channel": (8 + 16 / k, lambda w: fp8(w, k)),
        "int4, per channel": (4 + 16 / k, lambda w: integer(w, 4, k)),
        "int4, 128": (4 + 16 / 128, lambda w: integer(w, 4, 128)),
        "int4, 32": (4 + 16 / 32, lambda w: integer(w, 4, 32)),
        "MXFP4, 32": (4 + 8 / 32, mxfp4),
        "NVFP4, 16": (4 + 8 / 16, nvfp4),
    }
    print("relative error       bits ", *(f"{name:>16}" for name in tensors))
    errors = {}
    for name, (bits, function) in formats.items():
        for kind, w in tensors.items():
            errors[name, kind] = ((function(w) - w).norm() / w.norm()).item()
        print(f"{name:18} {bits:7.3f}", *(f"{errors[name, kind]:16.2%}" for kind in tensors))

    for back, top in ((integer(column, 8, k), 127), (fp8(column, k), 448)):
        scale = largest(back) / top  # the largest of a row is `top` scales
        assert torch.equal(scale, scale.bfloat16().float())  # 16 bits, as counted

    # within an octave E4M3 has eight even steps, 1/8 of its low end and 1/16 of its high end
    low, high = (step / math.sqrt(12) for step in (1 / 16, 1 / 8))
    print(f"E4M3 predicted: between {low:.1%} and {high:.1%}, whatever the spread")
    for kind in tensors:
        assert low < errors["E4M3, per channel", kind] < high
    assert errors["int8, per channel", "Gaussian"] < errors["E4M3, per channel", "Gaussian"] / 2
    for kind in tensors:  # among the formats with at most 4.5 bits
        rivals = [errors[name, kind] for name, (bits, _) in formats.items() if bits <= 4.5]
        assert min(rivals) == errors["NVFP4, 16", kind]
    assert errors["MXFP4, 32", "Gaussian"] < errors["int4, 128", "Gaussian"]
    outlier = "an outlier column"
    assert errors["E4M3, per channel", outlier] < errors["int8, per channel", outlier]
    # a small block limits the damage of the outlier to its own block
    assert errors["int4, per channel", outlier] > 4 * errors["int4, 32", outlier]


if __name__ == "__main__":
    main()
