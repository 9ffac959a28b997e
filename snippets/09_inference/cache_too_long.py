"""A cache that is longer than the position table: confusing errors, or an empty result.

The table has a row for each of 64 positions. What happens to token 65 depends on how its row is
read: by a slice, by an embedding, or after a check.
"""

import torch
from torch import nn

CONTEXT, HIDDEN = 64, 16


def shown(words: str, work, expected: type[Exception] | None) -> None:
    """Print what `work` does, and hold it against the error that it should raise."""
    try:
        result = work()
    except (RuntimeError, IndexError, ValueError) as error:
        print(f"{words}: {type(error).__name__}: {str(error).splitlines()[0]}")
        assert type(error) is expected
    else:
        assert expected is None, f"{words}: no error"
        print(f"{words}: no error, shape {list(result.shape)}")


def main() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(CONTEXT, HIDDEN)
    head = nn.Linear(HIDDEN, 37)

    # --8<-- [start:failures]
    def by_slice(ids_length: int, start: int) -> torch.Tensor:
        x = torch.randn(1, ids_length, HIDDEN)
        return head(x + table.weight[start : start + ids_length])

    shown("a prompt of 65, by slice", lambda: by_slice(65, 0), RuntimeError)
    shown("token 65 after 64, by slice", lambda: by_slice(1, 64), None)
    shown("its logits, last place", lambda: by_slice(1, 64)[:, -1], IndexError)
    shown("token 65, by embedding", lambda: table(torch.tensor([[64]])), IndexError)
    # --8<-- [end:failures]
    assert by_slice(1, 64).shape[1] == 0, "a sum with no rows has no rows"
    assert by_slice(2, 63).shape[1] == 2, "the one row that is left serves both tokens"
    for start, new in ((0, 64), (5, 3), (63, 1)):  # control: the first 64 tokens have rows
        torch.manual_seed(start)
        found = by_slice(new, start)
        torch.manual_seed(start)
        x = torch.randn(1, new, HIDDEN) + table(torch.arange(start, start + new))
        torch.testing.assert_close(found, head(x))

    # --8<-- [start:fix]
    def position(start: int, new: int) -> torch.Tensor:
        if start + new > CONTEXT:
            raise ValueError(
                f"{start} tokens cached and {new} new exceed the {CONTEXT} positions"
            )
        return table.weight[start : start + new]

    shown("fixed", lambda: position(64, 1), ValueError)
    # --8<-- [end:fix]
    for start, new in ((0, 64), (5, 3), (63, 1)):
        rows = table(torch.arange(start, start + new))
        torch.testing.assert_close(position(start, new), rows)
    for start, new in ((63, 2), (0, 65)):  # the last of the new tokens alone has no row
        try:
            position(start, new)
        except ValueError:
            continue
        raise AssertionError(f"{new} tokens after {start} were accepted")


if __name__ == "__main__":
    main()
