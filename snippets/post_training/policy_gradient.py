"""Compares the expected value of policy-gradient estimators with the exact gradient.

A policy with 12 parameters has nine possible answers. For groups of G answers, the program
lists all 9^G groups in float64 and computes expected values without sampling.
The second table shows how the standard deviation changes the weight of easy and hard prompts.
Draws policy_gradient.svg.
"""

import math
from collections.abc import Callable

import matplotlib
import torch

matplotlib.use("svg")
import matplotlib.pyplot as plt

VOCABULARY, GROUP, FLIPS = 3, 4, 8  # FLIPS: the group size of the second table
REWARDS = torch.tensor([0.2, 1.0, 0.5, 0.9, 0.1, 0.8, 0.6, 0.3, 1.0], dtype=torch.float64)


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """GRPO: each reward minus its group's mean, divided by the group's standard deviation."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def log_probs(weights: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the nine answers of two tokens. weights: [4, 3] logits."""
    first, second = weights[0].log_softmax(0), weights[1:].log_softmax(1)
    return (first[:, None] + second).flatten()  # [9]


def exact_gradient(weights: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """The gradient of the expected reward by finite differences, without log-derivatives."""
    gradient = torch.zeros(weights.numel(), dtype=torch.float64)
    for i in range(weights.numel()):
        change = torch.zeros(weights.numel(), dtype=torch.float64)
        change[i] = step
        up, down = (weights + s * change.view_as(weights) for s in (1, -1))
        difference = (log_probs(up).exp() - log_probs(down).exp()) @ REWARDS
        gradient[i] = difference / (2 * step)
    return gradient


# --8<-- [start:expected_estimate]
def expected_estimate(weights: torch.Tensor, group: int, advantage: Callable):
    """Return the mean [12] and the total variance of an estimator over all groups."""
    scores = torch.autograd.functional.jacobian(log_probs, weights).flatten(1)  # [9, 12]
    numbers = torch.arange(len(REWARDS))
    groups = torch.cartesian_prod(*[numbers] * group)  # [9 ** G, G]
    probability = log_probs(weights)[groups].sum(1).exp()  # answers are independent
    estimates = (advantage(REWARDS[groups])[..., None] * scores[groups]).mean(1)
    mean = probability @ estimates
    return mean, (probability @ (estimates - mean).square().sum(1)).item()


ESTIMATORS: dict[str, Callable] = {
    "no baseline": lambda r: r,
    "constant 0.5": lambda r: r - 0.5,
    "mean of the others": lambda r: r - (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1),
    "mean of the group": lambda r: r - r.mean(1, keepdim=True),
    "GRPO": lambda r: group_advantages(r.flatten(), r.shape[1]).view_as(r),
    "best of the group": lambda r: r - r.amax(1, keepdim=True),
}
# --8<-- [end:expected_estimate]


def compare_estimators(weights: torch.Tensor) -> dict[str, tuple[float, float, float]]:
    """Return the length of the expected gradient, its angle in degrees, and the noise.

    The unit of the length is the exact gradient. The noise is the standard deviation of one
    estimate, divided by the length of its mean.
    """
    exact = exact_gradient(weights)
    rows = {}
    for name, advantage in ESTIMATORS.items():
        mean, variance = expected_estimate(weights, GROUP, advantage)
        along = (mean @ exact / (exact @ exact)).item()
        across = ((mean - along * exact).norm() / exact.norm()).item()
        noise = math.sqrt(variance) / mean.norm().item()
        length = (mean.norm() / exact.norm()).item()
        rows[name] = (length, math.degrees(math.atan2(across, along)), noise)
    return rows


def weight_of_prompt(p: float, group: int) -> tuple[float, float, float]:
    """For rewards of 0 and 1, return two factors of the gradient and the silent groups.

    The first factor belongs to the baseline "mean of the group", and the second to GRPO. The
    third number is the fraction of groups without gradient. One logit decides whether the
    answer is right, with probability p.
    """
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * group)
    probability = (outcomes * p + (1 - outcomes) * (1 - p)).prod(1)
    factors = []
    for name in ("mean of the group", "GRPO"):
        advantages = ESTIMATORS[name](outcomes)
        estimates = (advantages * (outcomes - p)).mean(1)  # 1 - p, or -p for a wrong answer
        factors.append((probability @ estimates / (p * (1 - p))).item())
    return *factors, probability[estimates == 0].sum().item()


