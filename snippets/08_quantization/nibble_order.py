"""Failure: nibbles are unpacked in the wrong order, which swaps every pair of columns."""

import torch


# --8<-- [start:orders]
def pack(q: torch.Tensor) -> torch.Tensor:
    return q[:, 0::2] | q[:, 1::2] << 4  # even columns in the low nibble


def unpack_high_first(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed >> 4, packed & 15], -1).flatten(-2)


def unpack_low_first(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


# --8<-- [end:orders]


def main() -> None:
    torch.manual_seed(0)
    q = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    x = torch.randn(8, 128)
    right = x @ (q.float() - 8).T
    for name, unpack in (("high first", unpack_high_first), ("low first", unpack_low_first)):
        back = unpack(pack(q))
        wrong = x @ (back.float() - 8).T
        assert torch.equal(back.flatten().bincount(), q.flatten().bincount())
        error = ((wrong - right).norm() / right.norm()).item()
        assert error == 0 if name == "low first" else abs(error - 2**0.5) < 0.1
        print(f"{name:10}: the same shape and histogram, error of the product {error:.2f}")
    even = torch.full_like(q, 9)
    assert torch.equal(unpack_high_first(pack(even)), even)
    print("a test with a constant weight passes in both orders")
    count = torch.arange(16, dtype=torch.uint8).view(1, -1)
    assert torch.equal(unpack_low_first(pack(count)), count)
    assert not torch.equal(unpack_high_first(pack(count)), count)
    print(
        "a test with 0 to 15 fails in the wrong order:",
        unpack_high_first(pack(count))[0, :6].tolist(),
    )


if __name__ == "__main__":
    main()
