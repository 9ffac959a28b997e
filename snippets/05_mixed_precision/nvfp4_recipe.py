"""What each of the four parts of the NVFP4 training recipe does to the errors.

A linear layer has three products: y = x wᵀ, dx = g w and dwᵀ = xᵀ g. In NVFP4, all factors are
rounded to E2M1, in blocks of 16 values along the sum of the product. NVIDIA's training recipe
(arXiv 2509.25149) adds four parts: a random Hadamard transform along the tokens for dw,
stochastic rounding for gradients, one scale for 16 × 16 weights, and a few layers in bf16.

Compare the columns "without" and "with". On these data, each of the first three parts makes a
cast less accurate. In return it removes an error that is the same in every step and never
averages out.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

BLOCK, TOKENS, H, LAYERS, DRAWS = 16, 256, 96, 7, 64


def round_e2m1(x: torch.Tensor, stochastic: bool = False) -> torch.Tensor:
    """Round to 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives; larger magnitudes become 6."""
    step = torch.exp2(x.abs().clamp(1, 6).log2().floor()) / 2  # ½ up to 2, 1 up to 4, then 2
    steps = x / step
    whole = (steps + torch.rand_like(x)).floor() if stochastic else steps.round()
    return (whole * step).clamp(-6, 6)


def cast(x: torch.Tensor, rows: int = 1, stochastic: bool = False) -> torch.Tensor:
    """x [r, k] after a cast to NVFP4 and back; each `rows` × 16 values share a scale."""
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK)
    wanted = blocks.abs().amax((1, 3), keepdim=True) / 6
    factor = wanted.max() / 448  # one fp32 number for the whole tensor
    scale = (wanted / factor).to(torch.float8_e4m3fn).float() * factor
    return (round_e2m1(blocks / scale.clamp(min=1e-30), stochastic) * scale).view_as(x)


def transform(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Flip signs and multiply each 16 values along the last dimension by a Hadamard matrix."""
    hadamard = torch.ones(1, 1, dtype=x.dtype)
    for _ in range(4):
        top, bottom = torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)
        hadamard = torch.cat([top, bottom])
    mixed = x.reshape(*x.shape[:-1], -1, BLOCK) * signs @ hadamard / BLOCK**0.5
    return mixed.reshape(x.shape)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


SIGNS = 2.0 * torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(0)) - 1


class NVFP4Product(torch.autograd.Function):
    """y = x wᵀ, [t, i] and [o, i] -> [t, o], with the whole recipe in all three products."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return cast(x) @ cast(w, rows=BLOCK).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx = cast(g, stochastic=True) @ cast(w, rows=BLOCK)  # same values of w as in forward
        g_mixed, x_mixed = transform(g.t(), SIGNS), transform(x.t(), SIGNS)  # along tokens
        return dx, cast(g_mixed, stochastic=True) @ cast(x_mixed).t()


def gradients(weights: list[torch.Tensor], four_bits: list[bool]) -> list[torch.Tensor]:
    """Gradients of a residual network's weights; `four_bits` says which layers use NVFP4."""
    generator = torch.Generator().manual_seed(1)
    h, head = (torch.randn(n, H, generator=generator) for n in (TOKENS, 64))
    labels = torch.randint(0, len(head), (TOKENS,), generator=generator)
    weights = [w.clone().requires_grad_() for w in weights]
    for w, four in zip(weights, four_bits, strict=True):
        x = F.layer_norm(h, (H,))
        h = h + F.gelu(NVFP4Product.apply(x, w) if four else x @ w.t())
    loss = F.cross_entropy(F.layer_norm(h, (H,)) @ head.t() / H**0.5, labels)
    return list(torch.autograd.grad(loss, weights))


