"""This program measures how far each of several causes moves the sampler from the trainer.

The trainer needs one forward pass. In most rows of the table, the trainer computes in fp32. In
each row, the sampler differs from the trainer in one thing. The sampler draws answers and
reports log-probabilities, as an inference engine does. Then the trainer computes the
log-probabilities of the same tokens. The last column shows what the cause changed.
"""

import copy

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


# --8<-- [start:experts]
class Experts(nn.Module):
    """Several matrices h -> 4h. A router chooses one of them for each token (top-1)."""

    def __init__(self, h: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(h, experts, bias=False)
        self.weight = nn.Parameter(torch.randn(experts, 4 * h, h) / h**0.5)
        self.choices: list[torch.Tensor] = []  # of each call, [b, s]
        self.replay: list[torch.Tensor] | None = None  # choices to use in the next calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        choice = shares.argmax(-1) if self.replay is None else self.replay.pop(0)
        self.choices.append(choice)
        every = torch.einsum("bsh,efh->bsef", x, self.weight)
        index = choice[..., None, None].expand(*choice.shape, 1, every.shape[-1])
        share = shares.gather(-1, choice[..., None])  # the router gets its gradient here
        return every.gather(2, index)[..., 0, :] * share


# --8<-- [end:experts]
# --8<-- [start:samplers]
class RowSplit(nn.Module):
    """The product of a tensor-parallel layer whose input is split over n ranks."""

    def __init__(self, linear: nn.Linear, n: int) -> None:
        super().__init__()
        self.linear, self.n = linear, n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(self.n, -1), self.linear.weight.chunk(self.n, 1), strict=True)
        return sum(part @ weight.T for part, weight in parts)  # the all-reduce


def split_rows(policy: Policy, n: int) -> Policy:
    """Return a copy whose row-parallel layers add the partial sums of n ranks."""
    policy = copy.deepcopy(policy)
    for block in policy.blocks:
        block.out, block.down = RowSplit(block.out, n), RowSplit(block.down, n)
    return policy


def to_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Round each row to 255 levels between minus and plus its largest magnitude."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


@torch.no_grad()
def with_8_bit_weights(policy: Policy) -> Policy:
    policy = copy.deepcopy(policy)
    for block in policy.blocks:
        for linear in (block.qkv, block.out, block.up, block.down):
            linear.weight.copy_(to_8_bits(linear.weight))
    return policy


class AttentionInParts(PolicyBlock):
    """The same block, but it attends to the cached and to the new tokens in two parts."""

    merged_in = torch.float32  # the format of both results before they are merged

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], mask: torch.Tensor):
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        parts = [(k, v, mask[:, -s:])]
        if cache:
            parts.insert(0, (*cache, mask[:, :-s]))
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        outs, logs = [], []
        for keys, values, seen in parts:  # in fp32, as attention kernels do
            scores = q.float() @ keys.float().transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(~seen, -torch.inf)
            logs.append(scores.logsumexp(-1, keepdim=True))
            outs.append((scores.softmax(-1) @ values.float()).to(self.merged_in).float())
        shares = torch.stack(logs).softmax(0)  # how much each part weighs
        mixed = (shares * torch.stack(outs)).sum(0).to(x.dtype)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def in_parts(policy: Policy, merged_in: torch.dtype) -> Policy:
    policy = copy.deepcopy(policy)
    for block in policy.blocks:
        block.__class__, block.merged_in = AttentionInParts, merged_in
    return policy


@torch.no_grad()
def draw_answers(policy, prompts, new, rng, chunk=None, cache_8_bits=False, top_p=1.0):
    """Sample like `sample`, with the options of an engine.

    Returns the answers [n, new], and the logarithm of the distribution from which each token
    was drawn, [n, new, vocabulary].
    """
    caches: list[list] = [[] for _ in policy.blocks]
    answers, distributions = [], []
    ended = torch.zeros(len(prompts), 1, dtype=torch.bool)
    pieces = prompts.split(chunk or prompts.shape[1], 1)
    for _ in range(new):
        for piece in pieces:
            logits = policy(piece, caches)
            if cache_8_bits:
                for cache in caches:
                    cache[:] = [to_8_bits(entry) for entry in cache]
        scores = logits[:, -1].double().log_softmax(-1)
        likely, order = scores.exp().sort(-1, descending=True)
        outside = likely.cumsum(-1) - likely >= top_p  # the likelier tokens already have top_p
        outside = torch.zeros_like(outside).scatter(1, order, outside)
        scores = scores.masked_fill(outside, -torch.inf).log_softmax(-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=rng).masked_fill(ended, PAD)
        answers.append(tokens)
        distributions.append(scores)
        ended = ended | (tokens == END)
        pieces = (tokens,)
    return torch.cat(answers, 1), torch.stack(distributions, 1)


