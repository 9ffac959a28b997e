"""Multiply row-major matrices with a column-major gemm, and copy no element.

BLAS stores matrices by columns and torch stores them by rows. The memory of a row-major matrix,
read by columns, is the transposed matrix. So the gemm gets the factors in exchanged order. Look
at the third line: without the exchange the result is the product in the wrong order.
"""

import random

M, N, K = 3, 4, 5


# --8<-- [start:gemm]
def gemm(flags: str, m: int, n: int, k: int, a: list, lda: int, b: list, ldb: int) -> list:
    """Return C [m, n] = op(A) op(B) like BLAS: flat lists, stored by columns.

    Each of the two letters in `flags` is "n" (as it is) or "t" (transposed). `lda` and `ldb`
    are the lengths of the stored columns.
    """
    c = [0.0] * (m * n)
    for i in range(m):
        for j in range(n):
            for r in range(k):
                left = a[i + r * lda] if flags[0] == "n" else a[r + i * lda]
                right = b[r + j * ldb] if flags[1] == "n" else b[j + r * ldb]
                c[i + j * m] += left * right
    return c


def matmul(a: list, b: list, m: int, n: int, k: int) -> list:
    """Return A [m, k] @ B [k, n], all stored by rows. No element is copied."""
    return gemm("nn", n, m, k, b, n, a, k)


def linear(x: list, w: list, m: int, n: int, k: int) -> list:
    """Return x [m, k] @ w.T for a weight w [n, k], all stored by rows."""
    return gemm("tn", n, m, k, w, k, x, k)


# --8<-- [end:gemm]


class Memory(list):
    """A list that counts how many elements are read from all lists of this class."""

    reads = 0

    def __getitem__(self, index: int) -> float:
        Memory.reads += 1
        return super().__getitem__(index)


def definition(a: list[list], b: list[list]) -> list:
    """Return the product of two lists of rows as a flat list, stored by rows."""
    columns = list(zip(*b, strict=True))
    return [sum(x * y for x, y in zip(r, c, strict=True)) for r in a for c in columns]


def flat(rows: list[list]) -> Memory:
    return Memory(value for row in rows for value in row)


def main() -> None:
    random.seed(0)

    def matrix(rows: int, columns: int) -> list[list]:
        return [[random.randint(-9, 9) for _ in range(columns)] for _ in range(rows)]

    a, b, w = matrix(M, K), matrix(K, N), matrix(N, K)
    assert matmul(flat(a), flat(b), M, N, K) == definition(a, b)
    print(f"[{M}, {K}] @ [{K}, {N}] by rows, through a gemm by columns: equal")
    assert linear(flat(a), flat(w), M, N, K) == definition(a, list(zip(*w, strict=True)))
    print("x @ w.T: the flag `t` takes the place of a transposed copy: equal")
    # the gradient of w is dy.T @ x, and here the second factor of the gemm has the flag
    dy = matrix(M, N)
    gradient = gemm("nt", K, N, M, flat(a), K, flat(dy), N)
    assert gradient == definition(list(zip(*dy, strict=True)), a)
    assert Memory.reads == 3 * 2 * M * N * K  # three products read both factors, and no copy

    p, q = matrix(M, M), matrix(M, M)
    plain = gemm("nn", M, M, M, flat(p), M, flat(q), M)
    assert plain == definition(q, p) != definition(p, q)
    print("square matrices p and q without the exchange: the result is q @ p, not p @ q")


if __name__ == "__main__":
    main()
