"""Step 2: each call begins with a counter"""

STEP, HINT = 2, "position"


def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
    quarters = torch.arange(first // 4, (first + n + 3) // 4)
    zero = torch.zeros_like(quarters)
    counter = [quarters & MASK, quarters >> 32, zero + (offset & MASK), zero + (offset >> 32)]
    words = philox(torch.stack(counter, -1), (seed & MASK, seed >> 32)).flatten()
    begin = 0
    return (words[begin : begin + n] >> 8).float() / 2**24
