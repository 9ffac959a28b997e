"""A query that may see no key makes its output NaN, and the gradients of other rows too.

Such rows come from padding in front, from an empty context in cross-attention, or from a causal
mask with more queries than keys. A softmax over minus infinities is 0/0. Two fixes work.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


# --8<-- [start:versions]
def plain(q, k, v, seen):
    z = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return z.softmax(-1) @ v


def added(q, k, v, seen):
    """Add the mask as a bias of minus infinity. An addition passes every gradient on."""
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    return (q @ k.T * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def guarded(q, k, v, seen):
    """Set the scores of a row without keys to 0, and also its weights after the softmax."""
    empty = ~seen.any(-1, keepdim=True)
    z = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return z.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v


def late(q, k, v, seen):
    """Replace NaN in the output. This fix fails: the weights in backward are still NaN."""
    return plain(q, k, v, seen).nan_to_num(0.0)


# --8<-- [end:versions]


# --8<-- [start:online]
def online(q, k, v, seen, guard: bool):
    """Use tiles of two keys. Without the guard, e^(-inf - (-inf)) is NaN."""
    m, total, out = torch.full((len(q),), -torch.inf), torch.zeros(len(q)), torch.zeros_like(q)
    for j in range(0, len(k), 2):
        z = q @ k[j : j + 2].T * q.shape[-1] ** -0.5
        z = z.masked_fill(~seen[:, j : j + 2], -torch.inf)
        new = torch.maximum(m, z.max(-1).values)
        base = new.masked_fill(new == -torch.inf, 0) if guard else new
        p, shrink = (z - base[:, None]).exp(), (m - base).exp()
        total = total * shrink + p.sum(-1)
        out, m = out * shrink[:, None] + p @ v[j : j + 2], new
    return out / (total.masked_fill(total == 0, 1) if guard else total)[:, None]


# --8<-- [end:online]


def describe(x: torch.Tensor) -> str:
    bad = int(x.isnan().any(-1).sum())
    return f"NaN in {bad}" if bad else "finite"


def main() -> None:
    torch.manual_seed(0)
    n, d = 6, 4
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen[:, :3] = False  # three tokens of padding in front: rows 0, 1 and 2 see nothing
    q, k, v = (torch.randn(n, d, requires_grad=True) for _ in range(3))
    library = lambda q, k, v, seen: scaled_dot_product_attention(  # noqa: E731
        q[None, None], k[None, None], v[None, None], attn_mask=seen
    )[0, 0]
    print("causal mask, three tokens of padding in front; rows of 6 that have NaN")
    print("                    out       dQ        dK        dV")
    results = {}
    for name, way in (
        ("masked_fill", plain),
        ("added bias", added),
        ("nan_to_num after", late),
        ("guarded", guarded),
        ("library", library),
    ):
        out = way(q, k, v, seen)
        loss = out[3:].sum()  # no loss on padding
        assert loss.isfinite(), "the loss must ignore the rows without keys"
        gradients = torch.autograd.grad(loss, (q, k, v))
        results[name] = (out, gradients)
        print(f"{name:20}" + "".join(f"{describe(t):10}" for t in (out, *gradients)))
    assert (
        results["added bias"][1][0].isnan().any()
        and results["nan_to_num after"][1][2].isnan().any()
    )
    for name in ("guarded", "library"):
        assert all(t.isfinite().all() for t in (results[name][0], *results[name][1]))
    torch.testing.assert_close(results["guarded"], results["library"])
    for out, _ in results.values():  # all agree on the rows that see a key
        torch.testing.assert_close(out[3:], results["library"][0][3:])
        weight = torch.sigmoid(q[4] @ (k[4] - k[3]) / d**0.5)  # row 4 sees the keys 3 and 4
        torch.testing.assert_close(out[4], weight * v[4] + (1 - weight) * v[3])
    assert results["nan_to_num after"][0][:3].eq(0).all()
    with torch.no_grad():
        for guard in (False, True):
            out = online(q, k, v, seen, guard)
            print(f"{'online, guarded' if guard else 'online, as it is':20}{describe(out)}")
        torch.testing.assert_close(out, results["guarded"][0])
        assert online(q, k, v, seen, False).isnan().any()


if __name__ == "__main__":
    main()
