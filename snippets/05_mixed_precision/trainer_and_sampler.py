"""Two programs run the same bf16 or fp16 model, but they compute different probabilities.

In reinforcement learning, one program samples the tokens, and the trainer computes their
probabilities again. Here both programs have the same 16-bit weights. The sampler uses two
tensor-parallel ranks, so it adds two partial sums that are already rounded to 16 bits. The
trainer adds all products in fp32 and rounds once. The program compares the log-probabilities of
the sampled tokens. Look at the ratio of the errors: fp16 has three mantissa bits more than
bf16, so its differences are about 2^3 times smaller.
"""

import math

import torch
from torch import nn

TOKENS, H, LAYERS, VOCABULARY = 4096, 64, 8, 256


def weights() -> list[torch.Tensor]:
    """Return the matrices [in, out] of all layers and of the head, in fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(H, 4 * H), (4 * H, H)] * LAYERS + [(H, VOCABULARY)]
    return [torch.randn(s, generator=generator) / math.sqrt(s[0]) for s in shapes]


def product(x: torch.Tensor, weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """Multiply 16-bit matrices. Each rank rounds its partial sums to 16 bits."""
    parts = zip(x.chunk(ranks, -1), weight.chunk(ranks, 0), strict=True)
    total = torch.zeros((), dtype=x.dtype)
    for columns, rows in parts:
        total = total + (columns.float() @ rows.float()).to(x.dtype)
    return total


def log_probabilities(
    x: torch.Tensor, matrices: list[torch.Tensor], ranks: int
) -> torch.Tensor:  # [tokens, h] -> [tokens, vocabulary]
    *layers, head = matrices
    for up, down in zip(layers[::2], layers[1::2], strict=True):
        normed = nn.functional.rms_norm(x, (H,))
        x = x + product(product(normed, up, 1).relu(), down, ranks) / 2
    logits = product(nn.functional.rms_norm(x, (H,)), head, ranks)
    return logits.float().log_softmax(-1)


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, H, generator=generator)
    differences = {}
    print("       log-probability, RMS difference   tokens with a ratio outside 0.99 to 1.01")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)):
        cast = [matrix.to(dtype or torch.float32) for matrix in [x, *weights()]]
        sampler, trainer = (log_probabilities(cast[0], cast[1:], n) for n in (2, 1))
        token = sampler.exp().multinomial(1, generator=generator)  # [tokens, 1]
        log_ratio = (trainer - sampler).gather(1, token)
        differences[name] = log_ratio.square().mean().sqrt().item()
        changed = (log_ratio.exp() - 1).abs().gt(0.01).double().mean().item()
        print(f"{name}   ≈{differences[name]:<32.1e}  ≈{changed:.1%}")
        again = log_probabilities(cast[0], cast[1:], 2)
        assert torch.equal(again, sampler) and not torch.equal(trainer, sampler)
    ratio = differences["bf16"] / differences["fp16"]
    print(f"bf16 differs ≈{ratio:.1f} times as much as fp16")
    assert 6 < ratio < 10 and differences["fp32"] < 1e-3 * differences["fp16"]


if __name__ == "__main__":
    main()
