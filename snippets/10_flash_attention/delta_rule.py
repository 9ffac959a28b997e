"""The gated delta rule: one triangular solve per chunk replaces one update per token.

Linear attention adds a new value to what the state returns for the same key. The delta rule
first subtracts what the state returns, so the new value replaces the old one. The program
compares the chunked form with the recurrent form and with products of transition matrices. It
also shows why the keys are normalised: with keys of length 2 and beta = 1, the state grows in
each step. At the end, it stores more keys than the state has rows, and measures the error of
the values that it reads back.
"""

import torch
from torch.nn import functional as F

S, D = 144, 16  # tokens and head width; the chunks have 64 tokens


# --8<-- [start:recurrent]
def recurrent_delta(q, k, v, log_decay, beta):
    """Loop over tokens; q, k, v [s, d], log_decay and beta [s] -> output, last state."""
    state = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for t in range(len(q)):
        state = log_decay[t].exp() * state  # forget
        error = v[t] - k[t] @ state  # the new value minus what the state returns for this key
        state = state + beta[t] * torch.outer(k[t], error)
        outputs.append(q[t] @ state)
    return torch.stack(outputs), state


# --8<-- [end:recurrent]


# --8<-- [start:chunked]
def chunked_delta(q, k, v, log_decay, beta, size=64):
    """The result of recurrent_delta with one triangular solve per chunk of `size` tokens."""
    state = q.new_zeros(k.shape[1], v.shape[1])
    outputs = []
    for part in torch.arange(len(q)).split(size):
        q_c, k_c, v_c, b = q[part], k[part], v[part], beta[part, None]
        total = log_decay[part].cumsum(0)
        decay = (total[:, None] - total[None, :]).tril().exp().tril()
        since = total.exp()[:, None]  # the decay since the start of the chunk
        # error = b * (v - since * k @ state - sum over earlier tokens of the chunk)
        earlier = b * (k_c @ k_c.T * decay).tril(-1)
        right = b * (v_c - since * (k_c @ state))
        error = torch.linalg.solve_triangular(earlier, right, upper=False, unitriangular=True)
        outputs.append(since * (q_c @ state) + (q_c @ k_c.T * decay) @ error)
        to_end = (total[-1] - total).exp()[:, None]
        state = total[-1].exp() * state + (k_c * to_end).T @ error
    return torch.cat(outputs), state


# --8<-- [end:chunked]


def by_matrices(q, k, v, log_decay, beta):
    """The textbook recurrence with a transition matrix, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    state, outputs = torch.zeros(D, D, dtype=torch.float64), []
    for query, key, value, gate, rate in zip(q, k, v, log_decay.double(), beta, strict=True):
        keep = gate.exp() * (torch.eye(D, dtype=torch.float64) - rate * key[:, None] * key)
        state = keep @ state + rate * key[:, None] * value
        outputs.append(query @ state)
    return torch.stack(outputs), state


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, S, D, dtype=torch.float64)
    k = F.normalize(k, dim=-1)
    log_decay = F.logsigmoid(torch.randn(S, dtype=torch.float64) + 3)
    beta = torch.rand(S, dtype=torch.float64)
    inputs = q, k, v, log_decay, beta

    truth = by_matrices(*inputs)
    torch.testing.assert_close(recurrent_delta(*inputs), truth)
    for size in (1, 50, 64, S):  # 50 does not divide 144
        torch.testing.assert_close(chunked_delta(*inputs, size), truth)
    difference = recurrent_delta(q, k, v, log_decay, torch.ones_like(beta))[0] - truth[0]
    assert difference.abs().max() > 0.1, "beta must matter"
    print(f"{S} tokens: chunks of 1, 50, 64 and {S} tokens give the result of the recurrence")

    key, old, new = F.normalize(torch.randn(D), dim=0), torch.randn(D), torch.randn(D)
    twice, gate = torch.stack([key, key]), torch.zeros(2)
    replaced, _ = recurrent_delta(twice, twice, torch.stack([old, new]), gate, torch.ones(2))
    added = old * key.dot(key) + new * key.dot(key)  # linear attention
    torch.testing.assert_close(replaced[-1], new)
    assert (added - new).abs().max() > 0.5
    half, _ = recurrent_delta(
        twice, twice, torch.stack([old, new]), gate, torch.tensor([1.0, 0.5])
    )
    torch.testing.assert_close(half[-1], (old + new) / 2)
    print(
        "two values with one key: linear attention reads their sum, the delta rule the new one"
    )
    print("with beta = 0.5 for the new value, the delta rule reads the mean of both")

    long, values = torch.stack([2 * key] * 8), torch.stack([old] + [0 * old] * 7)
    _, first = recurrent_delta(long[:1], long[:1], values[:1], gate[:1], torch.ones(1))
    _, last = recurrent_delta(long, long, values, torch.zeros(8), torch.ones(8))
    growth = last.norm() / first.norm()  # the squared length is 4: each step has 1 - 4 = -3
    torch.testing.assert_close(growth, torch.tensor(3.0**7), rtol=1e-4, atol=0)
    print(
        f"keys of length 2 and beta = 1: after 7 steps the state is {growth:,.0f} times larger"
    )

    print(f"store n values under random keys of {D}, and read them all: relative error")
    recalled = []
    for n in (4, D, 4 * D):
        keys, values = F.normalize(torch.randn(n, D), dim=-1), torch.randn(n, D)
        _, state = recurrent_delta(keys, keys, values, torch.zeros(n), torch.ones(n))
        read = {
            "linear": keys @ (keys.T @ values),
            "delta": keys @ state,
            # the factor 40 gives almost all weight to the key itself
            "softmax": (40 * keys @ keys.T).softmax(-1) @ values,
        }
        recalled.append([float((x - values).norm() / values.norm()) for x in read.values()])
        shown = zip(read, recalled[-1], strict=True)
        print(f"n = {n:2}: " + ", ".join(f"{name} {error:.2f}" for name, error in shown))
    for linear, delta, softmax in recalled[1:]:
        assert softmax < 0.1 < delta < linear  # the cache keeps every key
    assert recalled[0][1] < recalled[1][1] < recalled[2][1]


if __name__ == "__main__":
    main()
