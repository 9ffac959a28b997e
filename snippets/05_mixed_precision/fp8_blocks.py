"""The three products of a linear layer in fp8, with the scales that DeepSeek-V3 uses.

Activations and gradients have one scale for each 1 × 128 values along the sum of the product,
and weights one for each 128 × 128 (its report, arXiv 2412.19437, sections 3.3.2 and 3.5.2).
Tensor cores add 128 products. Then fp32 multiplies this sum by both scales and adds it.

In the first table, compare the rows "128 × 128" and "tile" for dx. In the last table, compare
the errors with and without fp32 sums.
"""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, IN, OUT, BLOCK, TOP = 512, 1024, 768, 128, 448.0  # E4M3 ends at 448


def cast(x: torch.Tensor, rows: int, power_of_two: bool = False) -> tuple[torch.Tensor, ...]:
    """x [r, k] -> fp8 [r, k], and factors [r / rows, k / 128] that undo the scaling."""
    tiles = x.reshape(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK)
    scale = (tiles.abs().amax((1, 3)) / TOP).clamp(min=1e-30)
    if power_of_two:
        scale = torch.exp2(scale.log2().ceil())
    return (tiles / scale[:, None, :, None]).to(E4M3).view_as(x), scale


def product(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """a bᵀ, [m, k] and [n, k] -> [m, n]; both arguments are results of `cast`."""
    (a8, sa), (b8, sb) = a, b
    sa = sa.repeat_interleave(a8.shape[0] // sa.shape[0], 0)  # [m, k / 128]
    sb = sb.repeat_interleave(b8.shape[0] // sb.shape[0], 0)  # [n, k / 128]
    total = torch.zeros(a8.shape[0], b8.shape[0])
    for i in range(a8.shape[1] // BLOCK):
        k = slice(i * BLOCK, (i + 1) * BLOCK)
        partial = a8[:, k].float() @ b8[:, k].float().T  # tensor cores
        total += partial * sa[:, i, None] * sb[:, i]  # fp32 units
    return total


def linear(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y = x wᵀ, dx = g w, dwᵀ = xᵀ g; they sum over the inputs, the outputs and the tokens."""
    w8, sw = cast(w, BLOCK)  # a square block stays a block when transposed
    y = product(cast(x, 1), (w8, sw))
    dx = product(cast(g, 1), (w8.T, sw.T))
    dw = product(cast(x.T, 1), cast(g.T, 1))  # 128 tokens of one channel: tiles of 128 × 1
    return y, dx, dw


def other(x: torch.Tensor, kind: str, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """x [r, k] after a cast with one scale for the tensor, for a row, or for 128 × 128."""
    if kind == "128 × 128":
        x8, scale = cast(x, BLOCK)
        return x8.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    amax = x.abs().amax() if kind == "tensor" else x.abs().amax(1, keepdim=True)
    scale = amax / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


def narrow(a: torch.Tensor, b: torch.Tensor, promote: int) -> torch.Tensor:
    """Row sums of a · b that keep 14 bits of the largest of 32 products and the sum so far."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        top = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
        step = torch.exp2(top.log2().floor() - 13)
        return (x / step).trunc() * step

    total, inside = torch.zeros(len(a), 1), torch.zeros(len(a), 1)
    for k in range(0, a.shape[1], 32):
        products = a[:, k : k + 32] * b[:, k : k + 32]
        inside = cut(cut(torch.cat([products, inside], 1)).sum(1, keepdim=True))
        if (k + 32) % promote == 0:
            total, inside = total + inside, torch.zeros(len(a), 1)
    return (total + inside)[:, 0]


def errors(results: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> list:
    """Relative errors of each product's rows: the median, and the fraction above 10%."""
    rows = [(r - e).norm(dim=1) / e.norm(dim=1) for r, e in zip(results, exact, strict=True)]
    return [(row.median().item(), (row > 0.1).float().mean().item()) for row in rows]


def tensors() -> tuple[torch.Tensor, ...]:
    """x, w and g: two channels are loud, and the gradients of the tokens differ widely."""
    torch.manual_seed(0)
    x, w = torch.randn(TOKENS, IN), 0.02 * torch.randn(OUT, IN)
    x[:, :256:BLOCK] *= 30_000  # as in a trained layer, their weights are
    w[:, :256:BLOCK] /= 30_000  # small in return
    return x, w, 1e-6 * torch.randn(TOKENS, OUT) * torch.exp(3 * torch.randn(TOKENS, 1))


def main() -> None:
    torch.set_num_threads(1)
    x, w, g = tensors()
    x64, w64, g64 = x.double(), w.double(), g.double()
    exact = x64 @ w64.T, g64 @ w64, x64.T @ g64
    print("median error of a row / fraction of rows with an error above 10%")
    print(f"scale for a{'y = x wᵀ':>28}{'dx = g w':>16}{'dwᵀ = xᵀ g':>16}{'bytes for x':>14}")
    found = {}
    per_tensor = (
        ("tensor", E4M3),
        ("tensor, E5M2 for g", E5M2),
        ("row", E4M3),
        ("128 × 128", E4M3),
    )
    for name, dtype in per_tensor:
        kind = name.split(",")[0]
        x8, w8, g8 = other(x, kind), other(w, kind), other(g, kind, dtype)
        wt, xt, gt = other(w.T, kind), other(x.T, kind), other(g.T, kind, dtype)
        found[name] = errors((x8 @ w8.T, g8 @ wt.T, xt @ gt.T), exact)  # rows: along the sum
    found["tile, DeepSeek-V3"] = errors(linear(x, w, g), exact)
    scales = (1, 1, TOKENS, TOKENS * IN // BLOCK**2, TOKENS * IN // BLOCK)
    for (name, cells), count in zip(found.items(), scales, strict=True):
        text = "".join(f"{f'{median:.1%} / {lost:4.0%}':>16}" for median, lost in cells)
        print(f"{name:23}{text}{1 + 4 * count / x.numel():14.4f}")
    # fp32 sums add no error: compare with float64, and with scales that are applied first
    x8, w8 = other(x[:BLOCK], "128 × 128"), other(w, "128 × 128")
    ours = product(cast(x[:BLOCK], BLOCK), cast(w, BLOCK)).double()
    torch.testing.assert_close(ours, x8.double() @ w8.double().T, rtol=1e-4, atol=1e-4)
    tiles, tensor, blocks = (found[n] for n in ("tile, DeepSeek-V3", "tensor", "128 × 128"))
    assert all(median < 0.045 and lost < 0.02 for median, lost in tiles)  # 3 mantissa bits
    assert tensor[0][0] > 0.1 and tensor[1][1] > 0.4 and blocks[1][1] > 0.3
    assert found["row"][0][0] > 1.15 * tiles[0][0]

    print("\nx is stored in tiles of 1 × 128, and dw needs a second cast to tiles of 128 × 1")
    for name, two in (("fp32 scales", False), ("powers of two", True)):
        x8, sx = cast(x, 1, two)
        kept = x8.float() * sx.repeat_interleave(BLOCK, 1)
        again, scale = cast(kept.T, 1, two)
        changed = (again.float() * scale.repeat_interleave(BLOCK, 1) != kept.T).float().mean()
        print(f"{name:13} {changed:6.1%} of the elements are rounded a second time")
        assert changed < 0.005 if two else changed > 0.5

    print("\nsums of 4,096 products: relative error in the 2-norm / largest error of one sum")
    print("factors             14 bits throughout    fp32 after each 128")
    for name, draw in (("normal", torch.randn), ("between 0 and 1", torch.rand)):
        a, b = draw(2, 256, 4096).to(E4M3).float()
        truth = (a.double() * b.double()).sum(1)
        cells, norms = [], []
        for promote in (4096, BLOCK):
            off = narrow(a, b, promote) - truth
            norms.append((off.norm() / truth.norm()).item())
            cells.append(f"{norms[-1]:.2%} / {(off / truth).abs().max().item():.2%}")
        print(f"{name:17}{cells[0]:>21}{cells[1]:>23}")
        assert norms[0] > 8 * norms[1] and norms[1] < 1e-3


if __name__ == "__main__":
    main()
