"""A paged cache from scratch: block tables, an allocator, attention over gathered blocks.

Sequences of several lengths share one pool of blocks and grow one block at a time. The logits
equal those of a contiguous cache, which is the same cache with blocks as long as the context.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT = 64


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


class CachedCharModel(nn.Module):
    """ids and positions [b, s] -> logits [b, s, v]; `attends` has one function per layer."""

    def __init__(self, vocabulary=42, hidden=64, heads=4, layers=2, context=CONTEXT) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(CachedBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attends) -> torch.Tensor:
        x = self.token(ids) + self.position(positions)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)
        return self.head(self.norm(x))


def without_cache(model: CachedCharModel, ids: list[int]) -> torch.Tensor:
    """Logits [s, v] of the whole sequence at once."""

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    positions = torch.arange(len(ids))[None]
    return model(torch.tensor([ids]), positions, [causal] * len(model.blocks))[0]


# --8<-- [start:paged]
class PagedCache:
    """Keys and values of all sequences in one pool; a block table lists the blocks of each."""

    def __init__(self, model: CachedCharModel, blocks: int, block: int) -> None:
        self.model, self.block = model, block
        heads, size = model.blocks[0].heads, model.token.embedding_dim
        self.pool = torch.zeros(len(model.blocks), 2, blocks, block, heads, size // heads)
        self.free = list(range(blocks))
        random.Random(0).shuffle(self.free)  # as after an hour of requests
        self.tables: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}

    def grow(self, sequence: int) -> None:
        """Add a place for one token, in a new block if the last block is full."""
        table = self.tables.setdefault(sequence, [])
        length = self.length.setdefault(sequence, 0)
        if length == len(table) * self.block:
            table.append(self.free.pop())
        self.length[sequence] = length + 1

    def release(self, sequence: int) -> None:
        self.free += self.tables.pop(sequence)
        del self.length[sequence]

    def step(self, sequences: list[int], ids: list[int]) -> torch.Tensor:
        """One token for each of `sequences`, all in one batch; logits [b, v]."""
        for sequence in sequences:
            self.grow(sequence)
        length = torch.tensor([self.length[s] for s in sequences])
        widest = max(len(self.tables[s]) for s in sequences)
        tables = torch.tensor(  # [b, widest]; the padding is block 0, and the mask hides it
            [(self.tables[s] + [0] * widest)[:widest] for s in sequences]
        )
        here = length - 1
        last = tables.gather(1, here[:, None] // self.block)[:, 0]
        visible = torch.arange(widest * self.block) < length[:, None]

        def attend(layer: int):
            def write_and_mix(q, k, v):
                gathered = []
                for part, new in zip(self.pool[layer], (k, v), strict=True):
                    part[last, here % self.block] = new[:, :, 0]  # [b, a, h/a]
                    gathered.append(part[tables].flatten(1, 2).transpose(1, 2))
                mask = visible[:, None, None]
                return F.scaled_dot_product_attention(q, *gathered, attn_mask=mask)

            return write_and_mix

        attends = [attend(layer) for layer in range(len(self.model.blocks))]
        return self.model(torch.tensor(ids)[:, None], here[:, None], attends)[:, 0]


# --8<-- [end:paged]


def feed(cache: PagedCache, texts: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """Run all texts in one batch, one token each per step; logits [s, v] of each.

    Text i begins in step 2i, so the sequences of a batch have different lengths.
    """
    logits: dict[int, list[torch.Tensor]] = {name: [] for name in texts}
    for step in range(max(2 * i + len(text) for i, text in enumerate(texts.values()))):
        place = {name: step - 2 * i for i, name in enumerate(texts)}
        alive = [name for name, text in texts.items() if 0 <= place[name] < len(text)]
        answers = cache.step(alive, [texts[name][place[name]] for name in alive])
        for name, answer in zip(alive, answers, strict=True):
            logits[name].append(answer)
    return {name: torch.stack(rows) for name, rows in logits.items()}


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, dice = CachedCharModel(), random.Random(1)
    lengths = (3, 37, 60, 16)
    texts = {name: [dice.randrange(42) for _ in range(n)] for name, n in enumerate(lengths)}
    paged, contiguous = PagedCache(model, blocks=32, block=8), PagedCache(model, 4, CONTEXT)
    batches: list[int] = []
    model.register_forward_hook(lambda _, args, out: batches.append(len(out)))
    one, other = feed(paged, texts), feed(contiguous, texts)
    # One batch in each step, and each token once. Both caches run all texts.
    assert len(batches) == 2 * (4 + 60) and sum(batches) == 2 * sum(lengths)
    assert all(len(table) == 1 for table in contiguous.tables.values())  # one row for each
    for name, text in texts.items():
        torch.testing.assert_close(one[name], other[name])
        torch.testing.assert_close(one[name], without_cache(model, text))
        rows, straight = (  # keys and values [2, s, a, h/a]
            cache.pool[0][:, cache.tables[name]].flatten(1, 2)[:, : len(text)]
            for cache in (paged, contiguous)
        )
        assert torch.equal(rows, straight), "layer 0, bit for bit"
        print(f"sequence {name}: {len(text):2} tokens in blocks {paged.tables[name]}")
    print("logits at every position: paged = contiguous = no cache")

    paged.release(2)
    in_use = [block for table in paged.tables.values() for block in table]
    assert sorted(in_use + paged.free) == list(range(32)), (
        "every block is in one table, or free"
    )
    assert paged.length.keys() == paged.tables.keys()
    print(f"sequence 2 ends: {len(paged.free)} of 32 blocks are free for the next sequence")
    again = feed(paged, {4: texts[2]})[4]
    torch.testing.assert_close(again, other[2])
    print(f"sequence 4: {len(texts[2])} tokens in blocks {paged.tables[4]}: equal again")


if __name__ == "__main__":
    main()
