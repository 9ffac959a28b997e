"""Step 2: 32 bits of the counter"""

STEP, HINT = 2, "counter"


def uniform(seed, offset, first, n):
    q = torch.arange(first // 4, (first + n + 3) // 4)
    z = torch.zeros_like(q)
    words = philox(
        torch.stack([q, z, z + (offset & MASK), z + (offset >> 32)], -1),
        (seed & MASK, seed >> 32),
    ).flatten()
    b = first % 4
    return (words[b : b + n] >> 8).float() / 2**24
