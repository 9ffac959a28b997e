"""The same request in a larger batch: other kernels, a different order of sums, other bits.

One row is multiplied with one matrix, in batches of several sizes. If two words are almost
equally likely, the last bits decide which one greedy decoding chooses.
"""

import torch


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randn(2048, 2048) / 2048**0.5
    rows = torch.randn(64, 2048)

    # --8<-- [start:differs]
    alone = rows[:1] @ weight.T
    sizes = (2, 4, 8, 16, 32, 64)
    outputs = {size: (rows[:size] @ weight.T)[:1] for size in sizes}
    other = [size for size in sizes if not torch.equal(outputs[size], alone)]
    off = max((outputs[size] - alone).abs().max().item() for size in sizes)
    # --8<-- [end:differs]
    share = max((outputs[size] != alone).float().mean().item() for size in sizes)
    print(f"batches in which row 0 has other bits than alone: ≈{len(other)} of {len(sizes)}")
    print(f"at most ≈{share:.0%} of its values, by ≈{1e7 * off:.0f} units of 1e-7")
    assert other, "every batch gave the same bits"
    differ = max(torch.count_nonzero(outputs[size] - alone).item() for size in sizes)
    assert share == differ / alone.numel()
    for output in outputs.values():
        torch.testing.assert_close(output, alone, rtol=1e-4, atol=1e-4)

    # --8<-- [start:tie]
    # two words whose scores are equal in exact arithmetic: the sums' order decides
    flips = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        word = torch.randn(2048, generator=generator)
        shuffled = torch.randperm(2048, generator=generator)
        # word · row, its terms in another order: the same number, other last bits
        first, second = (rows[0] * word), (rows[0] * word)[shuffled]
        margins = [first.view(part, -1).sum(1).sum() - second.view(part, -1).sum(1).sum()
                   for part in (1, 64)]  # fmt: skip
        flips += bool(margins[0].sign() != margins[1].sign())
    # --8<-- [end:tie]
    print(f"ties decided otherwise when sums are cut in 64 parts: ≈{flips} of 200")
    assert 10 < flips < 160  # two fair coins would differ in 100, three-sided ones in 133

    # --8<-- [start:fix]
    def invariant(x: torch.Tensor) -> torch.Tensor:
        """The same kernel on the same shape for every row, whatever the batch."""
        return torch.cat([x[i : i + 1] @ weight.T for i in range(len(x))])

    for size in sizes:
        assert torch.equal(invariant(rows[:size])[:1], alone)
    print("one row per product: the same bits in every batch")
    # --8<-- [end:fix]
    torch.testing.assert_close(invariant(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
