"""This program computes the bias and the noise of importance weights exactly, without sampling.

The task is so small that the program can list all answers. It computes the gradient of the
trainer's success by automatic differentiation. Then it computes the mean and the standard
deviation of the gradient that a stale sampler gives, with each kind of importance weight.
The figure shows the weights of the likeliest answers to one prompt.
"""

import copy
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2


class PolicyBlock(nn.Module):
    """A transformer block on [b, s, h] with optional cached keys and values."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], mask: torch.Tensor):
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, heads, s, h / heads]
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """A causal transformer over TOKENS: token numbers [b, s] -> logits [b, s, vocabulary]."""

    def __init__(self, h: int = 32, heads: int = 4, layers: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(TOKENS), h), nn.Embedding(longest, h)
        self.blocks = nn.ModuleList(PolicyBlock(h, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(h), nn.Linear(h, len(TOKENS), bias=False)

    def forward(self, tokens: torch.Tensor, caches: list[list] | None = None) -> torch.Tensor:
        """With `caches` (one list per block), `tokens` continue the sequences in the cache."""
        caches = [[] for _ in self.blocks] if caches is None else caches
        past = caches[0][0].shape[2] if caches[0] else 0
        s = tokens.shape[1]
        mask = torch.ones(s, past + s, dtype=torch.bool, device=tokens.device).tril(past)
        x = self.token(tokens) + self.position.weight[past : past + s]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, mask)
        return self.head(self.norm(x))


def draw_prompts(n: int, length: int, rng: torch.Generator) -> torch.Tensor:
    """Return n random rows of `length` opening brackets, [n, length]."""
    return torch.randint(OPENING, CLOSING, (n, length), generator=rng)


def rewards_of(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1.0 where an answer closes every bracket of its prompt in order and then ends, [n]."""
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    return (answers[:, : right.shape[1]] == right).all(1).float()


def log_probs_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token of the answers in one forward pass, [n, new]."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]


