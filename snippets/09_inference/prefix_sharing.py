"""Prefix sharing: a hash of all tokens up to a block's end finds the block again.

Requests with the same system prompt find its blocks in the cache and prefill only the rest.
The outputs equal the outputs without sharing. A hash of the tokens of one block alone also
finds blocks that were computed after other tokens: the logits are wrong, and there is no
error.
"""

import hashlib
import random
from collections import OrderedDict

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


# --8<-- [start:prefix]
class PrefixCache:
    """Full blocks by hash, the least recently used first. A full block is never written."""

    def __init__(self, pool: Pool, chained: bool = True) -> None:
        self.pool, self.chained = pool, chained
        self.known: OrderedDict[bytes, int] = OrderedDict()
        self.computed = self.evicted = 0

    def hashes(self, ids: list[int], salt: str) -> list[bytes]:
        """A hash for each full block, over its tokens and, if chained, all tokens before it."""
        parent, result = hashlib.sha256(salt.encode()).digest(), []
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            block = str(ids[start : start + BLOCK]).encode()
            digest = hashlib.sha256(parent + block).digest()
            result.append(digest)
            parent = digest if self.chained else parent
        return result

    def new_block(self, in_use: list[int]) -> int:
        if self.pool.free:
            return self.pool.free.pop()
        oldest = next(key for key, block in self.known.items() if block not in in_use)
        self.evicted += 1
        return self.known.pop(oldest)

    def prefill(self, ids: list[int], salt: str = "") -> torch.Tensor:
        """Logits after `ids`. Computes the tokens that no block has, and at least one token."""
        hashes, table = self.hashes(ids, salt), []
        for digest in hashes:
            if digest not in self.known or (len(table) + 1) * BLOCK >= len(ids):
                break
            table.append(self.known[digest])
        start = len(table) * BLOCK
        while len(table) * BLOCK < len(ids):
            table.append(self.new_block(table))
        self.computed += len(ids) - start
        logits = self.pool.run(ids[start:], start, table)[-1]
        for digest, block in zip(hashes, table, strict=False):
            if self.known.setdefault(digest, block) != block:
                self.pool.free.append(block)  # two blocks with the same content
        for digest in reversed(hashes):  # evict the end of a prefix before its start
            self.known.move_to_end(digest)
        self.pool.free += table[len(hashes) :]  # an answer would continue in this block
        return logits


# --8<-- [end:prefix]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, dice = CachedCharModel(), random.Random(0)
    for block in model.blocks:  # make the untrained model depend on its context
        block.qkv.weight *= 4
        block.out.weight *= 4

    def text(n: int) -> list[int]:
        return [dice.randrange(42) for _ in range(n)]

    system = [text(40), text(40)]  # two applications share the server
    requests = [dice.choice(system) + text(dice.randint(4, 20)) for _ in range(40)]
    total = sum(map(len, requests))

    for blocks in (64, 14):
        cache = PrefixCache(Pool(model, blocks))
        for ids in requests:
            torch.testing.assert_close(cache.prefill(ids), without_cache(model, ids)[-1])
            for other in requests:  # a block without the blocks before it cannot be found
                known = [digest in cache.known for digest in cache.hashes(other, "")]
                assert known == sorted(known, reverse=True), "a start was evicted first"
        print(
            f"{blocks} blocks: {cache.computed} of {total} prompt tokens computed, "
            f"{cache.evicted} blocks evicted, all outputs equal"
        )
        once = 2 * 40 + total - 40 * len(requests)  # each system prompt once, and each tail
        if blocks == 64:
            assert cache.computed == once and not cache.evicted
        else:
            assert once < cache.computed < 1.1 * once and cache.evicted

    tenants = PrefixCache(Pool(model, 64))
    for number, salt in enumerate(("ann", "bob", "ann")):
        before = tenants.computed
        tenants.prefill(requests[0], salt)
        print(f"salt {salt!r}: {tenants.computed - before} of {len(requests[0])} computed")
        assert (tenants.computed - before < len(requests[0])) == (number == 2)

    middle, end = text(8), text(4)
    one, two = text(8) + middle + end, text(8) + middle + end  # one block in two contexts
    careless = PrefixCache(Pool(model, 64), chained=False)
    careless.known[careless.hashes(two, "")[0]] = careless.pool.free.pop()
    careless.pool.run(two[:8], 0, list(careless.known.values()))
    careless.prefill(one)
    right = without_cache(model, two)[-1]
    difference = (careless.prefill(two) - right).abs().max().item()
    print(f"hash of the block alone: largest error of a logit ≈{difference:.2f}, no message")
    assert difference > 0.01
    proper = PrefixCache(Pool(model, 64))
    proper.prefill(one)
    torch.testing.assert_close(proper.prefill(two), right)
    whole = text(2 * BLOCK)  # the second time all blocks are known, but no logits
    for _ in range(2):
        torch.testing.assert_close(proper.prefill(whole), without_cache(model, whole)[-1])
    assert len(proper.pool.free) + len(proper.known) == 64


if __name__ == "__main__":
    main()
