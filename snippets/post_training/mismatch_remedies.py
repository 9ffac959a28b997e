"""This program trains with samplers that disagree with the trainer, with and without remedies.

A policy learns to close three brackets with GRPO. Each line of the output is one way to sample
and one remedy, for several seeds. The success is the trainer's exact probability of a right
answer, averaged over all eight prompts. It is not the reward of the samples.
"""

import copy
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

SEEDS, BATCHES, LENGTH, GROUP = 3, 50, 3, 8
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


# --8<-- [start:samplers]
class Rounded(nn.Module):
    """A sampler that computes in `dtype`, or in bf16 with weights of 8 bits."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        super().__init__()
        policy = copy.deepcopy(policy)
        if dtype == torch.float8_e4m3fn:
            for weight in (p for p in policy.parameters() if p.dim() > 1):
                scale = weight.data.abs().max() / torch.finfo(dtype).max
                weight.data = (weight.data / scale).to(dtype).float() * scale
            dtype = torch.bfloat16
        self.policy, self.blocks = policy.to(dtype), policy.blocks

    def forward(self, tokens: torch.Tensor, caches: list[list]) -> torch.Tensor:
        return self.policy(tokens, caches).float()


class TopP(nn.Module):
    """A sampler that keeps the likeliest tokens until their probability reaches p."""

    def __init__(self, policy: Policy, p: float) -> None:
        super().__init__()
        self.policy, self.blocks, self.p = policy, policy.blocks, p

    def forward(self, tokens: torch.Tensor, caches: list[list]) -> torch.Tensor:
        logits = self.policy(tokens, caches)
        likely, order = logits.softmax(-1).sort(-1, descending=True)
        outside = likely.cumsum(-1) - likely >= self.p
        return logits.masked_fill(
            torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf
        )


# --8<-- [end:samplers]
# --8<-- [start:weights]
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


def weighted_loss(new, old, advantages, mask, weights, clip: float = 0.2) -> torch.Tensor:
    """The clipped loss, in which each token has an importance weight, a constant [n, t]."""
    ratio = (new - old).exp()
    a = advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return -(weights * objective * mask).sum() / mask.sum()


# --8<-- [end:weights]
@torch.no_grad()
def success(policy: Policy) -> float:
    """The exact probability of a right answer, the mean over all prompts."""
    prompts = torch.tensor(list(itertools.product((OPENING, OPENING + 1), repeat=LENGTH)))
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    return log_probs_of(policy, prompts, right).sum(1).exp().mean().item()


# --8<-- [start:train]
def train_with(policy: Policy, seed: int, engine: Callable, age: int, weights: Callable):
    """Train a copy of the policy, with a sampler that is `engine(policy)` of `age` batches ago.

    During the first `age` batches, the sampler has the initial weights. Returns four numbers
    for each batch, [batches, 4]: the trainer's success, the reward of the samples, the mean of
    |log π - log μ|, and the fraction of the groups in which all rewards are equal.
    """
    policy, rng = copy.deepcopy(policy), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, fused=True)
    history, rows = [], []
    for _ in range(BATCHES):
        history.append(copy.deepcopy(policy) if age else policy)
        sampler = engine(history[max(0, len(history) - 1 - age)])
        prompts = draw_prompts(8, LENGTH, rng).repeat_interleave(GROUP, 0)
        answers, log_mu = sample(sampler, prompts, LENGTH + 1, rng)
        rewards, mask = rewards_of(prompts, answers), answer_mask(answers)
        advantages = group_advantages(rewards, GROUP)
        for step in range(2):
            new = log_probs_of(policy, prompts, answers)
            if step == 0:  # the policy has not changed yet
                old = new.detach()
                difference = (old - log_mu) * mask
            loss = weighted_loss(new, old, advantages, mask, weights(difference))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        gap = (difference.abs().sum() / mask.sum()).item()
        equal = (advantages.view(-1, GROUP) == 0).all(1).float().mean().item()
        rows.append([success(policy), rewards.mean().item(), gap, equal])
    return torch.tensor(rows)


# --8<-- [end:train]
def pretrained(seed: int) -> Policy:
    torch.manual_seed(seed)
    policy = Policy(h=16, layers=1)
    pretrain(policy, LENGTH, torch.Generator().manual_seed(seed))
    return policy


# --8<-- [start:runs]
ENGINES: dict[str, tuple[Callable, int]] = {  # a name -> the engine, and its age in batches
    "same": (lambda policy: policy, 0),
    "bf16": (lambda policy: Rounded(policy, torch.bfloat16), 0),
    "fp8 weights": (lambda policy: Rounded(policy, torch.float8_e4m3fn), 0),
    "16 batches old": (lambda policy: policy, 16),
    "top-p 0.8": (lambda policy: TopP(policy, 0.8), 0),
}
RUNS = [  # the sampler and the importance weights
    ("same", "no weights"),
    ("bf16", "no weights"),
    ("fp8 weights", "no weights"),
    *(("16 batches old", name) for name in WEIGHTS if name != "token, at most 2"),
    ("top-p 0.8", "no weights"),
    ("top-p 0.8", "token, at most 2"),
]
# --8<-- [end:runs]


def plot_curves(curves: dict[tuple, torch.Tensor]) -> dict[tuple, torch.Tensor]:
    """Draw the mean and the range of the seeds. Returns the curves in the picture."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "svg.fonttype": "none", "svg.hashsalt": "mismatch_remedies", "font.size": 11,
    }  # fmt: skip
    panels = {
        "rounding": [RUNS[i] for i in (0, 1, 2)],
        "a sampler 16 batches old": [RUNS[i] for i in (0, 3, 5, 7)],
        "top-p 0.8": [RUNS[i] for i in (0, 8, 9)],
    }
    colours, lines = ["#6b7280", "#c2410c", "#0b6e99", "#15803d"], ["-", "--", "-.", ":"]
    drawn = {}
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True)
    for ax, (title, runs) in zip(axes, panels.items(), strict=True):
        for run, colour, line in zip(runs, colours, lines, strict=False):
            curve = curves[run][..., 0]  # [seeds, batches]
            label = run[0] if title == "rounding" or run[0] == "same" else run[1]
            x = range(1, BATCHES + 1)
            drawn[run] = curve.mean(0)
            ax.plot(x, drawn[run], line, color=colour, label=label)
            ax.fill_between(x, curve.amin(0), curve.amax(0), color=colour, alpha=0.12, lw=0)
        ax.set(title=title, xlabel="batch of samples", ylim=(0, 1.02))
        ax.spines[["top", "right"]].set_visible(False)
        place = {"loc": "lower right", "bbox_to_anchor": (1.06, -0.03), "handlelength": 1.3}
        ax.legend(frameon=False, fontsize=10, **place)
    axes[0].set_ylabel("success of the trainer's policy")
    figure.tight_layout()
    figure.savefig("mismatch_remedies.svg", transparent=True, metadata={"Date": None})
    return drawn


