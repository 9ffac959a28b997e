"""Compare all schemes of the chapter on one trained model: bytes, loss and speed.

The linear layers of the blocks are stored as each scheme says, and they are converted to floats
when they are used. Two int8 schemes also quantize the inputs and multiply integers. Embeddings,
norms and the head stay in fp32, except in the bf16 model.

Compare the column "bits per character" of a row with that of fp32. The rows after NF4 train the
model for 100 more steps, so compare them with the row "fp32, 100 steps more".
"""

import copy
import math
import random
import time
import unicodedata
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, GROUP, LINEAR_WEIGHTS = ("qkv", "out", "up", "down"), 32, 98_304
NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
                    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0])  # fmt: skip


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


class Stored(nn.Module):
    """A linear layer that stores its weight in fewer bits and converts it when called."""

    def __init__(self, linear: nn.Linear, x: torch.Tensor | None = None) -> None:
        super().__init__()
        self.bias = linear.bias
        self.store(linear.weight.detach(), x)

    def keep(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight(), self.bias)


class Int8(Stored):
    def store(self, w: torch.Tensor, x: torch.Tensor | None) -> None:
        scale = w.abs().amax(1, keepdim=True) / 127
        self.keep(q=(w / scale).round().clamp(-127, 127).to(torch.int8), scale=scale)

    def weight(self) -> torch.Tensor:
        return self.q * self.scale


class Int8Dynamic(Int8):
    """Multiply integers and add in int32. Each token gets its scale when it arrives."""

    def scale_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        x_scale = self.scale_of(rows)
        q = (rows / x_scale).round().clamp(-127, 127).to(torch.int8)
        y = int_mm(q, self.q.T) * x_scale * self.scale.T
        return (y + self.bias).unflatten(0, x.shape[:-1])


class Int8Static(Int8Dynamic):
    """All inputs have one scale, which comes from the calibration text."""

    def store(self, w: torch.Tensor, x: torch.Tensor | None) -> None:
        super().store(w, x)
        self.keep(x_scale=x.abs().amax() / 127)

    def scale_of(self, x: torch.Tensor) -> torch.Tensor:
        return self.x_scale


class Fp8(Stored):
    def store(self, w: torch.Tensor, x: torch.Tensor | None) -> None:
        scale = w.abs().amax(1, keepdim=True) / 448
        self.keep(q=(w / scale).to(torch.float8_e4m3fn), scale=scale)

    def weight(self) -> torch.Tensor:
        return self.q.float() * self.scale


