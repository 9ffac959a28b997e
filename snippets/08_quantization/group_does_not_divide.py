"""A layer whose inputs are no multiple of the group: the error, and zeros that fix it."""

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
    pad = -K % GROUP  # 28
    padded = quantize(F.pad(w, (0, pad)))  # zeros change no group's largest magnitude
    y = F.linear(F.pad(x, (0, pad)), padded)
    # --8<-- [end:fix]
    assert padded[:, K:].eq(0).all()
    torch.testing.assert_close(y, F.linear(x, padded[:, :K]))
    error = ((y - F.linear(x, w)).norm() / F.linear(x, w).norm()).item()
    print(f"padded from {K} to {K + pad} inputs: error {error:.1%}, {pad / K:.0%} more")
    assert error < 0.15


if __name__ == "__main__":
    main()
