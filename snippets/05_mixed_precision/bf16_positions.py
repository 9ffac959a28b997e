"""Rotary tables are wrong above position 256 if positions or frequencies become bf16.

bf16 has 8 significant bits. From 256 on it can store only every second integer, and from 512 on
only every fourth. model.bfloat16() casts floating-point buffers, such as the inverse
frequencies. Integer buffers keep their type, but that is not enough: PyTorch multiplies an
integer tensor by a bf16 tensor in bf16, so the positions are rounded inside the product.

Look at the largest errors. A cosine is between -1 and 1, so an error above 1 means that the
value is arbitrary.
"""

import math

import torch
from torch import nn

LOW, SEQUENCE, DIM = torch.bfloat16, 4096, 64


def rotary(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of position · frequency: [s], [d/2] -> [s, d]."""
    angle = positions[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Buffers(nn.Module):
    """The two buffers that code for rotary embeddings often registers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(SEQUENCE))  # [s]
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))


def main() -> None:
    print("258 to 265 in bf16:", [int(v) for v in torch.arange(258, 266).to(LOW).tolist()])
    exact_buffers, cast = Buffers(), Buffers().bfloat16()
    positions, frequencies = exact_buffers.positions, exact_buffers.frequencies
    for length in (256, 1024, SEQUENCE):
        distinct = positions[:length].to(LOW).unique().numel()
        print(f"{length:5} positions: {distinct} distinct in bf16")
    types = {name: str(b.dtype).removeprefix("torch.") for name, b in cast.named_buffers()}
    print("after model.bfloat16():", ", ".join(f"{n} {t}" for n, t in types.items()))
    assert torch.equal(cast.positions, positions)

    right = torch.outer(positions.double(), frequencies.double())
    turns = torch.polar(torch.ones_like(right), right)
    exact = torch.cat([turns.real, turns.imag], dim=-1)
    assert abs(exact[-1, 0].item() - math.cos(SEQUENCE - 1)) < 1e-9
    for name, p, f in (
        ("all in fp32, cast at the end", positions.float(), frequencies),
        ("frequencies rounded to bf16", positions.float(), cast.frequencies.float()),
        ("positions rounded to bf16", positions.to(LOW).float(), frequencies),
        ("integer positions, bf16 frequencies", cast.positions, cast.frequencies),
        ("  fix: frequencies made anew in fp32", cast.positions, Buffers().frequencies),
    ):
        table = rotary(p, f)
        error = (table.to(LOW).double() - exact).abs().max().item()
        product = str((p[:1] * f[:1]).dtype).removeprefix("torch.")
        print(f"{name:37} product in {product:8}  largest error {error:.3f}")
        assert product == ("bfloat16" if f.dtype == LOW else "float32")
        assert error < 0.01 if "fp32" in name else error > 1
    with torch.autocast("cpu", LOW):
        outer = torch.arange(SEQUENCE).float()[:, None] @ frequencies[None]
        angle = torch.arange(SEQUENCE).float()[:, None] * frequencies[None]
    torch.testing.assert_close(angle.double(), right)
    assert (outer.double() - right).abs().max() > 1  # radians: the product in bf16 is no angle
    print(f"under autocast, p[:, None] @ f[None]: {outer.dtype}; p[:, None] * f: {angle.dtype}")


if __name__ == "__main__":
    main()
