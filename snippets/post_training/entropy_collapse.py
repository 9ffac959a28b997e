"""Shows how training stops if all answers of a group get the same reward.

Eight updates on each batch without clipping change the policy too much. With most seeds, the
entropy of the policy collapses, which means that the policy repeats a few answers. Look at the
silent groups, whose rewards are all equal, and at the last reward. The entropy bonus of the
last row does not help.
"""

import copy
import itertools
import math
import statistics

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, PROMPTS, GROUP, UPDATES = 4, 16, 8, 8  # UPDATES: optimizer steps for each batch
PRETRAINING, EARLY, STEPS, SEEDS = 40, 4, 6, range(3)
CLIP, NO_CLIP = 0.2, 1e6


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


def every_prompt(length: int) -> torch.Tensor:
    """All rows of `length` opening brackets, [2 ** length, length]."""
    pairs = itertools.product((OPENING, OPENING + 1), repeat=length)
    return torch.tensor(list(pairs))


@torch.no_grad()
def exact_rewards(policy: Policy, prompts: torch.Tensor) -> torch.Tensor:
    """The probability of the right answer to each prompt, which is its expected reward."""
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    return log_probs_of(policy, prompts, right).sum(1).exp()


def mean_entropy(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the next token, a mean over all tokens of the answers."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    scores, mask = logits.log_softmax(-1), answer_mask(answers)
    return -((scores.exp() * scores).sum(-1) * mask).sum() / mask.sum()


def start(seed: int) -> tuple[Policy, torch.Tensor]:
    """Return a policy that has learned the format, and the state of its random numbers."""
    torch.manual_seed(seed)
    policy, rng = Policy(), torch.Generator().manual_seed(seed)
    pretrain(policy, LENGTH, rng, PRETRAINING)
    return policy, rng.get_state()


def train(policy: Policy, state: torch.Tensor, clip: float, bonus: float):
    """Train a copy. Return entropy, silent groups and reward after 0, 4 and 6 batches."""
    policy, rows = copy.deepcopy(policy), []
    rng = torch.Generator()
    rng.set_state(state)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(STEPS + 1):
        prompts = draw_prompts(PROMPTS, LENGTH, rng).repeat_interleave(GROUP, 0)
        answers, old = sample(policy, prompts, LENGTH + 1, rng)
        rewards = rewards_of(prompts, answers)
        advantages, mask = group_advantages(rewards, GROUP), answer_mask(answers)
        if step in (0, EARLY, STEPS):
            with torch.no_grad():
                entropy = mean_entropy(policy, prompts, answers).item()
            silent = (advantages.view(-1, GROUP) == 0).all(1)  # no gradient
            grouped = rewards.view(-1, GROUP)
            assert torch.equal(silent, (grouped == grouped[:, :1]).all(1))  # equal rewards
            reward = exact_rewards(policy, every_prompt(LENGTH)).mean().item()
            rows.append((entropy, silent.float().mean().item(), reward))
        for _ in range(UPDATES if step < STEPS else 0):
            new = log_probs_of(policy, prompts, answers)
            loss = clipped_loss(new, old, advantages, mask, clip)
            if bonus:
                loss = loss - bonus * mean_entropy(policy, prompts, answers)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    return rows


def main() -> None:
    torch.set_num_threads(1)
    cases = {  # clip, weight of the entropy bonus, seeds
        "no clipping": (NO_CLIP, 0.0, SEEDS),
        f"clipped at {CLIP}": (CLIP, 0.0, SEEDS),
        "bonus, no clipping": (NO_CLIP, 0.3, SEEDS[:1]),
    }
    print(f"{UPDATES} updates per batch     entropy after batches   silent groups     reward")
    steps = f"    0      {EARLY}      {STEPS}       {EARLY}     {STEPS}       {STEPS}"
    print(f"objective          seed {steps}")
    starts = [start(seed) for seed in SEEDS]
    rows = {}
    for name, (clip, bonus, seeds) in cases.items():
        assert ("no clipping" in name) == (clip == NO_CLIP)
        for seed in seeds:
            rows[name, seed] = first, early, last = train(*starts[seed], clip, bonus)
            entropies = " ".join(f"≈{row[0]:.2f}" for row in (first, early, last))
            silent = f"≈{early[1]:<5.0%} ≈{last[1]:<5.0%}"
            print(f"{name:18} {seed:4}   {entropies}     {silent}   ≈{last[2]:.2f}")
            # at first, four of five tokens are one of two brackets with equal probability
            assert abs(first[0] - LENGTH * math.log(2) / (LENGTH + 1)) < 0.12
    free, clipped = ([rows[name, seed] for seed in SEEDS] for name in list(cases)[:2])
    # each seed has its own policy, and both objectives start from the same policy and samples
    assert [row[0] for row in free] == [row[0] for row in clipped]
    assert len({row[0][0] for row in free}) == len(SEEDS)
    silent = [statistics.fmean(row[1][1] for row in each) for each in (free, clipped)]
    assert silent[0] > 0.6 and silent[0] > silent[1] + 0.3  # after four batches
    reward = [statistics.fmean(row[-1][2] for row in each) for each in (free, clipped)]
    assert reward[1] > reward[0] + 0.25  # clipping leads to a higher reward
    lowest = [min(row[1][0] for row in each) for each in (free, clipped)]
    assert lowest[0] < 0.25 and lowest[0] < lowest[1]  # the entropy collapses
    bonus = rows["bonus, no clipping", SEEDS[0]][-1]
    print(f"the largest entropy of six tokens: {math.log(len(TOKENS)):.2f}")
    assert bonus[0] > 0.9 * math.log(len(TOKENS)) and bonus[2] < 0.01  # random tokens


if __name__ == "__main__":
    main()
