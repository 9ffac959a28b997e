"""This program shows how masks made of large negative numbers fail in fp16.

The interesting query is one that may not see any key. A finite mask shifts all scores of this
query by the same amount, and softmax ignores such a shift. Two added masks give minus infinity
in the whole row, and a softmax written by hand then returns NaN. SDPA returns zeros for this
row. A boolean mask has none of these failures.
"""

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def main() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 4, 8).half() for _ in range(2))
    v = torch.eye(4, 8, dtype=torch.float16).view(1, 1, 4, 8)  # columns 0 to 3: the weights
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[0] = False  # padding on the left: this query may not see any key
    zeros = torch.zeros(4, 4, dtype=torch.float16)

    # --8<-- [start:values]
    try:
        zeros.masked_fill(~keep, -1e9)
    except RuntimeError as error:
        print(f"-1e9 in fp16: {error}")
    least = torch.finfo(torch.float16).min  # -65504
    finite = zeros.masked_fill(~keep, least)
    twice = finite + finite  # two masks that hide the same keys, added

    def row(mask: torch.Tensor | None, attend=F.scaled_dot_product_attention) -> list[float]:
        return [round(w, 2) for w in attend(q, k, v, mask)[0, 0, 0, :4].tolist()]

    def by_hand(q, k, v, mask):
        return torch.softmax(q @ k.mT / 8**0.5 + mask, dim=-1) @ v

    print("no mask at all, SDPA:    ", row(None))
    print("finfo.min, SDPA:         ", row(finite))
    print("finfo.min twice, by hand:", row(twice, by_hand))
    print("finfo.min twice, SDPA:   ", row(twice))
    print("boolean mask, SDPA:      ", row(keep))
    # --8<-- [end:values]
    weights = F.scaled_dot_product_attention(q, k, v, keep)
    seen = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    assert torch.equal(weights[0, 0, :, :4] > 0, seen.bool())
    some = by_hand(q, k, v, finite)[..., 1:, :]  # with a key, finite and boolean agree
    torch.testing.assert_close(some, weights[..., 1:, :], rtol=0, atol=0.01)
    torch.testing.assert_close(row(finite), row(None), rtol=0, atol=0.02)
    torch.testing.assert_close(row(zeros, by_hand), row(None), rtol=0, atol=0.02)
    assert twice[0].isneginf().all() and keep.dtype == torch.bool
    assert torch.tensor(row(twice, by_hand)).isnan().all()
    assert row(keep) == row(twice) == [0.0] * 4
    flash_allowed = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):  # in fp32, gradients too
        with sdpa_kernel(backend):
            flash_allowed.append(torch.backends.cuda.flash_sdp_enabled())  # on a CPU, too
            inputs = [x.float().requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*inputs, attn_mask=keep)
            assert out[0, 0, 0].eq(0).all() and out[0, 0, 1:].ne(0).any(-1).all()
            (out * torch.arange(8.0)).sum().backward()
            assert all(x.grad.isfinite().all() for x in inputs)
            assert inputs[0].grad[0, 0, 0].eq(0).all() and inputs[0].grad.abs().max() > 0.01
    assert flash_allowed == [False, True]


if __name__ == "__main__":
    main()
