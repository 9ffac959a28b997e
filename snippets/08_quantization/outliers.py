"""Shows what outliers in activations do to int8, and three methods that fix it.

Large language models have a few outlier channels, whose activations are many times as large as
the others. A small model has none, so the program makes them: it multiplies a channel of a norm
by a power of two and divides the weights that read this channel by the same number. The model
computes the same function, bit for bit. Then int8 fails, and LLM.int8 (Dettmers et al., 2022),
SmoothQuant (Xiao et al., 2022) and a rotation (as in QuaRot, Ashkboos et al., 2024) restore
most of the loss. Draws outliers.svg.
"""

import copy
import math
import random
import unicodedata
from collections.abc import Callable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

LAYERS = ("qkv", "out", "up", "down")


def unicode_names() -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the alphabet, and the ids of the text to train on and of the text held out.

    The text is the name of every character in Unicode 3.2 that has a name of its own (those of
    ideographs and of Korean syllables follow from a rule), one a line, shuffled.
    """
    names = [unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(0x110000)]
    names = [name for name in names if name and not name.startswith(("CJK", "HANGUL SYLLABLE"))]
    random.Random(0).shuffle(names)
    text = "\n".join(names) + "\n"
    alphabet = "".join(sorted(set(text)))
    ids = torch.tensor([alphabet.index(character) for character in text])
    return alphabet, ids[:-20_800], ids[-20_800:]


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to what came in."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, s, h]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, h/a]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharModel(nn.Module):
    """A transformer that predicts the next character: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, vocabulary: int, hidden=64, heads=4, layers=2, context=64) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, ids: torch.Tensor, steps=500, rows=8, context=64, lr=1e-2) -> None:
    """Train on windows cut at random from the text."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(ids) - context, (rows, 1), generator=generator)
        window = ids[starts + torch.arange(context + 1)]  # [b, s+1]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def bits_per_character(model: nn.Module, ids: torch.Tensor, context=64) -> float:
    """Return the cross-entropy on `ids`, cut into windows, in bits per character."""
    windows = ids.unfold(0, context + 1, context + 1)  # what is left over is no window
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item() / math.log(2)


# --8<-- [start:make]
@torch.no_grad()
def make_outliers(model: CharModel, channels: list[int], factor: float) -> CharModel:
    """Multiply channels of each norm's output, and divide the weights that read them."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for norm, linear in ((block.norm1, block.qkv), (block.norm2, block.up)):
            norm.weight[channels] *= factor
            norm.bias[channels] *= factor
            linear.weight[:, channels] /= factor
    return model


# --8<-- [end:make]


# --8<-- [start:W8A8]
def int8(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Round to 255 levels and back: one scale for the tensor (None) or one along `dim`."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=1e-12) / 127
    return (x / scale).round() * scale


class W8A8(nn.Module):
    """A linear layer with weights in int8 per output and activations in int8."""

    def __init__(self, linear: nn.Linear, dim: int | None) -> None:
        super().__init__()
        self.weight, self.bias, self.dim = int8(linear.weight.detach(), 1), linear.bias, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(int8(x, self.dim), self.weight, self.bias)


# --8<-- [end:W8A8]


# --8<-- [start:LLMInt8]
class LLMInt8(W8A8):
    """Columns of x with any magnitude above `threshold` are multiplied as floats."""

    def __init__(self, linear: nn.Linear, dim: int | None, threshold=6.0) -> None:
        super().__init__(linear, dim)
        self.exact, self.threshold = linear.weight.detach(), threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outlier = x.abs().flatten(0, -2).amax(0) > self.threshold  # [h]
        rest = F.linear(int8(x * ~outlier, self.dim), self.weight, self.bias)
        return rest + F.linear(x[..., outlier], self.exact[:, outlier])


# --8<-- [end:LLMInt8]


# --8<-- [start:Transformed]
class Transformed(nn.Module):
    """x·T times T⁻¹·W equals x times W, but the two factors may have smaller ranges."""

    def __init__(self, linear: nn.Linear, dim: int | None, t: torch.Tensor) -> None:
        super().__init__()
        moved = nn.Linear(*linear.weight.T.shape)
        moved.weight = nn.Parameter(torch.linalg.solve(t, linear.weight.detach().T).T)
        moved.bias = linear.bias
        self.linear, self.t = W8A8(moved, dim), t

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self.t)


