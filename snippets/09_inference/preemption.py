"""The pool of blocks runs out: sequences that are half done wait for one another forever.

A server that admits a request as soon as its prompt fits fills the pool with unfinished
answers. When each of them needs another block and no block is free, none can continue. There
are three fixes: reserve the worst case; or free the blocks of the latest arrival and compute
them again later; or copy these blocks to the host until they fit again.
"""

import itertools
import random
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, BLOCK, BLOCKS, LENGTH = 64, 8, 10, 48


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


class Sequence:
    """A request: its text so far, its blocks, and a copy of the blocks on the host."""

    numbers = itertools.count()

    def __init__(self, prompt: list[int]) -> None:
        self.ids, self.cached, self.table = list(prompt), 0, []
        self.saved: torch.Tensor | None = None
        self.number = next(Sequence.numbers)

    def precedes(self, other: "Sequence") -> bool:
        return self.number < other.number


# --8<-- [start:serve]
class Stuck(Exception):
    pass


def needed(sequence: Sequence, length: int) -> int:
    return -(-length // BLOCK) - len(sequence.table)


def serve(model: CachedCharModel, prompts: list[list[int]], fix: str) -> dict:
    """Grow every prompt to LENGTH tokens in a pool that is too small for all at once."""
    pool = Pool(model, BLOCKS)
    sequences = [Sequence(prompt) for prompt in prompts]
    waiting, running = deque(sequences), []
    done = {"steps": 0, "preempted": 0, "recomputed": 0, "blocks": 0, "bytes moved": 0}
    done["computed"] = done["younger kept"] = 0

    # --8<-- [start:preempt]
    def preempt(victim: Sequence) -> None:
        if fix == "swap":
            victim.saved = pool.data[:, :, victim.table].clone()  # on a GPU: to pinned memory
            done["bytes moved"] += victim.saved.nbytes
        else:
            done["recomputed"] += victim.cached
            victim.cached = 0
        done["preempted"] += 1
        done["younger kept"] += any(map(victim.precedes, running))
        done["blocks"] += len(victim.table)
        pool.free += victim.table
        victim.table = []
        running.remove(victim)
        waiting.appendleft(victim)

    # --8<-- [end:preempt]

    while waiting or running:
        while waiting:  # admit if its tokens and the next one fit
            sequence = waiting[0]
            length = LENGTH if fix == "reserve" else len(sequence.ids) + 1
            if needed(sequence, length) > len(pool.free):
                break
            sequence.table = [pool.free.pop() for _ in range(needed(sequence, length))]
            if sequence.saved is not None:
                blocks = sequence.saved.shape[2]
                pool.data[:, :, sequence.table[:blocks]] = sequence.saved
                done["bytes moved"] += sequence.saved.nbytes
                sequence.saved = None
            running.append(waiting.popleft())

        moved = False
        for sequence in list(running):
            while sequence in running and needed(sequence, len(sequence.ids)) > len(pool.free):
                if fix in ("recompute", "swap"):
                    preempt(running[-1])  # the latest arrival, possibly this one
                else:
                    break
            if sequence not in running or needed(sequence, len(sequence.ids)) > len(pool.free):
                continue
            sequence.table += [
                pool.free.pop() for _ in range(needed(sequence, len(sequence.ids)))
            ]
            logits = pool.run(sequence.ids[sequence.cached :], sequence.cached, sequence.table)
            done["computed"] += len(logits)  # tokens
            sequence.cached = len(sequence.ids)
            sequence.ids.append(int(logits[-1].argmax()))
            moved = True
            if len(sequence.ids) > LENGTH:
                pool.free += sequence.table
                running.remove(sequence)
        if not moved:
            lengths = [len(sequence.ids) for sequence in running]
            raise Stuck(f"{lengths} tokens of {LENGTH}, {len(pool.free)} blocks free")
        done["steps"] += 1
    return done | {"texts": [sequence.ids for sequence in sequences]}


# --8<-- [end:serve]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, dice = CachedCharModel(), random.Random(0)
    prompts = [[dice.randrange(42) for _ in range(n)] for n in (18, 12, 20, 7)]
    print(f"4 requests of {-(-LENGTH // BLOCK)} blocks in the end, {BLOCKS} blocks in the pool")
    try:
        serve(model, prompts, "none")
        raise AssertionError("the server is not stuck")
    except Stuck as error:
        print(f"none       stuck: {error}")
    block_bytes = 2 * 2 * BLOCK * 64 * 4  # layers · (K and V) · tokens · h · fp32
    steps = {}
    for fix in ("reserve", "recompute", "swap"):
        done = serve(model, prompts, fix)
        steps[fix] = done["steps"]
        for prompt, text in zip(prompts, done.pop("texts"), strict=True):
            answer = torch.tensor(text[len(prompt) :])
            logits = without_cache(model, text[:-1])[len(prompt) - 1 :]
            chosen = logits.gather(1, answer[:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)
        print(
            f"{fix:10} {done['steps']:3} steps, {done['preempted']} preempted, "
            f"{done['recomputed']} tokens computed again, "
            f"{done['bytes moved'] / 2**10:.0f} KiB moved; texts equal"
        )
        moved = 2 * done["blocks"] * block_bytes  # out, and in again
        assert done["bytes moved"] == (moved if fix == "swap" else 0)
        once = len(prompts) * LENGTH  # if no token is computed twice
        assert done["computed"] == once + done["recomputed"]
        assert (done["preempted"] > 0) == (fix != "reserve")
        assert done["younger kept"] == 0, "the latest arrival is preempted"
        assert (done["recomputed"] > 0) == (fix == "recompute")
    assert steps["recompute"] == steps["swap"] < steps["reserve"]


if __name__ == "__main__":
    main()
