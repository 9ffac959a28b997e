"""An int8 matrix product with int32 sums is exact; zero points become two sums and a constant.

Checked against 64-bit integers and float64. Then: how large the error of a product is that has
both factors rounded, and how many products an int32 can hold.
"""

import math

import torch

# --8<-- [start:product]
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


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] and [k, n] of int8 -> [m, n] of int32, exact on every processor."""
    return torch._int_mm(a, b) if INT_MM_IS_EXACT else a.int() @ b.int()


def product(qa: torch.Tensor, za: int, qb: torch.Tensor, zb: int) -> torch.Tensor:
    """(A - za) @ (B - zb) in integers: [m, k] and [k, n] of int8 -> [m, n] of int32."""
    k = qa.shape[1]
    sums = int_mm(qa, qb)  # all the work: int8 times int8 added up in int32
    rows = qa.sum(1, keepdim=True, dtype=torch.int32)  # [m, 1]
    columns = qb.sum(0, keepdim=True, dtype=torch.int32)  # [1, n]: known before A is
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

    # how long may a sum be? the worst case has every product as large as can be
    for name, largest in (
        ("-127 … 127 times -127 … 127", 127 * 127),
        ("-128 … 127 times -128 … 127", 128 * 128),
        ("0 … 255 times -128 … 127", 255 * 128),
    ):
        print(f"{name}: up to {(2**31 - 1) // largest:,} products fit for certain")
    k = (2**31 - 1) // (127 * 127)
    full = torch.full((32, k), 127, dtype=torch.int8)
    worst = int_mm(full, torch.full((k, 8), 127, dtype=torch.int8))
    assert (worst.long() == 127 * 127 * k).all() and 127 * 127 * (k + 1) >= 2**31
    print(f"tried with {k:,}: {worst[0, 0].item():,}, of at most {2**31 - 1:,}")


if __name__ == "__main__":
    main()