class Nibbles(Stored):
    """Two codes per byte, a table of 16 levels, and one scale for each group of inputs."""

    table, group, scales = torch.arange(16) - 7.5, GROUP, torch.bfloat16

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        codes = codes.to(torch.uint8)
        return codes[:, 0::2] | codes[:, 1::2] << 4

    def weight(self) -> torch.Tensor:
        codes = torch.stack([self.q & 15, self.q >> 4], -1).flatten(-2).int()
        w = self.table[codes].unflatten(1, (-1, self.group))
        return (w * self.scale.float().unsqueeze(-1)).flatten(1)

    def scale_for(self, w: torch.Tensor) -> torch.Tensor:
        return (w.abs().amax(-1) / self.table[-1]).clamp(min=1e-8).to(self.scales)

    def nearest(self, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Codes of w [n, k] with scales [n, groups]."""
        w = w.unflatten(1, (scale.shape[1], -1)) / scale.float().unsqueeze(-1)
        return torch.bucketize(w.flatten(1), (self.table[1:] + self.table[:-1]) / 2)

    def store(self, w: torch.Tensor, x: torch.Tensor | None) -> None:
        scale = self.scale_for(w.unflatten(1, (-1, self.group)))
        self.keep(q=self.pack(self.nearest(w, scale)), scale=scale)


class Nf4(Nibbles):
    table, group, scales = NF4, 64, torch.float32  # 32 bits for 64 weights: half a bit as well


class Gptq(Nibbles):
    def store(self, w: torch.Tensor, x: torch.Tensor | None) -> None:
        w, h = w.clone(), x.T.double() @ x.double()
        h += 0.01 * h.diagonal().mean() * torch.eye(len(h))
        upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True).float()
        codes, scales = torch.empty_like(w), []
        for i in range(w.shape[1]):
            if i % GROUP == 0:
                scales.append(self.scale_for(w[:, i : i + GROUP])[:, None])
            code = self.nearest(w[:, i : i + 1], scales[-1])
            error = w[:, i : i + 1] - self.table[code] * scales[-1].float()
            w[:, i + 1 :] -= error / upper[i, i] * upper[i, i + 1 :]
            codes[:, i : i + 1] = code
        self.keep(q=self.pack(codes), scale=torch.cat(scales, 1))


class Awq(Nibbles):
    def store(self, w: torch.Tensor, x: torch.Tensor | None) -> None:
        least, h = math.inf, x.T @ x
        for alpha in torch.linspace(0, 1, 6):
            column = (x.abs().mean(0).clamp(min=1e-4) ** alpha).bfloat16().float()
            super().store(w * column, x)
            self.keep(column=column.bfloat16())
            off = self.weight() - w
            error = (off @ h * off).sum().item()  # of the layer's output
            if error < least:
                least, best = error, (self.q, self.scale, self.column)
        self.keep(**dict(zip(("q", "scale", "column"), best, strict=True)))

    def weight(self) -> torch.Tensor:
        return super().weight() / self.column.float()


class Qat(nn.Module):
    """Round in the forward pass only; the gradient ignores the rounding (straight-through)."""

    def __init__(self, linear: nn.Linear, x: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = linear

    def rounded(self) -> torch.Tensor:
        w = self.linear.weight.detach().unflatten(1, (-1, GROUP))
        scale = (w.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-8).bfloat16().float()
        return (((w / scale - 0.5).round() + 0.5).clamp(-7.5, 7.5) * scale).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.linear.weight
        return F.linear(x, w + (self.rounded() - w).detach(), self.linear.bias)


# --8<-- [start:swap]
@torch.no_grad()
def swap(model: CharModel, new: Callable[..., nn.Module], ids=None) -> CharModel:
    """Replace the linear layers of the blocks. With `ids`, pass each new layer its inputs."""
    model = copy.deepcopy(model)
    if ids is not None:
        x = model.token(ids) + model.position.weight[: ids.shape[1]]  # enters the first block
    for block in model.blocks:
        for name in LAYERS:
            linear, seen = getattr(block, name), []
            if ids is not None:
                hook = linear.register_forward_pre_hook(lambda _, a, s=seen: s.append(a[0]))
                block(x)  # with the layers that have been replaced already
                hook.remove()
            setattr(block, name, new(linear, *(rows.flatten(0, 1) for rows in seen)))
        if ids is not None:
            x = block(x)
    return model


# --8<-- [end:swap]


def sizes(model: CharModel) -> tuple[int, float]:
    """Return bytes of the model, and bits per weight of its blocks with their scales."""
    linear = sum(
        t.nbytes
        for key, t in model.blocks.state_dict().items()
        if "norm" not in key and "bias" not in key
    )
    total = sum(t.nbytes for t in model.state_dict().values())
    return total, linear * 8 / LINEAR_WEIGHTS


@torch.no_grad()
def tokens_per_second(models: dict[str, CharModel], ids: torch.Tensor) -> dict[str, float]:
    """The best of five runs of each model. The models take turns, so all see the same load."""
    best = dict.fromkeys(models, math.inf)
    for _ in range(5):
        for name, model in models.items():
            start = time.process_time()  # of this process alone: there is one thread
            model(ids)
            best[name] = min(best[name], time.process_time() - start)
    return {name: ids.numel() / seconds for name, seconds in best.items()}


@torch.no_grad()
def check_layers(model: CharModel, models: dict[str, CharModel], ids: torch.Tensor) -> None:
    """Check the clock, and single layers, because the losses of the schemes are too similar."""
    tables = {Nibbles: torch.arange(16) - 7.5, Nf4: NF4}
    for scheme, table in tables.items():  # weights that are levels are kept exactly
        levels = torch.stack([table[torch.randperm(16)] for _ in range(16)])
        linear = nn.Linear(16 * 16, 1, bias=False)
        linear.weight = nn.Parameter(levels.reshape(1, -1))
        torch.testing.assert_close(scheme(linear).weight(), linear.weight)
    x = model.blocks[0].norm1(model.token(ids) + model.position.weight[: ids.shape[1]])
    layers = {name: made.blocks[0].qkv for name, made in models.items()}

    def off(layer: nn.Module, x: torch.Tensor) -> float:
        right = layers["fp32"](x)
        return ((layer(x) - right).norm() / right.norm()).item()

    names = "int8 weights", "fp8 weights", "int4, GPTQ", "int4, to nearest"
    errors = [off(layers[name], x) for name in names]
    assert 0.002 < 4 * errors[0] < 2 * errors[1] < errors[2] < 0.85 * errors[3], errors
    # QAT trains with the rounding that is applied afterwards, apart from ties
    differ = (Qat(layers["fp32"]).rounded() - Nibbles(layers["fp32"]).weight()).abs() > 1e-6
    assert differ.float().mean() < 1e-3
    assert type(layers["the same in int4"]) is type(layers["int4, QAT"]) is Nibbles
    # with two large inputs, AWQ stores their weights more precisely
    some = x.flatten(0, 1).clone()
    some[:, [3, 40]] *= 16
    assert off(Awq(layers["fp32"], some), some) < 0.7 * off(Nibbles(layers["fp32"]), some)
    # larger than all inputs of the calibration: a static range saturates, a dynamic one adapts
    large = 1000 * x.abs().amax(0)
    static, dynamic = layers["int8 static"], layers["int8 dynamic"]
    assert torch.equal(static(large), static(2 * large))
    assert not torch.equal(dynamic(large), dynamic(2 * large))
    # each token has its own scale: a large token does not change the others
    assert torch.equal(dynamic(torch.cat([x, large[None]]))[:-1], dynamic(x))
    multiply, b = torch._int_mm, FULL.T.contiguous()
    exact = torch.equal(multiply(FULL, b), FULL.int() @ b.int())
    with mock.patch.object(torch, "_int_mm", lambda a, b: 0 * multiply(a, b)):
        for layer in (m for made in models.values() for m in made.modules()):
            if isinstance(layer, Int8Dynamic):  # without that product, only the bias remains
                y = layer(torch.randn(32, layer.q.shape[1]))
                assert torch.equal(y, layer.bias.expand_as(y)) == exact
    inputs = []

    def silent(linear: nn.Linear, seen: torch.Tensor) -> nn.Module:
        inputs.append(seen)
        return copy.deepcopy(linear).apply(lambda m: [p.zero_() for p in m.parameters()])

    swap(model, silent, ids)  # if qkv or up returns zeros, out or down gets zeros
    assert torch.equal(inputs[0], x.flatten(0, 1))
    assert [bool(seen.any()) for seen in inputs] == [True, False] * 4

    def wait(ids: torch.Tensor) -> None:  # a model that needs at least 3 ms
        end = time.process_time() + 0.003
        while time.process_time() < end:
            pass

    speed = tokens_per_second({"fast": torch.sort, "slow": wait}, ids)
    assert speed["slow"] <= ids.numel() / 0.003 < speed["fast"]


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    train(model, text)
    starts = torch.randint(len(text) - 64, (32, 1))
    calibration = text[starts + torch.arange(64)]
    unseen = held_out.unfold(0, 64, 1)  # no method sees a window of the text that is measured
    assert not any((unseen == window).all(1).any() for window in calibration)

    def trained_on(new: Callable[..., nn.Module] | None) -> CharModel:
        tuned = copy.deepcopy(model) if new is None else swap(model, new)
        train(tuned, text, steps=100, lr=2e-3)
        for block in tuned.blocks:
            for name in LAYERS if new else ():
                setattr(block, name, getattr(block, name).linear)
        return tuned

    def in_bf16() -> CharModel:
        half = copy.deepcopy(model).bfloat16()
        # logits in fp32, since a loss in bf16 has 3 digits
        half.register_forward_hook(lambda *args: args[-1].float())
        return half

    longer = trained_on(None)
    schemes: dict[str, Callable[[], CharModel]] = {
        "fp32": lambda: model,
        "bf16": in_bf16,
        "int8 dynamic": lambda: swap(model, Int8Dynamic),
        "int8 static": lambda: swap(model, Int8Static, calibration),
        "int8 weights": lambda: swap(model, Int8),
        "fp8 weights": lambda: swap(model, Fp8),
        "int4, to nearest": lambda: swap(model, Nibbles),
        "int4, GPTQ": lambda: swap(model, Gptq, calibration),
        "int4, AWQ": lambda: swap(model, Awq, calibration),
        "NF4": lambda: swap(model, Nf4),
        "fp32, 100 steps more": lambda: longer,
        "the same in int4": lambda: swap(longer, Nibbles),
        "int4, QAT": lambda: swap(trained_on(Qat), Nibbles),
    }
    models = {name: make() for name, make in schemes.items()}
    parts = held_out.chunk(8)  # as many windows in each; small batches stay in the cache
    loss = {
        name: sum(bits_per_character(made, part) for part in parts) / len(parts)
        for name, made in models.items()
    }
    speed = tokens_per_second(models, calibration[:16])
    table = {name: (*sizes(made), loss[name], speed[name]) for name, made in models.items()}
    print("scheme                  bytes   bits a weight   bits per character   tokens/s")
    for name, (total, bits, lost, rate) in table.items():
        print(f"{name:20}{total:9,} {bits:11.2f}           ≈{lost:.3f}         "
              f"≈{rate:,.0f}")  # fmt: skip
    check_layers(model, models, calibration)
    _, _, losses, rates = zip(*table.values(), strict=True)
    assert len(set(losses)) == len(set(rates)) == len(table)  # each row is a different model
    assert abs(loss["fp32"] - bits_per_character(model, held_out)) < 1e-3  # on all of the text
    for name in ("bf16", "int8 dynamic", "int8 static", "int8 weights", "fp8 weights"):
        assert abs(loss[name] - loss["fp32"]) < 0.02
    for name in ("int4, to nearest", "int4, AWQ", "NF4"):
        assert 0.005 < loss[name] - loss["fp32"] < 0.04
    lost = loss["int4, to nearest"] - loss["fp32"]
    assert loss["int4, GPTQ"] - loss["fp32"] < 0.75 * lost
    longer_loss = loss["fp32, 100 steps more"]
    lost = loss["the same in int4"] - longer_loss
    assert 0.03 < loss["fp32"] - longer_loss < 0.12 and 0.005 < lost < 0.04
    # QAT trains for the same number of steps: it recovers a part of what rounding costs
    assert 0.2 * lost < loss["int4, QAT"] - longer_loss < 0.8 * lost


if __name__ == "__main__":
    main()
