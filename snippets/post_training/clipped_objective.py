"""Shows when the clipped objective has no gradient, and which mean changes the answer length.

The first table compares autograd with the rule of clipping. The second part lists all answer
lengths in float64 and computes the expected gradient of the logit that ends an answer. Length
does not change the reward here, so an objective without a length bias must give zero.
Draws clipped_objective.svg.
"""

import math
from collections.abc import Callable

import matplotlib
import torch

matplotlib.use("svg")
import matplotlib.pyplot as plt

CLIP, LONGEST, P_STOP = 0.2, 8, 0.25


def clipped_loss(new, old, advantages, mask, clip: float = 0.2) -> torch.Tensor:
    """The clipped objective of PPO with its sign reversed, a mean over all answer tokens.

    `new` and `old` are log-probabilities [n, t], `advantages` is [n], `mask` is [n, t].
    """
    ratio = (new - old).exp()
    a = advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return -(objective * mask).sum() / mask.sum()


# --8<-- [start:gradient_of_token]
def gradient_of_token(ratio: float, advantage: float) -> float:
    """The rule of clipping: d(objective) / d(log-probability) of one token."""
    if advantage > 0 and ratio > 1 + CLIP:  # already much more probable than in the rollout
        return 0.0
    if advantage < 0 and ratio < 1 - CLIP:  # already much less probable than in the rollout
        return 0.0
    return ratio * advantage


# --8<-- [end:gradient_of_token]


def token_gradients(ratios: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
    """For A = 1 and A = -1, compare the gradients that autograd computes with the rule."""
    n = len(ratios)
    old = torch.linspace(-3, -0.5, n, dtype=torch.float64).expand(2, n)
    new = (old + ratios.log()).requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss = clipped_loss(new, old, advantages, torch.ones(2, n), CLIP)
    gradients = -torch.autograd.grad(loss, new)[0] * 2 * n  # the loss is a mean of 2n tokens
    rows = list(zip(advantages.tolist(), gradients, strict=True))
    for a, row in rows:
        expected = [gradient_of_token(ratio, a) for ratio in ratios.tolist()]
        torch.testing.assert_close(row.tolist(), expected)
    return rows


def print_tokens() -> None:
    """Print the gradients of ten tokens, and find out where the gradient becomes zero."""
    ratios = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5], dtype=torch.float64)
    print("ratio           " + "".join(f"{ratio:8.1f}" for ratio in ratios))
    for a, row in token_gradients(ratios):
        print(f"gradient, A = {a:+.0f}" + "".join(f"{value + 0.0:8.1f}" for value in row))
    many = torch.arange(0.405, 1.6, 0.01, dtype=torch.float64)
    (_, good), (_, bad) = token_gradients(many)
    assert torch.equal(good == 0, many > 1.2) and torch.equal(bad == 0, many < 0.8)


def draw() -> None:
    """Draw the objective of one token against its ratio, and mark where it is flat."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "clipped", "font.size": 12}
    figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.4))
    ratios = torch.linspace(0.4, 1.6, 121, dtype=torch.float64)
    for axes, a in zip(panels, (1.0, -1.0), strict=True):
        advantages = torch.full((121,), a, dtype=torch.float64)
        loss = [
            clipped_loss(r.log().view(1, 1), torch.zeros(1, 1), b.view(1), torch.ones(1, 1))
            for r, b in zip(ratios, advantages, strict=True)
        ]
        axes.plot(ratios, [-value.item() for value in loss], color="#0b6e99", linewidth=2.5)
        edge = 1 + CLIP if a > 0 else 1 - CLIP
        axes.axvline(edge, color="#52525b", linestyle=":", linewidth=1.5)
        axes.axvline(1.0, color="#52525b", linewidth=0.8)
        end = 1.6 if a > 0 else 0.4
        axes.axvspan(edge, end, color="#c2410c", alpha=0.12)
        place = (1.4, 0.5) if a > 0 else (0.6, -1.5)
        axes.text(*place, "no\ngradient", ha="center", va="center")
        answer = "good" if a > 0 else "bad"
        axes.set(xlabel="ratio", ylabel="objective", title=f"{answer} answer, A = {a:+.0f}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("clipped_objective.svg", transparent=True, metadata={"Date": None})


# --8<-- [start:length_bias]
def sequence_mean(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum over an answer is divided by the length of this answer: the original GRPO."""
    return (scores / lengths).mean(1)


