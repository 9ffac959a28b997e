"""Beam search with a trained model finds more probable texts than greedy, but not better ones.

A beam keeps the w most probable beginnings. Width 1 is greedy. In a model that was trained for
a short time, the most probable name is the empty one, although the text has no empty line.
"""

import math
import random
import unicodedata

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


# --8<-- [start:beam]
@torch.no_grad()
def beam(
    model: nn.Module, prompt: torch.Tensor, tokens: int, width: int, end: int | None = None
):
    """The most probable continuation of `prompt` [s] found, and its log-probability.

    With `end`, a beginning that reached it is finished, and competes as it is. If none does,
    the best of those that are cut off is returned.
    """
    rows, scores, finished = prompt[None], torch.zeros(1, device=prompt.device), []
    for _ in range(tokens):
        steps = model(rows)[:, -1].log_softmax(-1)
        total = (scores[:, None] + steps).flatten()  # every row with every character
        scores, best = total.topk(min(width, len(total)))
        rows = torch.cat([rows[best // steps.shape[1]], best[:, None] % steps.shape[1]], 1)
        if end is not None:
            done = (rows[:, -1] == end) & scores.isfinite()  # not what has no probability
            finished += list(zip(scores[done].tolist(), rows[done], strict=True))
            rows, scores = rows[~done], scores[~done]
            best_end = max((score for score, _ in finished), default=-torch.inf)
            if len(rows) == 0 or best_end > scores.max():
                break  # no beginning can become more probable than it is
    if not finished:
        return rows[0, len(prompt) :], scores[0].item()
    score, row = max(finished, key=lambda pair: pair[0])
    return row[len(prompt) :], score


# --8<-- [end:beam]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, _ = unicode_names()
    newline = alphabet.index("\n")
    prompt = torch.tensor([newline])
    models = {}
    for steps in (100, 600):
        torch.manual_seed(0)
        models[steps] = CharModel(len(alphabet), layers=1)
        with torch.enable_grad():
            train(models[steps], text, steps=steps)
    model = models[600]

    begun = torch.tensor([alphabet.index(c) for c in "\nMATHEMATICAL "])
    greedy = begun
    for _ in range(12):
        greedy = torch.cat([greedy, model(greedy[None])[0, -1:].argmax(-1)])
    found = {}
    print("12 characters after MATHEMATICAL: log2 of the probability")
    for width in (1, 4, 16, 64):
        row, score = beam(model, begun, 12, width)
        found[width] = score
        print(f"  width {width:2}: ≈{score / math.log(2):.1f}")
        if width == 1:
            assert row.equal(greedy[len(begun) :])
    assert found[64] > found[1] + 0.1, "a wide beam found no more than greedy"
    print("width 1 is greedy; width 64 finds a more probable text")

    def trap(rows: torch.Tensor) -> torch.Tensor:
        """Logits whose least likely character is followed by a certain one."""
        logits = torch.zeros(*rows.shape, 39)
        logits[..., 38], logits[rows == 38, 5] = -1.0, 50.0
        return logits

    assert (
        beam(trap, prompt, 2, 39)[0].tolist()
        == [38, 5]
        != beam(trap, prompt, 2, 38)[0].tolist()
    )
    # width 39² tries every pair of characters: nothing can be missed
    row, score = beam(model, prompt, 2, len(alphabet) ** 2)
    first = model(prompt[None])[0, -1].log_softmax(-1)
    pairs = torch.cat([prompt.repeat(39, 1), torch.arange(39)[:, None]], 1)
    both = first[:, None] + model(pairs)[:, -1].log_softmax(-1)
    assert abs(both.max().item() - score) < 1e-4
    print("width 39² over two characters is exhaustive search")

    # whole names: the search ends with the newline
    generator = torch.Generator().manual_seed(0)
    lengths, surprise = [], []
    rows = prompt.repeat(60, 1)
    for _ in range(50):
        p = model(rows)[:, -1].softmax(-1)
        drawn = torch.multinomial(p, 1, generator=generator)
        surprise += [-p.gather(1, drawn).log().mean(), torch.special.entr(p).sum(1).mean()]
        rows = torch.cat([rows, drawn], 1)
    # drawn as often as the model says: surprise is entropy
    assert 0.9 < sum(surprise[::2]) / sum(surprise[1::2]) < 1.1
    for row in rows[:, len(prompt) :]:
        ends = (row == newline).nonzero()
        lengths.append(int(ends[0]) if len(ends) else 50)
    print(f"names drawn: ≈{sum(lengths) / 60:.0f} characters on average")
    print("the most probable name, by a beam of 64")
    for steps, model in models.items():
        name, score = beam(model, prompt, 50, 64, newline)
        empty = model(prompt[None])[0, -1].log_softmax(-1)[newline].item()
        words = f"≈{len(name) - 1} characters" if len(name) > 1 else "the empty one"
        print(f"  trained for {steps} steps: {words}, log2 ≈{score / math.log(2):.1f} "
              f"(empty ≈{empty / math.log(2):.1f})")  # fmt: skip
        assert (len(name) == 1) == (steps == 100) and len(name) - 1 < sum(lengths) / 60


if __name__ == "__main__":
    main()
