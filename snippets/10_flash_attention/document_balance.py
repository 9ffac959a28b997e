"""This program compares the work of the ranks for three ways to cut a row of documents.

With one causal document, zigzag order gives every rank the same work. With several documents in
the row, zigzag order can be worse than neighbouring shards. If each document is cut into 2n
chunks of equal length, every rank again has the same work.
"""

import torch

RANKS = 4
ROWS = {
    "one document": [1024],
    "one long, many short": [640] + [32] * 12,
    "many short, one long": [32] * 12 + [640],
    "equal": [256] * 4,
    "shorter than 2n tokens": [4] * 256,
}


# --8<-- [start:orders]
def contiguous(lengths: list[int], n: int) -> list[torch.Tensor]:
    """Return the tokens of each rank if the ranks have neighbouring shards."""
    return list(torch.arange(sum(lengths)).tensor_split(n))


def zigzag(lengths: list[int], n: int) -> list[torch.Tensor]:
    """Return the tokens of each rank: rank r has the chunks r and 2n-1-r of the row."""
    chunks = torch.arange(sum(lengths)).tensor_split(2 * n)
    return [torch.cat([chunks[r], chunks[2 * n - 1 - r]]) for r in range(n)]


def zigzag_per_document(lengths: list[int], n: int) -> list[torch.Tensor]:
    """Give rank r the chunks r and 2n-1-r of every document; fair if 2n divides each length."""
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    cut = [zigzag([length], n) for length in lengths]
    return [
        torch.cat([s + one[r] for s, one in zip(starts, cut, strict=True)]) for r in range(n)
    ]


# --8<-- [end:orders]


def main() -> None:
    assert torch.stack(contiguous([8], 4)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert torch.stack(zigzag([8], 4)).tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]
    both = zigzag_per_document([8, 16], 4)  # the second document begins at token 8
    assert both[1].tolist() == [1, 6, 10, 11, 20, 21]
    print(f"slowest rank's pairs over a fair share, {RANKS} ranks, 1,024 tokens")
    print("documents in the row     contiguous   zigzag   zigzag per document")
    for name, lengths in ROWS.items():
        # token i of a document attends to i + 1 tokens of it
        work = torch.cat([torch.arange(1, length + 1) for length in lengths])
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (document[:, None] == document).tril()  # [query, key]: the pairs that count
        assert torch.equal(mask.sum(1), work)
        fair = work.sum().item() / RANKS
        worst = []
        for order in (contiguous, zigzag, zigzag_per_document):
            shards = order(lengths, RANKS)
            assert torch.equal(torch.cat(shards).sort().values, torch.arange(1024))
            assert {len(shard) for shard in shards} == {1024 // RANKS}
            worst.append(max(work[shard].sum().item() for shard in shards) / fair)
        print(f"{name:24} {worst[0]:10.2f} {worst[1]:8.2f} {worst[2]:21.2f}")
        divisible = all(length % (2 * RANKS) == 0 for length in lengths)
        assert (abs(worst[2] - 1) < 1e-6) == divisible, "2n must divide every length"
        if name == "one long, many short":
            assert worst[1] > worst[0] > 1.5, "zigzag order is worse than none"
        assert (abs(worst[1] - 1) > 0.3) == ("many" in name), "zigzag depends on the documents"


if __name__ == "__main__":
    main()