def check_loss() -> None:
    """Compare the loss with a loop over tokens, of which the clip changes some."""
    rng = torch.Generator().manual_seed(2)
    old, new = torch.randn(2, 4, 3, generator=rng, dtype=torch.float64)
    a, weights = torch.randn(4, generator=rng), torch.rand(4, 3, generator=rng) * 2
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    total = 0.0
    for i, t in mask.nonzero().tolist():
        ratio = (new[i, t] - old[i, t]).exp().item()
        limit = min(ratio, 1.2) if a[i] > 0 else max(ratio, 0.8)
        total -= weights[i, t].item() * limit * a[i].item()
    found = weighted_loss(new, old, a, mask, weights).item()
    assert abs(found - total / 9) < 1e-6


def check_age(policy: Policy) -> None:
    """The sampler of a batch must be the trainer of 16 batches ago.

    Both updates of a batch must have the same importance weights, because the ratio in the
    clipped objective already contains the first update.
    """
    seen, differences = [], []

    def engine(sampler: Policy) -> Policy:
        seen.append(success(sampler))
        return sampler

    def token_weights(difference: torch.Tensor) -> torch.Tensor:
        differences.append(difference)
        return WEIGHTS["token"](difference)

    trainer = train_with(policy, 0, engine, ENGINES["16 batches old"][1], token_weights)
    assert torch.equal(torch.stack(differences[::2]), torch.stack(differences[1::2]))
    before = [success(policy), *trainer[:, 0].tolist()]  # before each batch
    for batch, sampled in enumerate(seen):
        assert abs(sampled - before[max(0, batch - 16)]) < 1e-6


