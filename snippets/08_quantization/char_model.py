"""A small transformer learns the names of Unicode characters in a few seconds.

Each Python contains the same text: version 3.2 of the Unicode character database. Other
programs of this chapter and of the next chapter define the same model and train it. Then they
change its weights or its arithmetic, and measure the loss.
"""

import math
import random
import time
import unicodedata

import torch
from torch import nn
from torch.nn import functional as F


# --8<-- [start:text]
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


# --8<-- [end:text]


# --8<-- [start:CharModel]
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


# --8<-- [end:CharModel]


# --8<-- [start:train]
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


# --8<-- [end:train]


@torch.no_grad()
def sample(model: nn.Module, prompt: torch.Tensor, characters: int, context=64) -> torch.Tensor:
    """Draw characters one after the other; `prompt` is [1, s]."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(characters):
        probabilities = model(prompt[:, -context:])[:, -1].softmax(-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        prompt = torch.cat([prompt, drawn], 1)
    return prompt


def main() -> None:
    torch.set_num_threads(1)  # on tensors this small, threads cost more than they save
    alphabet, text, held_out = unicode_names()
    print(f"{len(text) + len(held_out):,} characters of {len(alphabet)} kinds")

    torch.manual_seed(0)
    model = CharModel(len(alphabet))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    counts = torch.bincount(text, minlength=len(alphabet)) / len(text)
    print(f"a model that knows only how often each character comes: "
          f"{-counts[held_out].log2().mean():.3f} bits per character")  # fmt: skip
    untrained = bits_per_character(model, held_out)
    start = time.perf_counter()
    train(model, text)
    seconds = time.perf_counter() - start
    trained = bits_per_character(model, held_out)
    print(f"untrained ≈{untrained:.2f}, after ≈{seconds:.1f} s of training ≈{trained:.2f}")
    windows = held_out.view(-1, 65)
    shares = model(windows[:, :-1]).softmax(-1).gather(-1, windows[:, 1:, None])
    assert math.isclose(-shares.log2().mean(), trained, rel_tol=1e-4)
    assert 1.9 < trained < 2.2 < math.log2(len(alphabet)) < untrained

    newline = torch.full((1, 1), alphabet.index("\n"))
    written = "".join(alphabet[i] for i in sample(model, newline, 400)[0]).split()
    known = set("".join(alphabet[i] for i in text).split())
    share = sum(word in known for word in written) / len(written)
    print(f"of the words it writes, ≈{share:.0%} are words of the text")
    assert share > 0.15


if __name__ == "__main__":
    main()
