"""Shows that text is not enough: the trainer can split the same text into different tokens.

The vocabulary has merged tokens such as "))". The sampler may generate "))" as one token or as
two tokens. If it sends text, the trainer's tokenizer always chooses the longest token. Look at
the answers whose tokens change although the text is equal, and at the gradients.
"""

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]", "))", "]]", ")]", "])"]  # the last four are merged
PAD, END, OPENING, CLOSING = 0, 1, 2, 4
LENGTH, PROMPTS, GROUP = 4, 32, 8
MERGED = {(4, 4): 6, (5, 5): 7, (4, 5): 8, (5, 4): 9}  # two closing brackets: merged token


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


# --8<-- [start:tokenizer]
def decode(tokens: list[int]) -> str:
    return "".join(TOKENS[token] for token in tokens)


def text_of(row: list[int]) -> str:
    return decode(row).rstrip(TOKENS[PAD])


def encode(text: str) -> list[int]:
    """Split a text from left to right, always into the longest token that fits."""
    tokens: list[int] = []
    while text:
        length = max(len(t) for t in TOKENS if text.startswith(t))
        tokens.append(TOKENS.index(text[:length]))
        text = text[length:]
    return tokens


def tokenize_again(answers: torch.Tensor) -> torch.Tensor:
    """Send the answers as text: decode each row, encode it, and pad it to the old length."""
    rows = []
    for row in answers.tolist():
        tokens = encode(text_of(row))
        rows.append(tokens + [PAD] * (len(row) - len(tokens)))
    return torch.tensor(rows)


# --8<-- [end:tokenizer]


def make_answer(rng: torch.Generator) -> list[int]:
    """Four random closing brackets. Each half is one merged token or two tokens."""
    answer: list[int] = []
    for _ in range(LENGTH // 2):
        first, second = torch.randint(CLOSING, CLOSING + 2, (2,), generator=rng).tolist()
        merge = torch.rand((), generator=rng) < 0.5
        answer += [MERGED[first, second]] if merge else [first, second]
    return [*answer, END] + [PAD] * (LENGTH - len(answer))


def supervise(policy: Policy, rng: torch.Generator, steps: int = 50) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    answers = torch.tensor([make_answer(rng) for _ in range(128)])
    prompts = draw_prompts(len(answers), LENGTH, rng)
    mask = answer_mask(answers)
    for _ in range(steps):
        loss = -(log_probs_of(policy, prompts, answers) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def log_prob_and_gradient(policy: Policy, prompts, answers, advantages):
    """The log-probability of each answer, and the policy gradient as one vector."""
    sums = (log_probs_of(policy, prompts, answers) * answer_mask(answers)).sum(1)
    gradients = torch.autograd.grad((sums * advantages).mean(), list(policy.parameters()))
    return sums.detach(), torch.cat([g.flatten() for g in gradients])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    policy = Policy()
    supervise(policy, rng)
    prompts = draw_prompts(PROMPTS, LENGTH, rng).repeat_interleave(GROUP, 0)
    answers, old = sample(policy, prompts, LENGTH + 1, rng)
    texts = [text_of(row) for row in answers.tolist()]
    closing = {"(": ")", "[": "]"}
    right = ["".join(closing[TOKENS[t]] for t in row[::-1]) + "$" for row in prompts.tolist()]
    rewards = torch.tensor([float(a == b) for a, b in zip(texts, right, strict=True)])
    advantages = group_advantages(rewards, GROUP)

    again = tokenize_again(answers)
    assert [text_of(row) for row in again.tolist()] == texts  # the text is equal
    example = [MERGED[4, 5], 4, 5, END]
    shown = {"sampled tokens": example, "tokenized again": encode(decode(example))}
    for name, tokens in shown.items():
        print(f"{name:16}" + "   ".join(f"{TOKENS[token]:2}" for token in tokens).rstrip())
    results = {}
    print("\nthe trainer receives   changed   ratio of an answer   cosine of the gradients")
    _, exact = log_prob_and_gradient(policy, prompts, answers, advantages)
    for name, tokens in (("token numbers", answers), ("text", again)):
        sums, gradient = log_prob_and_gradient(policy, prompts, tokens, advantages)
        ratio = (sums - old.sum(1)).exp()
        cosine = F.cosine_similarity(gradient, exact, 0).item()
        count = int((tokens != answers).any(1).sum())
        results[name] = (count, ratio, cosine)
        span = f"≈{ratio.min():.2f} to ≈{ratio.max():.2f}"
        print(f"{name:20} ≈{count:3} of {len(answers)}   {span:18}   ≈{cosine:.3f}")
    assert results["token numbers"][0] == 0 and results["text"][0] > len(answers) / 2
    torch.testing.assert_close(results["token numbers"][1], torch.ones(len(answers)))
    assert rewards.sum() > 0 and results["token numbers"][2] > 0.999
    # answers are counted, not tokens, and some answers do not change
    assert results["text"][0] < len(answers)
    # the ratio of an answer is a product over its tokens, so it can be far from 1
    assert results["text"][1].min() < 0.01 and results["text"][1].max() > 2
    assert results["text"][2] < 0.9


if __name__ == "__main__":
    main()
