"""MFU and HFU of a small transformer, by formula and by counting, and with recomputation.

The model needs 6 FLOPs per token for each weight of a matrix, and 12 L h s FLOPs per token for
attention. The program counts the FLOPs that really run, and measures the peak with a large
product. Times are CPU times of one thread, so waiting for a core does not count.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

H, HEADS, LAYERS, S, V = 256, 4, 3, 128, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / (h // HEADS) ** 0.5).softmax(-1) @ v  # [b, a, s, h / a]
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(x)))


# --8<-- [start:flops]
def formula(tokens: int) -> int:
    """FLOPs of a forward and backward pass: matrices, and the two products of attention."""
    matrices = LAYERS * 12 * H * H + H * V  # the embedding is looked up, not multiplied
    return tokens * (6 * matrices + 12 * LAYERS * H * S)


def measure(blocks: nn.ModuleList, head: nn.Module, batch: int, recompute: bool):
    """The FLOPs counted in a step, and its time in s (the shortest of three)."""
    x, y = torch.randn(batch, S, H), torch.randint(V, (batch * S,))

    def step() -> None:
        hidden = x
        for block in blocks:
            hidden = (
                checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
            )
        F.cross_entropy(head(hidden).flatten(0, 1), y).backward()

    x.requires_grad_()  # as after an embedding: layer 1 also computes it
    with FlopCounterMode(display=False) as counter:
        step()
    first, times = x.grad.clone(), []
    for _ in range(3):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    torch.testing.assert_close(x.grad, 4 * first, rtol=1e-4, atol=0)  # all ran backward
    return counter.get_total_flops(), min(times)


# --8<-- [end:flops]


def peak() -> float:
    """FLOP/s of a product of 512 × 512 matrices, from the shortest of a hundred times."""
    square, times, flops = torch.randn(512, 512), [], 2 * 512**3
    with FlopCounterMode(display=False) as counter:
        square @ square
    assert counter.get_total_flops() == flops
    for _ in range(100):
        begin = time.process_time()
        square @ square
        times.append(time.process_time() - begin)
    return flops / min(times)


def check_attention(block: Block) -> None:
    x = torch.randn(2, S, H)
    heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in block.qkv(x).chunk(3, -1))
    x_out = x + block.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block(x), x_out + block.down(F.gelu(block.up(x_out))))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks, head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(H, V, bias=False)
    check_attention(blocks[0])
    top = peak()
    print(f"peak: ≈{top / 1e9:.0f} GFLOP/s in fp32 on one core")
    print("batch  recompute   formula (G)   counted (G)   step        MFU      HFU")
    for batch, recompute in ((1, False), (4, False), (4, True)):
        model, (counted, seconds) = formula(batch * S), measure(blocks, head, batch, recompute)
        mfu, hfu = model / top / seconds, counted / top / seconds
        print(
            f"{batch:5}  {'yes' if recompute else 'no':9} {model / 1e9:13.3f} "
            f"{counted / 1e9:13.3f}   ≈{1e3 * seconds:4.0f} ms   "
            f"≈{100 * mfu:3.0f} %   ≈{100 * hfu:.0f} %"
        )
        assert hfu > 1.1 * mfu if recompute else hfu == mfu
        # a block's forward pass runs again, without the down projection
        again = batch * S * LAYERS * (2 * 8 * H * H + 4 * H * S) if recompute else 0
        assert counted == model + again, "the formula is exact for this model"
    print("without recomputation the formula equals the count")


if __name__ == "__main__":
    main()
