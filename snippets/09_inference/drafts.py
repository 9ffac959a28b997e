"""Five ways to guess several tokens, and one way to check them: a tree in one forward pass.

Drafts come from a table of counts, from the text itself (n-grams), and from heads on the last
hidden state: Medusa heads do not see the earlier guesses, and a chained head does. A chain is a
tree without branches. Each way writes the same text as greedy decoding.
"""

import heapq
import itertools
import random
import unicodedata
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, DEPTH = 64, 4  # places of the model; tokens that a chain drafts


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


class Heads(nn.Module):
    """Medusa's: head k guesses the token k+1 places behind the next from one hidden state."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(DEPTH))
        self.out = nn.ModuleList(nn.Linear(hidden, vocabulary) for _ in range(DEPTH))

    def forward(self, h: torch.Tensor) -> list[torch.Tensor]:
        return [out(h + F.silu(mix(h))) for mix, out in zip(self.mix, self.out, strict=True)]


class Chained(nn.Module):
    """One module, used again and again: it joins a hidden state and the token that followed.

    DeepSeek-V3's multi-token prediction and EAGLE have a transformer block here; ours has an
    MLP, and so needs no cache. The model's own head reads what it returns.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm_h, self.norm_e = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.join = nn.Linear(2 * hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, h: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        x = self.join(torch.cat([self.norm_h(h), self.norm_e(token)], -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))


def train_heads(model, head, heads, chained, ids: torch.Tensor, steps=120, rows=8) -> None:
    """Train both on the frozen model's hidden states; `head` is the model's own."""
    generator = torch.Generator().manual_seed(1)
    own = [*heads.parameters(), *chained.parameters()]
    optimizer = torch.optim.AdamW(own, lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT - DEPTH, (rows, 1), generator=generator)
        window = ids[starts + torch.arange(CONTEXT + DEPTH + 1)]
        with torch.no_grad():
            h = model(window[:, :CONTEXT])  # [b, s, h]
            tokens = model.token(window)
        guesses, state, loss = heads(h), h, 0
        for k in range(DEPTH):
            behind = window[:, k + 2 : k + 2 + CONTEXT].flatten()  # k+1 places behind the next
            state = chained(state, tokens[:, k + 1 : k + 1 + CONTEXT])
            for logits in (guesses[k], head(state)):
                loss = loss + F.cross_entropy(logits.flatten(0, 1), behind)
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


# --8<-- [start:verify]
Tree = list[tuple[int, int]]  # of nodes: a token and its parent, which comes first


