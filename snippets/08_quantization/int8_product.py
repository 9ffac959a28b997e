"""An int8 matrix product with int32 sums is exact; zero points become two sums and a constant.

The sums are compared with 64-bit integers and float64. The program then measures the error of a
product with two rounded factors, and counts how many products always fit into an int32.
"""

import math

import torch

# --8<-- [start:rounding]
# an x86 without VNNI adds pairs of products in 16 bits, which saturate
FULL = torch.full((32, 64), 127, dtype=torch.int8)
INT_MM_IS_EXACT = (torch._int_mm(FULL, FULL.T.contiguous()) == 64 * 127 * 127).all().item()


def parameters(x: torch.Tensor) -> tuple[float, int]:
    """Scale and zero point for int8, -128 … 127."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    scale = (high - low) / 255
    return scale, round(-low / scale) - 128


def to_int8(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    return ((x / scale).round() + zero).clamp(-128, 127).to(torch.int8)


# --8<-- [end:rounding]


# --8<-- [start:product]
def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] and [k, n] of int8 -> [m, n] of int32, exact on every processor."""
    return torch._int_mm(a, b) if INT_MM_IS_EXACT else a.int() @ b.int()


def product(qa: torch.Tensor, za: int, qb: torch.Tensor, zb: int) -> torch.Tensor:
    """(A - za) @ (B - zb) in integers: [m, k] and [k, n] of int8 -> [m, n] of int32."""
    k = qa.shape[1]
    sums = int_mm(qa, qb)  # most of the work: int8 times int8, added in int32
    rows = qa.sum(1, keepdim=True, dtype=torch.int32)  # [m, 1]
    columns = qb.sum(0, keepdim=True, dtype=torch.int32)  # [1, n]: known in advance
    return sums - zb * rows - za * columns + k * za * zb


# --8<-- [end:product]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(64, 1024, generator=generator) * 3 - 1  # off centre: its zero point is not 0
    b = torch.randn(1024, 128, generator=generator)
    (sa, za), (sb, zb) = parameters(a), parameters(b)
    qa, qb = to_int8(a, sa, za), to_int8(b, sb, zb)
    print(f"zero points {za} and {zb}")
    assert parameters(torch.tensor([51.0, 255.0])) == (1.0, -128)  # 0 is in every range

    integers = product(qa, za, qb, zb)
    exact = (qa.long() - za) @ (qb.long() - zb)
    assert integers.dtype == torch.int32 and torch.equal(integers.long(), exact)
    floats = (qa.double() - za) @ (qb.double() - zb)
    assert torch.equal(integers.double(), floats)
    print("int32 sums equal 64-bit integers and float64, to the last digit")

    true = a.double() @ b.double()
    error = ((sa * sb * integers.double() - true).norm() / true.norm()).item()
    parts = [scale**2 / 12 / x.square().mean().item() for scale, x in ((sa, a), (sb, b))]
    predicted = math.sqrt(sum(parts))
    print(f"relative error of the product {error:.2%}, predicted {predicted:.2%}")
    assert math.isclose(error, predicted, rel_tol=0.05)

    # how long may a sum be? in the worst case every product has the largest magnitude
    for name, largest in (
        ("-127 … 127 times -127 … 127", 127 * 127),
        ("-128 … 127 times -128 … 127", 128 * 128),
        ("0 … 255 times -128 … 127", 255 * 128),
        ("-255 … 255 times -255 … 255", 255 * 255),  # with the zero points subtracted
    ):
        print(f"{name}: up to {(2**31 - 1) // largest:,} products always fit")
    k = (2**31 - 1) // (127 * 127)

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, 127, dtype=torch.int8)

    worst, wrapped = (int_mm(full(32, length), full(length, 8)) for length in (k, k + 1))
    assert (worst.long() == 127 * 127 * k).all()
    assert (wrapped.long() == 127 * 127 * (k + 1) - 2**32).all()  # one more wraps around
    k_affine = (2**31 - 1) // (255 * 255)
    for length, wraps in ((k_affine, 0), (k_affine + 1, 2**32)):
        affine = product(full(32, length), -128, full(length, 8), -128)
        assert (affine.long() == 255 * 255 * length - wraps).all()
    print(f"tried with {k:,}: {worst[0, 0].item():,}, of at most {2**31 - 1:,}")


if __name__ == "__main__":
    main()
