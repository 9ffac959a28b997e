"""Latent attention in small: the cache contains one narrow vector per token, no keys or values.

After DeepSeek-V2 (2405.04434, Section 2.1). In the expanded form, each head computes its keys
and values from the latent vector. In the absorbed form, the matrix for the keys is applied to
the query, the matrix for the values is applied after the sum, and attention uses the latent
vectors.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, HEADS, WIDTH, LATENT, ROTARY = 256, 8, 32, 48, 16


# --8<-- [start:weights]
class LatentAttention(nn.Module):
    """The last of s tokens attends to all of them. The cache is [b, s, LATENT + ROTARY]."""

    def __init__(self) -> None:
        super().__init__()
        scale = HIDDEN**-0.5
        self.query = nn.Parameter(scale * torch.randn(HEADS, HIDDEN, WIDTH))
        self.query_rotary = nn.Parameter(scale * torch.randn(HEADS, HIDDEN, ROTARY))
        self.down = nn.Parameter(scale * torch.randn(HIDDEN, LATENT))  # its result is cached
        self.key_rotary = nn.Parameter(scale * torch.randn(HIDDEN, ROTARY))  # one for all heads
        self.up_key = nn.Parameter(LATENT**-0.5 * torch.randn(HEADS, LATENT, WIDTH))
        self.up_value = nn.Parameter(LATENT**-0.5 * torch.randn(HEADS, LATENT, WIDTH))

    def cache(self, x: torch.Tensor) -> torch.Tensor:  # [b, s, h] -> [b, s, LATENT + ROTARY]
        return torch.cat([x @ self.down, rotate(x @ self.key_rotary)], -1)

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        content = torch.einsum("bh,ahd->bad", x[:, -1], self.query)
        rotary = torch.einsum("bsh,ahr->basr", x, self.query_rotary)
        return content, rotate(rotary)[:, :, -1]


# --8<-- [end:weights]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: rotate pair i of token s by the angle s / 10000^(2i/d)."""
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[-2])[:, None] / 10_000 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * turns.cos() - b * turns.sin(), a * turns.sin() + b * turns.cos()], -1)


# --8<-- [start:both]
def expanded(m: LatentAttention, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Compute the keys and values of each head, then attend: [b, a, d]."""
    latent, rotary = cache.split([LATENT, ROTARY], -1)
    content, turned = m.queries(x)
    keys = torch.einsum("bsl,ald->basd", latent, m.up_key)
    values = torch.einsum("bsl,ald->basd", latent, m.up_value)
    scores = torch.einsum("bad,basd->bas", content, keys)
    scores += torch.einsum("bar,bsr->bas", turned, rotary)
    weights = (scores / (WIDTH + ROTARY) ** 0.5).softmax(-1)
    return torch.einsum("bas,basd->bad", weights, values)


def absorbed(m: LatentAttention, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The same with q·(U c) = (Uᵀq)·c: all queries share one head of keys."""
    content, turned = m.queries(x)
    query = torch.cat([torch.einsum("bad,ald->bal", content, m.up_key), turned], -1)
    scores = torch.einsum("bac,bsc->bas", query, cache)  # the cache itself is the keys
    weights = (scores / (WIDTH + ROTARY) ** 0.5).softmax(-1)
    mixed = torch.einsum("bas,bsl->bal", weights, cache[..., :LATENT])  # and the values
    return torch.einsum("bal,ald->bad", mixed, m.up_value)


# --8<-- [end:both]


def by_definition(m: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """The same, head by head in float64. Pairs are rotated as complex numbers: [b, a, d]."""
    w, x, heads = {name: p.double() for name, p in m.named_parameters()}, x.double(), []
    angles = torch.arange(x.shape[1])[:, None] / 1e4 ** (torch.arange(0, ROTARY, 2) / ROTARY)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(t: torch.Tensor) -> torch.Tensor:
        z = torch.complex(*t.chunk(2, -1)) * turn
        return torch.cat([z.real, z.imag], -1)

    latent = x @ w["down"]
    for a in range(HEADS):
        q = torch.cat([x @ w["query"][a], turned(x @ w["query_rotary"][a])], -1)[:, -1:]
        k = torch.cat([latent @ w["up_key"][a], turned(x @ w["key_rotary"])], -1)
        heads.append(F.scaled_dot_product_attention(q, k, latent @ w["up_value"][a])[:, 0])
    return torch.stack(heads, 1).float()


def per_cached_token(heads: int, width: int, rank: int, rotary: int) -> tuple[int, int]:
    """FLOPs of a decode step for each cached token: expanded, and absorbed."""
    make = 2 * heads * 2 * rank * width  # keys and values from the latent vector
    expanded_form = make + 2 * heads * (2 * width + rotary)
    return expanded_form, 2 * heads * (2 * rank + rotary)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    m, x = LatentAttention(), torch.randn(2, 200, HIDDEN)
    cache = m.cache(x)
    torch.testing.assert_close(absorbed(m, x, cache), expanded(m, x, cache))
    torch.testing.assert_close(expanded(m, x, cache), by_definition(m, x), rtol=1e-3, atol=1e-4)
    print("absorbed equals expanded")

    full = 2 * HEADS * WIDTH
    print(f"cached per token and layer: {cache.shape[-1]} values; "
          f"keys and values of {HEADS} heads: {full}")  # fmt: skip

    grow, stay = per_cached_token(HEADS, WIDTH, LATENT, ROTARY)
    with FlopCounterMode(display=False) as counter:
        expanded(m, x, cache)
    counted = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        absorbed(m, x, cache)
    moved = 2 * 2 * HEADS * 2 * LATENT * WIDTH  # absorbed: two products for each new token
    assert counted - counter.get_total_flops() == 2 * 200 * (grow - stay) - moved
    print(f"FLOPs per cached token: {grow} expanded, {stay} absorbed, {grow / stay:.0f} times")
    grow, stay = per_cached_token(128, 128, 512, 64)
    print(f"with the sizes of DeepSeek-V3: {grow / stay:.0f} times")
    assert stay * 100 < grow

    # why the rotary part is separate: a rotated key is no fixed matrix times the latent
    keys = torch.einsum("bsl,ald->basd", cache[..., :LATENT], m.up_key)
    query = torch.randn(2, HEADS, WIDTH)
    moved = torch.einsum("bad,ald->bal", query, m.up_key)
    plain = torch.einsum("bad,basd->bas", query, keys)
    turned = torch.einsum("bad,basd->bas", query, rotate(keys))
    absorbed_scores = torch.einsum("bal,bsl->bas", moved, cache[..., :LATENT])
    torch.testing.assert_close(absorbed_scores, plain, rtol=1e-4, atol=1e-4)
    off = (absorbed_scores - turned).abs().mean() / turned.abs().mean()
    print(f"if the keys were rotated: scores off by {off:.1f} of their size")
    assert off > 0.3


if __name__ == "__main__":
    main()
