"""An 8-bit cache in a trained model: its effect on logits, on greedy text, and on bytes.

Keys and values are rounded when they are written, with the scales that engines use: none (only
fp8), one for each head from a sample of text, or one for each token and head. Then the program
computes the bytes, the number of requests and the time of a step for Llama 3 8B.
"""

import itertools
import math
import random
import unicodedata

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, LAYERS = 64, 2


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


class CachedBlock(nn.Module):
    """Attention, then an MLP; the caller decides what the new tokens attend to."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, h/a]
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TrainedCharModel(nn.Module):
    """ids and positions [b, s] -> logits [b, s, v]; `attends` has one function per layer.

    Without the two it is the model that is trained: whole sequences, causal, no cache.
    """

    def __init__(self, vocabulary: int, hidden=64, heads=4, layers=2, context=CONTEXT) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(CachedBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, positions=None, attends=None) -> torch.Tensor:
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        attends = [causal] * len(self.blocks) if attends is None else attends
        x = self.token(ids) + self.position(positions)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)
        return self.head(self.norm(x))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention among the new tokens alone, as in training and in the first prefill."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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


# --8<-- [start:rounding]
def to_float8(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """E4M3 and back: 4 bits of exponent, 3 of fraction, at most 448."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def to_integer(x: torch.Tensor, scale: torch.Tensor, most: int) -> torch.Tensor:
    return (x / scale).round().clamp(-most, most) * scale


def per_token(x: torch.Tensor, most: int) -> torch.Tensor:
    """One scale for each token and head; x is [b, a, s, d]."""
    scale = x.abs().amax(-1, keepdim=True) / most
    return to_integer(x, scale.masked_fill(scale == 0, 1), most)  # zeros stay zeros


# --8<-- [end:rounding]


def attends(keep, gain=1.0) -> list:
    """One function a layer: keys and values pass through `keep(layer, which, x)` on their way.

    With a gain keys are so much larger and queries smaller: the same scores, in floats.
    """

    def attend(layer: int):
        return lambda q, k, v: causal(q / gain, keep(layer, 0, k * gain), keep(layer, 1, v))

    return [attend(layer) for layer in range(LAYERS)]


@torch.no_grad()
def greedy(model: nn.Module, ids: torch.Tensor, hooks: list) -> torch.Tensor:
    """Continue [b, s] to the context's end. A token's rounding does not depend on later ones,
    so a pass over the whole text sees what a cache would hold."""
    while ids.shape[1] < CONTEXT:
        logits = model(ids, attends=hooks)[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = TrainedCharModel(len(alphabet), layers=LAYERS)
    train(model, text, steps=250)
    windows = held_out[: 60 * (CONTEXT + 1)].view(60, CONTEXT + 1)
    prompts, following = windows[:16, :32], windows[:, 1:].flatten()

    sample: dict[tuple[int, int], torch.Tensor] = {}

    def note(layer: int, which: int, x: torch.Tensor) -> torch.Tensor:
        sample[layer, which] = x
        return x

    with torch.no_grad():
        model(text[: 32 * CONTEXT].view(32, CONTEXT), attends=attends(note))
    a_head = {at: x.abs().amax((0, 2, 3), keepdim=True) / 448 for at, x in sample.items()}

    # --8<-- [start:ways]
    ways = {
        "fp32": lambda layer, which, x: x,
        "bf16": lambda layer, which, x: x.bfloat16().float(),
        "fp8, no scale": lambda layer, which, x: to_float8(x, 1.0),
        "fp8, a scale a head": lambda layer, which, x: to_float8(x, a_head[layer, which]),
        "int8, a token, a head": lambda layer, which, x: per_token(x, 127),
        "int4, a token, a head": lambda layer, which, x: per_token(x, 7),
    }
    # --8<-- [end:ways]
    for layer, which in itertools.product(range(LAYERS), (0, 1)):
        x = sample[layer, which]
        stored = ways["fp8, a scale a head"](layer, which, x)
        # the largest number of a head is 448 scales, so it is stored exactly
        torch.testing.assert_close(stored.abs().amax((0, 2, 3)), x.abs().amax((0, 2, 3)))
    exact = torch.empty(0)
    runs = [(words, keep, 1.0) for words, keep in ways.items()]
    runs.append(("fp8, keys 200 times", ways["fp8, no scale"], 200.0))
    runs.append(("int8, keys 200 times", ways["int8, a token, a head"], 200.0))
    error, other = {}, {}
    print("keys and values         error of a logit   bits a character")
    for words, keep, gain in runs:
        with torch.no_grad():
            logits = model(windows[:, :-1], attends=attends(keep, gain))
        exact = logits if words == "fp32" else exact
        error[words] = ((logits - exact).square().mean().sqrt() / exact.std()).item()
        other[words] = (logits.argmax(-1) != exact.argmax(-1)).float().mean().item()
        bits = F.cross_entropy(logits.flatten(0, 1), following).item() / math.log(2)
        print(f"{words:22} {f'≈{error[words]:.2%}' if error[words] else 'none':>13} "
              f"{f'≈{bits:.3f}':>18}")  # fmt: skip
    right = greedy(model, prompts, attends(ways["fp32"]))
    changed = {}
    for words in ("fp8, no scale", "int8, a token, a head", "int4, a token, a head"):
        texts = greedy(model, prompts, attends(ways[words]))
        changed[words] = (texts != right).any(1).sum().item()
    fp8, int8, int4 = changed.values()
    print(
        f"greedy, 16 texts of 32 characters: fp8 changes ≈{fp8}, int4 ≈{int4}, int8 the fewest"
    )
    assert 0 <= int8 < fp8 < int4
    shown = [f"{words.split(',')[0]} ≈{other[words]:.1%}" for words in changed]
    print(
        f"another character most likely at: {', '.join(shown)} of {following.numel():,} places"
    )
    assert error["bf16"] < error["int8, a token, a head"] < error["fp8, no scale"] / 3
    assert error["fp8, no scale"] < error["int4, a token, a head"]
    assert error["fp8, keys 200 times"] > 5 * error["fp8, no scale"]  # cut off at 448
    assert abs(error["int8, keys 200 times"] / error["int8, a token, a head"] - 1) < 0.1

    # --8<-- [start:bytes]
    rows = 2 * 32 * 8  # Llama 3 8B: keys and values, layers, heads of the cache, each 128 wide
    sizes = {
        "16 bits": 256,
        "fp8": 128,
        "int8 and a scale": 128 + 4,
        "int4 and a scale": 64 + 4,
    }
    c0, c1 = 2 * 7.50e9 / 3.35e12, 2 * 7.50e9 / 989e12  # H100: a step's weights, a token
    print("Llama 3 8B on 80 GB, 2,000 cached   a token   requests   step    at 128   tokens/s")
    for words, size in sizes.items():
        cached = 2000 * rows * size
        fit = int((0.9 * 80e9 - 16.1e9) / cached)
        full, at_128 = (c0 + b * (c1 + cached / 3.35e12) for b in (fit, 128))
        print(f"  {words:30} {rows * size / 1024:6.0f} KiB {fit:8} {1e3 * full:7.1f} ms "
              f"{1e3 * at_128:5.1f} ms {fit / full:8.0f}")  # fmt: skip
    # --8<-- [end:bytes]


if __name__ == "__main__":
    main()
