"""Packed documents upset zigzag's balance: work per rank under three ways to cut a row.

A causal mask alone gives every rank the same work in zigzag order. With several documents in
the row it need not. Cutting each document into 2n chunks brings the balance back.
"""

import torch

RANKS = 4
ROWS = {
    "one document": [1024],
    "one long, many short": [640] + [32] * 12,
    "many short, one long": [32] * 12 + [640],
    "equal": [256] * 4,
}


# --8<-- [start:orders]
def contiguous(lengths: list[int], n: int) -> list[torch.Tensor]:
    """The tokens of each rank: neighbouring shards."""
    return list(torch.arange(sum(lengths)).tensor_split(n))


def zigzag(lengths: list[int], n: int) -> list[torch.Tensor]:
    """Chunks r and 2n-1-r of the row for rank r."""
    chunks = torch.arange(sum(lengths)).tensor_split(2 * n)
    return [torch.cat([chunks[r], chunks[2 * n - 1 - r]]) for r in range(n)]


def zigzag_per_document(lengths: list[int], n: int) -> list[torch.Tensor]:
    """Chunks r and 2n-1-r of every document for rank r; fair if 2n divides each length."""
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    cut = [zigzag([length], n) for length in lengths]
    return [
        torch.cat([s + one[r] for s, one in zip(starts, cut, strict=True)]) for r in range(n)
    ]


# --8<-- [end:orders]


def main() -> None:
    print(f"slowest rank's pairs over a fair share, {RANKS} ranks, 1,024 tokens")
    print("documents in the row     contiguous   zigzag   zigzag per document")
    for name, lengths in ROWS.items():
        # token i of a document attends to i + 1 tokens of it
        work = torch.cat([torch.arange(1, length + 1) for length in lengths])
        fair = work.sum().item() / RANKS
        worst = []
        for order in (contiguous, zigzag, zigzag_per_document):
            shards = order(lengths, RANKS)
            assert torch.equal(torch.cat(shards).sort().values, torch.arange(1024))
            worst.append(max(work[shard].sum().item() for shard in shards) / fair)
        print(f"{name:24} {worst[0]:10.2f} {worst[1]:8.2f} {worst[2]:21.2f}")
        assert abs(worst[2] - 1) < 1e-6, "per document it is always fair"
        assert (abs(worst[1] - 1) < 1e-6) == (name == "one document") or name == "equal"


if __name__ == "__main__":
    main()
