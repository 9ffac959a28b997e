"""Quantization-aware training: the forward pass rounds weights, the backward pass ignores this.

The weights of the trained model get 4, 3 and 2 bits in three ways: rounded with the widest
range, rounded with the best range, and trained for 60 more steps with a straight-through
estimator. Draws qat.svg.
"""

import copy
import math
import random
import unicodedata

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

STEPS = 60


# The model, its text and its training are those of char_model.py.
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


# --8<-- [start:RoundThrough]
class RoundThrough(torch.autograd.Function):
    """Forward: round and clamp. Backward: the identity inside the range, 0 outside."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, step: torch.Tensor, largest: int) -> torch.Tensor:
        q = weight / step
        ctx.save_for_backward(q.abs() <= largest + 0.5)
        return q.round().clamp(-largest, largest) * step

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None


# --8<-- [end:RoundThrough]


# --8<-- [start:FakeQuantize]
class FakeQuantize(nn.Module):
    """A parametrization: each use of layer.weight rounds the fp32 weight."""

    def __init__(self, step: torch.Tensor, largest: int) -> None:
        super().__init__()
        self.largest = largest
        self.register_buffer("step", step)  # [out, 1]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return RoundThrough.apply(weight, self.step, self.largest)


# --8<-- [end:FakeQuantize]


# --8<-- [start:steps]
def widest(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """The smallest step whose range contains the largest weight of each row."""
    return weight.abs().amax(1, keepdim=True) / largest


def least_squares_steps(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """The fraction of the widest step that has the smallest square error, for each row."""
    steps = torch.stack([widest(weight, largest) * share / 20 for share in range(4, 21)])
    back = (weight / steps).round().clamp(-largest, largest) * steps  # [17, out, in]
    best = (back - weight).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return steps.gather(0, best)[0]


# --8<-- [end:steps]


@torch.no_grad()
def quantized(model: nn.Module, bits: int, choose) -> nn.Module:
    """Return a copy whose Linears round their weights to `bits` bits."""
    model = copy.deepcopy(model)
    largest = 2 ** (bits - 1) - 1
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            step = choose(layer.weight, largest)
            parametrize.register_parametrization(layer, "weight", FakeQuantize(step, largest))
    return model


def draw(bits: list[int], table: dict[str, list[float]], fp32: dict[str, float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "qat", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    colours = ("#52525b", "#0b6e99", "#c2410c")
    words = ("rounded, widest range", "rounded, best range", f"trained on, {STEPS} steps")
    for values, colour, word in zip(table.values(), colours, words, strict=True):
        axes.plot(bits, values, "o-", color=colour, label=word)
    for (word, value), above in zip(fp32.items(), (True, False), strict=True):
        axes.axhline(value, color="#15803d", linestyle="--", linewidth=1.3)
        place = value + (0.02 if above else -0.04)
        axes.text(1.97, place, word, color="#15803d", va="bottom" if above else "top")
    axes.legend(frameon=False, labelcolor="linecolor", loc="upper right")
    axes.set(xlabel="bits per weight", ylabel="bits per character", xticks=bits)
    axes.set(xlim=(1.9, 4.1), ylim=(min(min(fp32.values()) - 0.3, 1.6), None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("qat.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    held_out = held_out[:5_200]
    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    train(model, text)
    fp32 = bits_per_character(model, held_out)
    further = copy.deepcopy(model)
    train(further, text, STEPS, lr=3e-3)
    control = bits_per_character(further, held_out)
    print(f"fp32: ≈{fp32:.3f} bits per character; after {STEPS} more steps ≈{control:.3f}")
    assert control < fp32 - 0.01

    weight = model.blocks[0].up.weight.detach().requires_grad_()
    step = least_squares_steps(weight.detach(), 7)
    fake = torch.fake_quantize_per_channel_affine(
        weight, step[:, 0], torch.zeros(len(step), dtype=torch.int32), 0, -7, 7
    )
    upstream = torch.randn(fake.shape, generator=torch.Generator().manual_seed(0))
    (theirs,) = torch.autograd.grad(fake, weight, upstream)
    rounded = RoundThrough.apply(weight, step, 7)
    (ours,) = torch.autograd.grad(rounded, weight, upstream)
    assert 0 < (theirs == 0).float().mean() < 0.1 and (ours != theirs).float().mean() < 1e-3
    assert ((rounded - fake).abs() > step / 2).float().mean() < 1e-3  # ties
    print("forward and backward equal torch.fake_quantize_per_channel_affine, except ties")

    table: dict[str, list[float]] = {"widest": [], "best": [], "trained": []}
    print("bits   rounded, widest range   rounded, best range   trained on   recovered")
    for bits in (4, 3, 2):
        wide = bits_per_character(quantized(model, bits, widest), held_out)
        ours = quantized(model, bits, least_squares_steps)
        best = bits_per_character(ours, held_out)
        before = ours.head.weight.detach().clone()
        train(ours, text, STEPS, lr=3e-3)
        assert (ours.head.weight != before).float().mean() > {4: 0.05, 3: 0.05, 2: 0.02}[bits]
        trained = bits_per_character(ours, held_out)
        for (
            layer
        ) in ours.modules():  # each weight is one of a few integers times the step of its row
            if isinstance(layer, nn.Linear):
                integers = layer.weight / layer.parametrizations.weight[0].step
                assert (integers - integers.round()).abs().max() < 1e-3
                assert integers.round().unique().numel() <= 2**bits - 1
        for name, value in zip(table, (wide, best, trained), strict=True):
            table[name].append(value)
        recovered = (best - trained) / (best - control)
        cells = [f"≈{value:.3f}" for value in (wide, best, trained)]
        print(
            "{:4}   {:>21}   {:>19}   {:>10}".format(bits, *cells)
            + f"   {f'≈{recovered:.0%}':>9}"
        )
        assert abs(recovered - 2 / 3) < 0.12
        assert trained < best - {4: 0.0, 3: 0.05, 2: 0.3}[bits]
    draw([4, 3, 2], table, {"fp32": fp32, f"fp32, {STEPS} more steps": control})


if __name__ == "__main__":
    main()
