"""This program packs several documents into one row and compares them with separate rows.

First it counts how many tokens and how many pairs of query and key are wasted by padding. Then
it shows that packed documents with a document mask have the same outputs and gradients as
separate documents. At the end it shows what changes without the mask and which positions must
restart.
"""

import torch
from torch.nn import functional as F

A, D, ROW = 2, 16, 512


# --8<-- [start:pack]
def pack(lengths: list[int], row: int) -> list[list[int]]:
    """Return the documents of each row of `row` tokens, by first fit with the longest first."""
    if max(lengths, default=0) > row:
        raise ValueError(f"a document has {max(lengths)} tokens, and a row {row}")
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in rows:
            if sum(lengths[j] for j in members) + lengths[i] <= row:
                members.append(i)
                break
        else:
            rows.append([i])
    return rows


def document_mask(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal mask [s, s] of packed documents, and each token's position."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(document))
    keep = (document[:, None] == document) & (place[:, None] >= place)
    position = torch.cat([torch.arange(n) for n in lengths])
    return keep, position


# --8<-- [end:pack]


def rotary(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Turn pairs of x [a, s, d] by angles that grow with the position (RoPE)."""
    angle = position[:, None] / 10000 ** (torch.arange(0, D, 2) / D)  # [s, d/2]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def attend(x, position, mask=None) -> torch.Tensor:
    """Rotary self-attention of x [3, a, s, d], causal unless a mask is given."""
    q, k, v = rotary(x[0], position), rotary(x[1], position), x[2]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None
    )[0]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lengths = (torch.randn(64) * 0.9 + 4.5).exp().int().clamp(8, ROW).tolist()
    useful = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    rows = pack(lengths, ROW)
    assert sorted(i for row in rows for i in row) == list(range(64))
    assert max(sum(lengths[i] for i in row) for row in rows) <= ROW
    assert len(rows) == -(-useful[0] // ROW), "no packing could use fewer rows"
    print(f"64 documents of {min(lengths)} to {max(lengths)} tokens, {useful[0]} in all")
    print("                         tokens   used    causal pairs   used")

    def line(name: str, tokens: int, pairs: int) -> None:
        print(
            f"{name:22} {tokens:8} {100 * useful[0] / tokens:5.1f}%"
            f" {pairs:15} {100 * useful[1] / pairs:5.1f}%"
        )

    by_length = sorted(lengths)
    groups = [by_length[i : i + 8] for i in range(0, 64, 8)]
    longest = max(lengths)
    triangle = [n * (n + 1) // 2 for n in range(ROW + 1)]
    line("padded to the longest", 64 * longest, 64 * triangle[longest])
    tops = [max(group) for group in groups]  # each group is padded to its own longest
    line("8 of similar length", 8 * sum(tops), 8 * sum(triangle[n] for n in tops))
    line("packed, causal only", len(rows) * ROW, len(rows) * triangle[ROW])
    packed = sum(triangle[lengths[i]] for row in rows for i in row)
    line("packed, documents", len(rows) * ROW, packed)
    assert packed == useful[1]

    members = [lengths[i] for i in rows[-1]]  # the last row holds many short documents
    separate = [torch.randn(3, A, n, D, requires_grad=True) for n in members]
    together = torch.cat([x.detach() for x in separate], dim=2).requires_grad_()
    keep, position = document_mask(members)
    turns = torch.outer(position.double(), 1e4 ** (-torch.arange(D // 2).double() / (D // 2)))
    x = together.detach()[0].double()  # RoPE is a product of complex numbers
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(turns * 0 + 1, turns)
    turned = torch.view_as_real(pairs).flatten(-2)
    torch.testing.assert_close(rotary(x, position), turned, rtol=1e-4, atol=1e-5)
    # --8<-- [start:equal]
    apart = torch.cat([attend(x, torch.arange(x.shape[2])) for x in separate], dim=1)
    joined = attend(together, position, keep)
    torch.testing.assert_close(joined, apart, rtol=1e-4, atol=1e-5)

    loss_weights = torch.randn_like(apart)
    (apart * loss_weights).sum().backward()
    (joined * loss_weights).sum().backward()
    gradients = torch.cat([x.grad for x in separate], dim=2)
    torch.testing.assert_close(together.grad, gradients, rtol=1e-4, atol=1e-5)
    # --8<-- [end:equal]
    print(f"\n{len(members)} documents in one row: equal to {len(members)} rows, gradients too")

    with torch.no_grad():
        leaked = attend(together, position)  # causal, but across documents
        running = attend(together, torch.arange(len(position)), keep)
        first = members[0]
        assert torch.allclose(leaked[:, :first], apart[:, :first], atol=1e-5)
        error = ((leaked - apart)[:, first:].norm() / apart[:, first:].norm()).item()
        assert error > 0.1
        print(f"without the mask: the first is right, the rest off by {100 * error:.0f}%")
        torch.testing.assert_close(running, joined, rtol=1e-3, atol=1e-4)
        assert not torch.equal(running, joined)  # the angles differ, so the rounding does too
        print("rotary positions that run on through the row: the same outputs")
        absolute = torch.randn(ROW, D)  # a learned embedding of each position
        shifted = (absolute[: len(position)] - absolute[position]).norm(dim=-1) > 0
        assert shifted.sum() == len(position) - first
        print(f"learned positions that run on: {shifted.sum()} of {len(position)} tokens wrong")
        crossing = (position[1:] == 0).sum().item()  # the next token starts a new document
        assert crossing == len(members) - 1
        print(f"labels that cross into the next document: {crossing} of {len(position) - 1}")


if __name__ == "__main__":
    main()
