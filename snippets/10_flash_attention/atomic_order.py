"""This program shows that the order of additions to dQ changes its last bits.

A backward with one program for each tile of keys lets all programs add to dQ with atomics, in
the order in which they finish. Here a shuffled loop takes the place of the GPU's scheduler. If
one program owns the sum, there is only one order. Look at the number of different results.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

TILE, S, D = 32, 512, 32


def contributions() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what each tile of keys adds to dQ, and dQ by the library in float64."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(S, D) for _ in range(4))
    p = (q @ k.T * D**-0.5).softmax(-1)
    dp = do @ v.T
    dz = p * (dp - (p * dp).sum(-1, keepdim=True)) * D**-0.5
    wide = q.double().requires_grad_()
    scaled_dot_product_attention(wide, k.double(), v.double()).backward(do.double())
    return [dz[:, j : j + TILE] @ k[j : j + TILE] for j in range(0, S, TILE)], wide.grad


# --8<-- [start:order]
def summed(parts: list[torch.Tensor], order: list[int]) -> torch.Tensor:
    dq = torch.zeros_like(parts[0])
    for j in order:
        dq += parts[j]  # on a GPU: atomicAdd, as soon as tile j is finished
    return dq


# --8<-- [end:order]


def main() -> None:
    torch.set_num_threads(1)
    parts, exact = contributions()
    orders = [torch.randperm(len(parts)).tolist() for _ in range(20)]
    runs = [summed(parts, order) for order in orders]
    different = len({tuple(r.flatten().tolist()) for r in runs})
    spread = (torch.stack(runs).max(0).values - torch.stack(runs).min(0).values).max()
    errors = [((r - exact).norm() / exact.norm()).item() for r in runs]
    owned = [summed(parts, list(range(len(parts)))) for _ in range(20)]
    print(f"atomics: {different} results in {len(runs)} runs, up to ≈{spread:.0e} apart")
    print(f"relative error of each: ≈{min(errors):.0e} to ≈{max(errors):.0e}")
    print(f"one owner, one order: {len({tuple(r.flatten().tolist()) for r in owned})} result")
    assert different > 1 and all(torch.equal(r, owned[0]) for r in owned)
    again = [summed(parts, order) for order in orders]  # the order alone decides the bits
    assert all(torch.equal(x, y) for x, y in zip(runs, again, strict=True))
    assert len(set(errors)) == different  # the errors are those of the different results
    assert max(errors) < 1e-6 and max(errors) < 1.2 * min(errors)  # none is better


if __name__ == "__main__":
    main()