def closed_form(p: float, group: int) -> float:
    """The same factor from the binomial distribution of the number k of right answers."""
    total = 0.0
    for k in range(group + 1):
        chance = math.comb(group, k) * p**k * (1 - p) ** (group - k)
        total += chance * math.sqrt(k * (group - k) * group * (group - 1)) / group**2
    return total / (p * (1 - p))


def draw() -> dict[float, tuple[float, float, float]]:
    """Draw how strongly a prompt counts against the probability of a right answer.

    Returns what the figure shows at each probability: the dashed, the solid, the dotted curve.
    """
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gradient", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    ps = [i / 100 for i in range(2, 99)]
    limit = [1 / math.sqrt(p * (1 - p)) for p in ps]
    weights = [closed_form(p, FLIPS) for p in ps]
    axes.plot(ps, limit, ":", color="#52525b", linewidth=2, label="GRPO, very large groups")
    axes.plot(ps, weights, color="#0b6e99", linewidth=2.5, label=f"GRPO, groups of {FLIPS}")
    plain = [(FLIPS - 1) / FLIPS] * len(ps)
    axes.plot(ps, plain, "--", color="#c2410c", linewidth=2, label="only the mean subtracted")
    axes.set(xlabel="probability of a right answer", ylabel="factor of the gradient")
    axes.set(xlim=(0, 1), ylim=(0, 5))
    axes.legend(frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("policy_gradient.svg", transparent=True, metadata={"Date": None})
    return {p: row for p, *row in zip(ps, plain, weights, limit, strict=True)}


def main() -> None:
    drawn = draw()
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(VOCABULARY + 1, VOCABULARY, generator=rng, dtype=torch.float64)
    rows = compare_estimators(weights)
    print(f"all {9**GROUP} groups of {GROUP} answers; the unit of length is the exact gradient")
    print("baseline              length    angle   noise / length")
    for name, (length, angle, noise) in rows.items():
        print(f"{name:20} {length:7.3f} {angle:7.1f}° {noise:16.2f}")

    for name in ("no baseline", "constant 0.5", "mean of the others"):
        assert abs(rows[name][0] - 1) < 1e-6 and rows[name][1] < 1e-4  # unbiased
    assert abs(rows["mean of the group"][0] - (GROUP - 1) / GROUP) < 1e-6
    assert rows["mean of the group"][1] < 1e-4  # only the length is different
    assert rows["GRPO"][1] > 5 and rows["best of the group"][1] > 2  # a different direction
    assert rows["mean of the others"][2] < rows["no baseline"][2] / 1.4
    assert abs(rows["mean of the group"][2] - rows["mean of the others"][2]) < 1e-9

    print(f"\nrewards of 0 and 1, groups of {FLIPS}: how strongly one prompt counts")
    print("P(right)   mean only   GRPO   1/sqrt(p(1-p))   groups without gradient")
    for p in (1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16):
        plain, factor, silent = weight_of_prompt(p, FLIPS)
        assert abs(plain - (FLIPS - 1) / FLIPS) < 1e-12  # the same for every prompt
        assert abs(factor / closed_form(p, FLIPS) - 1) < 1e-3  # 1e-4 is added to the deviation
        assert abs(silent - p**FLIPS - (1 - p) ** FLIPS) < 1e-12
        many = 1 / math.sqrt(p * (1 - p))
        print(f"{p:8.4f} {plain:11.3f} {factor:6.2f} {many:16.2f} {silent:25.1%}")
    for p in (0.02, 0.25, 0.5, 0.9):
        many = [*weight_of_prompt(p, FLIPS)[:2], (p - p**2) ** -0.5]
        assert all(abs(a / b - 1) < 1e-3 for a, b in zip(drawn[p], many, strict=True))
    assert abs(closed_form(0.25, 1000) / (1 / math.sqrt(0.25 * 0.75)) - 1) < 1e-2


if __name__ == "__main__":
    main()
