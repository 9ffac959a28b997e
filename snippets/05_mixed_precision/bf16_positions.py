"""Positions above 256 collapse: arange in bf16, and what rotary embeddings make of it.

bf16 has 8 significant bits, so from 256 on it counts in twos, from 512 on in fours.
model.half() and model.bfloat16() cast buffers too, and a position or an inverse frequency is
often a buffer.
"""

import math

import torch

LOW, SEQUENCE, DIM = torch.bfloat16, 4096, 64


def rotary(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of position · frequency: [s], [d/2] -> [s, d]."""
    angle = positions[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def main() -> None:
    print("258 to 265 in bf16:", [int(v) for v in torch.arange(258, 266).to(LOW).tolist()])
    positions = torch.arange(SEQUENCE)
    for length in (256, 1024, SEQUENCE):
        distinct = positions[:length].to(LOW).unique().numel()
        print(f"{length:5} positions: {distinct} distinct in bf16")
    frequencies = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    right = torch.outer(positions.double(), frequencies.double())
    turns = torch.polar(torch.ones_like(right), right)
    exact = torch.cat([turns.real, turns.imag], dim=-1)
    assert abs(exact[-1, 0].item() - math.cos(SEQUENCE - 1)) < 1e-9
    for name, p, f in (
        ("all in fp32, cast at the end", positions.float(), frequencies),
        ("frequencies a bf16 buffer", positions.float(), frequencies.to(LOW).float()),
        ("positions in bf16", positions.to(LOW).float(), frequencies),
    ):
        table = rotary(p, f).to(LOW).double()
        error = (table - exact).abs().max().item()
        print(f"{name:29} largest error of a cosine or sine {error:.3f}")
        assert (error < 0.01) == (name == "all in fp32, cast at the end")
    with torch.autocast("cpu", LOW):
        outer = torch.arange(SEQUENCE).float()[:, None] @ frequencies[None]
        angle = torch.arange(SEQUENCE).float()[:, None] * frequencies[None]
    torch.testing.assert_close(angle.double(), right)
    assert (outer.double() - right).abs().max() > 1  # radians: the product in bf16 is no angle
    print(f"under autocast, p[:, None] @ f[None]: {outer.dtype}; p[:, None] * f: {angle.dtype}")


if __name__ == "__main__":
    main()
