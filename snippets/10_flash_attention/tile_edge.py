"""This program shows what keys behind the end of a sequence do to attention.

A masked load fills the last tile with zeros. A key of zeros has the score 0, and e^0 = 1 is
added to the sum. Lengths that are multiples of the tile are right, so a test with such a length
finds nothing. Look at the column "phantom keys" and at the two columns of ratios.
"""

import math

import torch

TILE = 32


# --8<-- [start:attention]
def attention(q, k, v, masked: bool):
    """Attention over padded tiles, as a kernel loads them: `other=0.0` behind the end."""
    s = len(k)
    padding = (0, 0, 0, -s % TILE)
    k, v = (torch.nn.functional.pad(t, padding) for t in (k, v))
    z = q @ k.T * q.shape[-1] ** -0.5
    if masked:
        z[:, s:] = -torch.inf  # a score of minus infinity, not a key of zeros
    return z.softmax(-1) @ v


# --8<-- [end:attention]


def main() -> None:
    torch.manual_seed(0)
    print("                                                       |out| over what it should be")
    print("    s   phantom keys   error unmasked   error masked   counted   predicted")
    for s in (96, 100, 33, 3):
        q, k, v = torch.randn(s, 16), torch.randn(s, 16), torch.randn(s, 16)
        truth = (q.double() @ k.double().T / 4).softmax(-1) @ v.double()
        wrong, right = (attention(q, k, v, masked) for masked in (False, True))
        errors = [(x - truth).abs().max().item() for x in (wrong, right)]
        ratio = (wrong.norm() / truth.norm()).item()
        # z is normal, so a real key weighs e^(1/2) on average; a phantom key weighs e^0
        predicted = s * math.exp(0.5) / (s * math.exp(0.5) + -s % TILE)
        cells = [f"≈{error:.0e}" for error in errors]
        print(
            f"{s:5}   {-s % TILE:12}   {cells[0]:>14}   {cells[1]:>12}     ≈{ratio:.2f}   "
            f"{predicted:9.2f}"
        )
        real = (q @ k.T / 4).exp().sum(-1, keepdim=True)  # each phantom key adds e^0 = 1
        torch.testing.assert_close(wrong, (truth * real / (real + -s % TILE)).float())
        assert errors[1] < 1e-5
        assert (errors[0] < 1e-5) == (s % TILE == 0) and abs(ratio - predicted) < 0.05
    assert ratio < 0.3  # 3 real keys, 29 phantoms
    low, high = torch.full((1, 16), -10.0), torch.full((33, 16), 10.0)  # scores of -400
    assert attention(low, high, torch.ones(33, 16), masked=True).allclose(torch.ones(1))


if __name__ == "__main__":
    main()
