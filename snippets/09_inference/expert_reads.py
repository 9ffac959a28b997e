"""A step of a mixture of experts computes with the chosen experts and reads their union.

A dense model uses one number of parameters for both counts: each token multiplies with all of
them, and a step reads all of them once. With experts, each token multiplies with its K experts,
so the FLOPs use the active parameters. But the tokens of a step choose different experts, so
the bytes use every expert that at least one token chooses. The table uses the shape of
DeepSeek-V3 in 8 bits. A simulated router draws the choices, evenly and unevenly, and a formula
predicts the even case. Look at the column with FLOPs per byte: an H100 needs 591 in fp8.
"""

import random

HIDDEN, LAYERS, SPARSE, EXPERTS, K = 7168, 61, 58, 256, 8  # SPARSE of the LAYERS have experts
EXPERT = 3 * HIDDEN * 2048  # parameters of one expert, and bytes in 8 bits
OTHER = 671e9 - SPARSE * EXPERTS * EXPERT - 129_280 * HIDDEN  # all but experts and embedding
ACTIVE = OTHER + SPARSE * K * EXPERT
HEADS, LATENT, ROTARY = 128, 512, 64
RIDGE = 1979e12 / 3.35e12  # FLOPs per byte of an H100 in fp8


# --8<-- [start:reads]
def union(tokens: int) -> float:
    """Experts of a layer that a step of `tokens` tokens reads, if all are equally likely."""
    return EXPERTS * (1 - (1 - K / EXPERTS) ** tokens)


def flops_per_byte(tokens: int, experts_read: float) -> float:
    """Two FLOPs for each active parameter and token, over one byte for each parameter read."""
    return 2 * ACTIVE * tokens / (OTHER + SPARSE * EXPERT * experts_read)


# --8<-- [end:reads]


def chosen(weights: list[float], generator: random.Random) -> list[int]:
    """K different experts of one token, drawn one after another in proportion to `weights`."""
    # the K largest of u^(1/w) are such a draw
    keys = [generator.random() ** (1 / weight) for weight in weights]
    return sorted(range(EXPERTS), key=keys.__getitem__)[-K:]


def drawn(tokens: int, spread: float, generator: random.Random) -> float:
    """Experts that the tokens of a step choose: a count of a set, the mean of 16 layers."""
    layers = 16
    total = 0
    for _ in range(layers):
        weights = [2 ** generator.gauss(0, spread) for _ in range(EXPERTS)]
        total += len({i for _ in range(tokens) for i in chosen(weights, generator)})
    return total / layers


def attention_flops(columns: int, values: int, heads: int) -> int:
    """FLOPs of one query and one cached token in one layer, counted product by product."""
    flops = 0
    for _ in range(heads):
        flops += sum(2 for _ in range(columns))  # the score: a product and an addition each
        flops += sum(2 for _ in range(values))  # the score times each element of the value
    return flops


def main() -> None:
    generator = random.Random(0)
    every = OTHER + SPARSE * EXPERTS * EXPERT
    print(
        f"DeepSeek-V3: a token uses {ACTIVE / 1e9:.1f} of {every / 1e9:.0f} billion parameters"
    )
    print("        experts read in a layer             FLOPs per byte")
    print("tokens  formula    even  uneven  GB read      true  if only the     if all")
    print("                 router  router               count  active are read are read")
    for tokens in (1, 4, 16, 64, 256):
        expected = union(tokens)
        even, uneven = (drawn(tokens, spread, generator) for spread in (0.0, 1.0))
        assert abs(even / expected - 1) < 0.04 and K <= uneven <= EXPERTS
        if 4 <= tokens <= 64:
            assert uneven < even, "popular experts are chosen again"
        read = OTHER + SPARSE * EXPERT * expected
        wrong = 2 * tokens, 2 * tokens * ACTIVE / every
        right = flops_per_byte(tokens, expected)
        print(f"{tokens:6} {expected:8.1f} {even:7.1f} {uneven:7.1f} {read / 1e9:8.0f} "
              f"{right:12.2f} {wrong[0]:15.2f} {wrong[1]:8.2f}")  # fmt: skip
        # the first simple count is right for one token, the second for very many tokens
        assert wrong[1] <= right <= wrong[0] * (1 + 1e-12)
        assert (abs(right / wrong[0] - 1) < 1e-9) == (tokens == 1)
    dense = next(t for t in range(1, 10**6) if 2 * t >= RIDGE)
    sparse = next(t for t in range(1, 10**6) if flops_per_byte(t, union(t)) >= RIDGE)
    alone = next(t for t in range(1, 10**6) if 2 * t * K / union(t) >= RIDGE)
    print(f"compute-bound on an H100: dense weights from {dense} tokens per step,")
    print(f"  the whole model from {sparse}, its experts from {alone}")
    assert 15 * dense < sparse < alone  # the other weights get all tokens
    assert abs(alone / dense / (EXPERTS / K) - 1) < 0.01
    absorbed = LAYERS * attention_flops(LATENT + ROTARY, LATENT, HEADS)
    print(f"attention, FLOPs per cached token: {absorbed / 1e6:.1f} million; "
          f"the rule 4Lh gives {4 * LAYERS * HIDDEN / 1e6:.1f}")  # fmt: skip
    assert absorbed == 2 * LAYERS * HEADS * (2 * LATENT + ROTARY)
    # the rule is right where heads times their width is the width of the model
    assert 32 * attention_flops(128, 128, 32) == 4 * 32 * 4096  # Llama 3 8B


if __name__ == "__main__":
    main()
