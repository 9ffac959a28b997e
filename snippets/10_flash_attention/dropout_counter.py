"""This program shows dropout in a tiled kernel whose mask is a function and is never stored.

The mask depends on the seed, the row and the column. Forward and backward use different tiles
in a different order. A counter-based generator returns the same random number for a position
whenever it is called, so both passes see the same mask. A generator with a state returns its
first numbers to the tile that comes first, so backward drops other weights than forward. Look
at the lines "counter" and "stateful".
"""

import torch

S, D, DROP, SEED = 48, 16, 0.25, 7


# --8<-- [start:counter]
def hashed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's final mix: 32 bits in, 32 well-mixed bits out, stored as int64."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def keep(seed: int, rows: torch.Tensor, columns: torch.Tensor, keys: int) -> torch.Tensor:
    """Return 1/(1-p) for each kept weight of a tile and 0 for each dropped weight."""
    counter = rows[:, None] * keys + columns  # the number of the position in the matrix
    uniform = hashed(hashed(counter) ^ seed).double() / 2**32
    return (uniform >= DROP) / (1 - DROP)


# --8<-- [end:counter]


class Stateful:
    """The wrong generator for this purpose: its numbers depend on how many came before."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)

    def __call__(self, seed: int, rows, columns, keys: int) -> torch.Tensor:
        shape = len(rows), len(columns)
        return (torch.rand(shape, generator=self.generator) >= DROP).double() / (1 - DROP)


# --8<-- [start:tiles]
def forward(q, k, v, mask, tile: int):
    """Compute `tile` queries at a time; return the output and the log-sum-exp of each row."""
    out, lse = q.new_empty(len(q), v.shape[1]), q.new_empty(len(q))
    columns = torch.arange(len(k), device=q.device)
    for rows in torch.arange(len(q), device=q.device).split(tile):
        scores = q[rows] @ k.T / q.shape[1] ** 0.5
        lse[rows] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[rows, None])  # softmax first, then dropout
        out[rows] = (weights * mask(SEED, rows, columns, len(k))) @ v
    return out, lse


def backward(d_out, q, k, v, out, lse, mask, tile: int):
    """Compute dQ, dK and dV from `tile` keys at a time, beginning with the last ones."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dot = (d_out * out).sum(-1, keepdim=True)  # the same formula as without dropout
    scale, rows = q.shape[1] ** -0.5, torch.arange(len(q), device=q.device)
    for columns in reversed(torch.arange(len(k), device=q.device).split(tile)):
        weights = torch.exp(q @ k[columns].T * scale - lse[:, None])
        kept = mask(SEED, rows, columns, len(k))  # the same numbers as in forward
        dv[columns] = (weights * kept).T @ d_out
        d_scores = weights * (kept * (d_out @ v[columns].T) - dot) * scale
        dq += d_scores @ k[columns]
        dk[columns] = d_scores.T @ q
    return dq, dk, dv


# --8<-- [end:tiles]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v, d_out = (torch.randn(S, D, dtype=torch.float64) for _ in range(4))
    whole = torch.arange(S)
    full = keep(SEED, whole, whole, S)
    tiles = torch.cat([keep(SEED, rows, whole, S) for rows in whole.split(7)])
    assert torch.equal(full, tiles) and not torch.equal(full, keep(SEED + 1, whole, whole, S))
    # published for MurmurHash3: nothing hashed, seeds 1 and 2^32 - 1
    assert hashed(torch.tensor([1, 0xFFFFFFFF])).tolist() == [0x514E28B7, 0x81F16F39]
    torch.testing.assert_close(full.unique(), torch.tensor([0, 1 / (1 - DROP)]))
    kept = (full > 0).double()
    share = kept.mean().item()
    assert abs(share - (1 - DROP)) < 0.04
    for axis in (0, 1):  # neither whole rows nor whole columns are dropped
        assert (kept.mean(axis) - (1 - DROP)).abs().max() < 0.3
    print(f"kept {100 * share:.1f}% of {S * S} weights; any tiling gives the same mask")

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]  # the truth: the mask stored
    weights = torch.softmax(inputs[0] @ inputs[1].T / D**0.5, dim=-1)
    truth = (weights * full) @ inputs[2]
    truth.backward(d_out)
    visited: list[tuple[int, int]] = []

    def noted(seed, rows, columns, keys):
        visited.append((rows[0].item(), columns[0].item()))
        return keep(seed, rows, columns, keys)

    for name, make in (("counter", lambda: noted), ("stateful", Stateful)):
        out, lse = forward(q, k, v, make(), tile=16)
        gradients = backward(d_out, q, k, v, out, lse, make(), tile=12)
        if name == "counter":
            torch.testing.assert_close(out, truth)
            torch.testing.assert_close(list(gradients), [x.grad for x in inputs])
            # forward visits tiles of rows, and backward visits tiles of columns, last first
            assert visited == [(0, 0), (16, 0), (32, 0), (0, 36), (0, 24), (0, 12), (0, 0)]
            print("counter:  output, dQ, dK and dV equal those with a stored mask")
            continue
        rule = make()
        mask = torch.cat([rule(SEED, rows, whole, S) for rows in whole.split(16)])
        torch.testing.assert_close(mask.unique().float(), full.unique())  # the same scale
        assert abs((mask > 0).double().mean() - (1 - DROP)) < 0.04
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = (torch.softmax(inputs[0] @ inputs[1].T / D**0.5, -1) * mask) @ inputs[2]
        torch.testing.assert_close(out, expected)  # forward started from the same seed
        expected.backward(d_out)

        def stored(seed, rows, columns, keys, mask=mask):
            return mask[rows[:, None], columns]

        right = backward(d_out, q, k, v, out, lse, stored, tile=12)  # only the numbers differ
        torch.testing.assert_close(list(right), [x.grad for x in inputs])
        error = (gradients[2] - inputs[2].grad).norm() / inputs[2].grad.norm()
        assert error > 0.1
        print(f"stateful: the same seed in both, dV off by ≈{100 * error:.0f}%")
    print(
        f"kept for backward: a seed and an offset, 16 bytes, in place of {S * S} mask entries"
    )


if __name__ == "__main__":
    main()
