"""Step 1: the key changes before the first round"""

STEP, HINT = 1, "key"


def philox(counter, key):
    a, b, c, d = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
        hi0, lo0 = multiply(MULTIPLIERS[0], a)
        hi1, lo1 = multiply(MULTIPLIERS[1], c)
        a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0
    return torch.stack([a, b, c, d], -1)
