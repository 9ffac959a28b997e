"""A key-value cache from scratch: the keys and values of each token are computed only once.

The model is the small transformer of chapter 08, untrained. With the cache it returns the same
logits as without a cache, whether the prompt arrives whole, in pieces or token by token.
"""

import torch
from torch import nn
from torch.nn import functional as F

Cache = list[tuple[torch.Tensor, torch.Tensor] | None]  # per layer: keys, values [b, a, c, d]


# --8<-- [start:block]
class ConcatBlock(nn.Module):
    """Attention and an MLP. Takes and returns the keys and values of earlier tokens."""

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


# --8<-- [end:block]


# --8<-- [start:model]
class CachedModel(nn.Module):
    """ids [b, s] of new tokens, and the cache of the old ones -> logits [b, s, v], cache."""

    def __init__(self, vocabulary: int, hidden=64, heads=4, layers=2, context=64) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(ConcatBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, cache: Cache | None = None):
        cache = cache or [None] * len(self.blocks)
        start = 0 if cache[0] is None else cache[0][0].shape[2]  # the first new position
        x = self.token(ids) + self.position.weight[start : start + ids.shape[1]]
        kept: Cache = []
        for block, past in zip(self.blocks, cache, strict=True):
            x, now = block(x, past)
            kept.append(now)
        return self.head(self.norm(x)), kept


# --8<-- [end:model]


# --8<-- [start:generate]
@torch.no_grad()
def with_cache(model: CachedModel, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Continue `prompt` [b, s] greedily: one prefill, then one token at a time."""
    logits, cache = model(prompt)
    written = [logits[:, -1].argmax(-1, keepdim=True)]
    while len(written) < tokens:
        logits, cache = model(written[-1], cache)
        written.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(written, 1)


@torch.no_grad()
def without_any_cache(model: CachedModel, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    for _ in range(tokens):
        logits, _ = model(prompt)
        prompt = torch.cat([prompt, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return prompt[:, -tokens:]


# --8<-- [end:generate]


@torch.no_grad()
def by_torch(model: CachedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits by torch's own layers with the same weights: causal, without a cache."""
    x = model.token(ids) + model.position.weight[: ids.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
    for b in model.blocks:
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        own = nn.ModuleList((b.qkv, b.out, b.up, b.down, b.norm1, b.norm2)).parameters()
        for theirs, weight in zip(layer.parameters(), own, strict=True):
            theirs.copy_(weight)
        x = layer(x, mask)
    return model.head(model.norm(x))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CachedModel(37).eval()
    ids = torch.randint(37, (3, 48))
    computed: list[int] = []  # the number of new tokens in each call of the model
    model.token.register_forward_hook(lambda _, args, out: computed.append(args[0].shape[1]))

    written = with_cache(model, ids[:, :16], 40)
    assert computed == [16] + [1] * 39  # each token once
    assert torch.equal(written, without_any_cache(model, ids[:, :16], 40))
    assert all(len(row.unique()) > 9 for row in written)
    print("40 tokens after a prompt of 16, three sequences: the same with and without a cache")

    with torch.no_grad():
        whole, _ = model(ids)
        torch.testing.assert_close(whole, by_torch(model, ids), rtol=1e-4, atol=1e-4)
        for pieces in ([48], [16, 16, 16], [40, 1, 7], [1] * 48):
            cache, parts = None, []
            computed.clear()
            for piece in ids.split(pieces, 1):
                logits, cache = model(piece, cache)
                parts.append(logits)
            torch.testing.assert_close(torch.cat(parts, 1), whole)
            assert computed == pieces
            words = "48 × 1" if len(pieces) == 48 else " + ".join(map(str, pieces))
            print(f"prompt as {words}: logits equal")

    total = sum(t.nbytes for pair in cache for t in pair)
    formula = 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, width of a head, bytes
    print(f"the cache of 3 × 48 tokens: {total} bytes; 2·L·a·d·4 = {formula} per token")
    assert total == 3 * 48 * formula


if __name__ == "__main__":
    main()
