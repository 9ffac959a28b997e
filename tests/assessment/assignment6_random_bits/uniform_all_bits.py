"""Step 2: all 32 bits"""

STEP, HINT = 2, "range"


def uniform(seed, offset, first, n):
    q = torch.arange(first // 4, (first + n + 3) // 4)
    z = torch.zeros_like(q)
    words = philox(
        torch.stack([q & MASK, q >> 32, z + (offset & MASK), z + (offset >> 32)], -1),
        (seed & MASK, seed >> 32),
    ).flatten()
    b = first % 4
    return words[b : b + n].float() / 2**32
