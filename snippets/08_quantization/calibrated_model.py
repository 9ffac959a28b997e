"""Compare four calibration methods on a trained model.

Only the inputs of the linear layers are quantized. Each layer has one symmetric range, which is
chosen before on a few windows by the methods of calibration.py. Look at the loss that each
method adds at 8, 5 and 4 bits.
"""

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


def min_max(x: torch.Tensor, bits: int) -> float:
    return x.abs().max().item()


def percentile(x: torch.Tensor, bits: int, share: float = 0.999) -> float:
    return x.abs().kthvalue(int(share * x.numel())).values.item()


def quantize_clipped(x: torch.Tensor, clip: float, bits: int) -> torch.Tensor:
    """Round symmetrically within [-clip, clip], and return floats."""
    largest = 2 ** (bits - 1) - 1
    step = clip / largest
    return (x / step).round().clamp(-largest, largest) * step


def error(x: torch.Tensor, clip: float, bits: int) -> float:
    return (quantize_clipped(x, clip, bits) - x).square().mean().item()


def least_squares(x: torch.Tensor, bits: int) -> float:
    widest = min_max(x, bits)
    candidates = [widest * i / 100 for i in range(1, 101)]
    return min(candidates, key=lambda clip: error(x, clip, bits))


def entropy(x: torch.Tensor, bits: int, bins: int = 2048) -> float:
    levels = 2 ** (bits - 1)  # of one sign: 128 for int8
    width = min_max(x, bits) / bins
    counts = torch.histc(x.abs(), bins, 0, bins * width).double()
    best, clip = float("inf"), 0.0
    for kept in (*range(levels, bins, 16), bins):  # up to the full range
        p = counts[:kept].clone()
        p[-1] += counts[kept:].sum()  # clipped values move to the edge
        # Q: merge the bins to `levels`, then distribute each level over its bins in use
        level = torch.arange(kept) * levels // kept
        used = (counts[:kept] > 0).double()
        merged = torch.zeros(levels, dtype=torch.double).index_add_(0, level, counts[:kept])
        sharing = torch.zeros(levels, dtype=torch.double).index_add_(0, level, used)
        q = (merged / sharing.clamp(min=1))[level] * used
        p, q = p / p.sum(), q / q.sum()
        inside = p > 0
        divergence = (p[inside] * (p[inside] / q[inside]).log()).sum().item()  # inf if q is 0
        if divergence < best:
            best, clip = divergence, (kept + 0.5) * width
    return clip


# --8<-- [start:run]
def record(model: nn.Module, windows: torch.Tensor) -> dict[nn.Linear, torch.Tensor]:
    """Return the inputs of each linear layer."""
    inputs: dict[nn.Linear, torch.Tensor] = {}
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[0]}))
        for layer in linears
    ]
    with torch.no_grad():
        model(windows)
    for hook in hooks:
        hook.remove()
    return inputs


def quantized_bits(model, held_out, clips: dict[nn.Linear, float], bits: int) -> float:
    """Bits per character with every Linear's input rounded and clamped to its range."""

    def replace(layer: nn.Linear, args: tuple[torch.Tensor]) -> torch.Tensor:
        return quantize_clipped(args[0], clips[layer], bits)

    hooks = [layer.register_forward_pre_hook(replace) for layer in clips]
    result = bits_per_character(model, held_out)
    for hook in hooks:
        hook.remove()
    return result


# --8<-- [end:run]


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    held_out = held_out[:5_200]
    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    train(model, text)
    fp32 = bits_per_character(model, held_out)
    print(f"fp32: ≈{fp32:.3f} bits per character")

    inputs = record(model, text[: 16 * 64].view(16, 64))
    print(f"{len(inputs)} layers, each calibrated on 1,024 characters")
    x = inputs[model.head]
    theirs = torch.fake_quantize_per_tensor_affine(x, 1 / 7, 0, -7, 7)  # 4 bits, clip 1
    apart = (quantize_clipped(x, 1.0, 4) - theirs).abs() > 0.5 / 7
    assert apart.float().mean() < 1e-3  # ties
    assert entropy(torch.arange(1.0, 9), 5) > 8  # 8 values, 16 levels: nothing is cut off
    assert percentile(-torch.arange(1.0, 1001), 8) == 999  # whatever the sign
    added: dict[tuple, float] = {}
    clipped: dict[tuple, float] = {}
    ranges: dict[tuple, dict[nn.Linear, float]] = {}
    widths = (8, 5, 4)
    print("added at         8 bits     5 bits     4 bits")
    for method in (min_max, percentile, least_squares, entropy):
        for bits in widths:
            clips = {layer: method(x.flatten(), bits) for layer, x in inputs.items()}
            ranges[method, bits] = clips
            outside = [(inputs[layer].abs() > clip).sum() for layer, clip in clips.items()]
            clipped[method, bits] = sum(outside) / sum(x.numel() for x in inputs.values())
            added[method, bits] = quantized_bits(model, held_out, clips, bits) - fp32
        cells = "   ".join(f"≈{added[method, bits]:+.3f}" for bits in widths)
        print(f"{method.__name__:14} {cells}")
    shares = (
        f"{m.__name__} ≈{clipped[m, 4]:.1%}" for m in (percentile, least_squares, entropy)
    )
    print(f"clipped at 4 bits: {', '.join(shares)}")
    # entropy's share comes from two layers: those behind GELU, whose minimum is -0.17
    behind = [block.down for block in model.blocks]
    clips = ranges[entropy, 4]
    cut = {layer: (x.abs() > clips[layer]).float().mean() for layer, x in inputs.items()}
    others = cut.keys() - set(behind)
    ends = " and ".join(f"≈{clips[layer]:.2f}" for layer in behind)
    print(f"entropy behind GELU: ranges {ends}, clipped ≈{max(cut[x] for x in behind):.0%}; "
          f"elsewhere at most ≈{max(cut[x] for x in others):.1%}")  # fmt: skip
    assert all(0.1 < clips[layer] < 0.4 and cut[layer] > 0.05 for layer in behind)
    for layer in others:  # there entropy clips less than least squares does
        x = inputs[layer].abs()
        assert cut[layer] < (x > ranges[least_squares, 4][layer]).float().mean()
    assert max(added[m, 8] for m in (min_max, percentile, least_squares, entropy)) < 0.01
    assert added[min_max, 4] > 3 * added[min_max, 8]
    assert all(added[least_squares, bits] < added[min_max, bits] for bits in (5, 4))
    assert clipped[entropy, 4] > 4 * clipped[least_squares, 4] > 0
    assert added[entropy, 4] > added[least_squares, 4]


if __name__ == "__main__":
    main()
