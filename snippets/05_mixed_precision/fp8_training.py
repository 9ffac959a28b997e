"""A small network trained with fp8 products, E4M3 in forward and E5M2 in backward.

The products are emulated. Both factors are cast to fp8 and multiplied in fp32, where each
product of two fp8 numbers is exact. One product is compared with torch's own fp8 product. The
scale of a cast comes from the tensor itself (current scaling) or from past steps (delayed
scaling). A run in bf16 shows what the losses are without fp8.

One batch is 64 times as large as the others. Look at the row "fp8, delayed": its scale is wrong
in that step, and wrong in the other direction in the 16 steps after it.
"""

import codecs
import contextlib
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the Zen of Python, which is the text to learn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONTEXT, H, STEPS, HISTORY, LOUD = 8, 96, 150, 16, 100


class Scale:
    """Casts of one tensor; the scale comes from its largest magnitude, now or in past steps."""

    def __init__(self, dtype: torch.dtype, recipe: str) -> None:
        self.dtype, self.recipe, self.limit = dtype, recipe, torch.finfo(dtype).max
        self.history: list[torch.Tensor] = []  # the largest magnitudes of the last steps
        self.fill: list[float] = []  # largest |x| · scale / limit of each step
        self.errors: list[float] = []  # relative error of the cast in each step

    def cast(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x · scale in fp8, and the scale."""
        amax = x.abs().amax()
        seen = max(self.history) if self.history and self.recipe == "delayed" else amax
        self.history = [*self.history[-HISTORY + 1 :], amax]
        scale = torch.ones(()) if self.recipe == "none" else self.limit / seen.clamp(min=1e-12)
        x8 = (x * scale).clamp(-self.limit, self.limit).to(self.dtype)
        self.fill.append((amax * scale / self.limit).item())
        self.errors.append(((x8.float() / scale - x).norm() / x.norm()).item())
        return x8, scale


class Fp8Product(torch.autograd.Function):
    """y = x wᵀ, [b, i] and [o, i] -> [b, o]; both factors of all three products are fp8."""

    @staticmethod
    def forward(ctx, x, w, scales):
        (x8, sx), (w8, sw) = scales["x"].cast(x), scales["w"].cast(w)
        ctx.save_for_backward(x8, sx, w8, sw)  # one byte per element
        ctx.scales = scales
        return x8.float() @ w8.float().t() / (sx * sw)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x8, sx, w8, sw = ctx.saved_tensors
        g8, sg = ctx.scales["g"].cast(g)
        return (
            g8.float() @ w8.float() / (sg * sw),
            g8.float().t() @ x8.float() / (sg * sx),
            None,
        )


class Fp8Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, recipe: str) -> None:
        super().__init__(inputs, outputs)
        self.scales = {"x": Scale(E4M3, recipe), "w": Scale(E4M3, recipe)}
        self.scales["g"] = Scale(E5M2, recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fp8Product.apply(x, self.weight, self.scales) + self.bias


def train(recipe: str, loud: bool, seed: int = 0) -> tuple[list[float], Scale | None]:
    """The losses of all steps, and the casts of the first layer's input."""
    torch.manual_seed(seed)
    text = codecs.decode(this.s, "rot13")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    windows = ids.unfold(0, CONTEXT + 1, 1)  # [characters, context + 1]
    size = len(letters)

    def linear(i: int, o: int) -> nn.Linear:
        return nn.Linear(i, o) if recipe == "bf16" else Fp8Linear(i, o, recipe)

    body = nn.Sequential(linear(CONTEXT * 16, H), nn.GELU(), linear(H, H), nn.GELU())
    embedding, head = nn.Embedding(size, 16), nn.Linear(H, size)  # no fp8 for these two
    parameters = [*embedding.parameters(), *body.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for step in range(STEPS):
        batch = windows[torch.randint(len(windows), (128,))]
        x = embedding(batch[:, :-1]).flatten(1)
        x = x * 64 if loud and step == LOUD else x
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe == "bf16"):
            hidden = body(x)
        assert hidden.dtype == (torch.bfloat16 if recipe == "bf16" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(head(hidden.float()), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if recipe != "bf16":  # both layers cast both factors of forward, and the gradient
        casts = [scale for layer in body[::2] for scale in layer.scales.values()]
        assert [len(scale.fill) for scale in casts] == [STEPS] * 6
        fits = [max(abs(fill - 1) for fill in scale.fill) < 1e-3 for scale in casts]
        assert fits == [recipe == "current"] * 6  # the largest elements fit exactly
    return losses, body[0].scales["x"] if recipe != "bf16" else None


def last(losses: list[float]) -> float:
    return sum(losses[-10:]) / 10


def check() -> None:
    """All three products against float64; delayed scaling looks back HISTORY steps."""
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48)
    layer, saved = Fp8Linear(64, 48, "current"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    y.backward(g)
    assert sum(t.nbytes for t in saved if t.dim()) == x.numel() + layer.weight.numel()

    def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.finfo(dtype).max / t.detach().abs().max()
        return (t.detach() * scale).to(dtype).double() / scale

    x8, w8, g8 = rounded(x, E4M3), rounded(layer.weight, E4M3), rounded(g, E5M2)
    near = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(y, x8 @ w8.T + layer.bias, **near)
    torch.testing.assert_close(x.grad, g8 @ w8, **near)
    torch.testing.assert_close(layer.weight.grad, g8.T @ x8, **near)
    error = layer.scales["x"].errors[-1]
    assert abs(error - ((x8 - x).norm() / x.norm()).item()) < 1e-5
    delayed, sizes = Scale(E4M3, "delayed"), [1.0, 8.0, *[1.0] * (HISTORY + 1)]
    scales = [delayed.cast(torch.tensor([size]))[1].item() for size in sizes]
    assert scales == [448, 448, *[448 / 8] * HISTORY, 448]


def main() -> None:
    torch.set_num_threads(1)  # the products are small
    torch.manual_seed(0)
    check()
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    (x8, sx), (w8, sw) = Scale(E4M3, "current").cast(x), Scale(E4M3, "current").cast(w)
    ours = x8.float() @ w8.float().t() / (sx * sw)
    theirs = torch._scaled_mm(
        x8, w8.t(), scale_a=1 / sx, scale_b=1 / sw, out_dtype=torch.float32
    )
    torch.testing.assert_close(ours, theirs)
    print("emulated product: equal to torch._scaled_mm, apart from rounding in fp32")
    print(f"{STEPS} steps; the input of step {LOUD} is 64 times as large")
    print(
        f"{'':14}loss: highest  last ten   largest |x| · scale / 448    error of the cast of x"
    )
    print(f"{'':14}after {LOUD}       steps    step {LOUD}  {HISTORY} steps after", end="")
    print(f"   step {LOUD}  {HISTORY} steps after")
    for recipe, title in (
        ("bf16", "bf16"),
        ("current", "fp8, current"),
        ("delayed", "fp8, delayed"),
        ("none", "fp8, scale 1"),
    ):
        losses, casts = train(recipe, loud=True)
        highest = max(losses[LOUD + 1 :])
        assert losses[0] > 3 and last(losses) < 0.5
        cells = ["–"] * 4
        if casts is not None:
            after = slice(LOUD + 1, LOUD + 1 + HISTORY)
            fill = casts.fill[LOUD], sum(casts.fill[after]) / HISTORY
            error = casts.errors[LOUD], sum(casts.errors[after]) / HISTORY
            cells = [
                f"≈{fill[0]:.2f}",
                f"≈{fill[1]:.3f}",
                f"≈{error[0]:.1%}",
                f"≈{error[1]:.1%}",
            ]
            if recipe == "current":  # three bits of mantissa
                assert max(casts.errors) < 2**-4
            if recipe == "delayed":
                assert fill[0] > 50 and error[0] > 0.9  # clamped
                assert max(casts.fill[after]) < 1 / 50  # for exactly 16 steps
                assert casts.fill[after.stop] > 1 / 2
        print(f"{title:14}{f'≈{highest:.1f}':>13}{f'≈{last(losses):.1f}':>10}", end="")
        print(f"{cells[0]:>12}{cells[1]:>16}{cells[2]:>11}{cells[3]:>16}")
    print("without that step, five seeds: mean of the last ten losses")
    ends: dict[str, list[float]] = {}
    for recipe, title in (("bf16", "bf16"), ("current", "fp8, current")):
        seeds = sorted(last(train(recipe, loud=False, seed=seed)[0]) for seed in range(5))
        ends[recipe] = seeds
        print(f"{title:12}  ≈{seeds[0]:.2f} to ≈{seeds[-1]:.2f}")
        assert seeds[-1] < 0.2
    assert ends["bf16"] != ends["current"]
    assert max(low for low, *_ in ends.values()) < min(high for *_, high in ends.values())


if __name__ == "__main__":
    main()
