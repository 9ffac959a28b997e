"""Step 1: the words stay in order"""

STEP, HINT = 1, "words"


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    a, b, c, d = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = multiply(MULTIPLIERS[0], a)
        hi1, lo1 = multiply(MULTIPLIERS[1], c)
        a, b, c, d = hi1 ^ b ^ k0, lo0, hi0 ^ d ^ k1, lo1
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return torch.stack([a, b, c, d], -1)
