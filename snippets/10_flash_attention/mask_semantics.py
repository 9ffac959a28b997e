"""This program shows that True in a mask means the opposite in SDPA and MultiheadAttention.

In SDPA, True means that the key takes part. In MultiheadAttention, True means that the key is
left out. With the wrong mask, a token attends only to padding, without an error and without
NaN.
"""

import torch
from torch import nn
from torch.nn import functional as F


def attend(mha: nn.MultiheadAttention, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the same layer by scaled_dot_product_attention; x [b, s, h], mask [b, s]."""
    b, s, h = x.shape
    qkv = F.linear(x, mha.in_proj_weight, mha.in_proj_bias)
    q, k, v = qkv.view(b, s, 3, mha.num_heads, -1).permute(2, 0, 3, 1, 4)  # [b, a, s, d]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    return mha.out_proj(out.transpose(1, 2).reshape(b, s, h))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mha = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 32)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])  # the last two are padding
    other = x.clone()
    other[1, 4:] = 100.0  # other padding must not matter

    with torch.no_grad():
        truth = mha(x, x, x, key_padding_mask=~real)[0][real]
        # --8<-- [start:ways]
        ways = {
            "MultiheadAttention, key_padding_mask=~real": lambda x: mha(
                x, x, x, key_padding_mask=~real
            )[0],
            "SDPA, attn_mask=real": lambda x: attend(mha, x, real),
            "SDPA, attn_mask=~real": lambda x: attend(mha, x, ~real),
        }
        # --8<-- [end:ways]
        for name, way in ways.items():
            out = way(x)[real]
            right = torch.allclose(out, truth, atol=1e-5)
            leak = not torch.allclose(way(other)[real], out, atol=1e-5)
            assert right != leak and right == ("~real" not in name or "Multi" in name)
            print(f"{name:43} right: {right!s:5}  padding changes it: {leak}")
        assert not out.isnan().any(), "no NaN betrays the inverted mask"
        only_padding = mha(x, x, x, key_padding_mask=real)[0][1, :4]
        torch.testing.assert_close(out[6:], only_padding)
        print(f"NaN in the last: {bool(out.isnan().any())}")


if __name__ == "__main__":
    main()
