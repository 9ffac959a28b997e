"""Step 2: words as signed numbers"""

STEP, HINT = 2, "range"


def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
    quarters = torch.arange(first // 4, (first + n + 3) // 4)
    zero = torch.zeros_like(quarters)
    counter = [quarters & MASK, quarters >> 32, zero + (offset & MASK), zero + (offset >> 32)]
    words = philox(torch.stack(counter, -1), (seed & MASK, seed >> 32)).flatten()
    begin = first - first // 4 * 4
    return words[begin : begin + n].to(torch.int32).float() / 2**31