# --8<-- [end:samplers]
def train_and_copy(policy: Policy, batches: int, rng: torch.Generator) -> list[Policy]:
    """Train with GRPO. Returns a copy of the policy before each batch."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    copies = []
    for _ in range(batches):
        copies.append(copy.deepcopy(policy))
        prompts = draw_prompts(16, 4, rng).repeat_interleave(8, 0)
        answers, old = sample(policy, prompts, 5, rng)
        advantages = group_advantages(rewards_of(prompts, answers), 8)
        for _ in range(2):
            new = log_probs_of(policy, prompts, answers)
            loss = clipped_loss(new, old, advantages, answer_mask(answers))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    return copies


# --8<-- [start:compare]
def distributions_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor):
    """The trainer's log-probabilities of the whole vocabulary, [n, new, vocabulary]."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits.double().log_softmax(-1)


def compare_tokens(sampler: torch.Tensor, trainer: torch.Tensor, answers: torch.Tensor):
    """Return the mean and the maximum of |Δ log p|, the KL divergence, and the largest ratio.

    Only tokens up to the end of each answer are compared. The KL divergence is
    KL(sampler ‖ trainer), the mean over all positions of a sum over the whole vocabulary.
    """
    mask = answer_mask(answers).bool()
    log_ratio = (trainer - sampler).gather(2, answers[..., None])[..., 0][mask]
    drawn = sampler.exp()[mask]
    difference = (sampler - trainer)[mask].masked_fill(drawn == 0, 0.0)
    kl = (drawn * difference).sum(-1).mean()
    size = log_ratio.abs()
    return size.mean().item(), size.max().item(), kl.item(), size.max().exp().item()


# --8<-- [end:compare]
def plot_causes(rows: dict[str, tuple[float, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "svg.fonttype": "none", "svg.hashsalt": "mismatch_causes", "font.size": 11,
    }  # fmt: skip
    figure, axes = plt.subplots(figsize=(8, 4.8))
    names = list(rows)[::-1]
    for place, name in enumerate(names):
        mean, largest = rows[name]
        assert mean <= largest
        mean = max(mean, 1.2e-8)
        axes.plot([mean, largest], [place, place], color="#6b7280", lw=1)
        axes.plot([mean], [place], "o", color="#0b6e99", label="mean" if not place else None)
        axes.plot(
            [largest], [place], "D", color="#c2410c", label="largest" if not place else None
        )
    axes.set(xscale="log", xlim=(1e-8, 10), xlabel="|log π − log μ| of a token (nats)")
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0.2, color="#6b7280", ls=":", lw=1)
    axes.text(0.22, len(names) - 0.9, "clip 0.2", color="#6b7280", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 0.08))
    figure.tight_layout()
    figure.savefig("mismatch_causes.svg", transparent=True, metadata={"Date": None})


def short(x: float) -> str:
    """Return a number with two digits, or with one digit and an exponent if it is tiny."""
    return "≈0.0000" if x < 1e-12 else f"≈{x:.2g}" if x > 1e-4 else f"≈{x:.0e}"


class Table:
    """Draws answers with one sampler after the other, and compares each with a trainer."""

    def __init__(self, prompts: torch.Tensor) -> None:
        self.prompts = prompts
        self.rows: dict[str, tuple[float, float, float, float]] = {}

    def add(self, name: str, sampler: Policy, trainer: Policy, acted: str = "", **options):
        """Print a row. Returns the answers and both distributions [n, new, vocabulary]."""
        rng = torch.Generator().manual_seed(1)
        new = self.prompts.shape[1] + 1
        answers, drawn = draw_answers(sampler, self.prompts, new, rng, **options)
        with torch.no_grad():
            computed = distributions_of(trainer, self.prompts, answers)
        self.rows[name] = mean, largest, kl, ratio = compare_tokens(drawn, computed, answers)
        mask = answer_mask(answers).bool()
        other = ((drawn.exp() - computed.exp()).abs().amax(-1)[mask] > 1e-7).float().mean()
        cells = [short(mean), short(largest), f"≈{max(kl, 0):.0e}", f"≈{ratio:.4g}"]
        acted = acted or f"≈{other:.0%} of the positions differ"
        print(f"{name:21}" + "".join(f"{cell:9}" for cell in cells) + acted)
        return answers, drawn, computed


def moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> str:
    """Say by how much the numbers differ, as a fraction of their mean magnitude."""
    pairs = list(zip(before, after, strict=True))
    change = sum((a - b.float()).abs().sum().item() for a, b in pairs)
    return f"move by ≈{change / sum(a.abs().sum().item() for a in before):.2%}"


def with_recorded_choices(policy: Policy, sampler: Policy) -> Policy:
    """Return a copy that uses the experts that the sampler chose for the same tokens."""
    policy = copy.deepcopy(policy)
    for block, source in zip(policy.blocks, sampler.blocks, strict=True):
        block.up.replay = [torch.cat(source.up.choices, 1)]
    return policy


def check_experts() -> None:
    """Replay random choices, and compare with a loop. The router must get a gradient."""
    layer, x, choices = Experts(4, 3), torch.randn(2, 5, 4), torch.randint(3, (2, 5))
    layer.replay = [choices]
    output = layer(x)
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        share = (layer.router.weight @ x[b, s]).softmax(0)[choices[b, s]]
        torch.testing.assert_close(output[b, s], layer.weight[choices[b, s]] @ x[b, s] * share)
    output.sum().backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().max() > 1e-3


# --8<-- [start:replay]
def measure_experts(prompts: torch.Tensor) -> dict[str, tuple[float, float, float, float]]:
    """Add the rows of a policy with experts, whose sampler computes in bf16."""
    torch.manual_seed(0)
    policy = Policy()  # not trained, because the trained router is rarely near a tie
    for block in policy.blocks:
        block.up = Experts(32, 8)
    for parameter in policy.parameters():
        parameter.data *= 1.5 if parameter.dim() == 2 else 1.0
    sampler, again = copy.deepcopy(policy).bfloat16(), copy.deepcopy(policy).bfloat16()
    table, new = Table(prompts), prompts.shape[1] + 1
    answers, drawn, computed = table.add("experts in bf16", sampler, policy, "see below")
    pairs = zip(sampler.blocks, policy.blocks, strict=True)
    flips = torch.stack([torch.cat(s.up.choices, 1) != p.up.choices[0] for s, p in pairs])
    replay = with_recorded_choices(policy, sampler)
    same, *_ = table.add("experts, replayed", again, replay, "see below")
    assert torch.equal(same, answers)
    # --8<-- [end:replay]
    mask = answer_mask(answers).bool()
    size = (computed - drawn).gather(2, answers[..., None])[..., 0].abs()
    flipped = flips[:, :, -new:].any(0) & mask
    near, far = size[mask & ~flipped].mean().item(), size[flipped].mean().item()
    print(
        f"experts: ≈{flips.float().mean():.1%} of the choices differ, so ≈{flipped.sum()}",
        end="",
    )
    print(f" of {mask.sum()} tokens use another expert:")
    print(f"  mean |Δ| ≈{far:.3f} with another expert, ≈{near:.4f} with the same experts")
    assert 0 < flipped.sum() < mask.sum() / 10 and far > 4 * near
    free, replayed = table.rows.values()
    assert replayed[1] < free[1] / 2, "the replay did not remove the largest differences"
    assert replayed[0] < 1.5 * near, "the replay left more than rounding errors"
    return table.rows


