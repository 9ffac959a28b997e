"""How many gradients become zero in fp16, and how many a loss scale saves: a histogram.

A small character model learns the Zen of Python in fp32. The program then takes the gradients
of one backward pass, of activations and of parameters. It multiplies them by a scale and casts
them to fp16. Look at the column "zero in fp16": without a scale about a tenth of the gradients
become zero. The program compares every fraction with a count in float64, which needs no cast.
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
    """Return the text that `import this` prints, as numbers of its characters."""
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


def gradients(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Return the nonzero gradients of all linear outputs and parameters after one backward."""
    collected: list[torch.Tensor] = []
    handles = [
        m.register_full_backward_hook(lambda m, i, o: collected.append(o[0].flatten()))
        for m in model.modules()
        if isinstance(m, nn.Linear)
    ]
    model.zero_grad()
    (scale * nn.functional.cross_entropy(model(x), y)).backward()
    for handle in handles:
        handle.remove()
    everything = torch.cat(collected + [p.grad.flatten() for p in model.parameters()])
    return everything[everything != 0]


def fractions_by_cast(g: torch.Tensor, scale: float) -> list[float]:
    """Return the fractions of g · scale that are zero, subnormal and infinite in fp16."""
    half = (g * scale).half()
    subnormal = half.ne(0) & (half.abs() < 2.0**-14)
    return [part.double().mean().item() for part in (half.eq(0), subnormal, half.isinf())]


def fractions_by_size(g: torch.Tensor, scale: float) -> list[float]:
    """Return the same fractions, computed in float64 from the limits of fp16.

    Below 2^-14, the step of fp16 is 2^-24. A tie is rounded to the even neighbour.
    """
    size = g.double().abs() * scale
    zero, normal = size <= 2.0**-25, size >= 2.0**-14 - 2.0**-25
    infinite = size >= 65504 + 16  # half a step above the largest number
    return [part.double().mean().item() for part in (zero, ~zero & ~normal, infinite)]


def draw(g: torch.Tensor, scale: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write underflow.svg; return edges and heights of the two histograms that it shows."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "underflow", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.9))
    bins = torch.arange(-64, 17).double()
    drawn = []
    for shift, colour, words, x in (
        (0, "#c2410c", "as it is", -33.0),
        (scale, "#0b6e99", f"times 2$^{{{scale}}}$", 3.5),
    ):
        counts = torch.histogram(g.double().abs().log2() + shift, bins).hist / len(g) * 100
        axes.stairs(counts, bins, color=colour, fill=True, alpha=0.35)
        shape = axes.stairs(counts, bins, color=colour, linewidth=1.5).get_data()
        drawn.append((torch.as_tensor(shape.edges), torch.as_tensor(shape.values)))
        axes.text(x, 10, words, color=colour, ha="center")
    for edge in (-25, -14, 16):
        axes.axvline(edge, color="#52525b", linewidth=1, linestyle="--")
    axes.text(-26, 14.4, "zero in fp16", ha="right", color="#52525b")
    axes.text(-19.5, 14.4, "subnormal", ha="center", color="#52525b", fontsize=11)
    axes.text(1, 14.4, "normal", ha="center", color="#52525b")
    axes.text(17, 14.4, "inf", color="#52525b")
    axes.set_xticks(range(-50, 20, 10), [f"2$^{{{t}}}$" for t in range(-50, 20, 10)])
    axes.set(xlabel="size of a gradient element", ylabel="fraction of elements (%)")
    axes.set(xlim=(-52, 21), ylim=(0, 15.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("underflow.svg", transparent=True, metadata={"Date": None})
    return drawn


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
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
    assert loss.dtype == g.dtype == torch.float32
    error = model(x).softmax(-1) - nn.functional.one_hot(y, int(text.max()) + 1)
    expected = (error / len(x)).flatten()  # the gradient of the logits comes first
    torch.testing.assert_close(g[: len(expected)], expected, rtol=1e-3, atol=1e-8)
    edges = [2.0**-25, 1.01 * 2.0**-25, 2.0**-14 - 2.0**-25, 2.0**-14, 65519, -65520]
    edges = torch.tensor(edges)  # zero, subnormal, normal, normal, the largest, infinite
    assert fractions_by_cast(edges, 1) == fractions_by_size(edges, 1) == [1 / 6] * 3
    # a scale of the loss multiplies every gradient, and a power of two rounds none of them
    assert torch.equal(gradients(model, x, y, 2.0**16), 2.0**16 * g)
    largest = g.abs().max()
    print(f"{len(x)} characters a step, loss ≈{loss.item():.2f} after {STEPS} steps")
    print(f"{len(g):,} gradient elements, largest 2^≈{largest.log2().item():.1f}")
    print("scale   zero in fp16   subnormal   infinite")
    for k in range(0, 33, 4):
        found = fractions_by_cast(g, 2.0**k)
        assert found == fractions_by_size(g, 2.0**k)
        assert (found[0] > 0.02) == (k == 0)  # only without a scale many gradients vanish
        assert (found[0] < 3e-4) == (k >= 12) and (found[2] > 0) == (k >= 24)
        parts = [f"≈{part:.2%}" for part in found]
        print(f"2^{k:<5}{parts[0]:>13}{parts[1]:>12}{parts[2]:>11}")
    limit = (65504 / largest).log2().item()
    for k in (limit - 0.01, limit + 0.01):  # with a larger scale, an element is infinite
        assert (g * 2.0**k).half().isinf().any() == (k > limit)
    print(f"the largest scale without an infinity: 2^≈{limit:.1f}")
    for scale, (edges, heights) in zip((1, 2.0**16), draw(g, 16), strict=True):
        zero, subnormal, _ = fractions_by_size(g, scale)
        starts = edges[:-1]
        assert abs(heights[starts < -25].sum().item() / 100 - zero) < 1e-3
        between = heights[(starts >= -25) & (starts < -14)].sum().item() / 100
        assert abs(between - subnormal) < 1e-3


if __name__ == "__main__":
    main()