class Verifier:
    """The target with a cache of one text; checks a whole tree of drafts in one pass."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.model, self.head, self.length, self.causal = model, head, 0, False
        width = model.token.embedding_dim // model.blocks[0].heads
        self.cache = torch.zeros(
            len(model.blocks), 2, model.blocks[0].heads, 2 * CONTEXT, width
        )

    def run(self, tree: Tree) -> torch.Tensor:
        """Hidden states [nodes, h]; every node sees the text, its ancestors and itself."""
        depth, seen = [0], torch.zeros(len(tree), self.length + len(tree), dtype=torch.bool)
        seen[0, : self.length + 1] = True
        for i, (_, parent) in list(enumerate(tree))[1:]:
            depth.append(depth[parent] + 1)
            seen[i] = seen[parent]
            seen[i, self.length + i] = True
        if self.causal:  # the mistake: guesses for one place see one another
            seen = torch.ones_like(seen).tril(self.length)

        def attend(layer: int):
            def write_and_mix(q, k, v):
                here = self.cache[layer, :, None, :, : self.length + len(tree)]
                here[:, :, :, self.length :] = torch.stack([k, v])
                return F.scaled_dot_product_attention(q, *here, attn_mask=seen)

            return write_and_mix

        ids = torch.tensor([[token for token, _ in tree]])
        places = self.length + torch.tensor([depth])  # two guesses for one place share it
        return self.model(ids, places, [attend(i) for i in range(len(self.model.blocks))])[0]

    def check(self, tree: Tree) -> tuple[list[int], torch.Tensor]:
        """The tokens that follow node 0 for certain, and the state that wrote the last."""
        h = self.run(tree)
        best = self.head(h).argmax(-1).tolist()
        path, written = [0], [best[0]]
        while match := [
            i for i, node in enumerate(tree) if node == (written[-1], path[-1]) and i
        ]:
            path.append(match[0])
            written.append(best[match[0]])
        # only the path's keys and values are of the text: they move up, the rest is overwritten
        rows = self.length + torch.tensor(path)
        self.cache[:, :, :, self.length : self.length + len(path)] = self.cache[:, :, :, rows]
        self.length += len(path)
        return written, h[path[-1]]


# --8<-- [end:verify]


# --8<-- [start:drafts]
def chain(tokens: list[int]) -> Tree:
    return [(token, i) for i, token in enumerate(tokens)]  # behind node 0, one after the other


def by_ngrams(text: list[int], longest=4) -> Tree:
    """What followed the last few tokens when they stood in the text before."""
    for n in range(longest, 0, -1):
        for at in range(len(text) - n - 1, -1, -1):
            if text[at : at + n] == text[-n:]:
                return chain(text[at + n : at + n + DEPTH])
    return []


def grow(state, guess, after, branches: int, nodes: int) -> Tree:
    """The `nodes` most probable beginnings by a draft, best first; 1 branch makes a chain."""
    tree: Tree = []
    waiting, order = [], itertools.count()  # what may come next: -p of the path, its last token

    def spread(state, parent: int, p: float, depth: int) -> None:
        if depth == DEPTH:
            return
        for q, token in zip(*(t.tolist() for t in guess(state).topk(branches)), strict=True):
            heapq.heappush(waiting, (-p * q, next(order), token, parent, state, depth))

    spread(state, 0, 1.0, 0)
    while waiting and len(tree) < nodes:
        p, _, token, parent, state, depth = heapq.heappop(waiting)
        tree.append((token, parent))
        spread(after(state, token), len(tree), -p, depth + 1)
    return tree


# --8<-- [end:drafts]


@torch.no_grad()
def write(
    verifier: Verifier, prompt: list[int], tokens: int, draft
) -> tuple[list[int], int, int]:
    """Continue greedily by `draft`: the text, the steps after prefill, the nodes checked."""
    verifier.length = 0
    # prefill: the prompt is a chain, and every token of it is of the text
    h = verifier.run([(token, max(0, i - 1)) for i, token in enumerate(prompt)])[-1]
    verifier.length = len(prompt)
    text, steps, checked = [*prompt, int(verifier.head(h).argmax())], 0, 0
    while len(text) < len(prompt) + tokens:
        tree = [(text[-1], 0), *draft(text, h)]
        written, h = verifier.check(tree)
        text += written
        steps, checked = steps + 1, checked + len(tree)
    return text, steps, checked


def copied(prompt: list[int], answer: list[int]) -> float:
    """Tokens a step with n-grams, if the target writes `answer` whatever is drafted."""
    at = steps = 0
    while at < len(answer):
        draft = [token for token, _ in by_ngrams(prompt + answer[:at])]
        kept = 0
        while kept < len(draft) and answer[at + kept : at + kept + 1] == [draft[kept]]:
            kept += 1
        at, steps = at + kept + 1, steps + 1
    return len(answer) / steps


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    kinds = len(alphabet)
    torch.manual_seed(0)
    model = TrainedCharModel(kinds, layers=1)
    train(model, text, steps=400)
    head, model.head = model.head, nn.Identity()  # from here on the model gives hidden states
    heads, chained, table = Heads(64, kinds), Chained(64), counts(text, kinds)
    train_heads(model, head, heads, chained, text)
    verifier = Verifier(model, head)

    # --8<-- [start:ways]
    def by_table(text, h, branches: int, nodes: int) -> Tree:
        two = (text[-2], text[-1])
        return grow(two, lambda s: table[s], lambda s, token: (s[1], token), branches, nodes)

    def by_heads(text, h, branches: int, nodes: int) -> Tree:
        guesses = [
            logits.softmax(-1) for logits in heads(h)
        ]  # all at once, blind to each other
        return grow(0, lambda k: guesses[k], lambda k, token: k + 1, branches, nodes)

    def by_chain(text, h, branches: int, nodes: int) -> Tree:
        def after(h, token):
            return chained(h, model.token.weight[token])

        return grow(after(h, text[-1]), lambda h: head(h).softmax(-1), after, branches, nodes)

    # --8<-- [end:ways]

    line, tree = {"branches": 1, "nodes": DEPTH}, {"branches": 3, "nodes": 12}
    ways = {
        "nothing": lambda text, h: [],
        "n-grams": lambda text, h: by_ngrams(text),
        "table": partial(by_table, **line),
        "table, tree": partial(by_table, **tree),
        "Medusa heads": partial(by_heads, **line),
        "Medusa heads, tree": partial(by_heads, **tree),
        "chained head": partial(by_chain, **line),
        "chained head, tree": partial(by_chain, **tree),
    }
    tokens, gain, plain = 30, {}, None
    prompts = held_out[: 12 * 100].view(12, 100)[:, :24].tolist()

    def texts_by(draft) -> tuple[list[list[int]], float, float]:
        """The texts, and tokens and checked nodes a step."""
        texts, steps, checked = zip(
            *(write(verifier, prompt, tokens, draft) for prompt in prompts), strict=True
        )
        written = sum(len(text) - 24 - 1 for text in texts)  # prefill gave the first
        cut = [text[: 24 + tokens] for text in texts]
        return cut, written / sum(steps), sum(checked) / sum(steps)

    used: set[str] = set()
    for name, module in (("Medusa heads", heads), ("chained head", chained)):
        module.register_forward_hook(lambda *_, name=name: used.add(name))
    print("draft                checked a step   tokens a step")
    for words, draft in ways.items():
        used.clear()
        texts, gain[words], checked = texts_by(draft)
        plain = plain or texts  # the first way is greedy decoding itself
        assert texts == plain, f"{words}: not the text of greedy decoding"
        assert used == {words.removesuffix(", tree")} & {"Medusa heads", "chained head"}
        print(f"{words:18} {f'≈{checked:.1f}':>12}            ≈{gain[words]:.2f}")
    whole = torch.tensor(plain)
    best = head(model(whole[:, :-1])).argmax(-1)  # one pass, without a cache and without drafts
    assert best[:, 23:].equal(whole[:, 24:]), "not the text of the model"
    print("each wrote the same 12 texts of 30 characters")
    assert gain["nothing"] == 1 < gain["n-grams"] < gain["table"] < gain["table, tree"]
    assert gain["Medusa heads"] < gain["chained head"], (
        "to see the last guess is worth something"
    )
    for words in ("table", "Medusa heads", "chained head"):
        assert gain[words] < gain[f"{words}, tree"], "a tree keeps more tokens than a chain"
    verifier.causal = True
    texts, _, _ = texts_by(ways["table, tree"])
    wrong = sum(text != right for text, right in zip(texts, plain, strict=True))
    print(f"a tree under a causal mask: ≈{wrong} of the 12 texts are wrong")
    assert wrong > 0

    prompt = held_out[:600].tolist()
    answer = "".join(alphabet[i] for i in prompt).replace("LETTER", "SIGN")
    edit = copied(prompt, [alphabet.index(c) for c in answer])
    print(
        f"n-grams, if the answer is the prompt with one word replaced: {edit:.2f} tokens a step"
    )
    assert 2 * gain["n-grams"] < edit <= DEPTH + 1


if __name__ == "__main__":
    main()
