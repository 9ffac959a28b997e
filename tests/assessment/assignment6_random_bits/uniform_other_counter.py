"""Step 2: the offset comes first"""

STEP, HINT = 2, "counter"


def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
    quarters = torch.arange(first // 4, (first + n + 3) // 4)
    zero = torch.zeros_like(quarters)
    counter = [zero + (offset & MASK), zero + (offset >> 32), quarters & MASK, quarters >> 32]
    words = philox(torch.stack(counter, -1), (seed & MASK, seed >> 32)).flatten()
    begin = first - first // 4 * 4
    return (words[begin : begin + n] >> 8).float() / 2**24
