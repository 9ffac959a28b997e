"""Positions that are off by one with a cache: almost the same loss, and a different text.

The trained character model of chapter 08 reads validation text, one character at a time, with a
cache. The position of each new character is right, one too large, or always 0.
"""

import math
import random
import unicodedata

import torch
from torch import nn
from torch.nn import functional as F


# As in chapter 08: the text and the training; the model is that of kv_cache.py
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


class ConcatBlock(nn.Module):
    """Attention, then an MLP; keys and values of what came before are handed in and out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x, past=None):  # x [b, s, h]: the new tokens alone
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, d]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)  # [b, a, c+s, d]
        new, all_ = q.shape[2], k.shape[2]
        # row i is token c+i, and sees columns 0 to c+i
        seen = torch.ones(new, all_, dtype=torch.bool, device=x.device).tril(all_ - new)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class ShiftedModel(nn.Module):
    """ids [b, s] of new tokens and the cache of the old -> logits [b, s, v] and the cache."""

    def __init__(self, vocabulary: int, hidden=64, heads=4, layers=2, context=32) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(ConcatBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, cache=None, shift=0):
        cache = cache or [None] * len(self.blocks)
        start = 0 if cache[0] is None else cache[0][0].shape[2] + shift
        x = self.token(ids) + self.position.weight[start : start + ids.shape[1]]
        kept = []
        for block, past in zip(self.blocks, cache, strict=True):
            x, now = block(x, past)
            kept.append(now)
        return self.head(self.norm(x)), kept


def train_cached(model: ShiftedModel, ids, steps=500, rows=8, context=32, lr=1e-2) -> None:
    """As in chapter 08; the cache that comes with the logits is not needed here."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(ids) - context, (rows, 1), generator=generator)
        window = ids[starts + torch.arange(context + 1)]  # [b, s+1]
        logits, _ = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


# --8<-- [start:read]
@torch.no_grad()
def read(model: ShiftedModel, windows: torch.Tensor, shift: int | None) -> float:
    """Bits per character after the first 8, with the cache. Shift None: always position 0."""
    logits, cache = model(windows[:, :8])
    bits = 0.0
    for at in range(8, windows.shape[1]):
        bits += F.cross_entropy(logits[:, -1], windows[:, at]).item() / math.log(2)
        far = -cache[0][0].shape[2] if shift is None else shift
        logits, cache = model(windows[:, at : at + 1], cache, far)
    return bits / (windows.shape[1] - 8)


# --8<-- [end:read]


@torch.no_grad()
def in_one_pass(model: ShiftedModel, windows: torch.Tensor) -> float:
    """The same bits without a cache."""
    logits, _ = model(windows[:, :-1])
    loss = F.cross_entropy(logits[:, 7:].flatten(0, 1), windows[:, 8:].flatten())
    return loss.item() / math.log(2)


@torch.no_grad()
def write(model: ShiftedModel, prompt: torch.Tensor, characters: int, shift: int) -> list[int]:
    logits, cache = model(prompt)
    written = []
    for _ in range(characters):
        written.append(logits[0, -1].argmax())
        logits, cache = model(written[-1].view(1, 1), cache, shift)
    return [int(w) for w in written]


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = ShiftedModel(len(alphabet))
    train_cached(model, text)
    windows = held_out[: 32 * 200].view(200, 32)

    right, ahead, stuck = (read(model, windows, shift) for shift in (0, 1, None))
    assert abs(right - in_one_pass(model, windows)) < 1e-3
    table = model.position.weight.data
    model.position.weight.data = torch.cat([table[:8], table[9:], table[:1]])
    assert abs(ahead - in_one_pass(model, windows)) < 1e-3  # what one too far means
    model.position.weight.data = table
    print(f"right: ≈{right:.3f} bits per character, as in one pass over the whole")
    print(f"one too far: ≈{ahead:.3f} bits")
    print(f"always 0: ≈{stuck:.3f} bits")
    assert abs(ahead - right) > 1e-4 and stuck > right + 0.3

    prompt = torch.tensor([[alphabet.index(c) for c in "\nARABIC LETTER "]])
    texts = [write(model, prompt, 16, shift) for shift in (0, 1)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), 16)
    print(f"greedy, right and one too far: part at character ≈{same} of 16")


if __name__ == "__main__":
    main()
