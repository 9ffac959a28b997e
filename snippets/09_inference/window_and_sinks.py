"""A cache that forgets: the last w characters alone, or with the first few, the sinks.

The character model is trained with its whole context. Then it reads validation text with a mask
that hides older characters. The loss shows what this costs. Draws window_and_sinks.svg.
"""

import math
import random
import unicodedata

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F


# As in chapter 08: the text, the model, its training
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


# --8<-- [start:block]
class WindowBlock(nn.Module):
    """As in chapter 08, but the mask `seen` [s, s] decides what each character sees."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.seen: torch.Tensor | None = None
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, s, h]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, h/a]
        if self.seen is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class WindowModel(nn.Module):
    """The transformer of chapter 08, of such blocks: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, vocabulary: int, hidden=64, heads=4, layers=2, context=32) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(WindowBlock(hidden, heads) for _ in range(layers))
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


# --8<-- [start:masks]
def window(s: int, last: int, first: int = 0) -> torch.Tensor:
    """Mask: each of s characters sees the `last` ones up to itself, and the `first` ones."""
    i, j = torch.arange(s)[:, None], torch.arange(s)
    return (j <= i) & ((i - j < last) | (j < first))


def ring(q, k, v, last: int, first: int = 0) -> torch.Tensor:  # each [b, a, s, d]
    """The same with a cache of `first` + `last` rows. A new row replaces the oldest one."""
    keys, values = k.new_empty(2, *k.shape[:2], first + last, k.shape[3])
    outputs = []
    for i in range(k.shape[2]):
        row = i if i < first else first + (i - first) % last
        keys[:, :, row], values[:, :, row] = k[:, :, i], v[:, :, i]
        full = min(i + 1, first + last)  # attention does not depend on their order
        outputs.append(F.scaled_dot_product_attention(
            q[:, :, i : i + 1], keys[:, :, :full], values[:, :, :full]))  # fmt: skip
    return torch.cat(outputs, 2)


# --8<-- [end:masks]


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "window", "font.size": 12}
    figure, grid = plt.subplots(1, 3, figsize=(7, 2.7), sharey=True)
    rows = (("everything", 24, 0), ("the last 8", 8, 0), ("the last 8, the first 2", 8, 2))
    for axes, (words, last, first) in zip(grid, rows, strict=True):
        for i, row in enumerate(window(24, last, first).tolist()):
            recent = range(max(0, i - last + 1), i + 1)
            older = sum(row) - len(recent)  # sinks outside of the window
            axes.barh(i, len(recent), left=recent[0] - 0.5, height=0.8, color="#0b6e99")
            if older:
                axes.barh(i, older, left=-0.5, height=0.8, color="#c2410c")
        axes.set(xlim=(-1, 24), ylim=(24, -1), aspect="equal", xlabel="key of token")
        axes.set_title(words, fontsize=12)
        axes.set_xticks([0, 8, 16])
        axes.set_yticks([0, 8, 16])
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("query of token")
    figure.tight_layout()
    figure.savefig("window_and_sinks.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = WindowModel(len(alphabet))
    train(model, text, steps=400, context=32)

    held_out = held_out[:6_600]

    def loss(last: int, first: int = 0) -> float:
        for block in model.blocks:
            block.seen = window(32, last, first)
        return bits_per_character(model, held_out, 32)

    def uniform(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, len(alphabet))

    assert abs(bits_per_character(uniform, held_out) - math.log2(len(alphabet))) < 1e-5
    full = loss(32)
    for block in model.blocks:
        block.seen = None
    assert abs(full - bits_per_character(model, held_out, 32)) < 1e-3
    print(f"everything seen: ≈{full:.2f} bits per character")
    print("last w only       with the first 4       with 4 more recent ones")
    for last in (2, 4, 8, 16):
        alone, sinks, more = loss(last), loss(last, 4), loss(last + 4)
        print(f"  w = {last:2} ≈{alone:.2f}     ≈{sinks:.2f}                  ≈{more:.2f}")
        if last == 2:
            assert alone > full + 0.2, "a window of 2 characters cost nothing"
            assert sinks < alone
            assert more < sinks - 0.1, "this model should need recent characters, not first"
    assert alone < full + 0.1, "half of the context should be enough"

    draw()
    # the weight on the first character; uniform weights would be 1/32
    with torch.no_grad():
        ids = held_out[: 32 * 200].view(200, 32)
        x, shares = model.token(ids) + model.position.weight, []
        for block in model.blocks:
            block.seen = None
            q, k, _ = block.qkv(block.norm1(x)).unflatten(-1, (3, 4, -1)).unbind(-3)
            scores = torch.einsum("bad,bsad->bas", q[:, -1], k) / 4  # the last one's queries
            first = scores.softmax(-1)[:, :, 0]
            rest = scores[:, :, 1:].logsumexp(-1) - scores.logsumexp(-1)
            torch.testing.assert_close(first, -rest.expm1(), rtol=1e-3, atol=1e-5)
            shares.append(first.mean().item())
            x = block(x)
    print("weight on the first character, seen from the last: "
          + ", ".join(f"layer {i} ≈{s:.3f}" for i, s in enumerate(shares)))  # fmt: skip

    q, k, v = torch.randn(3, 2, 4, 40, 16)
    for last, first in ((8, 0), (8, 4)):
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=window(40, last, first))
        torch.testing.assert_close(ring(q, k, v, last, first), masked)
    print("a ring of 8 rows, without and with 4 sinks: equal to the masks over 40 tokens")


if __name__ == "__main__":
    main()
