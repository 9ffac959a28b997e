"""Many fine-tuned models in one batch: one base product, and the A and B of each row.

A LoRA adapter adds x·A·B to x·W, where A and B have rank r. The rows of one batch may belong
to different adapters. Two batched products multiply each row by its own adapter. The result
equals the result of separate models with merged weights.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, RANK, ADAPTERS, ROWS = 256, 8, 5, 16


# --8<-- [start:lora]
def one_batch(x, weight, a, b, adapter):
    """x is [b, h], `a` [n, h, r], `b` [n, r, h]; row i belongs to adapter[i]."""
    small = torch.bmm(x[:, None], a[adapter])  # [b, 1, r]
    return x @ weight + torch.bmm(small, b[adapter])[:, 0]


def separately(x, weight, a, b, adapter):
    """A model for each adapter, with its product merged into the weight."""
    y = torch.empty_like(x)
    for n in range(len(a)):
        mine = adapter == n
        y[mine] = x[mine] @ (weight + a[n] @ b[n])
    return y


# --8<-- [end:lora]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, HIDDEN), torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
    a = torch.randn(ADAPTERS, HIDDEN, RANK) / HIDDEN**0.5
    b = torch.randn(ADAPTERS, RANK, HIDDEN) / RANK**0.5
    adapter = torch.randint(ADAPTERS, (ROWS,))
    assert len(adapter.unique()) == ADAPTERS
    together, alone = one_batch(x, weight, a, b, adapter), separately(x, weight, a, b, adapter)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together, one_batch(x, weight, a, b, adapter.roll(1)), atol=0.1)
    print(f"{ROWS} rows of {ADAPTERS} adapters in one batch: equal to {ADAPTERS} merged models")
    merged, pooled = ADAPTERS * weight.nbytes, weight.nbytes + a.nbytes + b.nbytes
    print(
        f"weights in memory: {merged / 2**10:.0f} KiB merged, {pooled / 2**10:.0f} KiB shared"
    )
    with FlopCounterMode(display=False) as base:
        x @ weight
    with FlopCounterMode(display=False) as both:
        one_batch(x, weight, a, b, adapter)
    plain = base.get_total_flops() // ROWS
    more = both.get_total_flops() // ROWS - plain
    share = 2 * RANK / HIDDEN
    print(f"FLOPs per row, counted: {plain:,} and {more:,} more; 2r/h = {share:.1%} of it")
    assert more == share * plain


if __name__ == "__main__":
    main()
