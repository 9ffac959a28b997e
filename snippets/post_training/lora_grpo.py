"""GRPO with LoRA: only adapters are sent, and the reference model needs no extra memory.

The weights of the trainer are frozen. Only narrow matrices A and B next to two layers of each
block are trained. The sampler merges them into its own copy of the frozen weights. With the
adapters switched off, the trainer is the reference model of the KL term. The table counts the
bytes. The last lines compare the log-probabilities of the trainer with other samplers: one
merges in fp32, one merges in bf16, one adds the adapters in each sync to weights that are
already merged, and one received no update. All of them compute in fp32. The frozen weights
are bf16 numbers, so the sampler that merges in bf16 differs only because the merge rounds.
"""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, GROUP, PROMPTS, STEPS, BETA = 3, 8, 16, 60, 0.05
R, ALPHA = 8, 16  # the rank of the adapters; their output is multiplied by ALPHA / R
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


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


# --8<-- [start:lora]
class LoRALinear(nn.Module):
    """x Wᵀ + bias + (α/r) x Aᵀ Bᵀ. Only A and B are trained, and B is zero at first.

    W and the bias come from `linear` and are frozen. A [r, in] and B [out, r] have W's dtype.
    """

    def __init__(self, linear: nn.Linear, r: int = R, alpha: float = ALPHA) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.requires_grad_(False)
        rows, columns = linear.weight.shape
        self.a = nn.Parameter(linear.weight.new_empty(r, columns).normal_(std=columns**-0.5))
        self.b = nn.Parameter(linear.weight.new_zeros(rows, r))
        self.scale = alpha / r

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.scale * (x @ self.a.T) @ self.b.T


# --8<-- [end:lora]


def add_adapters(policy: Policy) -> None:
    """Freeze all weights, and give two layers of each block an adapter."""
    policy.requires_grad_(False)
    policy.zero_grad()  # otherwise the last gradients of the pretraining stay in memory
    for block in policy.blocks:
        block.qkv, block.out = LoRALinear(block.qkv), LoRALinear(block.out)


# --8<-- [start:reference]
@contextlib.contextmanager
def adapters_off(policy: Policy) -> Iterator[None]:
    """Turn the policy into the reference model: only the frozen weights act."""
    adapted = [layer for layer in policy.modules() if isinstance(layer, LoRALinear)]
    scales = [layer.scale for layer in adapted]
    for layer in adapted:
        layer.scale = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(adapted, scales, strict=True):
            layer.scale = scale


# --8<-- [end:reference]


# --8<-- [start:sync]
class Sampler:
    """An engine with its own copy of the frozen weights; it runs the merged weights."""

    def __init__(self, frozen: Policy) -> None:
        self.frozen, self.policy = copy.deepcopy(frozen), copy.deepcopy(frozen)
        self.received = 0  # bytes

    def update(self, adapters: list[torch.Tensor], start_from_frozen: bool = True) -> None:
        """Merge: W becomes the frozen W + (alpha / r) B A, for each layer with an adapter."""
        self.received += sum(tensor.nbytes for tensor in adapters)
        pairs = iter(adapters)
        for block, frozen in zip(self.policy.blocks, self.frozen.blocks, strict=True):
            for layer, original in ((block.qkv, frozen.qkv), (block.out, frozen.out)):
                a, b = next(pairs), next(pairs)
                base = original.weight if start_from_frozen else layer.weight
                layer.weight.data = base.data + ALPHA / R * (b @ a).to(base.dtype)


def message(policy: Policy) -> list[torch.Tensor]:
    """What the trainer sends to the sampler: A and B of each layer with an adapter."""
    layers = [layer for block in policy.blocks for layer in (block.qkv, block.out)]
    return [matrix.detach() for layer in layers for matrix in (layer.a, layer.b)]


# --8<-- [end:sync]


