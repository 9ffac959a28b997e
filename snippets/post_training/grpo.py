"""Trains a small transformer with GRPO until it closes brackets in the right order.

Pretraining teaches only the format: closing brackets in a random order, then END. GRPO then
samples eight answers to each prompt, and a checker gives the reward 1 or 0. Look at the exact
reward of each seed, which is computed from all 16 prompts and not from samples. Draws grpo.svg.
"""

import copy
import itertools
import statistics

import matplotlib
import torch
import torch.nn.functional as F
from torch import nn

matplotlib.use("svg")
import matplotlib.pyplot as plt

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, PROMPTS, GROUP, UPDATES = 4, 16, 8, 2  # UPDATES: optimizer steps for each batch
PRETRAINING, STEPS, SEEDS = 40, 30, range(5)


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


@torch.no_grad()
def sample(policy: Policy, prompts: torch.Tensor, new: int, rng: torch.Generator):
    """Sample answers of at most `new` tokens with a KV cache.

    Returns the answers [n, new] (PAD after END) and the log-probability of each token [n, new].
    """
    caches: list[list] = [[] for _ in policy.blocks]
    tokens, answers, log_probs = prompts, [], []
    ended = torch.zeros(len(prompts), 1, dtype=torch.bool)
    for _ in range(new):
        scores = policy(tokens, caches)[:, -1].log_softmax(-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=rng).masked_fill(ended, PAD)
        answers.append(tokens)
        log_probs.append(scores.gather(1, tokens).masked_fill(ended, 0.0))
        ended = ended | (tokens == END)
    return torch.cat(answers, 1), torch.cat(log_probs, 1)


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


