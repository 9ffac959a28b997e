"""Which parts of a model tolerate 3 bits? Each part is rounded alone.

Tensors are rounded with one scale per row. The gains of a norm are one row, and so are its
biases. Compare the columns at the end of each row: they divide the additional loss by the share
of the parameters that the part has.
"""

import copy
import math
import random
import unicodedata

import torch
from torch import nn
from torch.nn import functional as F


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


# --8<-- [start:parts]
PARTS = {
    "attention": ("qkv.weight", "out.weight"),
    "MLP": ("up.weight", "down.weight"),
    "embeddings": ("token.weight", "position.weight"),
    "head": ("head.weight",),
    "norms": ("norm1", "norm2", "norm.weight", "norm.bias"),
}


@torch.no_grad()
def rounded(model: CharModel, endings: tuple[str, ...], bits: int) -> tuple[CharModel, int]:
    """A copy with these parameters rounded, and how many numbers that were."""
    model, count, top = copy.deepcopy(model), 0, 2 ** (bits - 1) - 0.5
    for name, w in model.named_parameters():
        if any(ending in name for ending in endings):
            scale = w.abs().amax(-1, keepdim=True) / top
            w.copy_(((w / scale - 0.5).round() + 0.5).clamp(-top, top) * scale)
            count += w.numel()
    return model, count


# --8<-- [end:parts]


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    train(model, text)
    exact = bits_per_character(model, held_out)
    few, _ = rounded(model, ("up.weight",), 3)
    assert few.blocks[0].up.weight[0].unique().numel() <= 2**3
    assert torch.equal(few.blocks[0].qkv.weight, model.blocks[0].qkv.weight)
    numbers = sum(p.numel() for p in model.parameters())
    print(f"fp32: ≈{exact:.3f} bits per character; in 3 bits alone")
    cost, share = {}, {}
    for name, endings in PARTS.items():
        changed, count = rounded(model, endings, 3)
        cost[name], share[name] = bits_per_character(changed, held_out) - exact, count / numbers
        each = cost[name] / share[name] / 100
        print(f"{name:12} ≈{cost[name]:+.3f}   {share[name]:6.1%} of the weights, "
              f"≈{each:+.4f} for each percent")  # fmt: skip
    assert cost["norms"] / share["norms"] > 10 * cost["MLP"] / share["MLP"]
    assert cost["embeddings"] / share["embeddings"] > cost["MLP"] / share["MLP"]


if __name__ == "__main__":
    main()
