"""A softmax can be computed in blocks, and the blocks can be merged in any order.

A block of scores z with values v is summarised by three results (m, l, o): its maximum,
Σ e^(z-m) and Σ e^(z-m) v. They represent the two sums e^m·l and e^m·o, and a merge adds these
sums. The program compares the result with float64 on inputs for which a naive softmax fails.
The last part uses powers of two, so nothing is rounded and every order gives the same bits.
"""

import random
from functools import partial, reduce

import torch

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# --8<-- [start:blocks]
def summarise(z: torch.Tensor, v: torch.Tensor, exp=torch.exp) -> State:
    """Return maximum, sum and weighted sum of scores z [rows, n] and values v [n, d]."""
    m = z.max(-1).values
    p = exp(z - finite(m)[:, None])
    return m, p.sum(-1), p @ v


def merge(a: State, b: State, exp=torch.exp) -> State:
    m = torch.maximum(a[0], b[0])
    # both factors are at most 1, and one of them is 1
    left, right = exp(a[0] - finite(m)), exp(b[0] - finite(m))
    return m, a[1] * left + b[1] * right, a[2] * left[:, None] + b[2] * right[:, None]


def finite(m: torch.Tensor) -> torch.Tensor:
    """Replace a maximum of -inf by 0, because e^(-inf - 0) is 0 and e^(-inf + inf) is NaN."""
    return m.masked_fill(m == -torch.inf, 0)


def finish(state: State) -> torch.Tensor:
    _, total, out = state
    return out / total.masked_fill(total == 0, 1)[:, None]  # a row without keys gives 0


def online(z: torch.Tensor, v: torch.Tensor, block: int, exp=torch.exp) -> torch.Tensor:
    state = None
    for start in range(0, z.shape[1], block):
        piece = summarise(z[:, start : start + block], v[start : start + block], exp)
        state = piece if state is None else merge(state, piece, exp)
    return finish(state)


# --8<-- [end:blocks]


def exact(z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the softmax by its definition in float64, and 0 for a row without keys."""
    return z.double().softmax(-1).nan_to_num(0.0) @ v.double()


def tree(states: list[State], exp=torch.exp) -> State:
    while len(states) > 1:
        pairs = range(0, len(states) - 1, 2)
        rest = states[len(states) - len(states) % 2 :]
        states = [merge(states[i], states[i + 1], exp) for i in pairs] + rest
    return states[0]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, n, d = 4, 1000, 8
    normal = torch.randn(rows, n)
    masked = normal.clone()
    masked[:, :400] = -torch.inf  # whole blocks before the first key
    masked[1] = -torch.inf  # a row that sees nothing
    masked[2, :-1] = -torch.inf  # one that sees the last key alone
    one_hot = torch.zeros(rows, n)
    one_hot[:, 777] = 1e4
    cases = {
        "normal": normal,
        "times 1e4": 1e4 * normal,
        "rising to 1e4": torch.linspace(9990, 10000, n).expand(rows, n),
        "falling from 1e4": torch.linspace(10000, 9990, n).expand(rows, n),
        "all equal to -1e4": torch.full((rows, n), -1e4),
        "one-hot, 1e4": one_hot,
        "masked, -inf": masked,
    }
    v = torch.randn(n, d) + 3
    widths: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        assert x.max() <= 0, "nothing overflows"
        widths.extend(x.shape[1:])  # of a block of scores; a vector of maxima adds nothing
        return x.exp()

    print("error against float64, over the largest output: blocks of 1, 7, 64; softmax in fp32")
    for name, z in cases.items():
        truth = exact(z, v)
        scale = truth.abs().max()
        outputs = [online(z, v, block, noted) for block in (1, 7, 64)]
        errors = [((out - truth).abs().max() / scale).item() for out in outputs]
        plain = ((z.softmax(-1).nan_to_num(0.0) @ v - truth).abs().max() / scale).item()
        naive = z.exp() @ v / z.exp().sum(-1, keepdim=True)
        assert naive.isfinite().all() == (name == "normal"), "a naive softmax fails"
        assert max(errors) < n * 2**-24, (name, errors)  # at most one rounding a merge
        assert errors[2] <= 3 * plain + 5e-7, (name, errors, plain)
        assert name != "normal" or errors[0] > 2 * errors[2], "each merge rounds"
        print(f"{name:18} " + " ".join(f"≈{e:.0e}" for e in (*errors, plain)))
    assert widths == len(cases) * ([1] * 1000 + [7] * 142 + [6] + [64] * 15 + [40])
    for name in ("times 1e4", "one-hot, 1e4"):  # all other weights underflow, so no rounding
        assert online(cases[name], v, 7).equal(v[cases[name].argmax(-1)])
    # every block has a new maximum, or none has, or a row begins with blocks without keys
    assert cases["rising to 1e4"].diff().min() > 0 > cases["falling from 1e4"].diff().max()
    assert masked[:, :64].isneginf().all() and masked[0].isfinite().sum() == 600
    assert online(masked, v, 7)[1].eq(0).all() and online(masked, v, 7)[2].equal(v[-1])

    # Powers of two instead of e: whole numbers as scores, and nothing is ever rounded.
    z = torch.randint(-6, 7, (rows, 64), dtype=torch.float64)
    values = torch.randint(-8, 9, (64, d), dtype=torch.float64)
    pieces = [
        summarise(x, y, torch.exp2)
        for x, y in zip(z.split(5, dim=1), values.split(5), strict=True)
    ]
    assert all(len({piece[0][row].item() for piece in pieces}) > 2 for row in range(rows))
    shuffle = random.Random(0)
    rounded = [summarise(*pair) for pair in zip(normal.split(5, 1), v.split(5), strict=True)]
    assert not torch.equal(reduce(merge, rounded)[2], tree(rounded)[2])  # a different order
    answers, orders = [], set()
    for _ in range(20):
        order = shuffle.sample(pieces, len(pieces))
        orders.add(tuple(map(id, order)))
        folded = reduce(partial(merge, exp=torch.exp2), order)
        answers += [folded, tree(order, torch.exp2)]
    whole = summarise(z, values, torch.exp2)
    same = all(
        torch.equal(x, y) for answer in answers for x, y in zip(answer, whole, strict=True)
    )
    assert same and len(orders) == 20 and len(set(map(id, answers))) == 40
    print(f"{len(answers)} orders and trees of {len(pieces)} blocks in base 2: the same bits")


if __name__ == "__main__":
    main()
