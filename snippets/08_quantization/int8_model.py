"""A trained model with int8 products, with dynamic and with static ranges, from scratch.

Every linear layer stores int8 weights with one scale per output and multiplies integers. A
dynamic layer finds the range of its input at each call. A static layer has a fixed range, which
was found in a calibration run.
"""

import copy
import math
import random
import unicodedata

import torch
from torch import nn
from torch.nn import functional as F


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


# an x86 without VNNI adds pairs of products in 16 bits, which saturate
FULL = torch.full((32, 64), 127, dtype=torch.int8)
INT_MM_IS_EXACT = (torch._int_mm(FULL, FULL.T.contiguous()) == 64 * 127 * 127).all().item()


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] and [k, n] of int8 -> [m, n] of int32, exact on every processor."""
    return torch._int_mm(a, b) if INT_MM_IS_EXACT else a.int() @ b.int()


# the smallest step: without it, a row of zeros would divide by 0
SMALLEST = torch.finfo(torch.float32).eps


# --8<-- [start:Int8Linear]
class Int8Linear(nn.Module):
    """A linear layer in int8. `input_range` is "token" or "tensor" (dynamic), or two bounds."""

    def __init__(self, layer: nn.Linear, input_range: str | tuple[float, float]) -> None:
        super().__init__()
        largest = layer.weight.detach().abs().amax(1, keepdim=True)
        step = (largest / 127).clamp(min=SMALLEST)  # [out, 1]
        weight = (layer.weight.detach() / step).round().to(torch.int8)
        self.register_buffer("weight", weight.T.contiguous())  # [in, out]
        self.register_buffer("step", step.T)  # [1, out]
        self.register_buffer("bias", layer.bias.detach())
        self.register_buffer("columns", weight.sum(1, dtype=torch.int32))  # for the zero point
        self.input_range = input_range

    # --8<-- [end:Int8Linear]
    # --8<-- [start:forward]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])  # [tokens, in]
        if isinstance(self.input_range, tuple):
            low, high = (torch.full((1, 1), bound) for bound in self.input_range)
        elif self.input_range == "tensor":
            low, high = x.min().view(1, 1), x.max().view(1, 1)
        else:
            low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        step = ((high - low) / 255).clamp(min=SMALLEST)
        zero = (-low / step).round() - 128
        q = ((x / step).round() + zero).clamp(-128, 127).to(torch.int8)
        sums = int_mm(q, self.weight) - zero.int() * self.columns  # int32
        return (sums * step * self.step + self.bias).view(*shape[:-1], -1)

    # --8<-- [end:forward]


# --8<-- [start:convert]
def convert(model: nn.Module, ranges: str | dict[str, tuple[float, float]]) -> nn.Module:
    """Return a copy with int8 layers; `ranges` is "token", "tensor", or bounds by name."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            input_range = ranges[name] if isinstance(ranges, dict) else ranges
            model.set_submodule(name, Int8Linear(layer, input_range))
    return model


# --8<-- [end:convert]


# --8<-- [start:calibrate]
@torch.no_grad()
def calibrate(model: nn.Module, windows: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest input of each linear layer over windows [b, s]."""
    ranges: dict[str, tuple[float, float]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def record(_, inputs: tuple[torch.Tensor], name=name) -> None:
                ranges[name] = inputs[0].min().item(), inputs[0].max().item()

            hooks.append(layer.register_forward_pre_hook(record))
    model(windows)
    for hook in hooks:
        hook.remove()
    return ranges


# --8<-- [end:calibrate]


def bytes_of(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def check(layer: nn.Linear, x: torch.Tensor) -> None:
    """The integer layer must equal a float64 product of rounded weights and inputs."""
    tokens = {"low": x.amin(1, keepdim=True), "high": x.amax(1, keepdim=True)}
    for input_range, (low, high) in {
        "token": (tokens["low"], tokens["high"]),
        "tensor": (x.min(), x.max()),
        (-1.5, 2.5): (torch.tensor(-1.5), torch.tensor(2.5)),  # static: it clamps some
    }.items():
        ours = Int8Linear(layer, input_range)
        step = ((high.clamp(min=0) - low.clamp(max=0)) / 255).clamp(min=SMALLEST)
        zero = (-low.clamp(max=0) / step).round() - 128
        rounded = (((x / step).round() + zero).clamp(-128, 127) - zero).double() * step.double()
        assert (ours.weight.abs().amax(0) == 127).all()  # each output has a step of its own
        weight = ours.weight.double() * ours.step.double()
        expected = rounded @ weight + ours.bias.double()
        torch.testing.assert_close(ours(x).double(), expected, rtol=1e-5, atol=1e-5)
        exact = layer(x).double()
        error = (expected - exact).norm() / exact.norm()
        assert error < (0.02 if isinstance(input_range, str) else 0.5)


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    train(model, text)
    x = torch.randn(50, 64)
    x[3] = 0  # a padded token
    check(model.blocks[0].up, x)
    print("the integer layer equals float64 on the rounded numbers")

    before = bits_per_character(model, held_out)
    windows = text[: 32 * 64].view(32, 64)  # from the training text, not from the test text
    unseen = held_out.unfold(0, 64, 1)
    assert not any((unseen == window).all(1).any() for window in windows)
    print("                                bytes   bits per character   added")
    print(f"{'fp32':26}{bytes_of(model):11,}   ≈{before:.3f}")
    rows: dict[str, object] = {
        "int8, dynamic per token": "token",
        "int8, dynamic per tensor": "tensor",
        "int8, static, 32 windows": calibrate(model, windows),
        "int8, static, 1 window": calibrate(model, windows[:1]),
    }
    many, one = rows["int8, static, 32 windows"], rows["int8, static, 1 window"]
    assert all(many[key][0] < one[key][0] and one[key][1] < many[key][1] for key in one)
    losses = {before}
    for name, ranges in rows.items():
        converted = convert(model, ranges)
        after = bits_per_character(converted, held_out)
        losses.add(after)
        cells = f"≈{after:.3f}             ≈{after - before:+.3f}"
        print(f"{name:26}{bytes_of(converted):11,}   {cells}")
        assert abs(after - before) < 0.005, (name, after)
        assert bytes_of(converted) < 0.35 * bytes_of(model)
    assert len(losses) == 1 + len(rows)  # each row is the loss of a different model


if __name__ == "__main__":
    main()
