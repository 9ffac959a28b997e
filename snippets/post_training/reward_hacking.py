"""Shows a reward that goes up while quality goes down, because the checker has a gap.

The flawed checker reports an error only if it finds a wrong bracket. An answer that ends too
early contains no wrong bracket. Look at the quality, which is the fraction of right answers,
and at the length of the answers. The second run uses a checker that also tests that every
bracket is closed.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, PROMPTS, GROUP, UPDATES = 4, 16, 8, 2  # UPDATES: optimizer steps for each batch
SHOWN = (0, 5, 20)  # the steps after which the policy is measured


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


# --8<-- [start:flawed]
def flawed_rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1.0 unless an answer contains a wrong bracket before its END, [n]."""
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    wrong = (answers != right) & (answers != END) & (answers != PAD)
    return (~wrong.any(1)).float()


# --8<-- [end:flawed]


def imitate(policy: Policy, rng: torch.Generator, steps: int = 80) -> None:
    """Pretrain on answers of mixed quality: right, cut off, or with random brackets."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = draw_prompts(64, LENGTH, rng)
        answers = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
        answers[:16, :LENGTH] = torch.randint(4, 6, (16, LENGTH), generator=rng)
        end = torch.randint(0, LENGTH, (16, 1), generator=rng)  # the next 16 rows end early
        late = torch.arange(LENGTH + 1) - end
        answers[16:32] = answers[16:32].masked_fill(late == 0, END).masked_fill(late > 0, PAD)
        mask = answer_mask(answers)
        loss = -(log_probs_of(policy, prompts, answers) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def measure(policy: Policy, score: Callable) -> tuple[float, float, float]:
    """Return the mean reward, the mean quality and the mean length of 800 answers."""
    rng = torch.Generator().manual_seed(1)
    prompts = draw_prompts(800, LENGTH, rng)
    answers, _ = sample(policy, prompts, LENGTH + 1, rng)
    quality = rewards_of(prompts, answers).mean().item()
    length = (answers >= CLOSING).sum(1).float().mean().item()
    rewards = score(prompts, answers)
    assert (rewards >= rewards_of(prompts, answers)).all()  # no checker rejects a right answer
    return rewards.mean().item(), quality, length


def check_the_checkers() -> None:
    """Give the right answer to the prompt "([[[" and four bad answers to both checkers."""
    cases = {  # an answer, and its rewards from the flawed and from the right checker
        "]]])$": (1, 1),
        "$....": (1, 0),  # an empty answer
        "]]$..": (1, 0),  # an answer that is cut off
        "([[[$": (0, 0),  # a copy of the prompt
        "]]]]$": (0, 0),  # one bracket is wrong
    }
    for text, expected in cases.items():
        prompt, answer = ([[TOKENS.index(c) for c in row]] for row in ("([[[", text))
        tensors = torch.tensor(prompt), torch.tensor(answer)
        found = tuple(int(score(*tensors)) for score in (flawed_rewards, rewards_of))
        assert found == expected, (text, found)


def main() -> None:
    torch.set_num_threads(1)
    check_the_checkers()
    checkers = {"finds no error": flawed_rewards, "everything is closed": rewards_of}
    torch.manual_seed(0)
    start, rows = Policy(), {}
    imitate(start, torch.Generator().manual_seed(0))
    print("checker                step   reward   quality   brackets in an answer")
    for name, score in checkers.items():
        policy, rng = copy.deepcopy(start), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
        for step in range(SHOWN[-1] + 1):
            if step in SHOWN:
                rows[name, step] = reward, quality, length = measure(policy, score)
                print(f"{name:22} {step:4}    ≈{reward:.2f}     ≈{quality:.2f}   ≈{length:.1f}")
            grpo_step(policy, optimizer, rng, score)

    flawed, fixed = ([rows[name, step] for step in SHOWN] for name in checkers)
    assert flawed[-1][0] > 0.95 > flawed[0][0] + 0.2  # the reward goes up
    assert flawed[-1][1] < 0.15 < flawed[0][1] - 0.1  # and the quality goes down
    assert flawed[-1][2] < 2 and fixed[-1][2] > 3.8  # short with the flaw, long without it
    assert 3.9 < fixed[-1][2] <= LENGTH  # END is no bracket, so a right answer has four
    assert fixed[0][1:] == flawed[0][1:] and fixed[-1][1] > 0.9  # both runs start equally


if __name__ == "__main__":
    main()
