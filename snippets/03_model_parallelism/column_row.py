"""An MLP cut over t ranks by columns or by rows, in all four combinations.

One process simulates all ranks: a list has one entry for each rank. All four combinations give
the result of the whole MLP, but they send different amounts. Each collective records how many
elements a rank would send in a ring, in units of b·s·h, which is the size of the input.
"""

import torch
from torch.nn import functional as F

T, TOKENS, H = 4, 32, 64  # ranks, b·s, hidden size
SHARE = (T - 1) / T  # fraction of a tensor that an all-gather or a reduce-scatter sends
Shards = list[torch.Tensor]
sent: list[float] = []  # elements that a rank sends, in b·s·h, one entry per collective


def by_columns(x: torch.Tensor, w: torch.Tensor) -> Shards:
    """[bs, k] · [k, m/t]: every rank needs the whole x and computes m/t columns."""
    return [x @ columns for columns in w.chunk(T, dim=1)]


def by_rows(x: Shards, w: torch.Tensor) -> Shards:
    """[bs, k/t] · [k/t, m]: a rank needs k/t columns of x and computes one term."""
    return [mine @ rows for mine, rows in zip(x, w.chunk(T, dim=0), strict=True)]


def gather(shards: Shards) -> torch.Tensor:
    """An all-gather along the columns; a rank sends (t-1)/t of the result."""
    whole = torch.cat(shards, dim=1)
    sent.append(SHARE * whole.numel() / (TOKENS * H))
    return whole


def reduce_scatter(terms: Shards) -> Shards:
    """The sum of all terms. Each rank gets some columns, and sends (t-1)/t of the sum."""
    total = torch.stack(terms).sum(dim=0)
    sent.append(SHARE * total.numel() / (TOKENS * H))
    return list(total.chunk(T, dim=1))


def all_reduce(terms: Shards) -> torch.Tensor:
    """The sum of all ranks' terms; a rank sends 2(t-1)/t of the result."""
    total = torch.stack(terms).sum(dim=0)
    sent.append(2 * SHARE * total.numel() / (TOKENS * H))
    return total


def column_row(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    hidden = [F.gelu(part) for part in by_columns(x, w1)]  # GeLU is elementwise
    return all_reduce(by_rows(hidden, w2))


def column_column(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    hidden = gather([F.gelu(part) for part in by_columns(x, w1)])
    return gather(by_columns(hidden, w2))


def row_row(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    # GeLU needs the sum, and each rank needs only its own columns
    columns = reduce_scatter(by_rows(list(x.chunk(T, dim=1)), w1))
    return all_reduce(by_rows([F.gelu(part) for part in columns], w2))


def row_column(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    total = all_reduce(by_rows(list(x.chunk(T, dim=1)), w1))
    return gather(by_columns(F.gelu(total), w2))


def gelu_of_terms(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The mistake: GeLU of each rank's term, and then the sum."""
    terms = by_rows(list(x.chunk(T, dim=1)), w1)
    return all_reduce([F.gelu(term) for term in terms]) @ w2


def gradient_by_hand(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, output_grad: torch.Tensor
) -> Shards:
    """Each rank's term of the gradient of x in `column_row`; every rank has `output_grad`."""
    terms = []
    for columns, rows in zip(w1.chunk(T, dim=1), w2.chunk(T, dim=0), strict=True):
        before = (x @ columns).requires_grad_()  # [bs, 4h/t]
        (F.gelu(before) @ rows).backward(output_grad)
        terms.append(before.grad @ columns.T)  # [bs, h]: only through this rank's columns
    return terms


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, H, requires_grad=True)
    w1, w2 = torch.randn(H, 4 * H) / H**0.5, torch.randn(4 * H, H) / (4 * H) ** 0.5
    whole = F.gelu(x @ w1) @ w2
    output_grad = torch.randn(TOKENS, H)
    whole.backward(output_grad)

    with torch.no_grad():
        print(f"t = {T}: elements that a rank sends in forward, in b·s·h")
        for pairing in (column_row, column_column, row_row, row_column):
            sent.clear()
            torch.testing.assert_close(pairing(x, w1, w2), whole)
            *between, after = sent  # the last collective comes after the second product
            name = pairing.__name__.replace("_", ", then ")
            print(f"  {name:19} {sum(between):.2f} + {after:.2f}  equal to the whole MLP")
        wrong = (gelu_of_terms(x, w1, w2) - whole).norm() / whole.norm()
        print(f"GeLU of each term, then the sum: wrong by {100 * wrong:.0f}%")

    terms = gradient_by_hand(x.detach(), w1, w2, output_grad)
    alone = (terms[0] - x.grad).norm() / x.grad.norm()
    torch.testing.assert_close(all_reduce(terms), x.grad)
    print(f"gradient of x, the term of rank 0 alone: wrong by {100 * alone:.0f}%")
    print("gradient of x, the terms of all ranks added: equal")


if __name__ == "__main__":
    main()
