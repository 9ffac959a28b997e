"""The index error that a GPU reports late, for example as CUBLAS_STATUS_NOT_INITIALIZED.

A tokenizer got one more token than the model has rows. On a CPU the lookup itself raises the
error. A check of each batch finds the sample and the position, and works on any device. The
second part enlarges the embedding by one row, which is the fix.
"""

import torch
from torch import nn

VOCABULARY, WIDTH, PAD = 50, 8, 50  # the ids 0 to 49 exist; the new padding token is 50


def make_batch() -> torch.Tensor:
    """Token ids of three samples, [3, 6]. The last sample is shorter and was padded."""
    ids = torch.randint(VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    ids[2, 4:] = PAD
    return ids


# --8<-- [start:check]
def check_ids(ids: torch.Tensor, rows: int, name: str) -> None:
    """Raise an error that names the first id without a row in an embedding of `rows` rows."""
    bad = ((ids < 0) | (ids >= rows)).nonzero()
    if len(bad):
        sample, position = bad[0].tolist()
        raise ValueError(
            f"{name}[{sample}, {position}] is {ids[sample, position]}, but there are {rows} "
            "rows"
        )


def enlarge(old: nn.Embedding, rows: int) -> nn.Embedding:
    """An embedding with more rows, whose first rows are those of the old embedding.

    The optimizer needs the new weight. A tied output layer must be enlarged as well.
    """
    like = {"device": old.weight.device, "dtype": old.weight.dtype}
    new = nn.Embedding(rows, old.embedding_dim, old.padding_idx, **like)
    with torch.no_grad():
        new.weight[: old.num_embeddings] = old.weight
    return new.requires_grad_(old.weight.requires_grad)


# --8<-- [end:check]


def try_lookup(ids: torch.Tensor, embedding: nn.Embedding, fixed: bool) -> None:
    """Check the batch and look it up; print which of the two calls raises an error."""
    for name, call in (
        ("the check", lambda: check_ids(ids, embedding.num_embeddings, "ids")),
        ("the embedding", lambda: embedding(ids)),
    ):
        try:
            call()
            print(f"{name}: no error")
            assert fixed
        except (ValueError, IndexError) as error:
            print(f"{name}: {type(error).__name__}: {error}")
            assert not fixed and ("ids[2, 4] is 50" in str(error) or name == "the embedding")


def main() -> None:
    torch.manual_seed(0)
    old, ids = nn.Embedding(VOCABULARY, WIDTH), make_batch()
    before = old.weight.detach().clone()
    check_ids(ids[:2], old.num_embeddings, "ids")  # the control: no sample here is padded
    try:
        check_ids(ids[:2] - VOCABULARY, old.num_embeddings, "ids")  # a negative id
        raise AssertionError("negative ids have no rows")
    except ValueError as error:
        assert str(error).startswith(f"ids[0, 0] is {ids[0, 0] - VOCABULARY},")
    try_lookup(ids, old, fixed=False)

    embedding = enlarge(old, VOCABULARY + 1)
    print(f"with {embedding.num_embeddings} rows:")
    try_lookup(ids, embedding, fixed=True)
    rows = embedding(ids)  # [3, 6] -> [3, 6, 8]
    torch.testing.assert_close(rows[:2], before[ids[:2]])  # the old rows are unchanged
    torch.testing.assert_close(rows[2, 5], embedding.weight[PAD])
    rows.sum().backward()
    expected = torch.tensor([(ids == row).sum().item() for row in range(VOCABULARY + 1)])
    torch.testing.assert_close(embedding.weight.grad[:, 0], expected.float())
    print(f"gradient of row {PAD}: {embedding.weight.grad[PAD, 0]:.0f}, one for each use")
    assert expected[PAD] == 2

    frozen = nn.Embedding(4, WIDTH, padding_idx=1, dtype=torch.bfloat16).requires_grad_(False)
    larger = enlarge(frozen, 5)
    assert (larger.padding_idx, larger.weight.dtype) == (1, torch.bfloat16)
    assert not larger.weight.requires_grad and torch.equal(larger.weight[:4], frozen.weight)


if __name__ == "__main__":
    main()
