"""Shows how padding with END hides END from the loss, so that the policy never learns to stop.

Two policies learn from the same answers, which are padded with END because the tokenizer has no
token for padding. The first mask leaves out every END. The second mask keeps the first END of
each answer. Look at the fraction of answers that end, and at the reward after GRPO.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, PADDED, PROMPTS, GROUP, UPDATES = 4, 8, 16, 8, 2
STEPS = 18


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


# --8<-- [start:masks]
def mask_without_padding(answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each token that is not padding. It is wrong if the padding token is END."""
    padding = END
    return (answers != padding).float()


MASKS: dict[str, Callable] = {
    "every END left out": mask_without_padding,
    "first END": answer_mask,
}
# --8<-- [end:masks]


def supervise(policy: Policy, mask_of: Callable, rng: torch.Generator, steps: int = 60) -> int:
    """Train on random closing brackets. Returns the number of END tokens in the loss."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    ends = 0
    for _ in range(steps):
        prompts = draw_prompts(64, LENGTH, rng)
        closing = torch.randint(CLOSING, len(TOKENS), (64, LENGTH), generator=rng)
        answers = F.pad(closing, (0, PADDED - LENGTH), value=END)  # padded with END
        mask = mask_of(answers)
        ends += int(((answers == END) * mask).sum())
        loss = -(log_probs_of(policy, prompts, answers) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ends


def check_masks() -> None:
    """Compare both masks with a loop over answers of different lengths."""
    answers = torch.tensor([[4, 5, END, END], [END, END, END, END], [4, 4, 5, 4]])
    without_end, with_first = (mask_of(answers) for mask_of in MASKS.values())
    for row, without, first in zip(answers.tolist(), without_end, with_first, strict=True):
        length = row.index(END) + 1 if END in row else len(row)
        assert first.tolist() == [1.0] * length + [0.0] * (len(row) - length)
        brackets = sum(token != END for token in row)
        assert without.tolist() == [1.0] * brackets + [0.0] * (len(row) - brackets)


def main() -> None:
    torch.set_num_threads(1)
    check_masks()
    print("mask in the loss     END in loss   answers that end   tokens   reward after GRPO")
    rows = {}
    for name, mask_of in MASKS.items():
        torch.manual_seed(0)
        rng = torch.Generator().manual_seed(0)
        policy = Policy()
        ends = supervise(policy, mask_of, rng)
        prompts = draw_prompts(400, LENGTH, rng)
        answers, _ = sample(policy, prompts, PADDED, rng)
        ended = (answers == END).any(1).float().mean().item()
        tokens = answer_mask(answers).sum(1).mean().item()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
        rewards = [grpo_step(policy, optimizer, rng) for _ in range(STEPS)]
        rows[name] = (ends, ended, tokens, rewards)
        columns = f"{ends:11,}           ≈{ended:6.1%}      ≈{tokens:.1f}"
        print(f"{name:20} {columns}           ≈{rewards[-1]:.2f}")
    without, first = rows.values()
    assert without[0] == 0 and first[0] == 64 * 60  # one END for each answer
    assert without[1] < 0.1 and first[1] > 0.9
    assert without[2] > PADDED - 0.5 and abs(first[2] - LENGTH - 1) < 0.3
    assert len(without[3]) == len(first[3]) == STEPS
    assert max(without[3]) < 0.05 and first[3][-1] > 0.3  # without END, there is never a reward


if __name__ == "__main__":
    main()
