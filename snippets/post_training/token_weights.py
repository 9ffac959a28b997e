"""Computes the weight of one token in four GRPO losses that differ only in their mean.

Four answers of different lengths are in two micro-batches. All advantages are 1 and the policy
has not changed, so the gradient with respect to the log-probability of a token is its weight
with the sign reversed. The program computes these gradients with autograd and compares them
with closed forms. The figure shows the weights as the heights of boxes.
"""

import itertools
import math
from fractions import Fraction

import torch

LENGTHS = [2, 3, 5, 8]  # tokens of the four answers; a micro-batch has two answers
MICRO, LIMIT = 2, 10  # no answer may have more than LIMIT tokens
INK, BLUE, ORANGE = "#1f2937", "#0b6e99", "#c2410c"
NAMES = {
    "grpo": "the mean of each answer, then the mean of the answers",
    "bnpo": "the mean of the tokens of a micro-batch, then the mean of the micro-batches",
    "dapo": "the mean of all tokens of the step",
    "dr_grpo": "the sum of all tokens, divided by (answers × longest allowed length)",
}


def clipped_loss(new, old, advantages, mask, clip: float = 0.2) -> torch.Tensor:
    """The clipped objective of PPO with its sign reversed, a mean over all answer tokens.

    `new` and `old` are log-probabilities [n, t], `advantages` is [n], `mask` is [n, t].
    """
    ratio = (new - old).exp()
    a = advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return -(objective * mask).sum() / mask.sum()


# --8<-- [start:means]
def step_loss(name: str, new, old, advantages, mask, micro: int) -> torch.Tensor:
    """The loss of one optimizer step: the sum over its micro-batches of `micro` answers."""
    n, total = len(new), torch.zeros((), dtype=new.dtype)
    for start in range(0, n, micro):
        part = [x[start : start + micro] for x in (new, old, advantages, mask)]
        tokens = part[3].sum()
        if name == "grpo":
            rows = zip(*(x.split(1) for x in part), strict=True)
            total = total + torch.stack([clipped_loss(*row) for row in rows]).sum() / n
        elif name == "bnpo":
            total = total + clipped_loss(*part) * micro / n
        elif name == "dapo":
            total = total + clipped_loss(*part) * tokens / mask.sum()
        else:
            total = total + clipped_loss(*part) * tokens / (n * LIMIT)
    return total


# --8<-- [end:means]


def closed_form(name: str, answer: int, micro: int) -> Fraction:
    """The weight of one token of this answer, by arithmetic."""
    n, length = len(LENGTHS), LENGTHS[answer]
    start = answer // micro * micro
    tokens = {
        "grpo": n * length,
        "bnpo": n // micro * sum(LENGTHS[start : start + micro]),
        "dapo": sum(LENGTHS),
        "dr_grpo": n * LIMIT,
    }
    return Fraction(1, tokens[name])


def weights(name: str, micro: int, ratio: float = 1.0) -> torch.Tensor:
    """The weight of each token by autograd, [n, t]. All tokens have the same ratio."""
    width = max(LENGTHS)
    old = torch.randn(len(LENGTHS), width, dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_(True)
    mask = torch.tensor([[float(t < n) for t in range(width)] for n in LENGTHS])
    step_loss(name, new, old, torch.ones(len(LENGTHS)), mask.double(), micro).backward()
    return -new.grad


def draw(table: dict[str, torch.Tensor]) -> str:
    """One row of boxes for each loss; a box is a token, and its height is its weight."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 420" '
        'font-family="system-ui, sans-serif">'
    ]
    for row, (name, values) in enumerate(table.items()):
        bottom, x = 84 + 96 * row, 90
        title = f'<text x="4" y="{bottom - 68}" fill="{INK}" font-size="14">'
        parts.append(f'{title}<tspan font-weight="600">{name}</tspan>: {NAMES[name]}</text>')
        for answer, length in enumerate(LENGTHS):
            colour = BLUE if answer < MICRO else ORANGE
            style = f'fill="{colour}" fill-opacity="0.25" stroke="{colour}"'
            for token in range(length):
                height = round(float(values[answer, token]) * 440, 1)
                y = round(bottom - height, 1)
                parts.append(f'<rect x="{x}" y="{y}" width="22" height="{height}" {style}/>')
                x += 24
            x += 20
    for x, words in ((82, "2 tokens"), (158, "3 tokens"), (250, "5 tokens"), (390, "8 tokens")):
        parts.append(f'<text x="{x}" y="392" fill="{INK}" font-size="13">{words}</text>')
    for x, number, colour in ((90, 1, BLUE), (250, 2, ORANGE)):
        words = f"micro-batch {number}"
        parts.append(f'<text x="{x}" y="412" fill="{colour}" font-size="13">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    torch.manual_seed(0)
    table = {name: weights(name, MICRO) for name in NAMES}
    print("weight of one token in the gradient of a step")
    print("answer                      " + "".join(f"{name:>9}" for name in NAMES))
    for answer, length in enumerate(LENGTHS):
        row = ""
        for name, values in table.items():
            exact = closed_form(name, answer, MICRO)
            expected = torch.zeros(max(LENGTHS), dtype=torch.float64)
            expected[:length] = float(exact)
            torch.testing.assert_close(values[answer], expected, rtol=1e-12, atol=0)
            row += f"{exact!s:>9}"
        print(f"{length} tokens, micro-batch {answer // MICRO + 1}     {row}")
    row = "".join(f"{float(values.sum()):9.3f}" for values in table.values())
    print(f"sum over all tokens         {row}")
    whole = [float(values[-1].sum() / values[0].sum()) for values in table.values()]
    print("answer of 8 / answer of 2   " + "".join(f"{ratio:9.3f}" for ratio in whole))
    for name in NAMES:  # a token with a ratio above 1.2 has no gradient in any of the losses
        assert weights(name, MICRO, 1.1).any() and not weights(name, MICRO, 1.3).any()
    # with micro-batches of a different size, only the weights of bnpo change
    for name, micro in itertools.product(NAMES, (1, len(LENGTHS))):
        values = weights(name, micro)
        for answer, length in enumerate(LENGTHS):
            exact = float(closed_form(name, answer, micro))
            assert torch.allclose(values[answer, :length], torch.tensor(exact).double())
        assert torch.allclose(values, table[name]) == (name != "bnpo")
    with open("token_weights.svg", "w", encoding="utf-8") as file:
        file.write(draw(table))


if __name__ == "__main__":
    main()