def main() -> None:
    torch.set_num_threads(1)
    check_loss()
    starts = [pretrained(seed) for seed in range(SEEDS)]
    assert all(0.05 < success(policy) < 0.25 for policy in starts), "guessing is 1/8"
    check_age(starts[0])
    print(f"{'':36}success of the trainer's policy     samples, at the end")
    print(
        f"{'sampler':15}{'weights':21}{'mean (range of seeds)':25}{'at the end':11}"
        f"{'reward':8}{'equal':7}|Δ|"
    )
    curves, mean, end = {}, {}, {}
    for run in RUNS:
        name, weights = run
        engine, age = ENGINES[name]
        curves[run] = torch.stack(
            [
                train_with(start, seed, engine, age, WEIGHTS[weights])
                for seed, start in enumerate(starts)
            ]
        )  # [seeds, batches, 4]
        seeds = curves[run][..., 0].mean(1)
        mean[run], end[run] = seeds.mean().item(), curves[run][:, -10:].mean((0, 1)).tolist()
        gap = curves[run][..., 2].mean().item()
        print(
            f"{name:15}{weights:21}"
            f"≈{mean[run]:.2f} (≈{seeds.min():.2f} to ≈{seeds.max():.2f})   ≈{end[run][0]:.2f}"
            f"      ≈{end[run][1]:.2f}   ≈{end[run][3]:.2f}  "
            + (f"≈{gap:.0e}" if gap > 1e-7 else "< 1e-7")
        )
    for run, curve in plot_curves(curves).items():  # the picture shows what the table shows
        assert abs(curve.mean().item() - mean[run]) < 1e-6
        assert abs(curve[-10:].mean().item() - end[run][0]) < 1e-6

    same, bf16, fp8, *old = RUNS[:8]
    cut, cut_weighted = RUNS[8:]
    gap = {run: curve[..., 2].mean().item() for run, curve in curves.items()}
    assert end[same][0] > 0.9, "the task is not learned"
    assert gap[same] < 1e-6 < 1e-4 < gap[bf16] < gap[fp8]  # both act, and do no harm
    assert all(abs(mean[run] - mean[same]) < 0.1 for run in (bf16, fp8))
    none, token, *_, truncated = old
    by_seed = {run: curve[..., 0].mean(1) for run, curve in curves.items()}
    assert (by_seed[none] < by_seed[token]).all(), "token weights must help with every seed"
    assert mean[none] < mean[same] - 0.04 and mean[none] < mean[truncated] - 0.02
    assert end[none][1] < end[none][0], "an old sampler gets lower rewards than the trainer"
    for run in (cut, cut_weighted):  # the reward of the samples promises too much
        assert end[run][0] < end[same][0] - 0.1 and end[run][0] < end[run][1] - 0.1
        assert end[run][3] > 0.9 > 0.5 > end[none][3], "the groups must have equal rewards"
    assert abs(mean[cut] - mean[cut_weighted]) < 0.05, "the weights changed something"


if __name__ == "__main__":
    main()
