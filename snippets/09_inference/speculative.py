"""Speculative decoding with a trained model: a table of counts drafts, one forward pass checks.

The target is the character model of chapter 08. The draft is a table of how often each
character follows two others. The program tests the result against the target's exact
distribution of the next three characters, and the tokens per round against the formula.
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


def counts(ids: torch.Tensor, kinds: int) -> torch.Tensor:
    """q(next | last two) as a table [v, v, v], smoothed by how often each character comes."""
    table = torch.zeros(kinds, kinds, kinds)
    ones = torch.ones(len(ids) - 2)
    table.index_put_((ids[:-2], ids[1:-1], ids[2:]), ones, accumulate=True)
    table += 0.5 * torch.bincount(ids, minlength=kinds) / len(ids)
    return table / table.sum(-1, keepdim=True)


# --8<-- [start:round]
@torch.no_grad()
def round_(model, table, ids, length, gamma: int, generator) -> torch.Tensor:
    """Lengthen row i of `ids` [b, s], of length[i], by 1 to gamma+1; return by how many."""
    row, drafts = torch.arange(len(ids)), []
    for i in range(gamma):
        q = table[ids[row, length + i - 2], ids[row, length + i - 1]]  # [b, v]
        ids[row, length + i] = torch.multinomial(q, 1, generator=generator)[:, 0]
        drafts.append(q)
    # one forward: the target's distribution at each draft, and at the place after the last
    used = int(length.max()) + gamma
    places = (length - 1)[:, None] + torch.arange(gamma + 1)
    p = model(ids[:, :used])[row[:, None], places].softmax(-1)  # [b, gamma+1, v]
    q = torch.stack([*drafts, torch.zeros_like(p[:, 0])], 1)  # after the last: nothing drafted

    drafted = ids[row[:, None], places[:, 1:]]  # [b, gamma]
    ratio = (p[:, :-1] / q[:, :-1]).gather(2, drafted[..., None])[..., 0]
    keep = torch.rand(ratio.shape, generator=generator) < ratio
    kept = keep.long().cumprod(1).sum(1)  # up to the first that is not kept
    residual = (p[row, kept] - q[row, kept]).clamp(min=0)  # p itself, if all were kept
    ids[row, length + kept] = torch.multinomial(residual, 1, generator=generator)[:, 0]
    return kept + 1


# --8<-- [end:round]


# --8<-- [start:exact]
@torch.no_grad()
def exact(model, prompt: torch.Tensor, kinds: int) -> torch.Tensor:
    """The target's probability of every triple of next characters, [v·v·v]."""
    rows, p = prompt[None], torch.ones(1)
    for _ in range(3):
        p = (p[:, None] * model(rows)[:, -1].softmax(-1)).flatten()
        rows = torch.cat([rows.repeat_interleave(kinds, 0),
                          torch.arange(kinds).repeat(len(rows))[:, None]], 1)  # fmt: skip
    return p


# --8<-- [end:exact]


def away(triples: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic, in standard deviations from its mean; rare triples count as one."""
    seen, expected = (
        torch.bincount(triples, minlength=len(p)).double(),
        p.double() * len(triples),
    )
    rare = expected < 10
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = len(seen) - 1
    statistic = ((seen - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, _ = unicode_names()
    kinds = len(alphabet)
    torch.manual_seed(0)
    model = CharModel(kinds, layers=1, context=32)
    train(model, text, steps=400, rows=16, context=32)
    table = counts(text, kinds)
    generator = torch.Generator().manual_seed(0)

    rows = 4_000
    prompt = torch.tensor([alphabet.index(c) for c in "\nGREEK "])
    p, place = exact(model, prompt, kinds), torch.tensor([kinds**2, kinds, 1])
    samples = {"plain": torch.multinomial(p, rows, replacement=True, generator=generator)}
    ids = torch.zeros(rows, 32, dtype=torch.long)
    ids[:, : len(prompt)] = prompt
    length = torch.full((rows,), len(prompt))
    while (length < len(prompt) + 3).any():  # rows that are done get longer as well
        length += round_(model, table, ids, length, 2, generator)  # the third: after the last
    gained = length - len(prompt)  # in three rounds: some rows kept no draft, others all six
    assert gained.min() == 3 and gained.max() == 9
    samples["speculative"] = (ids[:, len(prompt) : len(prompt) + 3] * place).sum(1)
    for at in range(len(prompt), len(prompt) + 3):  # the draft alone, for comparison
        q = table[ids[:, at - 2], ids[:, at - 1]]
        ids[:, at] = torch.multinomial(q, 1, generator=generator)[:, 0]
    samples["the draft alone"] = (ids[:, len(prompt) : len(prompt) + 3] * place).sum(1)
    print("4,000 continuations of GREEK by three characters: σ from the target's distribution")
    for words, sample in samples.items():
        far = away(sample, p)
        print(f"  {words:16} {f'≈{far:.0f}' if far > 5 else 'below 5'}")
        assert (far > 5) == (words == "the draft alone")

    print("drafted   kept of those tested   tokens per round   formula")
    for gamma in (1, 2, 4, 8):
        ids = torch.zeros(120, 32, dtype=torch.long)
        ids[:, : len(prompt)] = prompt
        length = torch.full((120,), len(prompt))
        extra = []
        while length.max() + gamma + 1 <= 32:
            extra.append(round_(model, table, ids, length, gamma, generator))
            length += extra[-1]
        got = torch.stack(extra).double()
        kept = (got - 1).sum()
        tested = kept + (got <= gamma).sum()  # one test failed in each round that ended early
        eta = (kept / tested).item()
        formula = (1 - eta ** (gamma + 1)) / (1 - eta)
        print(f"{gamma:4}      ≈{eta:.2f}                  ≈{got.mean():.2f}              "
              f"≈{formula:.2f}")  # fmt: skip
        assert abs(got.mean() / formula - 1) < 0.15


if __name__ == "__main__":
    main()