def token_mean(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens of the batch is divided by the number of tokens: DAPO."""
    return scores.sum(1) / lengths.sum(1)


def constant(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum over each answer is divided by the same constant: Dr. GRPO."""
    return (scores / LONGEST).mean(1)


def outcomes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All outcomes of one answer: their lengths, scores and probabilities, [9] each."""
    lengths = torch.tensor([*range(1, LONGEST + 1), LONGEST], dtype=torch.float64)
    ended = torch.ones_like(lengths)
    ended[-1] = 0  # the last outcome is an answer that is cut off
    probability = P_STOP**ended * (1 - P_STOP) ** (lengths - ended)
    # d(log p) / d(logit): 1 - p for the token that stops, -p for each token that continues
    return lengths, ended - P_STOP * lengths, probability


def push_to_stop(normalize: Callable, answers: int, advantage: float) -> float:
    """Expected gradient of the stop logit, divided by the last of `typical_sizes()`.

    Every answer has the same advantage. The sum runs over all lengths of all answers.
    """
    lengths, scores, probability = outcomes()
    groups = torch.cartesian_prod(*[torch.arange(len(lengths))] * answers).view(-1, answers)
    weights = probability[groups].prod(1)
    assert abs(weights.sum() - 1) < 1e-12
    pushes = advantage * normalize(scores[groups], lengths[groups])
    return round((weights @ pushes / typical_sizes()[2]).item(), 9) + 0.0  # never -0.0


# --8<-- [end:length_bias]


def typical_sizes() -> tuple[float, float, float]:
    """Return the mean length of an answer, the typical size of its score, and size / length."""
    lengths, scores, probability = outcomes()
    mean, size = (probability @ lengths).item(), (probability @ scores.square()).sqrt().item()
    assert abs(size**2 - mean * P_STOP * (1 - P_STOP)) < 1e-12  # the tokens are independent
    return mean, size, size / mean


def check_constant() -> None:
    """If the reward is the length, the constant gives the derivative of the mean length."""
    lengths, scores, probability = outcomes()
    pushes = constant((scores * lengths)[:, None], lengths[:, None])
    logit, step, means = math.log(P_STOP / (1 - P_STOP)), 1e-4, []
    for moved in (logit + step, logit - step):
        proceed = 1 / (1 + math.exp(moved))
        means.append(sum(proceed**k for k in range(LONGEST)))  # token k + 1 exists
    derivative = (means[0] - means[1]) / (2 * step)
    assert derivative < -1 and math.isclose(
        probability @ pushes * LONGEST, derivative, rel_tol=1e-6
    )


def check_means() -> None:
    """Two answers of 1 and 3 tokens, with the sums 1 and 6 over their tokens."""
    scores, lengths = torch.tensor([[1.0, 6.0]]), torch.tensor([[1.0, 3.0]])
    expected = {sequence_mean: (1 / 1 + 6 / 3) / 2, token_mean: 7 / 4, constant: 7 / 8 / 2}
    assert all(mean(scores, lengths).item() == value for mean, value in expected.items())


def main() -> None:
    draw()
    check_means()
    check_constant()
    print_tokens()
    mean, size, unit = typical_sizes()
    print(f"\nmean length {mean:.2f}, gradient of an answer {size:.3f}, per token {unit:.3f}")
    print(f"push towards the end of an answer, lengths 1 to {LONGEST}")
    print("normalization      answers   right answers   wrong answers")
    bias = {}
    for normalize in (sequence_mean, token_mean, constant):
        for answers in (1, 4):
            right, wrong = (push_to_stop(normalize, answers, a) for a in (1.0, -1.0))
            bias[normalize, answers] = right
            name = normalize.__name__.replace("_", " ")
            print(f"{name:18} {answers:7} {right:+15.3f} {wrong:+14.3f}")
            assert abs(right + wrong) < 1e-12
    assert all(bias[constant, n] == 0 for n in (1, 4))  # the mean of a score is zero
    assert bias[sequence_mean, 1] > 0.2  # right answers become shorter, and wrong ones longer
    assert abs(bias[sequence_mean, 4] - bias[sequence_mean, 1]) < 1e-8  # for every batch size
    assert abs(bias[token_mean, 1] - bias[sequence_mean, 1]) < 1e-8  # equal for one answer
    assert 0 < bias[token_mean, 4] < bias[token_mean, 1] / 3  # falls with the batch


if __name__ == "__main__":
    main()