def answer_mask(answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each token up to and including the first END, 0.0 for padding, [n, new]."""
    is_end = (answers == END).int()
    return (is_end.cumsum(1) - is_end == 0).float()


def pretrain(policy: Policy, length: int, rng: torch.Generator, steps: int = 100) -> None:
    """Teach the format and nothing else: random closing brackets, then END."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = draw_prompts(64, length, rng)
        closing = torch.randint(CLOSING, len(TOKENS), (64, length), generator=rng)
        answers = F.pad(closing, (0, 1), value=END)
        loss = -log_probs_of(policy, prompts, answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


WEIGHTS: dict[str, Callable] = {  # d = log π - log μ of each token, 0 after the end, [n, t]
    "no weights": lambda d: torch.ones_like(d),
    "token": lambda d: d.exp(),
    "token, at most 2": lambda d: d.exp().clamp(max=2.0),
    "sequence": lambda d: d.sum(1, keepdim=True).exp().expand_as(d),
    "sequence, 0 above 2": lambda d: (
        (w := d.sum(1, keepdim=True).exp()) * (w <= 2.0)
    ).expand_as(d),
    "sequence, at most 2": lambda d: d.sum(1, keepdim=True).exp().clamp(max=2.0).expand_as(d),
}


def check_weights() -> None:
    """Compare the rules with weights by hand, for token ratios whose product is 6 and 1/4."""
    d = torch.tensor([[4.0, 0.5, 3.0], [0.25, 4.0, 0.25]]).log()
    whole = {"sequence": (6.0, 0.25), "sequence, at most 2": (2.0, 0.25)}
    whole["sequence, 0 above 2"] = 0.0, 0.25
    expected = {name: torch.tensor(pair)[:, None].expand(2, 3) for name, pair in whole.items()}
    expected |= {"no weights": torch.ones(2, 3), "token": d.exp()}
    expected["token, at most 2"] = torch.tensor([[2.0, 0.5, 2.0], [0.25, 2.0, 0.25]])
    for name, rule in WEIGHTS.items():
        torch.testing.assert_close(rule(d), expected[name])


def all_answers(new: int) -> torch.Tensor:
    """Return every answer of `new` tokens that the sampler can draw: only PAD after END."""
    rows = torch.tensor(list(itertools.product(range(len(TOKENS)), repeat=new)))
    return rows[((rows == PAD) | answer_mask(rows).bool()).all(1)]


def token_log_probs(policy: Policy, prompts, answers) -> torch.Tensor:
    """The log-probabilities of the tokens, and 0 after the end, [n, new]."""
    return log_probs_of(policy, prompts, answers) * answer_mask(answers)


def success_of(policy: Policy, prompts, answers) -> torch.Tensor:
    """The exact mean reward over all prompts. The list must contain all right answers."""
    probability = token_log_probs(policy, prompts, answers).sum(1).exp()
    return (probability * rewards_of(prompts, answers)).sum() / len(prompts.unique(dim=0))


def climb(policy: Policy, steps: int, prompts, answers) -> Policy:
    """Return a copy after some steps of Adam on the exact success."""
    policy = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (-success_of(policy, prompts, answers)).backward()
        optimizer.step()
        policy.updates = getattr(policy, "updates", 0) + 1
    return policy


def gradient(value: torch.Tensor, policy: Policy) -> torch.Tensor:
    parameters = list(policy.parameters())
    parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    zeros = (torch.zeros_like(p) for p in parameters)
    return torch.cat(
        [(z if g is None else g).flatten() for g, z in zip(parts, zeros, strict=True)]
    )


@torch.no_grad()
def derivative(policy: Policy, direction: torch.Tensor, prompts, answers) -> torch.Tensor:
    """The derivative of each token's log-probability along a direction of the parameters."""
    start = nn.utils.parameters_to_vector(policy.parameters())
    values = []
    for step in (1e-4, -1e-4):
        nn.utils.vector_to_parameters(start + step * direction, policy.parameters())
        values.append(token_log_probs(policy, prompts, answers))
    nn.utils.vector_to_parameters(start, policy.parameters())
    return (values[0] - values[1]) / 2e-4


def plot_weights(answers: torch.Tensor, mu: torch.Tensor, pi: torch.Tensor) -> None:
    """Draw the probabilities of the answers to one prompt, and their weights."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "svg.fonttype": "none", "svg.hashsalt": "importance_weights", "font.size": 12,
    }  # fmt: skip
    top = pi.argsort(descending=True)[:8]
    names = ["".join(TOKENS[t] for t in row) for row in answers[top].tolist()]
    places = torch.arange(len(top), dtype=torch.float)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    left.barh(places - 0.2, mu[top], 0.38, color="#c2410c", hatch="//", label="sampler, μ")
    left.barh(places + 0.2, pi[top], 0.38, color="#0b6e99", label="trainer, π")
    left.set_yticks(places.tolist(), names)
    left.set(xlabel="probability of the answer", ylabel="answers to the prompt ([(")
    left.legend(frameon=False)
    right.barh(places, (pi / mu)[top], 0.6, color="#6b7280")
    right.axvline(2, color="#c2410c", ls="--", lw=1.5)
    right.text(2.1, 5.5, "limit 2", color="#c2410c", va="center")
    right.set(xlabel="importance weight π / μ")
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("importance_weights.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    check_weights()
    torch.manual_seed(0)
    length = 3
    every = torch.tensor(list(itertools.product((OPENING, OPENING + 1), repeat=length)))
    one = all_answers(length + 1)
    prompts, answers = every.repeat_interleave(len(one), 0), one.repeat(len(every), 1)
    print(f"{len(every)} prompts with {len(one)} answers each")
    rewards = rewards_of(prompts, answers).double()
    right = prompts[rewards == 1], answers[rewards == 1]  # the success depends only on them
    assert len(right[0]) == len(every)

    start = Policy(h=16, layers=1)
    pretrain(start, length, torch.Generator().manual_seed(0))
    trainer = sampler = climb(start.double(), 8, *right)  # μ
    errors, masks, ahead = [], [], []
    for more in (3, 9):
        trainer = climb(trainer, more, *right)  # π, first 3 and then 12 steps later
        # --8<-- [start:exact]
        new = token_log_probs(trainer, prompts, answers)  # log π of each token
        old = token_log_probs(sampler, prompts, answers).detach()  # log μ
        pi, mu = new.sum(1).exp().detach() / len(every), old.sum(1).exp() / len(every)
        torch.testing.assert_close(pi.sum(), torch.tensor(1.0).double())
        baseline = (mu * rewards).view(len(every), -1).sum(1) * len(every)
        advantages = rewards - baseline.repeat_interleave(len(one))
        exact = gradient(success_of(trainer, *right), trainer)
        direction = exact / exact.norm()
        slopes = derivative(trainer, direction, prompts, answers)
        # --8<-- [end:exact]
        # the sampler's mean advantage is zero for each prompt
        assert (mu * advantages).view(len(every), -1).sum(1).abs().max() < 1e-12
        both = [(p * rewards).sum() for p in (mu, pi)]
        print(f"success: ≈{both[0]:.2f} of the sampler, ≈{both[1]:.2f} of the trainer")
        print(f"  {'weights':21}{'largest':9}{'error of the mean':19}noise of one sample")
        error, noise = {}, {}
        for name, rule in WEIGHTS.items():
            # --8<-- [start:row]
            weights = rule(new.detach() - old) * answer_mask(answers)
            # One sample gives the gradient of sum(terms * log π).
            terms = advantages[:, None] * weights
            mean = gradient((mu[:, None] * terms * new).sum(), trainer)
            error[name] = ((mean - exact).norm() / exact.norm()).item()
            along = (terms * slopes).sum(1)  # the part along the exact gradient
            centre = (mu * along).sum()
            noise[name] = ((mu * (along - centre) ** 2).sum().sqrt() / exact.norm()).item()
            # --8<-- [end:row]
            torch.testing.assert_close(centre, mean @ direction, rtol=1e-4, atol=1e-6)
            # the variance is the mean of the squares minus the square of the mean
            variance = (mu * along**2).sum() - (mean @ direction) ** 2
            found = torch.tensor(noise[name]).double() * exact.norm()
            torch.testing.assert_close(found**2, variance, rtol=1e-4, atol=1e-6)
            share = f"≈{error[name]:.0%}" if error[name] > 1e-9 else "0%"
            print(f"  {name:21}{f'≈{weights.max():.1f}':9}{share:19}≈{noise[name]:.1f}")
        assert error["sequence"] < 1e-9, "these weights must give the exact gradient"
        assert error["no weights"] > 1.5 * error["token"] and error["token"] > 0.02
        assert error["token"] < error["token, at most 2"] < error["no weights"]
        assert 0.01 < error["sequence, at most 2"] < error["token"]
        whole = (pi / mu).double()
        torch.testing.assert_close((mu * whole).sum(), torch.tensor(1.0).double())
        assert (mu * whole.clamp(max=2.0) ** 2).sum() <= 2 < whole.max()
        masks.append(error["sequence, 0 above 2"] / error["no weights"])
        assert noise["sequence"] > 1.1 * max(noise["token"], noise["no weights"])
        errors.append(error["no weights"])
        ahead.append(trainer.updates - sampler.updates)
    shown = prompts.eq(torch.tensor([OPENING, OPENING + 1, OPENING])).all(1)
    plot_weights(answers[shown], mu[shown] * len(every), pi[shown] * len(every))
    assert ahead == [3, 12], "the trainer continues from its own weights"
    assert errors[0] < errors[1], "an older sampler must have a larger error"
    assert masks[0] < 0.9 < masks[1], "the mask must help only if the sampler is recent"
    assert noise["sequence, at most 2"] < 0.8 * noise["sequence"]  # of the older sampler


if __name__ == "__main__":
    main()
