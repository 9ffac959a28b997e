"""A histogram of real gradients on fp16's range: the share that becomes zero, and the rescue.

A character model learns the Zen of Python in fp32. Then one backward is taken apart: each
gradient of an activation or a parameter is cast to fp16, as it is and multiplied by a scale.
Draws underflow.svg.
"""

import contextlib
import io

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn

CONTEXT, H, LAYERS, STEPS = 8, 64, 4, 60


class NarrowBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def zen() -> torch.Tensor:
    """The text that `import this` prints, as numbers of its characters."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        import this  # noqa: F401
    characters = sorted(set(text.getvalue()))
    return torch.tensor([characters.index(c) for c in text.getvalue()])


def build(vocabulary: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(vocabulary, H // CONTEXT * 4),  # [b, context, h/2]
        nn.Flatten(),
        nn.Linear(H * 4, H),
        *(NarrowBlock() for _ in range(LAYERS)),
        nn.LayerNorm(H),
        nn.Linear(H, vocabulary),
    )


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All gradients of one backward that are not zero: of linears' outputs and parameters."""
    collected: list[torch.Tensor] = []
    handles = [
        m.register_full_backward_hook(lambda m, i, o: collected.append(o[0].flatten()))
        for m in model.modules()
        if isinstance(m, nn.Linear)
    ]
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for handle in handles:
        handle.remove()
    everything = torch.cat(collected + [p.grad.flatten() for p in model.parameters()])
    return everything[everything != 0]


def draw(g: torch.Tensor, scale: int) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "underflow", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.9))
    bins = torch.arange(-64, 17).double()
    for shift, colour, words, x in (
        (0, "#c2410c", "as it is", -33.0),
        (scale, "#0b6e99", f"times 2$^{{{scale}}}$", 3.5),
    ):
        counts = torch.histogram(g.double().abs().log2() + shift, bins).hist / len(g) * 100
        axes.stairs(counts, bins, color=colour, fill=True, alpha=0.35)
        axes.stairs(counts, bins, color=colour, linewidth=1.5)
        axes.text(x, 10, words, color=colour, ha="center")
    for edge in (-25, -14, 16):
        axes.axvline(edge, color="#52525b", linewidth=1, linestyle="--")
    axes.text(-26, 14.4, "zero in fp16", ha="right", color="#52525b")
    axes.text(-19.5, 14.4, "subnormal", ha="center", color="#52525b", fontsize=11)
    axes.text(1, 14.4, "normal", ha="center", color="#52525b")
    axes.text(17, 14.4, "inf", color="#52525b")
    axes.set_xticks(range(-50, 20, 10), [f"2$^{{{t}}}$" for t in range(-50, 20, 10)])
    axes.set(xlabel="size of a gradient element", ylabel="share of elements (%)")
    axes.set(xlim=(-52, 21), ylim=(0, 15.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("underflow.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait
    torch.manual_seed(0)
    text = zen()
    windows = text.unfold(0, CONTEXT + 1, 1)  # [b, context + 1]
    x, y = windows[:, :-1], windows[:, -1]
    model = build(int(text.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    g = gradients(model, x, y)
    print(f"{len(x)} characters a step, loss ≈{loss.item():.2f} after {STEPS} steps")
    print(f"{len(g):,} gradient elements, largest 2^≈{g.abs().max().log2().item():.1f}")
    print("scale   zero in fp16   subnormal   infinite")
    for k in range(0, 33, 4):
        half = (g * 2.0**k).half()
        zero = half.eq(0).double().mean().item()
        tiny = (half.ne(0) & (half.abs() < 2.0**-14)).double().mean().item()
        infinite = half.isinf().double().mean().item()
        assert (zero > 0.02) == (k == 0) and (infinite > 0) == (k >= 24)
        shares = [f"≈{share:.2%}" for share in (zero, tiny, infinite)]
        print(f"2^{k:<5}{shares[0]:>13}{shares[1]:>12}{shares[2]:>11}")
    room = 65504 / g.abs().max().item()
    print(f"the largest scale without an infinity: 2^≈{torch.tensor(room).log2().item():.1f}")
    draw(g, 16)


if __name__ == "__main__":
    main()