# --8<-- [start:grpo_step]
def grpo_step(policy: Policy, optimizer, rng: torch.Generator, score=rewards_of) -> float:
    """Sample a batch of groups, score it, and update the policy. Returns the mean reward."""
    prompts = draw_prompts(PROMPTS, LENGTH, rng).repeat_interleave(GROUP, 0)  # [128, 4]
    answers, old = sample(policy, prompts, LENGTH + 1, rng)  # [128, 5] each
    rewards = score(prompts, answers)
    advantages, mask = group_advantages(rewards, GROUP), answer_mask(answers)
    for _ in range(UPDATES):
        new = log_probs_of(policy, prompts, answers)
        loss = clipped_loss(new, old, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return rewards.mean().item()


# --8<-- [end:grpo_step]


def every_prompt(length: int) -> torch.Tensor:
    """All rows of `length` opening brackets, [2 ** length, length]."""
    pairs = itertools.product((OPENING, OPENING + 1), repeat=length)
    return torch.tensor(list(pairs))


@torch.no_grad()
def exact_rewards(policy: Policy, prompts: torch.Tensor) -> torch.Tensor:
    """The probability of the right answer to each prompt, which is its expected reward."""
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    return log_probs_of(policy, prompts, right).sum(1).exp()


def is_balanced(prompt: list[int], answer: list[int]) -> bool:
    """Check an answer with a stack of open brackets. The answer must contain END."""
    stack: list[int] = []
    for token in [*prompt, *answer]:
        if token == END:
            return not stack
        if token in (OPENING, OPENING + 1):
            stack.append(token)
        elif token == PAD or not stack or stack.pop() + 2 != token:
            return False
    return False


def check_checker() -> int:
    """Compare rewards_of with is_balanced on every prompt and answer of length 2.

    The exact reward must be the probability of the answers that have the reward 1.
    """
    answers, pairs = torch.tensor(list(itertools.product(range(len(TOKENS)), repeat=3))), 0
    torch.manual_seed(0)
    policy = Policy()
    for prompt in every_prompt(2):
        rewards = rewards_of(prompt.expand(len(answers), -1), answers)
        expected = [is_balanced(prompt.tolist(), answer) for answer in answers.tolist()]
        assert rewards.bool().tolist() == expected and sum(expected) == 1
        pairs += len(expected)
        with torch.no_grad():
            each = log_probs_of(policy, prompt.expand(len(answers), -1), answers).sum(1).exp()
        torch.testing.assert_close(exact_rewards(policy, prompt[None]), each @ rewards[:, None])
    return pairs


def check_groups(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the rewards, and compare the groups and their advantages with a plain loop."""
    groups = prompts.view(PROMPTS, GROUP, LENGTH)
    assert (groups == groups[:, :1]).all()
    rewards = rewards_of(prompts, answers)
    advantages = group_advantages(rewards, GROUP).tolist()
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP].tolist()
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        expected = [(reward - mean) / (deviation + 1e-4) for reward in group]
        difference = torch.tensor(advantages[start : start + GROUP]) - torch.tensor(expected)
        assert difference.abs().max() < 1e-4, (
            "group_advantages differs from a loop that divides by the standard deviation; "
            "to train with other advantages, call learn with score=rewards_of"
        )
    return rewards


def check_samples(policy: Policy, rng: torch.Generator) -> None:
    """Compare 100 samples per prompt with one forward pass and with the exact rewards."""
    prompts = every_prompt(LENGTH)
    exact = exact_rewards(policy, prompts)
    repeated = prompts.repeat_interleave(100, 0)
    answers, old = sample(policy, repeated, LENGTH + 1, rng)
    with torch.no_grad():
        new = log_probs_of(policy, repeated, answers) * answer_mask(answers)
    torch.testing.assert_close(old, new, rtol=1e-4, atol=1e-4)
    rewards = rewards_of(repeated, answers)
    error = ((exact * (1 - exact)).mean() / len(rewards)).sqrt()  # the standard error
    assert (rewards.mean() - exact.mean()).abs() < 5 * error + 10 / len(rewards)


def check_step() -> None:
    """Repeat one step of GRPO with a loop over the answers, which clips each token itself."""
    torch.manual_seed(0)
    policy, rng = Policy(), torch.Generator().manual_seed(0)
    pretrain(policy, LENGTH, rng, PRETRAINING)
    other, again = copy.deepcopy(policy), torch.Generator()
    again.set_state(rng.get_state())
    grpo_step(policy, torch.optim.SGD(policy.parameters(), lr=1.0), rng)

    prompts = draw_prompts(PROMPTS, LENGTH, again).repeat_interleave(GROUP, 0)
    answers, old = sample(other, prompts, LENGTH + 1, again)
    advantages = group_advantages(rewards_of(prompts, answers), GROUP).tolist()
    weights, clipped = list(other.parameters()), []
    for _ in range(UPDATES):
        new, total, tokens, flat = log_probs_of(other, prompts, answers), 0.0, 0, 0
        for answer, a, now, before in zip(answers.tolist(), advantages, new, old, strict=True):
            length = answer.index(END) + 1 if END in answer else len(answer)
            tokens += length
            if a:
                ratios = (now[:length] - before[:length]).exp()
                moved = ratios > 1.2 if a > 0 else ratios < 0.8  # these have no gradient
                total, flat = total + a * ratios[~moved].sum(), flat + int(moved.sum())
        clipped.append(flat)
        gradients = torch.autograd.grad(-total / tokens, weights)
        norm = sum(float(each.square().sum()) for each in gradients) ** 0.5
        with torch.no_grad():
            for weight, each in zip(weights, gradients, strict=True):
                weight -= each / max(1.0, norm)
    assert clipped[0] == 0 < clipped[-1], f"clipped tokens in each update: {clipped}"
    for one, two in zip(policy.parameters(), weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def learn(seed: int, steps: int, score=check_groups) -> tuple[list[float], torch.Tensor]:
    """Pretrain and train one policy. Returns its learning curve and its last exact rewards."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    policy = Policy()
    pretrain(policy, LENGTH, rng, PRETRAINING)
    prompts = every_prompt(LENGTH)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    curve = [exact_rewards(policy, prompts).mean().item()]
    for _ in range(steps):
        grpo_step(policy, optimizer, rng, score)
        curve.append(exact_rewards(policy, prompts).mean().item())
    check_samples(policy, rng)
    return curve, exact_rewards(policy, prompts)


def shuffled(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The same rewards, but each reward belongs to a different answer."""
    return rewards_of(prompts, answers).roll(GROUP // 2 + 1)


def check_control() -> None:
    """The control must have the same rewards, but many of them at other answers."""
    prompts = every_prompt(LENGTH).repeat_interleave(GROUP, 0)
    answers = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    answers[::3, 0] = PAD
    true, exchanged = rewards_of(prompts, answers), shuffled(prompts, answers)
    assert sorted(true.tolist()) == sorted(exchanged.tolist())
    assert (true != exchanged).float().mean() > 0.3


def draw(curves: list[list[float]], control: list[float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "grpo", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    columns = list(zip(*curves, strict=True))
    steps = range(len(columns))
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axes.fill_between(steps, low, high, color="#0b6e99", alpha=0.2, label="range of the seeds")
    for curve in curves:
        axes.plot(steps, curve, color="#0b6e99", linewidth=0.8)
    mean = [sum(c) / len(c) for c in columns]
    axes.plot(steps, mean, color="#0b6e99", linewidth=2.5, label=f"mean of {len(curves)} seeds")
    axes.plot(control, "--", color="#c2410c", linewidth=2, label="rewards exchanged")
    axes.set(xlabel="GRPO step", ylabel="expected reward", ylim=(0, 1.05), xlim=(0, STEPS))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.12))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig("grpo.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    check_step()
    check_control()
    print(f"the checker agrees with a stack on {check_checker()} pairs of prompt and answer")
    half = STEPS // 2
    columns = f"after {half} steps   after {STEPS} steps   lowest of 16 prompts"
    print(f"seed   reward before   {columns}")
    curves = []
    for seed in SEEDS:
        curve, exact = learn(seed, STEPS)
        curves.append(curve)
        row = f"{seed:4}   ≈{curve[0]:<12.3f}   ≈{curve[half]:<13.2f}   ≈{curve[-1]:<13.2f}"
        lowest = exact.min()
        print(f"{row}   ≈{lowest:.2f}")
        assert (exact >= lowest).all() and abs(exact.mean() - curve[-1]) < 1e-6
        assert len(exact) == len(every_prompt(LENGTH).unique(dim=0)) == 16
        chance = 0.5**LENGTH  # each bracket is right with probability 1/2
        assert abs(curve[0] - chance) < 0.02, f"before GRPO: {curve[0]:.3f}, not {chance:.3f}"
    control, _ = learn(0, half, shuffled)
    end = control[half]
    print(f"control: rewards exchanged between answers, after {half} steps ≈{end:.3f}")
    draw(curves, control)
    assert len({curve[0] for curve in curves}) == len(SEEDS), "each seed needs its own policy"
    # the control starts from the policy of seed 0, and its training changes this policy
    assert control[0] == curves[0][0] != end
    ends = [curve[STEPS] for curve in curves]
    assert min(ends) > 0.2 and sum(end > 0.9 for end in ends) >= 3, (
        "with the recorded settings, every seed reaches a reward of 0.2, and at least three"
        f" seeds reach 0.9; your settings give {', '.join(f'{end:.2f}' for end in ends)}"
    )
    assert max(control) < 0.15 and end < curves[0][half] / 2, (
        "with the recorded settings, the control stays below 0.15 and below half of seed 0;"
        f" your settings give {end:.2f} and {curves[0][half]:.2f}"
    )


if __name__ == "__main__":
    main()