def main() -> None:
    torch.set_num_threads(1)
    check_experts()
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    policy = Policy()
    pretrain(policy, 4, rng)
    copies = train_and_copy(policy, 20, rng)
    prompts = draw_prompts(512, 4, rng)
    table = Table(prompts)
    rows, parameters = table.rows, list(policy.parameters())
    print(f"{'cause':21}{'mean |Δ|':9}{'max |Δ|':9}{'KL':9}{'ratio':9}what changed")

    table.add("none: fp32 in both", policy, policy, "(no cause)")
    split = split_rows(policy, 4)
    with torch.no_grad():
        other = (split(prompts) != policy(prompts)).any(-1).float().mean().item()
    assert other > 0, "the partial sums did not change the bits"
    text = f"≈{other:.0%} of the prompt positions have different bits"
    table.add("TP 4, fp32 in both", split, policy, text)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rounded = copy.deepcopy(policy).to(dtype)
        text = "weights " + moved(parameters, list(rounded.parameters()))
        answers, drawn, computed = table.add(f"sampler in {name}", rounded, policy, text)
    squares = (drawn.exp() * (computed - drawn) ** 2).sum(-1)
    half_square = 0.5 * squares[answer_mask(answers).bool()].mean().item()
    both = copy.deepcopy(policy).bfloat16()
    table.add("bf16 in both", both, both)
    table.add("bf16 in both, TP 4", split_rows(both, 4), both)
    table.add("bf16, chunks of 2", both, both, chunk=2)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        merged = in_parts(both, dtype)  # the trainer has only one part
        _, chunked, _ = table.add(f"bf16, merged in {name}", merged, merged, chunk=2)
    _, whole = draw_answers(merged, prompts, 1, torch.Generator().manual_seed(1))
    assert not torch.equal(whole[:, 0], chunked[:, 0]), "the prompt was not cut into chunks"
    small = with_8_bit_weights(policy)
    text = "weights " + moved(parameters, list(small.parameters()))
    table.add("8-bit weights", small, policy, text)
    caches: list[list] = [[] for _ in policy.blocks]
    with torch.no_grad():
        policy(prompts, caches)
    entries = [entry for cache in caches for entry in cache]
    text = "cached numbers " + moved(entries, [to_8_bits(entry) for entry in entries])
    table.add("8-bit cache", policy, policy, text, cache_8_bits=True)
    answers, drawn, computed = table.add("top-p 0.9", policy, policy, "see below", top_p=0.9)
    for k in (1, 4, 16):
        text = "weights " + moved(parameters, list(copies[-k].parameters()))
        table.add(f"{k} batch{'es' * (k > 1)} old", copies[-k], policy, text)
    rows |= measure_experts(draw_prompts(512, 7, rng))
    equal = ("bf16 in both", "bf16, chunks of 2", "bf16, merged in fp32")  # on many CPUs
    plot_causes({name: row[:2] for name, row in rows.items() if name not in equal})

    mask = answer_mask(answers).bool()
    inside = drawn > -torch.inf  # the tokens that the filter kept
    mass = (computed.exp() * inside).sum(-1)
    torch.testing.assert_close(  # the filter divides by the mass that it keeps, and only that
        (computed - drawn)[inside], mass.log()[..., None].expand_as(drawn)[inside],
        rtol=0, atol=1e-5,
    )  # fmt: skip
    kept = mass[mask].mean().item()
    text = f"the probability that the filter keeps, ≈{kept:.3f} on average"
    print(f"top-p: every ratio π/μ is {text}")
    assert 0.9 <= kept < 1

    mean = {name: row[0] for name, row in rows.items()}
    formats = mean["sampler in bf16"] / mean["sampler in fp16"]
    stale = mean["1 batch old"] / mean["sampler in bf16"]
    print(f"mean |Δ|: bf16 is ≈{formats:.0f} × fp16, and 1 batch old is ≈{stale:.0f} × bf16")
    print(
        f"bf16: KL ≈{rows['sampler in bf16'][2]:.1e}, half of the mean of Δ² ≈{half_square:.1e}"
    )
    assert 0.8 < half_square / rows["sampler in bf16"][2] < 1.25
    assert rows["none: fp32 in both"][1] < 1e-4 and rows["TP 4, fp32 in both"][1] < 1e-4
    assert 4 < formats < 16  # 3 bits: about 8
    # Some CPUs have different bf16 kernels for one token and for a sequence.
    assert mean["bf16 in both"] < mean["bf16 in both, TP 4"] / 2
    for name in ("bf16, chunks of 2", "bf16, merged in fp32"):
        assert mean[name] < mean["bf16, merged in bf16"] / 2, name
    assert mean["bf16 in both, TP 4"] > 100 * mean["TP 4, fp32 in both"]
    for name in ("bf16 in both, TP 4", "bf16, merged in bf16", "8-bit weights", "8-bit cache"):
        assert mean["sampler in bf16"] / 10 < mean[name] < mean["sampler in bf16"] * 2, name
    assert mean["sampler in bf16"] * 5 < mean["top-p 0.9"] < mean["1 batch old"] / 2
    assert 30 < stale < 300
    assert mean["1 batch old"] < mean["4 batches old"] < mean["16 batches old"]


if __name__ == "__main__":
    main()
