"""A decode step as a CUDA graph needs one launch per token and not hundreds.

The token, its position and the cache are static tensors. A replay reads and writes them. The
program compares the tokens of the replays with the tokens of eager mode, and then their times.
It needs an NVIDIA GPU.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, LAYERS, MOST, VOCABULARY = 1024, 16, 16, 512, 4096


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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(MOST, HIDDEN)
        self.blocks = nn.ModuleList(StaticBlock(HIDDEN, HEADS, MOST) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, token, position):  # both [1]
        seen = (torch.arange(MOST, device=token.device) <= position).view(1, 1, 1, MOST)
        x = self.token(token) + self.position(position)
        for block in self.blocks:
            x = block(x, position, seen)
        return self.head(x).argmax(-1)


# --8<-- [start:capture]
def captured(model: Model) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """Capture a step that replaces `token` by the next token and adds 1 to `position`."""
    token = torch.zeros(1, dtype=torch.long, device="cuda")
    position = torch.zeros(1, dtype=torch.long, device="cuda")

    def step() -> None:
        token.copy_(model(token, position))
        position.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up: handles and autotuning must not be captured
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, token, position


# --8<-- [end:capture]


@torch.no_grad()
def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this program captures CUDA graphs: it needs an NVIDIA GPU")
    torch.manual_seed(0)
    model = Model().cuda().half().eval()
    tokens = 256

    def eager() -> torch.Tensor:
        token = torch.zeros(1, dtype=torch.long, device="cuda")
        position, written = torch.zeros_like(token), []
        for _ in range(tokens):
            token = model(token, position)
            position = position + 1
            written.append(token)
        return torch.cat(written)

    graph, token, position = captured(model)

    # --8<-- [start:replay]
    def replayed() -> torch.Tensor:
        token.zero_(), position.zero_()  # rows of the cache beyond the position are not seen
        written = []
        for _ in range(tokens):
            graph.replay()
            written.append(token.clone())
        return torch.cat(written)

    # --8<-- [end:replay]

    times = {}
    outputs = {}
    for words, work in (("eager", eager), ("graph", replayed)):
        work()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outputs[words] = work()
        torch.cuda.synchronize()
        times[words] = (time.perf_counter() - begin) / tokens
    # a kernel that adds in a different order may choose the other of two nearly equal tokens
    differ = (outputs["eager"] != outputs["graph"]).nonzero().flatten().tolist()
    same = min([tokens, *differ])
    assert same > 16
    size = sum(p.nbytes for p in model.parameters())
    print(f"{same} tokens equal; weights {size >> 20} MiB")
    for words, took in times.items():
        print(f"{words}: ≈{1e6 * took:.0f} µs per token, ≈{size / took / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
