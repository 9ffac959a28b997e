"""This program passes [b, s, heads, d] to SDPA, which expects [b, heads, s, d].

The call runs, but the result is wrong. SDPA attends over the last dimension but one. In the
wrong layout this dimension counts the heads, so the heads of one token attend to one another,
and no token receives information from another token.
"""

import torch
from torch.nn import functional as F


def tokens_reached(attend, x: torch.Tensor) -> list[int]:
    """Change token 0 of the first text of x [b, s, heads, d].

    Return the tokens of this text whose outputs change. No other text may change.
    """
    changed = x.clone()
    changed[0, 0] += 1
    moved = (attend(changed) - attend(x)).abs().amax(dim=(2, 3)).gt(1e-6)
    assert not moved[1:].any()
    return moved[0].nonzero().flatten().tolist()


def plain(x: torch.Tensor) -> torch.Tensor:
    """Causal attention of x [n, d] to itself, row by row."""
    past = [x[: i + 1] for i in range(len(x))]
    return torch.stack([torch.softmax(p @ p[-1] / x.shape[1] ** 0.5, 0) @ p for p in past])


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 8)  # 2 texts, 6 tokens, 4 heads

    # --8<-- [start:layouts]
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def right(x: torch.Tensor) -> torch.Tensor:
        q = x.transpose(1, 2)  # [b, s, heads, d] -> [b, heads, s, d], a view
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)

    # --8<-- [end:layouts]
    for attend, reached in ((wrong, [0]), (right, [0, 1, 2, 3, 4, 5])):
        out = attend(x)
        print(f"{attend.__name__:5} {list(out.shape)}: token 0 reaches tokens", end=" ")
        print(tokens_reached(attend, x))
        assert tokens_reached(attend, x) == reached
    for i, text in enumerate(x):
        by_head = torch.stack([plain(head) for head in text.transpose(0, 1)], dim=1)
        torch.testing.assert_close(right(x)[i], by_head)
        torch.testing.assert_close(wrong(x)[i], torch.stack([plain(token) for token in text]))


if __name__ == "__main__":
    main()
