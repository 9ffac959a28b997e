"""A state-space layer is a scan: 8 parallel steps replace a loop over 256 tokens.

The layer keeps a state h for each channel, and each token multiplies it by a decay and adds an
input: h = a h + b. Two such updates in a row are again one such update, so a scan can combine
them in pairs. The program compares the scan with a loop and with linear attention, because a
state-space layer with one decay for all channels is linear attention with decay. At the end, it
combines the pairs in the wrong order and shows that the result is wrong.
"""

import torch
from torch.nn import functional as F

S, CHANNELS, N = 256, 4, 16  # tokens, channels, and numbers in the state of a channel


# --8<-- [start:scan]
def combine(earlier, later):
    """One update that has the same effect as two: first `earlier`, then `later`."""
    (a1, b1), (a2, b2) = earlier, later
    return a2 * a1, a2 * b1 + b2


def scan(a, b, order=combine):
    """All states h[t] = a[t] h[t-1] + b[t], and the number of steps; a and b are [s, ...]."""
    distance, steps = 1, 0
    while distance < len(a):
        new_a, new_b = order((a[:-distance], b[:-distance]), (a[distance:], b[distance:]))
        a, b = torch.cat([a[:distance], new_a]), torch.cat([b[:distance], new_b])
        distance, steps = 2 * distance, steps + 1
    return b, steps


# --8<-- [end:scan]


def layer_inputs():
    """Return x [s, c], step [s, c], rate [c, n], inward and outward [s, n] of a Mamba layer."""
    x = torch.randn(S, CHANNELS, dtype=torch.float64)
    step = F.softplus(torch.randn(S, CHANNELS, dtype=torch.float64) - 2)
    rate = -torch.rand(CHANNELS, N, dtype=torch.float64) - 0.1
    inward, outward = torch.randn(2, S, N, dtype=torch.float64)
    return x, step, rate, inward, outward


def by_loop(x, step, rate, inward, outward):
    """The same layer with plain loops over channels and tokens, without a scan."""
    out = torch.zeros(S, CHANNELS, dtype=torch.float64)
    for c in range(CHANNELS):
        h = torch.zeros(N, dtype=torch.float64)
        for t in range(S):
            h = torch.exp(step[t, c] * rate[c]) * h + step[t, c] * x[t, c] * inward[t]
            out[t, c] = (outward[t] * h).sum()
    return out


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, step, rate, inward, outward = layer_inputs()
    # --8<-- [start:layer]
    a = torch.exp(step[:, :, None] * rate)  # [s, c, n]: the decays depend on the token
    b = (step * x)[:, :, None] * inward[:, None, :]  # [s, c, n]
    states, steps = scan(a, b)
    out = torch.einsum("sn,scn->sc", outward, states)
    # --8<-- [end:layer]
    torch.testing.assert_close(out, by_loop(x, step, rate, inward, outward))
    assert 2 ** (steps - 1) < S <= 2**steps
    print(f"{S} tokens, {CHANNELS} channels with {N} numbers each: {steps} steps of a scan")
    print("the scan gives the result of the loop over tokens")

    # One decay for all channels and numbers of a head, as in Mamba-2: linear attention.
    step1 = step[:, :1].expand(S, CHANNELS)
    shared = rate[:1, :1].expand(CHANNELS, N)
    total = (step1[:, 0] * shared[0, 0]).cumsum(0)
    decay = (total[:, None] - total[None, :]).tril().exp().tril()
    attention = (outward @ inward.T * decay) @ (step1 * x)  # queries, keys, values
    torch.testing.assert_close(attention, by_loop(x, step1, shared, inward, outward))
    print("one decay per head: linear attention with outward, inward and step * x as q, k, v")

    wrong, _ = scan(a, b, lambda earlier, later: combine(later, earlier))
    error = (torch.einsum("sn,scn->sc", outward, wrong) - out).norm() / out.norm()
    assert error > 0.3
    print(f"pairs combined in the wrong order: an error of {error:.0%}")


if __name__ == "__main__":
    main()
