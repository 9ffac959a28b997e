"""Resumes a GRPO job from a checkpoint, and shows three mistakes that change its KL.

A penalty keeps the policy near a reference, which is the policy before GRPO. The checkpoint is
complete, but three of the resumed jobs do not load all of it. "Reported" is the KL to the
reference that the job uses. "True" is the KL to the right reference. The reward is exact.
The options --seed 1 to --seed 4 repeat the experiment with other random numbers.
"""

import argparse
import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, PROMPTS, GROUP, BETA = 4, 16, 8, 0.1  # BETA: the weight of the KL penalty
PRETRAINING, SAVED, MORE, RATE = 40, 40, 8, 3e-3  # steps before and after the resume, rate
MISTAKES = ("none", "optimizer not loaded", "reference = policy", "reference not loaded")


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


def penalty_of(new: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor):
    """The KL penalty of GRPO from the log-probabilities of sampled tokens. Never negative."""
    gap = reference - new
    return ((gap.exp() - gap - 1) * mask).sum() / mask.sum()


class Job:
    """A policy, its reference, the optimizer and the random numbers of one training job."""

    def __init__(self, policy: Policy, reference: Policy, seed: int) -> None:
        self.policy, self.reference = policy, reference
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
        self.rng = torch.Generator().manual_seed(seed)

    # --8<-- [start:step]
    def step(self) -> None:
        prompts = draw_prompts(PROMPTS, LENGTH, self.rng).repeat_interleave(GROUP, 0)
        answers, old = sample(self.policy, prompts, LENGTH + 1, self.rng)
        advantages = group_advantages(rewards_of(prompts, answers), GROUP)
        mask = answer_mask(answers)
        with torch.no_grad():
            reference = log_probs_of(self.reference, prompts, answers)
        new = log_probs_of(self.policy, prompts, answers)
        loss = clipped_loss(new, old, advantages, mask)
        loss = loss + BETA * penalty_of(new, reference, mask)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    # --8<-- [end:step]

    def checkpoint(self) -> dict:
        parts = ("policy", "reference", "optimizer")
        state = {part: getattr(self, part).state_dict() for part in parts}
        return copy.deepcopy({**state, "rng": self.rng.get_state()})


@torch.no_grad()
def kl_of(policy: Policy, reference: Policy) -> float:
    """KL per token, summed over the vocabulary, on 512 answers of the policy."""
    rng = torch.Generator().manual_seed(99)
    prompts = draw_prompts(512, LENGTH, rng)
    answers, _ = sample(policy, prompts, LENGTH + 1, rng)
    tokens = torch.cat([prompts, answers], 1)[:, :-1]
    p, q = (model(tokens)[:, LENGTH - 1 :].log_softmax(-1) for model in (policy, reference))
    mask = answer_mask(answers)
    return (((p.exp() * (p - q)).sum(-1) * mask).sum() / mask.sum()).item()


@torch.no_grad()
def sampled_kl(policy: Policy, reference: Policy) -> tuple[float, float]:
    """Estimate the same KL from sampled tokens only: as a mean of logarithms, as a penalty."""
    rng = torch.Generator().manual_seed(98)
    prompts = draw_prompts(2048, LENGTH, rng)
    answers, log_probs = sample(policy, prompts, LENGTH + 1, rng)
    mask = answer_mask(answers)
    known = log_probs_of(reference, prompts, answers)
    gaps = (log_probs - known) * mask
    return (gaps.sum() / mask.sum()).item(), penalty_of(log_probs, known, mask).item()


# --8<-- [start:resume]
def resume(state: dict, mistake: str) -> Job:
    """Build a job with random weights, and load the checkpoint with one mistake."""
    torch.manual_seed(7)
    job = Job(Policy(), Policy(), seed=0)
    job.policy.load_state_dict(state["policy"])
    if mistake != "reference not loaded":
        source = "policy" if mistake == "reference = policy" else "reference"
        job.reference.load_state_dict(state[source])
    if mistake != "optimizer not loaded":
        job.optimizer.load_state_dict(state["optimizer"])
    job.rng.set_state(state["rng"])
    return job


# --8<-- [end:resume]


def distance(policy: Policy, other: Policy) -> float:
    """Euclidean distance between all weights of two policies."""
    pairs = zip(policy.parameters(), other.parameters(), strict=True)
    return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=0, help="0 is recorded, and 0 to 4 are tested"
    )
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy, prompts = Policy(), every_prompt(LENGTH)
    pretrain(policy, LENGTH, torch.Generator().manual_seed(seed), PRETRAINING)
    start = copy.deepcopy(policy)
    job = Job(policy, start, seed)
    for _ in range(SAVED):
        job.step()
    state = job.checkpoint()
    saved = copy.deepcopy(policy)
    for _ in range(MORE):
        job.step()  # the job that was never interrupted

    for estimate in sampled_kl(saved, start):
        assert abs(estimate / kl_of(saved, start) - 1) < 0.15

    before = exact_rewards(saved, prompts).mean()
    print(f"the job is resumed after {SAVED} steps, when its expected reward is ≈{before:.3f}")
    print(f"{'':23}after the first update      at resume     after {MORE} steps")
    columns = "length   its KL     reward   reported KL   reported KL   true KL   reward"
    print(f"{'mistake':22} {columns}")
    rows = {}
    for mistake in MISTAKES:
        resumed = resume(state, mistake)
        first = kl_of(resumed.policy, resumed.reference)
        resumed.step()
        length, change = distance(resumed.policy, saved), kl_of(resumed.policy, saved)
        reward = exact_rewards(resumed.policy, prompts).mean().item()
        for _ in range(MORE - 1):
            resumed.step()
        reported, true = kl_of(resumed.policy, resumed.reference), kl_of(resumed.policy, start)
        last = exact_rewards(resumed.policy, prompts).mean().item()
        row = rows[mistake] = (length, change, reward, first, reported, true, last)
        exact = "≈" if first else " "
        columns = "≈{:.3f}   ≈{:.5f}   ≈{:.3f}   " + exact
        columns += "{:.3f}        ≈{:.3f}        ≈{:.3f}    ≈{:.3f}"
        print(f"{mistake:22} {columns.format(*row)}")  # exactly the numbers that are checked
        if mistake == "none":
            assert distance(resumed.policy, job.policy) == 0.0  # equal to the bit
            assert row[6] == exact_rewards(job.policy, prompts).mean().item() != reward
    none, optimizer, same, missing = rows.values()
    # the first update of a new AdamW moves every weight by its learning rate
    count = sum(p.numel() for p in policy.parameters())
    print(f"learning rate times the square root of {count:,} weights: {RATE * count**0.5:.3f}")
    factor = optimizer[1] / none[1]
    print(f"optimizer not loaded: the KL of the first update is ≈{factor:.0f} times as large")
    assert 0.97 < optimizer[0] / (RATE * count**0.5) < 1.03
    assert optimizer[0] > 1.2 * none[0] and factor > 1.5  # for each of the five seeds
    assert optimizer[2] < none[2] - 0.01 and optimizer[2] < before - 0.01  # the reward falls
    assert abs(optimizer[3] - none[3]) < 1e-6  # the KL at the resume does not show the mistake
    assert same[3] == 0.0 and same[4] < none[4] / 4  # the job reports almost no KL
    assert same[5] > 1.01 * none[5]  # and the policy moves further from the right reference
    assert missing[3] > 2.5 * none[3] and none[4] == none[5]


if __name__ == "__main__":
    main()
