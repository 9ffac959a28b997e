"""Failure: the group does not divide the inputs of a layer. Padding with zeros fixes it."""

import sys

import torch
import torch.nn.functional as F

K, N, GROUP = 100, 64, 32


def quantize(w: torch.Tensor) -> torch.Tensor:
    grouped = w.unflatten(1, (-1, GROUP))
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    return ((grouped / scale).round() * scale).flatten(1)


def main() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(N, K), torch.randn(8, K)
    try:
        quantize(w)
        sys.exit("this was expected to fail")
    except RuntimeError as error:
        print(f"RuntimeError: {error}")

    # --8<-- [start:fix]
    def pad(t: torch.Tensor) -> torch.Tensor:
        return F.pad(t, (0, -t.shape[1] % GROUP))  # 28 zeros

    padded = quantize(pad(w))  # zeros do not change any largest magnitude
    y = F.linear(pad(x), padded)
    # --8<-- [end:fix]
    assert padded[:, K:].eq(0).all() and torch.equal(pad(padded), padded)  # 128 need no padding
    torch.testing.assert_close(y, F.linear(x, padded[:, :K]))
    error = ((y - F.linear(x, w)).norm() / F.linear(x, w).norm()).item()
    wide = padded.shape[1]
    print(f"padded from {K} to {wide} inputs: error {error:.1%}, {wide / K - 1:.0%} more")
    assert error < 0.15


if __name__ == "__main__":
    main()
