"""Reproduces four causes of a NaN in the GRPO loss or in its gradient, and fixes each of them.

Every case has three answers of two tokens and differs from a healthy batch in one detail. The
loss after the fix must equal a loop over the tokens. Look at the third case: its loss is an
ordinary number, and only the gradient is NaN.
"""

import math
from collections.abc import Callable

import torch

CLIP, BETA = 0.2, 0.01  # BETA: the weight of the KL penalty
REWARDS = torch.tensor([1.0, 0.0, 0.0])
MASK = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])  # the third answer has one token
# the logarithms of the ratios: the clip acts on the second token of the first two answers
MOVED = torch.tensor([[0.1, 0.3], [0.1, -0.3], [0.1, 0.1]])
TOKENS = torch.tensor([[[0], [1]], [[2], [3]], [[1], [0]]])
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """GRPO: each reward minus its group's mean, divided by the group's standard deviation."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def clipped_loss(new, old, advantages, mask, clip: float = 0.2) -> torch.Tensor:
    """The clipped objective of PPO with its sign reversed, a mean over all answer tokens.

    `new` and `old` are log-probabilities [n, t], `advantages` is [n], `mask` is [n, t].
    """
    ratio = (new - old).exp()
    a = advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return -(objective * mask).sum() / mask.sum()


def make_logits() -> torch.Tensor:
    """Logits [3, 2, 4] of a vocabulary of four tokens."""
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))


def pick(log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs.gather(2, TOKENS)[..., 0]


def padding(logits: torch.Tensor, fixed: bool) -> Batch:
    """The sampler stores -inf for padding. The ratio is then inf, and inf * 0 is NaN."""
    new = pick(logits.log_softmax(-1))
    old = (new.detach() - MOVED).masked_fill(MASK == 0, -math.inf)
    if fixed:  # replace the padding before the subtraction, because the mask comes too late
        old = old.masked_fill(MASK == 0, 0.0)
    return new, old, old, group_advantages(REWARDS, 3)


def equal_rewards(logits: torch.Tensor, fixed: bool) -> Batch:
    """All rewards of a group are equal, so the standard deviation is 0, and 0 / 0 is NaN."""
    rewards = torch.ones(3)
    advantages = (rewards - rewards.mean()) / rewards.std()
    if fixed:
        advantages = group_advantages(rewards, 3)  # adds 1e-4 to the standard deviation
    new = pick(logits.log_softmax(-1))
    old = new.detach() - MOVED
    return new, old, old, advantages


def log_of_zero(logits: torch.Tensor, fixed: bool) -> Batch:
    """A probability below the smallest fp16 number becomes 0, and its logarithm is -inf."""
    logits = logits - 20.0 * torch.nn.functional.one_hot(TOKENS[0, 0], 4)  # token 0 is rare
    assert logits.softmax(-1).log().isfinite().all()  # in float32, no probability is 0
    new = pick(logits.half().softmax(-1).log().float())
    if fixed:
        new = pick(logits.log_softmax(-1))  # one operation, in float32
    old = pick(logits.detach().log_softmax(-1)) - MOVED
    return new, old, old, group_advantages(REWARDS, 3)


def top_p(logits: torch.Tensor, fixed: bool) -> Batch:
    """The trainer cuts tokens off by its own probabilities, and cuts off a sampled token."""
    by_sampler, by_trainer = torch.zeros(2, 3, 2, 4, dtype=torch.bool)
    by_sampler[0, 0, 3] = by_trainer[0, 0, 0] = True  # the sampled token is token 0
    cut = by_sampler if fixed else by_trainer  # send the sampler's set with the answer
    new = pick(logits.masked_fill(cut, -math.inf).log_softmax(-1))
    full = logits.detach().masked_fill(by_sampler, -math.inf)
    old = pick(full.log_softmax(-1)) - MOVED
    return new, old, old, group_advantages(REWARDS, 3)


def loss_of(new, old, reference, advantages, beta: float) -> torch.Tensor:
    """The clipped loss plus a KL penalty that is never negative."""
    loss = clipped_loss(new, old, advantages, MASK, CLIP)
    if beta:
        gap = reference - new
        loss = loss + beta * ((gap.exp() - gap - 1) * MASK).sum() / MASK.sum()
    return loss


def loop_loss(new, old, reference, advantages, beta: float) -> float:
    """The same loss with a loop over the tokens, without any padding."""
    terms = []
    for row, column in MASK.nonzero().tolist():
        ratio = math.exp(new[row, column].item() - old[row, column].item())
        a = advantages[row].item()
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        gap = reference[row, column].item() - new[row, column].item()
        penalty = math.exp(gap) - gap - 1
        terms.append(beta * penalty - min(ratio * a, clipped * a))
    return sum(terms) / len(terms)


def run(case: Callable, fixed: bool, beta: float):
    """Return the inputs of the loss, the loss, and its gradient for the logits."""
    logits = make_logits().requires_grad_()
    batch = case(logits, fixed)
    loss = loss_of(*batch, beta)
    return batch, loss.item(), torch.autograd.grad(loss, logits)[0]


def describe(gradient: torch.Tensor) -> str:
    return "finite" if gradient.isfinite().all() else "not finite"


def main() -> None:
    print("case               loss    gradient       fixed: loss   gradient   loop")
    seen = {}
    for case, beta in ((padding, 0.0), (equal_rewards, 0.0), (log_of_zero, 0.0), (top_p, BETA)):
        _, loss, gradient = run(case, False, beta)
        batch, right, fixed_gradient = run(case, True, beta)
        expected = loop_loss(*batch, beta)
        assert not gradient.isfinite().all() and fixed_gradient.isfinite().all()
        assert math.isclose(right, expected, abs_tol=1e-6)
        assert fixed_gradient.abs().sum() > 0 or case is equal_rewards
        seen[case] = loss
        name = case.__name__.replace("_", " ")
        row = f"{name:14} {loss:8.3f}    {describe(gradient):12} {right + 0.0:13.3f}"
        print(f"{row}   {describe(fixed_gradient)} {expected + 0.0:8.3f}")
    assert math.isnan(seen[padding]) and math.isnan(seen[equal_rewards])
    assert math.isfinite(seen[log_of_zero])  # only the gradient shows the fault
    assert math.isnan(seen[top_p])  # the KL penalty contains inf - inf


if __name__ == "__main__":
    main()
