"""A reused block still contains another request's keys, and a mask that is too wide reads them.

Blocks are not erased when a new request gets them, because a correct mask ends at the end of
the sequence. Here the mask ends at the end of the block. The answer to one request then
depends on the request that used the memory before: it is wrong, it varies, and it leaks a
text.
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


# --8<-- [start:run]
class PrefillPool:
    """Blocks of keys and values for every layer, and the numbers of those that are free."""

    def __init__(self, model: CachedCharModel, blocks: int) -> None:
        self.model, self.free = model, list(range(blocks))
        hidden, heads = model.token.embedding_dim, model.blocks[0].heads
        self.data = torch.zeros(len(model.blocks), 2, blocks, BLOCK, heads, hidden // heads)

    def prefill(self, ids: list[int], careless: bool) -> torch.Tensor:
        """Logits [v] after `ids`. The blocks become free at the end and are not erased."""
        n = len(ids)
        table = torch.tensor([self.free.pop() for _ in range(-(-n // BLOCK))])
        positions = torch.arange(n)
        end = len(table) * BLOCK  # whole blocks are gathered
        visible = torch.arange(end) <= positions[:, None]
        if careless:  # "every place in my blocks is mine"
            visible |= torch.arange(end) >= n
        assert visible.sum() == n * (n + 1) // 2 + careless * n * (end - n)

        def attend(layer: int):
            def write_and_mix(q, k, v):
                where = table[positions // BLOCK], positions % BLOCK
                for part, new in zip(self.data[layer], (k, v), strict=True):
                    part[where] = new[0].transpose(0, 1)
                both = self.data[layer][:, table].flatten(1, 2).transpose(1, 2)
                return F.scaled_dot_product_attention(q, *both[:, None], attn_mask=visible)

            return write_and_mix

        attends = [attend(layer) for layer in range(len(self.model.blocks))]
        logits = self.model(torch.tensor([ids]), positions[None], attends)[0, -1]
        self.free += table.tolist()[::-1]
        return logits


# --8<-- [end:run]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, dice = CachedCharModel(), random.Random(0)
    for block in model.blocks:  # make the untrained model depend on its context
        block.qkv.weight *= 4
        block.out.weight *= 4
    ours = [dice.randrange(42) for _ in range(11)]  # 11 of 16 places
    right = without_cache(model, ours)[-1]
    secrets = [[secret] * 16 for secret in range(42)]

    for words, careless in (("masked to the length", False), ("masked to the block", True)):
        errors, seen = [], set()
        for secret in secrets:
            pool = PrefillPool(model, 2)
            pool.prefill(secret, careless=False)
            logits = pool.prefill(ours, careless)
            errors.append((logits - right).abs().max().item())
            seen.add(tuple(logits.mul(1e3).round().int().tolist()))
        print(
            f"{words:20} largest error ≈{max(errors):.4f}; "
            f"{len(seen)} different logits after 42 different predecessors"
        )
        if careless:
            assert min(errors) > 0.01
            assert len(seen) == 42, "the answer does not depend on the previous request"
        else:
            assert max(errors) < 1e-4 and len(seen) == 1

    for part, words in ((0, "keys"), (1, "values")):
        pool = PrefillPool(model, 2)
        pool.data[:, part] = float("nan")
        assert pool.data[:, 1 - part].eq(0).all()
        assert pool.prefill(ours, careless=False).isnan().all()
        print(f"{words} filled with NaN: NaN behind a correct mask too")
    pool = PrefillPool(model, 2)
    pool.data.fill_(1e4)
    torch.testing.assert_close(pool.prefill(ours, careless=False), right, rtol=0, atol=1e-4)
    pool.data.fill_(1e4)
    caught = (pool.prefill(ours, careless=True) - right).abs().max().item()
    print(f"filled with 10,000: the correct mask is right, the wide one off by ≈{caught:.1f}")
    assert caught > 0.1


if __name__ == "__main__":
    main()
