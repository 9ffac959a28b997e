"""Generating without no_grad: the keys and values of every step stay in memory.

The program counts the bytes that autograd saves while a cache grows by one token at a time,
without the parameters. The tokens are the same, so only the memory shows the mistake.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Step(nn.Module):
    """Attention of one new token over a cache that is grown by torch.cat."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, keys, values):  # x [1, h]; keys, values [s, h]
        q, k, v = self.qkv(x).chunk(3, -1)
        keys, values = torch.cat([keys, k]), torch.cat([values, v])
        weights = (q @ keys.T).softmax(-1)
        return self.dropout(self.out(weights @ values)), keys, values


# --8<-- [start:count]
def generate(step: Step, hidden: int, tokens: int) -> tuple[torch.Tensor, int]:
    """Feed outputs back in; return the last, and the bytes that autograd has saved."""
    mine = {p.data_ptr() for p in step.parameters()}
    saved: dict[int, torch.Tensor] = {}  # by address: a tensor saved twice is held once

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in mine:
            saved[tensor.data_ptr()] = tensor
        return tensor

    x, keys, values = torch.ones(1, hidden), torch.empty(0, hidden), torch.empty(0, hidden)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(tokens):
            x, keys, values = step(x, keys, values)
    return x.detach(), sum(t.nbytes for t in saved.values())


# --8<-- [end:count]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = 256
    step = Step(hidden).eval()
    print("tokens    cache       kept without no_grad   under no_grad")
    kept = {}
    for tokens in (64, 128, 256):
        before, kept[tokens] = generate(step, hidden, tokens)
        with torch.no_grad():
            after, none = generate(step, hidden, tokens)
        assert none == 0 and torch.equal(before, after)
        cache = 2 * tokens * hidden * 4
        held = kept[tokens] / 2**20
        print(f"{tokens:5}  {cache / 2**20:6.2f} MiB     {held:8.1f} MiB        "
              f"{none:8} bytes")  # fmt: skip
    assert kept[256] > 3.5 * kept[128] > 12 * kept[64]
    print("twice the tokens keep four times the bytes: each step saves the whole cache again")

    with torch.no_grad():
        x = torch.ones(1, hidden)
        for _ in range(64):  # the whole text anew for each token, by torch's attention
            q, k, v = step.qkv(x)[None].chunk(3, -1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[0]
            x = torch.cat([x, step.out(mixed[-1:])])
        torch.testing.assert_close(x[-1:], generate(step, hidden, 64)[0], rtol=1e-4, atol=1e-5)
        first, second = generate(step.train(), hidden, 64)[0], generate(step, hidden, 64)[0]
        print(f"without eval(): two runs equal: {torch.equal(first, second)}")
        assert not torch.equal(first, second)
        step.eval()
        assert torch.equal(generate(step, hidden, 64)[0], generate(step, hidden, 64)[0])
        print("with eval(): two runs equal: True")


if __name__ == "__main__":
    main()
