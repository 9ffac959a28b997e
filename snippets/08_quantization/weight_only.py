"""Weight-only quantization: int8 with a scale per channel, packed int4 with a scale per group.

Only the weight is stored in few bits. The layer converts it back to floats in each call, so it
needs no calibration. The program compares it with the kernels inside torch, which compute the
same result without writing these floats to memory.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

N, K = 2048, 2048  # outputs, inputs


# --8<-- [start:pack]
def pack(q: torch.Tensor) -> torch.Tensor:
    """Put two numbers of 0 to 15 in a byte: [n, k] uint8 -> [n, k/2] uint8."""
    return q[:, 0::2] | q[:, 1::2] << 4  # the even column in the low nibble


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[n, k/2] uint8 -> [n, k] uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


# --8<-- [end:pack]


# --8<-- [start:Int8Linear]
class Int8Linear(nn.Module):
    """y = (x · qᵀ) · scale: one scale per output is applied after the product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()  # [n, 1], 16 bits each
        self.register_buffer("q", (weight / scale).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scale", scale.squeeze(1))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.q.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


# --8<-- [end:Int8Linear]


# --8<-- [start:Int4Linear]
class Int4Linear(nn.Module):
    """One scale for `group` inputs of an output: it must be applied before the product."""

    def __init__(self, linear: nn.Linear, group: int) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        grouped = weight.unflatten(1, (-1, group))  # [n, k/group, group]
        scale = (
            grouped.abs().amax(-1, keepdim=True) / 7
        ).bfloat16()  # rounded before it is used
        q = (grouped / scale).round().clamp(-8, 7) + 8  # 8 means zero
        self.register_buffer("packed", pack(q.flatten(1).to(torch.uint8)))
        self.register_buffer("scale", scale.squeeze(-1))  # [n, k/group]
        self.bias = linear.bias
        self.group = group

    def weight(self) -> torch.Tensor:
        """Return the weight that the bytes represent: [n, k]."""
        q = unpack(self.packed).to(torch.int8) - 8
        return (q.unflatten(1, (-1, self.group)) * self.scale.float().unsqueeze(-1)).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight().to(x.dtype), self.bias)


# --8<-- [end:Int4Linear]


def relative(error: torch.Tensor, signal: torch.Tensor) -> float:
    return (error.float().norm() / signal.float().norm()).item()


def milliseconds(function: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


def bits_per_weight(module: nn.Module) -> float:
    return sum(b.nbytes for b in module.buffers()) * 8 / (N * K)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8).view(1, -1)
    assert torch.equal(pack(unpack(every)), every)  # all the pairs there are
    print("pack and unpack: bit-exact for all 256 bytes")

    linear = nn.Linear(K, N, bias=False)
    nn.init.normal_(linear.weight, std=K**-0.5)
    linear.bfloat16()
    x = torch.randn(1, K).bfloat16()
    exact = F.linear(x.float(), linear.weight.float())
    print("                  bits per weight   weight error: measured, Δ²/12   output error")
    int8, rows = Int8Linear(linear), {}
    rows["int8 per channel"] = (int8, int8.q * int8.scale.float()[:, None], int8.scale[:, None])
    for group in (2048, 128, 32):
        m = Int4Linear(linear, group)
        rows[f"int4, {group} a group"] = (m, m.weight(), m.scale.repeat_interleave(group, 1))
    for name, (module, weight, step) in rows.items():
        measured = relative(weight - linear.weight.float(), linear.weight)
        noise = (step.float().square() / 12).expand(N, K).mean().sqrt()
        predicted = (noise / linear.weight.float().square().mean().sqrt()).item()
        output = relative(module(x.float()) - exact, exact)
        print(f"{name:20}{bits_per_weight(module):11.3f} {measured:19.2%} {predicted:12.2%} "
              f"{output:16.1%}")  # fmt: skip
        assert abs(measured / predicted - 1) < 0.05 and abs(output / measured - 1) < 0.2

    # torch's kernels accept the same numbers, and dequantize them in registers
    int4 = Int4Linear(linear, 32)
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(int4.packed).int(), 1)
    scales = int4.scale.T.contiguous()  # [k/group, n], and a zero point which is 0 for us
    scales = torch.stack([scales, torch.zeros_like(scales)], -1)
    runs = {
        "bf16": lambda: F.linear(x, linear.weight),
        "int8, ours": lambda: int8(x),
        "int4, ours": lambda: int4(x),
        "int8, torch's": lambda: torch.ops.aten._weight_int8pack_mm(x, int8.q, int8.scale),
        "int4, torch's": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, tiles, 32, scales
        ),
    }
    times = {name: milliseconds(run) for name, run in runs.items()}
    for name, milliseconds_per_row in times.items():
        print(f"{name:14} ≈{milliseconds_per_row:.2f} ms a row of x")
    # Only a kernel that writes no floats to memory is fast. torch has it only for vector units.
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        for bits in ("int8", "int4"):
            assert times[f"{bits}, torch's"] < times[f"{bits}, ours"] / 2
    for bits in ("int8", "int4"):
        ours, theirs = runs[f"{bits}, ours"](), runs[f"{bits}, torch's"]()
        torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02)
    biased = nn.Linear(64, 64)
    for module in (Int8Linear(biased), Int4Linear(biased, 32)):
        assert torch.equal(module(torch.zeros(64)), biased.bias)
    print("ours equals torch's within bf16's rounding")


if __name__ == "__main__":
    main()
