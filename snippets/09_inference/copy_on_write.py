"""Several samples of one prompt share its blocks until they write: copy on write.

A fork of a sequence copies its block table and nothing else. A block that several sequences
use is copied when one of them writes to it. Each sample gets the logits of a run without
sharing.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, BLOCK = 64, 8


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


class Pool:
    """Blocks of keys and values for every layer, and the numbers of those that are free."""

    def __init__(self, model: CachedCharModel, blocks: int) -> None:
        self.model, self.free = model, list(range(blocks))
        heads, size = model.blocks[0].heads, model.token.embedding_dim
        shape = len(model.blocks), 2, blocks, BLOCK, heads, size // heads
        self.data = torch.full(shape, torch.nan)  # NaN reveals a read of an unwritten place

    def run(self, ids: list[int], start: int, table: list[int]) -> torch.Tensor:
        """Run `ids` at positions from `start` of the sequence of `table`; logits [s, v]."""
        end = start + len(ids)
        positions = torch.arange(start, end)
        blocks = torch.tensor(table)
        visible = torch.arange(end) <= positions[:, None]

        def attend(layer: int):
            def write_and_mix(q, k, v):
                where = blocks[positions // BLOCK], positions % BLOCK
                for part, new in zip(self.data[layer], (k, v), strict=True):
                    part[where] = new[0].transpose(0, 1)  # [s, a, h/a]
                both = self.data[layer][:, blocks].flatten(1, 2)[:, :end].transpose(1, 2)
                return F.scaled_dot_product_attention(q, *both[:, None], attn_mask=visible)

            return write_and_mix

        attends = [attend(layer) for layer in range(len(self.model.blocks))]
        return self.model(torch.tensor([ids]), positions[None], attends)[0]


class SharedPool(Pool):
    """A pool that counts for each block how many sequences use it."""

    def __init__(self, model: CachedCharModel, blocks: int) -> None:
        super().__init__(model, blocks)
        self.users = [0] * blocks


# --8<-- [start:write]
class Sequence:
    """A text, and the blocks that store its keys and values."""

    def __init__(self, pool: SharedPool, ids: list[int], table: list[int]) -> None:
        self.pool, self.ids, self.table, self.copies = pool, ids, table, 0

    def fork(self) -> "Sequence":
        for block in self.table:
            self.pool.users[block] += 1
        return Sequence(self.pool, list(self.ids), list(self.table))

    def extend(self, new: list[int]) -> torch.Tensor:
        """Append `new` and return the logits after it."""
        start, pool = len(self.ids), self.pool
        if start % BLOCK and pool.users[self.table[-1]] > 1:  # copy on write
            mine = pool.free.pop()
            pool.data[:, :, mine] = pool.data[:, :, self.table[-1]]
            pool.users[self.table[-1]] -= 1
            pool.users[mine] = 1
            self.table[-1] = mine
            self.copies += 1
        while len(self.table) * BLOCK < start + len(new):
            self.table.append(pool.free.pop())
            pool.users[self.table[-1]] = 1
        self.ids += new
        return pool.run(new, start, self.table)[-1]


# --8<-- [end:write]


def careless_extend(sequence: Sequence, new: list[int]) -> torch.Tensor:
    """The same without the copy: it writes into a block that others still read."""
    users = sequence.pool.users
    count, users[sequence.table[-1]] = users[sequence.table[-1]], 1
    block = sequence.table[-1]
    logits = sequence.extend(new)
    users[block] = count
    return logits


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, dice = CachedCharModel(), random.Random(0)
    prompt = [dice.randrange(42) for _ in range(30)]
    answers = [[dice.randrange(42) for _ in range(12)] for _ in range(4)]

    for words in ("with copy on write", "without"):
        pool = SharedPool(model, 64)
        first = Sequence(pool, [], [])
        first.extend(prompt)
        samples = [first, *(first.fork() for _ in range(3))]
        wrong = 0
        logits = {}
        for step in range(12):  # the four grow side by side
            for number, sample in enumerate(samples):
                extend = Sequence.extend if words != "without" else careless_extend
                logits[number] = extend(sample, answers[number][step : step + 1])
        for number, answer in enumerate(answers):
            alone = without_cache(model, prompt + answer)[-1]
            right = torch.allclose(logits[number], alone, atol=1e-4)
            assert right or (words == "without" and number < 3), "all but the last writer"
            wrong += not right
        copies = sum(sample.copies for sample in samples)
        used = 64 - len(pool.free)
        assert used == sum(users > 0 for users in pool.users), "a block is lost"
        separate = 4 * -(-(30 + 12) // BLOCK)
        print(
            f"{words}: {used} blocks where four separate ones need {separate}; "
            f"{copies} blocks copied; {wrong} of 4 samples wrong"
        )
        assert wrong == 0 or words == "without"
        if words == "without":
            assert wrong == 3
            lone = Sequence(SharedPool(model, 64), [], [])  # control: it shares no block
            for each in prompt + answers[0]:
                last = careless_extend(lone, [each]) if lone.ids else lone.extend([each])
            alone = without_cache(model, prompt + answers[0])[-1]
            torch.testing.assert_close(last, alone, rtol=0, atol=1e-4)
        else:  # the prompt's three full blocks once, and three blocks of each sample
            assert used == 3 + 4 * (6 - 3) and copies == 3
            assert all(pool.users[block] == 4 for block in first.table[:3])
            first.extend([0] * 6)  # 48 characters fill six blocks: a fork has nothing to copy
            fork = first.fork()
            fork.extend([0])
            assert fork.copies == 0


if __name__ == "__main__":
    main()