def loop_loss(new, old, reference, advantages, mask) -> float:
    """The same loss as in `train`, with a loop over the tokens."""
    terms, penalties = [], []
    for row, column in mask.nonzero().tolist():
        ratio = math.exp(new[row, column].item() - old[row, column].item())
        a = advantages[row].item()
        terms.append(min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
        gap = reference[row, column].item() - new[row, column].item()
        penalties.append(math.exp(gap) - 1 - gap)  # the ratio of reference to policy
    assert sum(penalties) > 0.01 * len(terms)  # the policy has moved away from the reference
    return (BETA * sum(penalties) - sum(terms)) / len(terms)


def train(
    policy: Policy, sampler: Sampler, careless: Sampler, frozen: Policy, rng: torch.Generator
):
    """GRPO on the adapters; return the optimizer and the mean reward of each batch.

    `careless` receives the same messages, but never starts from the frozen weights.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer, rewards = torch.optim.AdamW(trained, lr=5e-3), []
    passes: Counter[str] = Counter()
    for name, model in (("trainer", policy), ("sampler", sampler.policy)):
        model.register_forward_hook(lambda *_, name=name: passes.update([name]))
    layer, merges = policy.blocks[0].qkv, 0.0
    for _ in range(STEPS):
        merges = merges + ALPHA / R * (layer.b @ layer.a).detach()
        sampler.update(message(policy))
        careless.update(message(policy), start_from_frozen=False)
        prompts = draw_prompts(PROMPTS, LENGTH, rng).repeat_interleave(GROUP, 0)
        answers, old = sample(sampler.policy, prompts, LENGTH + 1, rng)
        reward, mask = rewards_of(prompts, answers), answer_mask(answers)
        rewards.append(float(reward.mean()))
        advantages = group_advantages(reward, GROUP)
        with torch.no_grad(), adapters_off(policy):
            reference = log_probs_of(policy, prompts, answers)
        assert torch.equal(reference, log_probs_of(frozen, prompts, answers))
        for update in range(2):
            new = log_probs_of(policy, prompts, answers)
            if update == 0:  # the sampler has the newest adapters, so both agree
                torch.testing.assert_close(new.detach() * mask, old, rtol=0, atol=1e-4)
            gap = reference - new
            kl = ((gap.exp() - gap - 1) * mask).sum() / mask.sum()
            loss = clipped_loss(new, old, advantages, mask) + BETA * kl
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
    # the trainer makes two updates and is the reference, and only the sampler samples
    assert passes == {"trainer": 3 * STEPS, "sampler": (LENGTH + 1) * STEPS}
    wrong = careless.policy.blocks[0].qkv.weight - frozen.blocks[0].qkv.weight
    torch.testing.assert_close(wrong, merges, rtol=1e-3, atol=1e-4)
    expected = loop_loss(new.detach(), old, reference, advantages, mask)  # the last update
    assert math.isclose(loss.item(), expected, abs_tol=1e-5)
    return optimizer, rewards


def bytes_of(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the bytes of the weights, the gradients and the moments of AdamW."""
    weights = list(policy.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    return {
        "weights": sum(p.nbytes for p in weights),
        "gradients": sum(p.grad.nbytes for p in weights if p.grad is not None),
        "moments of AdamW": sum(t.nbytes for t in moments),
    }


def full_step(frozen: Policy) -> dict[str, int]:
    """One optimizer step on all weights, for the comparison of the bytes."""
    policy = copy.deepcopy(frozen).requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    policy(torch.full((1, LENGTH), OPENING)).sum().backward()
    optimizer.step()
    return bytes_of(policy, optimizer)


@torch.no_grad()
def compare_samplers(
    policy: Policy, careless: Sampler, frozen: Policy, rng: torch.Generator
) -> dict[str, float]:
    """The mean difference of a token's log-probability between the trainer and a sampler."""
    prompts = draw_prompts(256, LENGTH, rng)
    answers, _ = sample(policy, prompts, LENGTH + 1, rng)
    exact = log_probs_of(policy, prompts, answers)
    results, mask = {}, answer_mask(answers)
    for name in ("merged in fp32", "merged in bf16", "no update", "sum of all merges"):
        sampler = Sampler(
            copy.deepcopy(frozen).to(torch.bfloat16 if "bf16" in name else torch.float32)
        )
        if name.startswith("merged"):
            sampler.update(message(policy))
        if name == "sum of all merges":
            sampler = careless
        # Here the sampler computes in fp32, so only its weights can be rounded.
        other = log_probs_of(sampler.policy.float(), prompts, answers)
        assert other.dtype == torch.float32
        results[name] = float(((other - exact).abs() * mask).sum() / mask.sum())
    return results


def svg_label(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def svg_box(x: float, y: float, width: float, lines: list[str], colour: str) -> str:
    """A box with one line of text above the other."""
    height = 12 + 18 * len(lines)
    style = f'fill="{colour}" fill-opacity="0.15" stroke="{colour}" rx="4"'
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {style}/>'
    return box + "".join(svg_label(x + 8, y + 20 + 18 * i, s) for i, s in enumerate(lines))


def svg_arrow(x: float, y: float, to: float) -> str:
    head = f"M {to} {y} l -8 -4 v 8 z"
    return f'<path d="M {x} {y} H {to}" stroke="{INK}"/><path d="{head}" fill="{INK}"/>'


def draw(sent: int, weights: int) -> str:
    """Draw the tensors of the trainer and of the sampler, and the tensors that are sent."""
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 200" '
            'font-family="system-ui, sans-serif">',
            svg_label(4, 18, "Trainer", INK, 15, 'font-weight="600"'),
            svg_box(
                4, 30, 250, [f"frozen W: {weights:,} bytes", "= the reference model"], MUTED
            ),
            svg_box(4, 90, 250, [f"A and B: {sent:,} bytes"], BLUE),
            svg_box(4, 132, 250, ["gradients and AdamW of A and B"], BLUE),
            svg_label(290, 98, "weight sync:", BLUE),
            svg_label(290, 126, f"{sent:,} bytes", BLUE),
            svg_arrow(254, 106, 440),
            svg_label(440, 18, "Sampler", INK, 15, 'font-weight="600"'),
            svg_box(
                440,
                30,
                270,
                [f"frozen W: {weights:,} bytes", "sent once, before the run"],
                MUTED,
            ),
            svg_box(
                440,
                90,
                270,
                ["merged: W + (alpha / r) B A", "computed again after each sync"],
                BLUE,
            ),
            "</svg>",
            "",
        ]
    )


def main() -> None:
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    policy = Policy()
    pretrain(policy, LENGTH, rng)
    policy.to(torch.bfloat16).float()  # as if the weights came from a checkpoint in bf16
    frozen = copy.deepcopy(policy).requires_grad_(False)
    add_adapters(policy)
    prompts = draw_prompts(8, LENGTH, rng)
    with torch.no_grad():  # B is zero, so the adapters do not change the policy yet
        assert torch.equal(policy(prompts), frozen(prompts))
    sampler = Sampler(frozen)
    careless = Sampler(frozen)
    optimizer, rewards = train(policy, sampler, careless, frozen, rng)
    means = [sum(rewards[i : i + 10]) / 10 for i in range(0, STEPS, 10)]
    print("mean reward of every ten batches: " + "  ".join(f"≈{mean:.2f}" for mean in means))
    assert means[-1] > means[0] + 0.3 and math.isclose(10 * sum(means), sum(rewards))
    prompts = torch.cartesian_prod(*[torch.tensor([OPENING, OPENING + 1])] * LENGTH)
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    exact = log_probs_of(policy, prompts, right).sum(1).exp().mean()
    assert abs(exact - means[-1]) < 0.15  # the rewards belong to right answers
    after = policy.state_dict()
    for name, weight in frozen.state_dict().items():  # unchanged, and equal in fp32 and bf16
        assert torch.equal(weight, after[name]) and torch.equal(weight, weight.bfloat16())

    full, lora = full_step(frozen), bytes_of(policy, optimizer)
    full["reference model"], lora["reference model"] = full["weights"], 0
    full["sent in each sync"], lora["sent in each sync"] = (
        full["weights"],
        sampler.received // STEPS,
    )
    print(f"\n{'bytes':18}   all weights      LoRA")
    for name in full:
        print(f"{name:18} {full[name]:13,} {lora[name]:9,}")
    adapters = len(frozen.blocks) * R * (32 + 96 + 32 + 32) * 4  # r * (in + out) numbers each
    assert lora["sent in each sync"] == lora["gradients"] == adapters
    assert (
        lora["moments of AdamW"] == 2 * adapters
        and lora["weights"] == full["weights"] + adapters
    )

    print("\nmean difference of a token's log-probability from the trainer's")
    results = compare_samplers(policy, careless, frozen, rng)
    for name, value in results.items():
        print(f"{name:21} ≈{value:.0e}")
    assert results["merged in fp32"] < 1e-5
    assert results["merged in fp32"] < results["merged in bf16"] / 10
    assert results["sum of all merges"] > results["no update"] > 0.1
    with open("lora_grpo.svg", "w", encoding="utf-8") as file:
        file.write(draw(lora["sent in each sync"], full["weights"]))


if __name__ == "__main__":
    main()
