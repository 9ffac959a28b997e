"""At batch size 1, small models wait for calls of operators, and large models for weights.

Three models of different width run the same code. For each model the program counts the
operators of a token and multiplies them by the time of the smallest operator. It also divides
the bytes of the weights by the speed of a sum over 256 MiB. Compare the two estimates with the
measured time of a token. The second estimate is not a limit: a product may read faster.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class StaticBlock(nn.Module):
    """Compute one token with a static cache, as static_cache.py does."""

    def __init__(self, hidden: int, heads: int, most: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.register_buffer("keys", torch.zeros(1, heads, most, hidden // heads))
        self.register_buffer("values", torch.zeros(1, heads, most, hidden // heads))

    def forward(self, x, position, seen):  # x [1, h]
        q, k, v = self.qkv(self.norm1(x)).view(3, 1, self.heads, 1, -1)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        x = x + self.out(mixed.reshape(1, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# --8<-- [start:count]
class Count(TorchDispatchMode):
    """Count the operators that PyTorch dispatches, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


# --8<-- [end:count]


def best(work, rounds: int) -> float:
    """Return the shortest time of `work` in seconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiny = torch.ones(1)

    def additions() -> None:
        for _ in range(1000):
            torch.add(tiny, tiny)

    with Count() as many:
        additions()
    thousand = best(additions, 10)
    overhead = thousand / many.operators
    assert abs(1000 * overhead / thousand - 1) < 1e-9
    wide = torch.randn(64 * 2**20)  # 256 MiB
    reading = best(wide.sum, 2)
    with Count() as three:
        tiny.view(1).add(1).mul_(2)
    assert three.operators == 3
    print(f"the smallest operator, λ: ≈{1e6 * overhead:.1f} µs")
    print("hidden   operators, each at λ    weights      read from memory    one token")
    took = {}
    for hidden in (32, 64, 2048):
        blocks = nn.ModuleList(StaticBlock(hidden, 4, 64) for _ in range(4))
        position = torch.tensor([5])
        seen = (torch.arange(64) <= position).view(1, 1, 1, 64)

        def token(blocks=blocks, hidden=hidden, position=position, seen=seen) -> torch.Tensor:
            x = torch.ones(1, hidden)
            for block in blocks:
                x = block(x, position, seen)
            return x

        with Count() as count:
            token()
        assert all(block.keys[0, :, 5].any() for block in blocks)  # each layer has run
        size = sum(p.nbytes for p in blocks.parameters())
        if hidden == 2048:  # in turn with reading, so that noise hits both
            took[hidden] = 1.0
            for _ in range(8):
                took[hidden] = min(took[hidden], best(token, 1))
                reading = min(reading, best(wide.sum, 1))
        else:
            took[hidden] = best(token, 200)
        bandwidth = wide.nbytes / reading
        calls, read = count.operators * overhead, size / bandwidth
        assert calls < 2 * took[hidden]  # no operator is faster than the smallest one
        memory = f"≈{1e3 * read:6.2f} ms" if size > 2**28 else "in a cache"
        mib, ms, host = size / 2**20, 1e3 * took[hidden], 1e3 * calls
        print(f"{hidden:5}    ≈{count.operators:3} × λ = ≈{host:.2f} ms    {mib:6.1f} MiB   "
              f"{memory:>16}    ≈{ms:.2f} ms")  # fmt: skip
    assert took[64] < 3 * took[32], "four times the weights should barely matter here"
    assert took[2048] > 10 * calls and took[2048] > 10 * took[64]
    # the last model: four bytes for each weight, at the speed of a sum over 2^28 bytes
    read_bytes = 4 * sum(p.numel() for p in blocks.parameters())
    assert abs(read / (read_bytes * reading / 2**28) - 1) < 1e-6
    print(f"memory was read at ≈{bandwidth / 1e9:.1f} GB/s")
    print("the small models wait for calls, the large one for weights")


if __name__ == "__main__":
    main()
