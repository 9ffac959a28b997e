"""This program runs the attention of one transformer block in six ways, with equal results.

The ways are: each document alone with is_causal, padded with a boolean mask, packed with a
mask, packed with a block mask, a prompt in pieces, and one token at a time with a cache. Each
result is compared with a block that is written by hand in float64. The program also prints how
many tokens go through the block, and how many pairs of query and key the chosen call has to
compute.
"""

import copy
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

H, A, A_KV, D = 64, 4, 2, 16
LENGTHS = [70, 20, 38]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(H), nn.RMSNorm(H)
        self.qkv = nn.Linear(H, (A + 2 * A_KV) * D, bias=False)
        self.out = nn.Linear(H, H, bias=False)
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.SiLU(), nn.Linear(4 * H, H))

    # --8<-- [start:choice]
    def attend(self, q, k, v, how):
        """q [b, 4, s_q, d], k and v [b, 2, s_k, d]; `how` is a mask, a BlockMask or None."""
        if isinstance(how, torch.Tensor):  # any other pattern, as a boolean mask
            return F.scaled_dot_product_attention(q, k, v, attn_mask=how, enable_gqa=True)
        if how is not None:  # a BlockMask for FlexAttention
            return flex_attention(q, k, v, block_mask=how, enable_gqa=True)
        s_q, s_k = q.shape[2], k.shape[2]
        if s_q == s_k:  # whole sequences: the flag, and no mask in memory
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if s_q == 1:  # one new token sees everything: no mask, and not is_causal
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        bias = causal_lower_right(s_q, s_k)  # a piece of a prompt
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    # --8<-- [end:choice]

    def forward(self, x, position, how=None, cache=None):
        """x [b, s, h], position [s] or [b, s] within the document, cache a list of (k, v)."""
        b, s, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(b, s, A + 2 * A_KV, D).transpose(1, 2)
        q, k, v = heads.split([A, A_KV, A_KV], dim=1)
        q, k = rotary(q, position), rotary(k, position)
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        out = self.attend(q, k, v, how)
        x = x + self.out(out.transpose(1, 2).reshape(b, s, H))
        return x + self.mlp(self.norm_2(x))


class Pairs(TorchFunctionMode):
    """Count the pairs of query and key that the arguments of each SDPA call ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            b, s_q, s_k = args[0].shape[0], args[0].shape[2], args[1].shape[2]
            self.counted += b * (s_q * (s_q + 1) // 2 if kwargs.get("is_causal") else s_q * s_k)
        return func(*args, **kwargs)


def rotary(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    angle = position[:, None] / 10000 ** (torch.arange(0, D, 2) / D)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Compute the block for one document [s, h] with einsum and complex rotations."""
    s = len(x)
    heads = block.qkv(block.norm_1(x)).view(s, -1, D)
    angle = torch.arange(s)[:, None, None] * 1e4 ** -(torch.arange(0, D, 2).double() / D)
    turned = torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * (1j * angle).exp()
    q, k, _ = torch.view_as_real(turned).flatten(-2).split([A, A_KV, A_KV], dim=1)
    k, v = (t.repeat_interleave(A // A_KV, dim=1) for t in (k, heads[:, -A_KV:]))
    future = torch.ones(s, s, dtype=torch.bool).triu(1)
    z = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    weights = z.masked_fill(future, -torch.inf).softmax(-1)
    x = x + block.out(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    return x + block.mlp(block.norm_2(x))


def compare(calls: Pairs) -> None:
    """Run the block in six ways and compare each with the block that is written by hand."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    block = Block().eval()
    documents = [torch.randn(1, n, H) for n in LENGTHS]
    exact = copy.deepcopy(block).double()
    with sdpa_kernel(SDPBackend.MATH):
        truth = [exact(x.double(), torch.arange(x.shape[1])) for x in documents]
    truth = torch.cat(truth, dim=1).float()
    plain = torch.cat([by_hand(exact, x[0].double()) for x in documents])[None].float()
    torch.testing.assert_close(truth, plain, rtol=1e-4, atol=1e-5)
    calls.counted = 0
    total, longest = sum(LENGTHS), max(LENGTHS)

    def show(name: str, out: torch.Tensor, tokens: int, pairs: int) -> None:
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
        assert "block mask" in name or calls.counted == pairs, "the calls ask for other pairs"
        calls.counted = 0
        print(f"{name:30} {tokens:6} {pairs:7}   equal")

    print("way                            tokens   pairs")
    out = torch.cat([block(x, torch.arange(x.shape[1])) for x in documents], dim=1)
    show("each alone, is_causal", out, total, sum(n * (n + 1) // 2 for n in LENGTHS))

    # --8<-- [start:padded]
    padded = nn.utils.rnn.pad_sequence([x[0] for x in documents], batch_first=True)
    real = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]  # [b, s]
    mask = real[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()
    out = block(padded, torch.arange(longest), mask)[real][None]
    # --8<-- [end:padded]
    show("padded, boolean mask", out, 3 * longest, 3 * longest**2)

    # --8<-- [start:packed]
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    place = torch.arange(total)
    mask = (document[:, None] == document) & (place[:, None] >= place)
    out = block(torch.cat(documents, dim=1), position, mask)

    def mask_mod(b, h, q, k):
        return (document[q] == document[k]) & (q >= k)

    blocks = create_block_mask(mask_mod, None, None, total, total, "cpu", BLOCK_SIZE=16)
    flex = block(torch.cat(documents, dim=1), position, blocks)
    # --8<-- [end:packed]
    show("packed, boolean mask", out, total, total**2)
    visited = round((1 - blocks.sparsity() / 100) * total**2)
    show("packed, block mask of 16", flex, total, visited)

    alone = sum(n * (n + 1) // 2 for n in LENGTHS)
    # --8<-- [start:cached]
    pieces, steps = [], []
    for x in documents:
        cache: list = []
        positions = torch.arange(x.shape[1])
        for part, where in zip(x.split(16, dim=1), positions.split(16), strict=True):
            pieces.append(block(part, where, cache=cache))
        cache = []
        for i in positions:
            steps.append(block(x[:, i : i + 1], positions[i : i + 1], cache=cache))
    # --8<-- [end:cached]
    first = 3 * 16 * 17 // 2  # the first piece of a document has no earlier keys: is_causal
    later = [min(i + 16, n) * min(16, n - i) for n in LENGTHS for i in range(16, n, 16)]
    in_pieces, counted = calls.counted - alone, alone
    assert in_pieces == first + sum(later)
    calls.counted = in_pieces
    show("pieces of 16, lower right", torch.cat(pieces, dim=1), total, first + sum(later))
    calls.counted = counted
    show("token by token, no mask", torch.cat(steps, dim=1), total, alone)


def main() -> None:
    with torch.no_grad(), Pairs() as calls:
        compare(calls)


if __name__ == "__main__":
    main()