# --8<-- [end:Transformed]


# --8<-- [start:smooth]
def smooth(x_max: torch.Tensor, weight: torch.Tensor, alpha: float) -> torch.Tensor:
    """SmoothQuant: divide channel j of x by max|xⱼ|^α / max|wⱼ|^(1-α)."""
    w_max = weight.abs().amax(0)
    return torch.diag(1 / (x_max.clamp(min=1e-5) ** alpha / w_max ** (1 - alpha)))


def hadamard(n: int) -> torch.Tensor:
    """Every entry is ±1/√n, every two rows are orthogonal. n is a power of two."""
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


# --8<-- [end:smooth]


New = Callable[[str, nn.Linear, int | None], nn.Module]  # name, layer, dim of the scales of x


def swap(model: CharModel, new: New, dim: int | None) -> CharModel:
    """A copy with every linear layer of the blocks replaced."""
    model = copy.deepcopy(model)
    for i, block in enumerate(model.blocks):
        for name in LAYERS:
            setattr(block, name, new(f"{i}.{name}", getattr(block, name), dim))
    return model


@torch.no_grad()
def record_inputs(model: CharModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of every linear layer of the blocks: {name: [tokens, inputs]}."""
    seen = {}
    for i, block in enumerate(model.blocks):
        for name in LAYERS:
            getattr(block, name).register_forward_pre_hook(
                lambda _, args, key=f"{i}.{name}": seen.update({key: args[0].flatten(0, 1)})
            )
    model(ids)
    return seen


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x - exact).norm() / exact.norm()).item()


def by_torch(x: torch.Tensor, per_row: bool) -> torch.Tensor:
    """Round x [n, k] to int8 and back with the library: one scale for each row or one."""
    scales = x.abs().amax(1) / 127 if per_row else (x.abs().max() / 127).repeat(len(x))
    zeros = torch.zeros(len(x), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -127, 127)


def draw(x: torch.Tensor, scales: torch.Tensor) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "outliers", "font.size": 11}
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.9), sharey=True)
    panels = {"with outliers": x, "smoothed, α = 0.5": x @ scales, "rotated": x @ hadamard(64)}
    colours = ("#c2410c", "#0b6e99", "#15803d")
    for i, (title, values) in enumerate(panels.items()):
        ax, colour = axes[i], colours[i]
        ax.vlines(range(64), 0.1, values.abs().amax(0), color=colour, linewidth=1.9)
        ax.set(title=title, yscale="log", ylim=(0.1, 1000), xlabel="channel", xlim=(-1, 64))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("largest |x|")
    figure.tight_layout()
    figure.savefig("outliers.svg", transparent=True, metadata={"Date": None})


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    original = CharModel(len(alphabet))
    with torch.enable_grad():
        train(original, text)
    altered = make_outliers(original, [3, 40], 64)
    calibration = text[:2048].view(-1, 64)
    unseen = held_out.unfold(0, 64, 1)
    assert not any((unseen == window).all(1).any() for window in calibration)
    assert torch.equal(original(calibration), altered(calibration))
    print("the model with outliers is the same function, bit for bit")

    seen = record_inputs(copy.deepcopy(altered), calibration)
    x_max = {key: x.abs().amax(0) for key, x in seen.items()}
    parts = held_out.chunk(8)  # small batches stay in the cache

    def evaluate(model: CharModel) -> float:
        return sum(bits_per_character(model, part) for part in parts) / len(parts)

    exact = evaluate(original)
    assert abs(exact - bits_per_character(original, held_out)) < 1e-3  # on all of the text
    print(f"fp32: ≈{exact:.3f} bits per character")

    def plain(key: str, linear: nn.Linear, dim: int | None) -> nn.Module:
        return W8A8(linear, dim)

    def split(key: str, linear: nn.Linear, dim: int | None) -> nn.Module:
        return LLMInt8(linear, dim)

    def smoothed(key: str, linear: nn.Linear, dim: int | None) -> nn.Module:
        return Transformed(linear, dim, smooth(x_max[key], linear.weight, 0.5))

    def rotated(key: str, linear: nn.Linear, dim: int | None) -> nn.Module:
        return Transformed(linear, dim, hadamard(linear.in_features))

    linear, x = altered.blocks[1].up, seen["1.up"]
    scales = smooth(x_max["1.up"], linear.weight, 0.5).diag()
    # with α = 0.5 the inputs and the weights of a channel have the same largest magnitude
    torch.testing.assert_close(x_max["1.up"] * scales, (linear.weight / scales).abs().amax(0))
    above = x.abs().amax(0) > 6
    assert above[[3, 40]].all() and above.sum() < 8  # LLM.int8 multiplies only these as floats
    gain = altered.blocks[1].norm2.weight / original.blocks[1].norm2.weight
    assert gain[[3, 40]].tolist() == [64, 64] and gain.sum() == 62 + 2 * 64
    # of the layer 1.up: the inputs and the weights that are rounded, and the product in floats
    w, h, none = linear.weight, hadamard(64), torch.zeros(1)
    factors = {
        "without outliers": (x / gain, w * gain, none),
        "with outliers": (x, w, none),
        "LLM.int8": (x * ~above, w, F.linear(x[:, above], w[:, above])),
        "SmoothQuant, α = 0.5": (x * scales, w / scales, none),
        "Hadamard rotation": (x @ h, w @ h, none),
    }

    losses, dims = {}, {"tensor": None, "token": -1}
    columns = ", ".join(f"per {where}" for where in dims)
    print(f"int8 weights and activations   a scale {columns}")
    for name, model, new in (
        ("without outliers", original, plain),
        ("with outliers", altered, plain),
        ("LLM.int8", altered, split),
        ("SmoothQuant, α = 0.5", altered, smoothed),
        ("Hadamard rotation", altered, rotated),
    ):
        for where, dim in dims.items():
            tested = swap(model, new, dim)
            replaced = [m for m in tested.modules() if isinstance(m, W8A8)]
            assert len(replaced) == 8  # all linear layers of the two blocks
            inputs, weight, floats = factors[name]
            expected = F.linear(
                by_torch(inputs, dim == -1), by_torch(weight, True), linear.bias
            )
            layer = tested.blocks[1].up  # an equal result needs int8 weights and int8 inputs
            layer_inputs = x / gain if model is original else x
            assert relative_error(layer(layer_inputs), expected + floats) < 1e-3, (name, where)
            losses[name, where] = evaluate(tested)
        row = (f"≈{losses[name, where]:.3f}" for where in dims)
        print(f"{name:28}", (14 * " ").join(row))

    print(f"channels into blocks.1.up with anything above 6: ≈{above.sum()} of 64")
    for where, most in (("tensor", 0.2), ("token", 0.05)):
        assert abs(losses["without outliers", where] - exact) < 0.01
        others = max(losses[fix, where] for fix in ("LLM.int8", "SmoothQuant, α = 0.5"))
        assert others < exact + 0.01 and others < losses["Hadamard rotation", where]
        assert losses["Hadamard rotation", where] < exact + most
    per_tensor, per_token = (losses["with outliers", where] for where in ("tensor", "token"))
    assert per_tensor - exact > 0.5 and 0.03 < per_token - exact < (per_tensor - exact) / 3
    draw(seen["1.up"], smooth(x_max["1.up"], altered.blocks[1].up.weight, 0.5))


if __name__ == "__main__":
    main()
