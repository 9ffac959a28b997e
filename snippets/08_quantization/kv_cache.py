"""A quantized KV cache: keys need a scale per channel, and values need a scale per token.

Liu et al. (KIVI, 2024) found that some channels of the keys are large in every token, and that
the values have no such channels. The program makes such keys, and values whose tokens differ in
size. Groups of 32 share a scale and a zero point. The newest tokens stay floats until a group
is full. Compare four rows with equal bits: the choice for the keys changes the score's error.
"""

import torch
import torch.nn.functional as F

TOKENS, HEAD, GROUP = 1024 + 20, 64, 32


# --8<-- [start:affine]
def affine(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Quantize with scale and zero point (the minimum) along `dim`, and back."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return ((x - low) / scale).round() * scale + low


def per_channel(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Each channel of GROUP tokens has its own range. An incomplete group stays in floats."""
    full = len(x) // GROUP * GROUP
    old = affine(x[:full].unflatten(0, (-1, GROUP)), bits, 1).flatten(0, 1)
    return torch.cat([old, x[full:]])


def per_token(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Each group of GROUP channels of a token has its own range."""
    full = len(x) // GROUP * GROUP
    old = affine(x[:full].unflatten(1, (-1, GROUP)), bits, 2).flatten(1)
    return torch.cat([old, x[full:]])


# --8<-- [end:affine]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert torch.equal(affine(torch.ones(2, GROUP), 2, 1), torch.ones(2, GROUP))  # not 0/0
    normal = torch.randn(TOKENS, HEAD)
    keys = normal.clone()
    keys[:, 5] += 20  # large in every token, of one sign
    keys[:, 40] -= 15
    values = torch.randn(TOKENS, HEAD) * torch.randn(TOKENS, 1).mul(0.5).exp()
    wanted = torch.randperm(TOKENS)[:256]
    queries = 1.2 * normal[wanted]  # each query looks for one key among the others

    def attention(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = queries @ k.T / HEAD**0.5
        return scores, F.softmax(scores, -1) @ v

    exact_scores, exact = attention(keys, values)

    def error(k: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
        scores, out = attention(k, v)
        return (
            (scores - exact_scores).square().mean().sqrt().item(),
            ((out - exact).norm() / exact.norm()).item(),
        )

    ways = {"per token": per_token, "per channel": per_channel}
    found = {}
    print(
        "bits   keys         values        rms error of a score   relative error of the output"
    )
    for bits in (8, 4, 2):
        for k_name, k_way in ways.items():
            for v_name, v_way in ways.items():
                found[bits, k_name, v_name] = error(k_way(keys, bits), v_way(values, bits))
                score, output = found[bits, k_name, v_name]
                print(f"{bits:4}   {k_name:12} {v_name:12} {score:18.3f} {output:25.1%}")
    for bits in (8, 4, 2):
        kivi, worst = (
            found[bits, "per channel", "per token"],
            found[bits, "per token", "per token"],
        )
        # a step is in proportion to a range: 32 Gaussian numbers span 4.1 standard deviations,
        # and with the large one among them, of mean 20 or 15, about 22 or 17
        assert 3.8 < worst[0] / kivi[0] < 5.8
        assert kivi[1] <= min(f[1] for (b, _, _), f in found.items() if b == bits)
    both = found[4, "per channel", "per token"][1]
    only_k = error(per_channel(keys, 4), values)[1]
    only_v = error(keys, per_token(values, 4))[1]
    print(f"4 bits: keys alone {only_k:.1%}, values alone {only_v:.1%}, both {both:.1%}")
    assert abs((only_k**2 + only_v**2) ** 0.5 / both - 1) < 0.1  # errors without relation

    # --8<-- [start:bytes]
    layers, heads, head, context = 32, 8, 128, 128 * 1024  # Llama 3 8B's shape
    numbers = 2 * layers * heads * head * context
    for bits in (16, 8, 4, 2):
        per_number = (
            bits if bits == 16 else bits + 2 * 16 / GROUP
        )  # a scale and a zero in 16 bits
        size = numbers * per_number / 8 / 2**30
        print(f"{bits:2} bits: {per_number:.0f} bits stored, {size:5.2f} GiB for a sequence "
              f"of {context:,} tokens")  # fmt: skip
    # --8<-- [end:bytes]


if __name__ == "__main__":
    main()
