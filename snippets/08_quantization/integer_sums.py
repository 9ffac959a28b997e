"""Failures: sums of int8 products in too few bits wrap around, without an error.

`@` on int8 tensors also adds in int8. int32 wraps around too: in the worst case from 133,145
products on.
"""

import torch

# an x86 without VNNI adds pairs of products in 16 bits, which saturate
FULL = torch.full((32, 64), 127, dtype=torch.int8)
INT_MM_IS_EXACT = (torch._int_mm(FULL, FULL.T.contiguous()) == 64 * 127 * 127).all().item()


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] and [k, n] of int8 -> [m, n] of int32, exact on every processor."""
    return torch._int_mm(a, b) if INT_MM_IS_EXACT else a.int() @ b.int()


def main() -> None:
    torch.set_num_threads(1)
    # --8<-- [start:int8]
    a = torch.full((2, 300), 1, dtype=torch.int8)
    b = torch.full((300, 2), 1, dtype=torch.int8)
    wrong = a @ b  # int8: 300 - 256
    right = int_mm(a, b)  # torch._int_mm: int32
    # --8<-- [end:int8]
    print(f"300 products of 1 · 1 in {str(wrong.dtype).removeprefix('torch.')}: "
          f"{wrong[0, 0].item()}; by torch._int_mm: {right[0, 0].item()}")  # fmt: skip
    assert wrong.dtype == torch.int8 and wrong[0, 0].item() == 44 and right[0, 0].item() == 300

    # --8<-- [start:int32]
    k = 200_000
    a = torch.full((32, k), 127, dtype=torch.int8)
    b = torch.full((k, 8), 127, dtype=torch.int8)
    wrong = int_mm(a, b)
    parts = zip(a.split(100_000, 1), b.split(100_000, 0), strict=True)
    right = sum(int_mm(left, below).long() for left, below in parts)
    # --8<-- [end:int32]
    print(f"200,000 products of 127 · 127 in int32: {wrong[0, 0].item():,}")
    print(f"two halves, added in int64: {right[0, 0].item():,}")
    # .item() first: compared with an int32 tensor, the Python number would wrap as well
    assert wrong[0, 0].item() == 127 * 127 * k - 2**32 and right[0, 0].item() == 127 * 127 * k

    # --8<-- [start:sum]
    numbers = torch.full((1000,), 100, dtype=torch.int8)
    total = numbers.sum()  # sum() widens to int64 by default, @ does not
    narrow = numbers.sum(dtype=torch.int8)
    # --8<-- [end:sum]
    print(f"sum of 1,000 times 100: {total.item():,}; with dtype=int8: {narrow.item()}")
    assert total.dtype == torch.int64 and total.item() == 100_000
    assert narrow.item() == (100_000 + 128) % 256 - 128


if __name__ == "__main__":
    main()
