"""This program triggers four common messages of FlexAttention and shows two fixes.

It calls flex_attention without torch.compile, with a block mask for a different length, with a
mask_mod that branches on an index, and with an input that requires a gradient on a CPU.
"""

import warnings

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def causal(b, h, q, k):
    return q >= k


def first_line(function) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        return f"{type(error).__name__}: {str(error).splitlines()[0].split('. ')[0]}"
    raise AssertionError("it ran")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = flex_attention(q, k, v)
    said = [str(w.message) for w in caught if "without torch.compile" in str(w.message)]
    print(f"called as it is:\n    {said[0].splitlines()[0]}")

    # --8<-- [start:failures]
    short = create_block_mask(causal, None, None, 128, 128, "cpu")

    def branching(b, h, q, k):
        return q >= k if q > 3 else k >= 0  # one trace serves all indices: no branch on one

    def where(b, h, q, k):
        return torch.where(q > 3, q >= k, k >= 0)

    learned = q.clone().requires_grad_()
    failures = {
        "a mask for 128 tokens, 256 given": lambda: flex_attention(q, k, v, block_mask=short),
        "a mask_mod that branches": lambda: create_block_mask(
            branching, None, None, 256, 256, "cpu"
        ),
        "a gradient on a CPU": lambda: flex_attention(learned, k, v),
    }
    # --8<-- [end:failures]
    for name, function in failures.items():
        print(f"{name}:\n    {first_line(function)}")
    fixed = create_block_mask(where, None, None, 256, 256, "cpu")
    out = flex_attention(q, k, v, block_mask=fixed)
    torch.testing.assert_close(out[:, :, :4], plain[:, :, :4])  # these see every key
    seen = torch.arange(256) <= torch.arange(256)[:, None]
    seen[:4] = True
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    again = create_block_mask(causal, None, None, 256, 256, "cpu")
    out = flex_attention(q, k, v, block_mask=again)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    print("torch.where, and a mask of the right length: both run")


if __name__ == "__main__":
    main()
