"""Step 2: the offset is left out"""

STEP, HINT = 2, "offset"


def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
    quarters = torch.arange(first // 4, (first + n + 3) // 4)
    zero = torch.zeros_like(quarters)
    counter = [quarters & MASK, quarters >> 32, zero + 2, zero]
    words = philox(torch.stack(counter, -1), (seed & MASK, seed >> 32)).flatten()
    begin = first - first // 4 * 4
    return (words[begin : begin + n] >> 8).float() / 2**24
