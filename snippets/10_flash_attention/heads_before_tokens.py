"""This program passes [b, s, heads, d] to SDPA, which expects [b, heads, s, d].

The call runs, but the result is wrong. SDPA attends over the last dimension but one. In the
wrong layout this dimension counts the heads, so the heads of one token attend to one another,
and no token receives information from another token.
"""

import torch
from torch.nn import functional as F


def tokens_reached(attend, x: torch.Tensor) -> list[int]:
    """Change token 0 of x [b, s, heads, d] and return the tokens whose outputs change."""
    changed = x.clone()
    changed[:, 0] += 1
    moved = (attend(changed) - attend(x)).abs().amax(dim=(0, 2, 3))
    return moved.gt(1e-6).nonzero().flatten().tolist()


def plain(x: torch.Tensor) -> torch.Tensor:
    """Causal attention of x [n, d] to itself, row by row."""
    past = [x[: i + 1] for i in range(len(x))]
    return torch.stack([torch.softmax(p @ p[-1] / x.shape[1] ** 0.5, 0) @ p for p in past])


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 6, 4, 8)  # 6 tokens, 4 heads

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
    by_head = torch.stack([plain(head) for head in x[0].transpose(0, 1)], dim=1)
    torch.testing.assert_close(right(x)[0], by_head)
    torch.testing.assert_close(wrong(x)[0], torch.stack([plain(token) for token in x[0]]))


if __name__ == "__main__":
    main()
