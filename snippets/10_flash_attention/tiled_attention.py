"""Flash attention in plain PyTorch computes forward and backward in tiles of scores.

Forward saves its inputs, its output and one number per query, the log-sum-exp. Backward
computes the weights of each tile again. The program compares the gradients with finite
differences and with scaled_dot_product_attention. It also counts saved elements, tiles and
FLOPs.
"""

import torch
from torch.autograd import gradcheck
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode


# --8<-- [start:forward]
def wide(*tensors):
    """Convert 16-bit tensors to fp32. Tensors with wider types keep their type."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


class TiledAttention(torch.autograd.Function):
    """softmax(QKᵀ/√d)V of [..., s, d]. If causal, query i sees keys up to i + s_k - s_q."""

    tiles = 0  # the number of tiles that all calls have computed

    @staticmethod
    def scores(q, k, rows, columns, shift):
        """Return a tile of scaled scores. shift is s_k - s_q, or None if there is no mask."""
        TiledAttention.tiles += 1
        z = q[..., rows, :] @ k[..., columns, :].mT * q.shape[-1] ** -0.5
        cut = shift is not None and columns.stop - 1 > rows.start + shift
        if cut:  # the diagonal runs through this tile
            i = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + shift
            j = torch.arange(columns.start, columns.stop, device=q.device)
            z = z.masked_fill(j > i, -torch.inf)
        return z

    @staticmethod
    def forward(ctx, q, k, v, causal, block_q, block_k):
        given, (q, k, v) = (q, k, v), wide(q, k, v)
        s_q, s_k = q.shape[-2], k.shape[-2]
        shift = s_k - s_q if causal else None
        o, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
        for rows in spans(0, s_q, block_q):
            end = s_k if shift is None else min(s_k, max(0, rows.stop + shift))
            m = torch.full_like(lse[..., rows], -torch.inf)
            total = torch.zeros_like(m)
            out = torch.zeros_like(o[..., rows, :])
            for columns in spans(0, end, block_k):  # skips tiles right of the diagonal
                z = TiledAttention.scores(q, k, rows, columns, shift)
                new = torch.maximum(m, z.max(-1).values)
                safe = new.masked_fill(new == -torch.inf, 0)
                p = (z - safe[..., None]).exp()
                shrink = (m - safe).exp()
                total = total * shrink + p.sum(-1)
                out = out * shrink[..., None] + p @ v[..., columns, :]
                m = new
            o[..., rows, :] = out / total.masked_fill(total == 0, 1)[..., None]
            lse[..., rows] = m + total.log()  # minus infinity for a row without keys
        o = o.to(given[0].dtype)
        ctx.save_for_backward(*given, o, lse)
        ctx.shift, ctx.blocks = shift, (block_q, block_k)
        return o

    # --8<-- [end:forward]
    # --8<-- [start:backward]
    @staticmethod
    def backward(ctx, do):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("TiledAttention has no second derivative")
        q, k, v, o, lse, do = wide(*ctx.saved_tensors, do)
        scale, (block_q, block_k) = q.shape[-1] ** -0.5, ctx.blocks
        s_q, s_k = q.shape[-2], k.shape[-2]
        delta = (do * o).sum(-1)  # Σ_j P_ij dP_ij, without P
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # no keys: weights 0
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for columns in spans(0, s_k, block_k):
            first = 0 if ctx.shift is None else max(0, columns.start - ctx.shift)
            for rows in spans(first // block_q * block_q, s_q, block_q):
                z = TiledAttention.scores(q, k, rows, columns, ctx.shift)
                p = (z - lse[..., rows, None]).exp()  # the final weights
                dv[..., columns, :] += p.mT @ do[..., rows, :]
                dp = do[..., rows, :] @ v[..., columns, :].mT
                dz = p * (dp - delta[..., rows, None]) * scale
                dq[..., rows, :] += dz @ k[..., columns, :]
                dk[..., columns, :] += dz.mT @ q[..., rows, :]
        return dq, dk, dv, None, None, None


def spans(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def attention(q, k, v, causal=False, block_q=32, block_k=32):
    return TiledAttention.apply(q, k, v, causal, block_q, block_k)


# --8<-- [end:backward]


def check_against_library(s_q: int, s_k: int, causal: bool) -> float:
    """Largest difference in fp32, output and gradients; causal lengths may be unequal."""
    shapes = ((2, 3, s_q, 16), (2, 3, s_k, 16), (2, 3, s_k, 16))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    mask = torch.ones(s_q, s_k, dtype=torch.bool).tril(s_k - s_q) if causal else None
    do = torch.randn(2, 3, s_q, 16)
    results = []
    for out in (attention(q, k, v, causal), scaled_dot_product_attention(q, k, v, mask)):
        results.append((out, *torch.autograd.grad(out, (q, k, v), do)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return max((x - y).abs().max().item() for x, y in zip(*results, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for s_q, s_k, causal in ((5, 7, False), (7, 7, True), (5, 8, True), (6, 4, True)):
        q = torch.randn(2, s_q, 3, dtype=torch.float64, requires_grad=True)
        k, v = (  # values may have another width than keys
            torch.randn(2, s_k, d, dtype=torch.float64, requires_grad=True) for d in (3, 2)
        )
        for block_q in (2, 4):  # by 4, rows without a key share a tile with others
            assert gradcheck(lambda *t, c=causal, b=block_q: attention(*t, c, b, 3), (q, k, v))
        print(f"gradcheck, {s_q} queries, {s_k} keys, causal {causal}: passed")
    assert attention(q, k, v, True)[:, :2].eq(0).all()  # two queries see no key
    for s_q, s_k, causal in ((100, 100, False), (100, 100, True), (50, 130, True)):
        worst = check_against_library(s_q, s_k, causal)
        print(f"fp32, {s_q} x {s_k}, causal {causal}: equal to the library, ≈{worst:.0e} apart")
    inputs = [torch.randn(n, 16).bfloat16().requires_grad_() for n in (8, 4096, 4096)]
    q, k, v = inputs
    double = scaled_dot_product_attention(q.double(), k.double(), v.double())
    do, results = torch.randn(8, 16).bfloat16(), []
    for out in (double, attention(q, k, v), (q @ k.T / 4).softmax(-1) @ v):
        results.append((out, *torch.autograd.grad(out, inputs, do.to(out.dtype))))
    for truth, ours, plain in zip(*results, strict=True):
        assert (ours - truth).norm() < (plain - truth).norm()
    out = attention(q, k, v)
    saved = [x.dtype for x in out.grad_fn.saved_tensors]
    assert saved == [torch.bfloat16] * 4 + [torch.float32], "no copies in fp32"

    s, d, tile = 512, 16, 32
    t = s // tile
    q, k, v = (torch.randn(1, s, d, requires_grad=True) for _ in range(3))
    print(f"s = {s}, tiles of {tile} x {tile}: computed forward, backward; FLOPs over s²d")
    for causal, expected in ((False, t * t), (True, t * (t + 1) // 2)):
        before = TiledAttention.tiles
        saved: list[int] = []  # elements that forward keeps for backward
        with (
            FlopCounterMode(display=False) as forward,
            torch.autograd.graph.saved_tensors_hooks(
                lambda x, saved=saved: (saved.append(x.numel()), x)[1], lambda x: x
            ),
        ):
            out = attention(q, k, v, causal, tile, tile)
        assert sum(saved) == 4 * s * d + s  # q, k, v, the output and the log-sum-exp
        middle = TiledAttention.tiles
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts = middle - before, TiledAttention.tiles - middle
        flops = [c.get_total_flops() / (s * s * d) for c in (forward, backward)]
        assert counts == (expected, expected) and flops[1] == 2.5 * flops[0]
        print(
            f"causal {causal!s:5}: {counts[0]}, {counts[1]} of {t * t} tiles; "
            f"{flops[0]:.3f}, {flops[1]:.3f}, a factor of {flops[1] / flops[0]:.1f}"
        )
    out = attention(q, k, v)
    for loss in (out.square().sum(), out.sum()):  # once_differentiable accepts the second one
        try:
            torch.autograd.grad(loss, q, create_graph=True)
        except RuntimeError as error:
            assert "no second derivative" in str(error)
        else:
            raise AssertionError("create_graph=True leads to a wrong second derivative")


if __name__ == "__main__":
    main()
