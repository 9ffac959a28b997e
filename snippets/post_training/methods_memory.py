"""Counts what REINFORCE, RLOO, GRPO and PPO keep in memory and compute for each answer token.

Every method updates the small policy once or twice on 64 answers. The program counts the bytes
of all tensors after the update, and hooks count the tokens in each forward and backward pass.
Trained models are in float32, and the frozen reference is in bfloat16. The last column is for
a model with 8 billion parameters, and for a critic of the same size.
"""

import statistics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, ANSWERS = 4, 64


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


def bracket_rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1.0 where the first token closes the last bracket, as 1 of 6 tokens does, [n]."""
    return (answers[:, 0] == prompts[:, -1] + (CLOSING - OPENING)).float()


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


# --8<-- [start:methods]
class Method(NamedTuple):
    group: int  # answers to each prompt
    updates: int  # optimizer steps for each batch
    reference: bool = False  # a frozen model in bfloat16 for the KL penalty
    critic: bool = False  # a trained model that predicts the reward of each prefix


METHODS = {
    "REINFORCE": Method(group=1, updates=1),
    "RLOO": Method(group=8, updates=1),
    "GRPO": Method(group=8, updates=2),
    "GRPO with KL": Method(group=8, updates=2, reference=True),
    "PPO with KL": Method(group=1, updates=2, reference=True, critic=True),
}
# --8<-- [end:methods]


class Counter:
    """Counts the answer tokens that pass forward and backward through all models."""

    def __init__(self, *models: nn.Module) -> None:
        self.forward = self.backward = 0
        for model in models:
            model.register_forward_hook(self.count)

    def count(self, model: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        tokens = output.shape[0] * (output.shape[1] - LENGTH + 1)
        self.forward += tokens
        if output.requires_grad:
            output.register_hook(lambda gradient: self.count_backward(tokens))

    def count_backward(self, tokens: int) -> None:
        self.backward += tokens


def values_of(critic: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The predicted reward before each answer token, [n, new]."""
    return critic(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :, 0]


def bytes_of(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of all parameters, gradients and optimizer states."""
    tensors = [t for m in models for p in m.parameters() for t in (p, p.grad) if t is not None]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [t for t in state.values() if t.dim() > 0]  # without the step counter
    return sum(t.nbytes for t in tensors)


def check_advantages(method: Method, rewards: list[float], advantages: list[float]) -> None:
    """Compare the advantages of a method without a critic with a loop over the answers."""
    for i, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        start = i - i % method.group
        group = rewards[start : start + method.group]
        others = rewards[start:i] + rewards[i + 1 : start + method.group]
        if method.group == 1:
            expected = reward - 0.5
        elif method.updates == 1:
            expected = reward - statistics.fmean(others)
        else:
            deviation = statistics.stdev(group) + 1e-4
            expected = (reward - statistics.fmean(group)) / deviation
        assert abs(advantage - expected) < 1e-3


def train(method: Method) -> tuple[int, int, int, int]:
    """Train on one batch. Returns parameters, bytes, and tokens forward and backward."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    policy = Policy()
    trained, frozen = [policy], []
    if method.critic:
        critic = Policy()
        critic.head = nn.Linear(32, 1, bias=False)  # one value instead of six logits
        trained.append(critic)
    if method.reference:
        frozen.append(Policy().requires_grad_(False).bfloat16())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in trained]
    prompts = draw_prompts(ANSWERS // method.group, LENGTH, rng)
    prompts = prompts.repeat_interleave(method.group, 0)
    answers, old = sample(policy, prompts, LENGTH + 1, rng)
    counter = Counter(*trained, *frozen)  # after sampling, which all methods need

    rewards, mask = bracket_rewards(prompts, answers), answer_mask(answers)
    if method.critic:
        with torch.no_grad():
            advantages = rewards[:, None] - values_of(critic, prompts, answers)  # [n, new]
    elif method.group == 1:
        advantages = rewards - 0.5  # 0.5 stands for a running mean of earlier rewards
    elif method.updates == 1:
        others = rewards.view(-1, method.group).sum(1).repeat_interleave(method.group) - rewards
        advantages = rewards - others / (method.group - 1)
    else:
        advantages = group_advantages(rewards, method.group)
    assert 0 < rewards.mean() < 1
    if not method.critic:
        check_advantages(method, rewards.tolist(), advantages.tolist())
    penalty_of = [log_probs_of(model, prompts, answers) for model in frozen]
    for _ in range(method.updates):
        new = log_probs_of(policy, prompts, answers)
        if method.updates == 1:
            loss = -(new * advantages[:, None] * mask).sum() / mask.sum()
        else:
            columns = advantages if method.critic else advantages[:, None].expand_as(new)
            loss = clipped_loss(
                *(x.reshape(-1, 1) for x in (new, old)),
                columns.reshape(-1),
                mask.reshape(-1, 1),
            )
        for reference in penalty_of:
            gap = reference - new
            loss = loss + 0.01 * ((gap.exp() - gap - 1) * mask).sum() / mask.sum()
        if method.critic:
            error = values_of(critic, prompts, answers) - rewards[:, None]
            loss = loss + (error.square() * mask).sum() / mask.sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    count = sum(p.numel() for p in policy.parameters())
    tokens = answers.numel()
    total = bytes_of([*trained, *frozen], optimizers)
    passes = counter.forward // tokens, counter.backward // tokens
    with torch.no_grad():  # the updates make good tokens likelier, and improve the critic
        gain = (log_probs_of(policy, prompts, answers) - old) * mask
        columns = advantages if method.critic else advantages[:, None]
        assert (gain * columns).sum() > 0
        if method.critic:
            error = values_of(critic, prompts, answers) - rewards[:, None]
            assert (error.square() * mask).sum() < (advantages.square() * mask).sum()
    return count, total, *passes


def main() -> None:
    torch.set_num_threads(1)
    print("method          group   bytes per parameter   forward   backward   8B model")
    for name, method in METHODS.items():
        count, total, forward, backward = train(method)
        each = total / count
        # 16 bytes for each trained parameter in fp32, and 2 bytes for each frozen one in bf16
        expected = 16 * (1 + method.critic) + 2 * method.reference
        row = f"{name:14} {method.group:6} {each:21.2f} {forward:9} {backward:10}"
        print(f"{row} {expected * 8:7.0f} GB")
        head = 5 * 32 * 16 / count  # the head of the small critic has five fewer outputs
        assert abs(each + head * method.critic - expected) < 1e-9
        models = 1 + method.critic
        assert backward == models * method.updates
        assert forward == backward + method.reference + method.critic


if __name__ == "__main__":
    main()
