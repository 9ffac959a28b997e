"""Quantizes a trained model to 4, 3 and 2 bits with GPTQ and AWQ, which use calibration text.

The program starts at the input and quantizes one layer after the other, so each layer is fitted
to the outputs of the quantized layers before it. Groups of 32 inputs share a scale. It also
tests how much text GPTQ needs and which text, and how the methods handle outlier channels.
Draws calibrated.svg.
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


# --8<-- [start:methods]
def nearest(w: torch.Tensor, x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round to 2^bits levels, a scale per group of inputs; w [n, k]. Needs no x."""
    w = w.unflatten(1, (-1, group))
    top = 2 ** (bits - 1) - 0.5
    scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-8) / top
    return (((w / scale - 0.5).round() + 0.5).clamp(-top, top) * scale).flatten(1)


def gptq(w: torch.Tensor, x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Compensate each column's error in later columns; a group's scale is set when reached."""
    x, w, top = x.double(), w.double(), 2 ** (bits - 1) - 0.5
    h = x.T @ x
    h += 0.01 * h.diagonal().mean() * torch.eye(len(h))
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    for i in range(w.shape[1]):
        if i % group == 0:
            scale = w[:, i : i + group].abs().amax(1, keepdim=True).clamp(min=1e-8) / top
        q = ((w[:, i : i + 1] / scale - 0.5).round() + 0.5).clamp(-top, top) * scale
        w[:, i + 1 :] -= (w[:, i : i + 1] - q) / upper[i, i] * upper[i, i + 1 :]
        w[:, i : i + 1] = q
    return w.float()


def awq(w: torch.Tensor, x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Multiply columns by (mean |x|)^α, round, and divide again; use the best of six α."""
    best, least, h = w, math.inf, x.T @ x
    for alpha in torch.linspace(0, 1, 6):
        scale = x.abs().mean(0).clamp(min=1e-4) ** alpha
        q = nearest(w * scale, x, bits, group) / scale
        error = ((q - w) @ h * (q - w)).sum().item()  # |x·(q - w)ᵀ|²
        if error < least:
            best, least = q, error
    return best


# --8<-- [end:methods]

Method = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


# --8<-- [start:layer_by_layer]
@torch.no_grad()
def layer_by_layer(
    model: CharModel, method: Method, ids: torch.Tensor, bits: int, group=32
) -> CharModel:
    """Quantize each linear layer of the blocks with its own inputs over `ids`."""
    model = copy.deepcopy(model)
    x = model.token(ids) + model.position.weight[: ids.shape[1]]  # the input of the first block
    for block in model.blocks:
        for name in LAYERS:
            linear, seen = getattr(block, name), []
            hook = linear.register_forward_pre_hook(lambda _, args, s=seen: s.append(args[0]))
            block(x)
            hook.remove()
            rows = seen[0].flatten(0, 1)  # [tokens, k]
            linear.weight.copy_(method(linear.weight, rows, bits, group))
        x = block(x)  # the output of the quantized block
    return model


# --8<-- [end:layer_by_layer]


def draw(found: dict, exact: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "calibrated", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7, 3.4))
    rows = {"to nearest": ("#c2410c", 14), "AWQ": ("#7c3aed", -4), "GPTQ": ("#15803d", 0)}
    for name, (colour, up) in rows.items():
        lost = [found[name, bits] - exact for bits in (4, 3, 2)]
        axes.plot((4, 3, 2), lost, "o-", color=colour, linewidth=2)
        at = {"xytext": (8, up - 5), "textcoords": "offset points", "color": colour}
        axes.annotate(name, (2, lost[2]), **at)
    axes.set(yscale="log", xlim=(4.1, 1.6), ylim=(0.003, 1), xticks=(4, 3, 2))
    axes.set(xlabel="bits a weight, without scales", ylabel="bits per character over fp32")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("calibrated.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    train(model, text)
    parts = held_out.chunk(8)  # small batches stay in the cache

    def evaluate(model: CharModel) -> float:
        return sum(bits_per_character(model, part) for part in parts) / len(parts)

    exact = evaluate(model)
    starts = torch.randint(len(text) - 64, (32, 1))
    calibration = text[starts + torch.arange(64)]

    measured = held_out.unfold(0, 64, 1)  # no calibration window is in this text
    assert not any((measured == window).all(1).any() for window in calibration)

    # each layer is fitted to exactly those inputs that it gets in the quantized model
    shown, given = [], []
    rounded = layer_by_layer(
        model, lambda w, x, *how: shown.append(x) or nearest(w, x, *how), calibration, 2
    )
    for layer in (getattr(block, name) for block in rounded.blocks for name in LAYERS):
        layer.register_forward_pre_hook(lambda _, args: given.append(args[0].flatten(0, 1)))
    rounded(calibration)
    torch.testing.assert_close(given, shown)

    def loss(model: CharModel, method: Method, ids: torch.Tensor, bits: int) -> float:
        return evaluate(layer_by_layer(model, method, ids, bits))

    print(
        f"fp32: ≈{exact:.3f} bits per character; groups of 32, so 0.5 bits a weight for scales"
    )
    methods = {"to nearest": nearest, "AWQ": awq, "GPTQ": gptq}
    found = {}
    for name, method in methods.items():
        for bits in (4, 3, 2):
            found[name, bits] = loss(model, method, calibration, bits)
        print(f"{name:12}", *(f"{bits} bits ≈{found[name, bits]:.3f}  " for bits in (4, 3, 2)))
    draw(found, exact)
    for bits in (4, 3, 2):
        lost = found["to nearest", bits] - exact
        assert found["GPTQ", bits] - exact < 0.75 * lost  # GPTQ avoids much of the loss
        assert (
            abs(found["AWQ", bits] - exact - lost) < 0.3 * lost
        )  # AWQ avoids almost none of it

    print("GPTQ at 2 bits, calibrated on")
    unrelated = torch.randint(len(alphabet), calibration.shape)
    assert bits_per_character(model, unrelated.flatten()) > math.log2(len(alphabet))
    for name, ids in {
        "64 characters": calibration[:1],
        "512 characters": calibration[:8],
        "2,048 characters": calibration,
        "2,048 drawn at random": unrelated,
    }.items():
        found[name] = loss(model, gptq, ids, 2)
        print(f"  {name:22} ≈{found[name]:.3f}")
    assert found["2,048 characters"] < found["512 characters"] + 0.02
    assert found["512 characters"] < found["to nearest", 2] < found["64 characters"]
    assert found["2,048 drawn at random"] < found["to nearest", 2] - 0.05

    outliers = copy.deepcopy(model)  # the same function, with two outlier channels per norm
    with torch.no_grad():
        for block in outliers.blocks:
            for norm, linear in ((block.norm1, block.qkv), (block.norm2, block.up)):
                norm.weight[[3, 40]] *= 16
                norm.bias[[3, 40]] *= 16
                linear.weight[:, [3, 40]] /= 16
        assert torch.equal(outliers(calibration), model(calibration))
    print("two channels 16 times as large, their weights 16 times as small, 4 bits")
    for name, method in methods.items():
        found[name, "outliers"] = loss(outliers, method, calibration, 4)
        print(f"  {name:12} ≈{found[name, 'outliers']:.3f}")
    lost = found["to nearest", "outliers"] - exact
    assert found["AWQ", "outliers"] - exact < 0.25 * lost < found["GPTQ", "outliers"] - exact
    assert found["GPTQ", "outliers"] - exact < 0.8 * lost


if __name__ == "__main__":
    main()
