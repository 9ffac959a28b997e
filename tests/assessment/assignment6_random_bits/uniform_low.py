"""Step 2: the low bits"""

STEP, HINT = 2, "low_bits"


def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
    quarters = torch.arange(first // 4, (first + n + 3) // 4)
    zero = torch.zeros_like(quarters)
    counter = [quarters & MASK, quarters >> 32, zero + (offset & MASK), zero + (offset >> 32)]
    words = philox(torch.stack(counter, -1), (seed & MASK, seed >> 32)).flatten()
    begin = first - first // 4 * 4
    return (words[begin : begin + n] & 0xFFFFFF).float() / 2**24