def check() -> None:
    """Compare with a table of E2M1, with a product in float64, and with autograd."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    probe = torch.arange(-7 * 64, 7 * 64 + 1) / 64  # all ties are among these numbers
    near = [
        min(range(8), key=lambda i: (abs(abs(v) - table[i]), i % 2)) for v in probe.tolist()
    ]
    assert round_e2m1(probe).equal(table[near] * probe.sign())  # a tie goes to the even code
    drawn = torch.stack([round_e2m1(probe, stochastic=True) for _ in range(4000)])
    inside = probe.abs() <= 6
    assert all(len(v.unique()) <= 2 for v in drawn.unbind(1))  # one of the two neighbours
    torch.testing.assert_close(drawn.mean(0)[inside], probe[inside], rtol=0, atol=0.08)
    x = torch.randn(2, 48) * torch.tensor([[1.0], [20.0]])
    factor = x.abs().max() / 6 / 448
    for block, ours in zip(x.view(-1, BLOCK), cast(x).view(-1, BLOCK), strict=True):
        scale = (block.abs().max() / 6 / factor).to(torch.float8_e4m3fn).float() * factor
        near = [min(table, key=lambda n: abs(abs(v) / scale - n)) for v in block]
        torch.testing.assert_close(ours, torch.stack(near) * scale * block.sign())
    a, b = torch.randn(2, 48, 64, dtype=torch.float64)
    signs = SIGNS.double()
    torch.testing.assert_close(transform(a, signs) @ transform(b, signs).t(), a @ b.t())
    assert not torch.allclose(transform(a, signs), transform(a, torch.ones_like(signs)))
    x, w, g = (torch.randn(n, 64, requires_grad=True) for n in (128, 64, 128))
    y, again = NVFP4Product.apply(x, w), NVFP4Product.apply(x, w)
    assert y.equal(again) and error(y, x @ w.t()) < 0.2  # two factors with four bits each
    exact = torch.autograd.grad(x @ w.t(), (x, w), g)
    for ours, theirs in zip(torch.autograd.grad(y, (x, w), g), exact, strict=True):
        assert error(ours, theirs) < 0.25
    used = NVFP4Product.apply(torch.eye(64), w).t()  # the weights that forward multiplies by
    ones, y = torch.ones(128, 64), NVFP4Product.apply(x, w)
    torch.testing.assert_close(torch.autograd.grad(y, x, ones, True)[0], ones @ used)
    assert not torch.autograd.grad(y, x, g, True)[0].equal(torch.autograd.grad(y, x, g)[0])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    check()
    torch.manual_seed(0)
    table = []

    x = torch.randn(64, 1024)  # [channels, tokens]: blocks along the tokens, as dw needs them
    x[:, ::BLOCK] *= 30  # one token of each block is loud
    plain, mixed = cast(x), cast(transform(x, SIGNS))
    zeros = [(t == 0).float().mean().item() for t in (plain, mixed)]
    casts = error(plain, x), error(mixed, transform(x, SIGNS))
    table.append(("random Hadamard transform", "values that become 0", *zeros))
    table.append(("", "error of one cast", *casts))
    assert zeros[0] > 0.5 and zeros[1] < 0.05 and casts[1] > casts[0]

    g = torch.randn(128, 256) * torch.randn(128, 1).exp()  # gradients of loud and quiet tokens
    nearest, draws = cast(g), torch.stack([cast(g, stochastic=True) for _ in range(DRAWS)])
    single, mean = (
        (error(nearest, g), error(draws[0], g)),
        (error(nearest, g), error(draws.mean(0), g)),
    )
    table.append(("stochastic rounding", f"error of the mean of {DRAWS} casts", *mean))
    table.append(("", "error of one cast", *single))
    assert single[1] > 1.2 * single[0] and mean[1] < mean[0] / 4

    w = torch.randn(256, 256)
    differ, chain, casts = [], [], []
    for rows in (1, BLOCK):
        forward, backward = cast(w, rows), cast(w.t().contiguous(), rows).t()
        differ.append((forward != backward).float().mean().item())
        chain.append(error(g @ backward, g @ forward))
        casts.append(error(forward, w))
    table.append(("16 × 16 weights per scale", "weights that differ in backward", *differ))
    table.append(("", "so dx differs from the gradient", *chain))
    table.append(("", "error of one cast", *casts))
    assert differ[0] > 0.5 and chain[0] > 0.1 and differ[1] == 0 and chain[1] < 1e-6
    assert casts[1] > casts[0]

    weights = [torch.randn(H, H) / H**0.5 for _ in range(LAYERS)]
    exact = torch.cat([t.flatten() for t in gradients(weights, [False] * LAYERS)])
    found = {}
    for name, high in (("none", ()), ("last", (LAYERS - 1,)), ("first", (0,))):
        ours = gradients(weights, [layer not in high for layer in range(LAYERS)])
        found[name] = error(torch.cat([t.flatten() for t in ours]), exact)
    table.append(
        (
            f"last of {LAYERS} layers not cast",
            "error of all gradients",
            found["none"],
            found["last"],
        )
    )
    table.append(
        ("first layer instead", "error of all gradients", found["none"], found["first"])
    )
    assert 0.2 < found["first"] < found["last"] < found["none"] < 0.4

    print(f"{'part of the recipe':27}{'what is measured':34}{'without':>8}{'with':>8}")
    for part, quantity, without, using in table:
        print(f"{part:27}{quantity:34}{without:8.1%}{using:8.1%}")


if __name__ == "__main__":
    main()
