"""This program makes the log-probabilities of the sampler and of the trainer equal to the bit.

Both programs compute the log-probabilities of the same tokens with the same weights. The
trainer needs one forward pass for whole sequences. The sampler needs one pass per token, with
a KV cache, and in batches of any size. With ordinary kernels, the sums have different orders,
so the last bits differ. Then every sum is added from its first term to its last term, and all
bits are equal. The program also draws the places where a trainer and a sampler can differ.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
H = 64  # the hidden size


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


def answer_mask(answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each token up to and including the first END, 0.0 for padding, [n, new]."""
    is_end = (answers == END).int()
    return (is_end.cumsum(1) - is_end == 0).float()


# --8<-- [start:ordered]
def in_float64(function, x: torch.Tensor) -> torch.Tensor:
    """Compute in float64 and round, because vector and scalar code differ in the last bit."""
    return function(x.double()).to(x.dtype)


def ordered_product(x: torch.Tensor, weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Return x @ weight.T, where every sum is added from its first to its last term.

    With more `parts`, each part is added in this way, and then the sums of the parts.
    """
    total = 0.0
    for columns in torch.arange(weight.shape[1]).chunk(parts):
        part = torch.zeros(())
        for k in columns.tolist():
            part = part + x[..., k : k + 1] * weight[:, k]  # one multiplication, one addition
        total = total + part
    return total


def ordered_sum(terms: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dimension, added from the first to the last term."""
    total = torch.zeros(())
    for term in terms.unbind(-1):
        total = total + term
    return total[..., None]


# --8<-- [end:ordered]
def ordered_norm(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    mean = ordered_sum(x * x) / x.shape[-1]
    return x / (mean + torch.finfo(x.dtype).eps).sqrt() * norm.weight


def ordered_log_softmax(scores: torch.Tensor) -> torch.Tensor:
    shifted = scores - scores.amax(-1, keepdim=True)
    return shifted - in_float64(torch.log, ordered_sum(in_float64(torch.exp, shifted)))


class OrderedPolicy:
    """The function of a Policy, written a second time with sums that have a fixed order."""

    def __init__(self, policy: Policy, parts: int = 1) -> None:
        self.policy, self.parts, self.blocks = policy, parts, policy.blocks
        self.passes: list[list[int]] = []  # the shapes of the tokens in all forward passes

    def product(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return ordered_product(x, linear.weight, self.parts)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int):
        """q [b, s, heads, d] with k and v [b, past + s, heads, d] -> [b, s, heads * d]."""
        k, v = k.transpose(1, 2)[:, None], v.transpose(1, 2)[:, None]  # [b, 1, heads, keys, d]
        scores = ordered_sum(q[..., None, :] * k)[..., 0] / q.shape[-1] ** 0.5
        future = torch.arange(k.shape[3]) > past + torch.arange(q.shape[1])[:, None]
        # A future key gets the weight 0, so it adds exactly 0 at the end of each sum.
        weights = in_float64(
            torch.exp, ordered_log_softmax(scores.masked_fill(future[:, None], -torch.inf))
        )
        return ordered_sum((weights[..., None] * v).transpose(-1, -2))[..., 0].flatten(2)

    def __call__(self, tokens: torch.Tensor, caches: list[list] | None = None) -> torch.Tensor:
        self.passes.append(list(tokens.shape))
        caches = [[] for _ in self.blocks] if caches is None else caches
        past = caches[0][0].shape[1] if caches[0] else 0
        policy, s = self.policy, tokens.shape[1]
        x = policy.token(tokens) + policy.position.weight[past : past + s]
        for block, cache in zip(self.blocks, caches, strict=True):
            heads = self.product(ordered_norm(block.norm1, x), block.qkv)
            q, k, v = heads.view(*x.shape[:2], 3, block.heads, -1).unbind(2)
            if cache:
                k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
            cache[:] = [k, v]
            x = x + self.product(self.attend(q, k, v, past), block.out)
            up = self.product(ordered_norm(block.norm2, x), block.up)
            x = x + self.product(in_float64(F.gelu, up), block.down)
        return self.product(ordered_norm(policy.norm, x), policy.head)


# --8<-- [start:two]
def trainer_log_probs(policy, prompts: torch.Tensor, answers: torch.Tensor, log_softmax):
    """Return the log-probability of each token from one pass over whole sequences, [n, new]."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return log_softmax(logits).gather(2, answers[..., None])[..., 0]


def sampler_log_probs(policy, prompts, answers, log_softmax, batch: int):
    """Return the same numbers from one pass per token, with a cache, in batches of `batch`."""
    rows = []
    for prompt, answer in zip(prompts.split(batch), answers.split(batch), strict=True):
        caches: list[list] = [[] for _ in policy.blocks]
        tokens, columns = prompt, []
        assert len(prompt) <= batch
        for t in range(answers.shape[1]):
            scores = log_softmax(policy(tokens, caches)[:, -1])
            tokens = answer[:, t : t + 1]  # the token that was sampled, and no new one
            columns.append(scores.gather(1, tokens))
        assert caches[0][0][0].numel() == (prompt.shape[1] + t) * H  # each token once
        rows.append(torch.cat(columns, 1))
    return torch.cat(rows)


# --8<-- [end:two]
def draw_places() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "same_bits", "font.size": 11}
    figure, axes = plt.subplots(figsize=(9, 4.4))
    boxes = {
        (0.0, 1.5): "weights\nafter step i",
        (2.6, 3.0): "trainer: one pass\nover whole sequences",
        (2.6, 0.0): "sampler: one pass\nper token, KV cache",
        (6.2, 3.0): "log-probability\nlog π of each token",
        (6.2, 0.0): "log-probability\nlog μ of each token",
    }
    for (x, y), text in boxes.items():
        width = 1.6 if x == 0 else 2.3
        colour = {0.0: "#c2410c", 3.0: "#15803d"}.get(y, "#6b7280")
        axes.add_patch(plt.Rectangle((x, y), width, 0.9, fill=False, edgecolor=colour, lw=2))
        axes.text(x + width / 2, y + 0.45, text, ha="center", va="center")
    arrow = {"arrowstyle": "->", "color": "#6b7280", "lw": 1.5}
    for start, end in [
        ((1.6, 2.1), (2.6, 3.3)),
        ((1.6, 1.8), (2.6, 0.6)),
        ((4.9, 3.45), (6.2, 3.45)),
        ((4.9, 0.45), (6.2, 0.45)),
        ((7.35, 1.9), (7.35, 3.0)),
        ((7.35, 1.5), (7.35, 0.9)),
    ]:
        axes.annotate("", end, start, arrowprops=arrow)
    causes = {
        (0.0, 0.55): "stale weights,\n8-bit weights",
        (2.75, 2.55): "number format (bf16, fp16, fp32)",
        (2.75, 2.15): "order of the sums: kernel, batch,",
        (2.75, 1.8): "chunk of the prompt, TP degree",
        (2.75, 1.35): "8-bit cache, choice of experts",
        (5.05, 1.05): "top-p",
        (6.55, 1.7): "equal to the bit?",
    }
    for (x, y), text in causes.items():
        axes.text(x, y, text, va="center", ha="left", color="#c2410c")
    axes.set(xlim=(-0.1, 8.7), ylim=(-0.2, 4.1))
    axes.axis("off")
    figure.tight_layout()
    figure.savefig("same_bits.svg", transparent=True, metadata={"Date": None})


class Operations(TorchDispatchMode):
    """Records the names of all operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def add_in_a_loop(terms: torch.Tensor) -> torch.Tensor:
    """Add the numbers of a vector one by one, in a loop of Python over single numbers."""
    total = torch.zeros(())
    for term in terms.tolist():
        total = total + term
    return total


def check_order(rows: torch.Tensor, weight: torch.Tensor, policy: "Policy") -> None:
    """Compare the ordered sums with a loop, and test that the policy uses no other sum."""
    terms = rows[0] * weight[0]
    expected = {1: add_in_a_loop(terms), 2: sum(map(add_in_a_loop, terms.chunk(2)))}
    for parts, value in expected.items():
        assert ordered_product(rows[:1], weight[:1], parts).item() == value.item()
    assert ordered_sum(terms).item() == expected[1].item()
    products = [row * weight[0] for row in rows[:8]]
    assert any(add_in_a_loop(each) != add_in_a_loop(each.flip(0)) for each in products), (
        "the order must change the bits"
    )
    with Operations() as operations:
        tokens = torch.tensor([[OPENING, OPENING + 1, CLOSING]])
        ordered_log_softmax(OrderedPolicy(policy)(tokens))
    kernels = {"mm", "bmm", "addmm", "sum", "mean", "cumsum", "dot", "mv", "logsumexp"}
    kernels |= {"_softmax", "_log_softmax", "norm", "linear", "einsum", "_fused_rms_norm"}
    assert not kernels & operations.names, kernels & operations.names
    assert {"add", "mul", "exp", "amax"} <= operations.names, operations.names


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw_places()

    print("1024 terms per sum, row 0 in a batch of 128 rows and alone")
    rows, weight = torch.randn(128, 1024), torch.randn(512, 1024)
    ordinary = [x @ weight.T for x in (rows, rows[:1])]
    ordered = [ordered_product(x, weight) for x in (rows, rows[:1])]
    halves = ordered_product(rows[:1], weight, parts=2)
    for name, (batch, alone) in {
        "ordinary product": ordinary,
        "first to last": ordered,
        "first to last, alone in 2 parts": [ordered[0], halves],
    }.items():
        assert len(batch) == 128 and len(alone) == 1
        other = (batch[:1] != alone).float().mean().item()
        print(
            f"  {name:32} ≈{other:.0%} of the values have different bits".replace("≈0%", "0%")
        )
    exact = rows.double() @ weight.double().T
    for result in (*ordinary, *ordered, halves):  # all of them are right
        torch.testing.assert_close(result.double(), exact[: len(result)], rtol=0, atol=1e-3)
    assert not torch.equal(ordinary[0][:1], ordinary[1]), "the batch did not change the bits"
    assert torch.equal(ordered[0][:1], ordered[1])
    assert not torch.equal(ordered[1], halves), "the order of the sums did not change the bits"

    policy = Policy(h=H)
    for parameter in policy.parameters():
        parameter.mul_(1.5 if parameter.dim() == 2 else 1.0)  # less uniform probabilities
    rng = torch.Generator().manual_seed(0)
    prompts = draw_prompts(128, 4, rng)
    answers, reported = sample(policy, prompts, 5, rng)
    mask = answer_mask(answers).bool()
    softmax = torch.nn.LogSoftmax(-1)
    torch.testing.assert_close(
        sampler_log_probs(policy, prompts, answers, softmax, 128)[mask], reported[mask]
    )

    check_order(rows, weight, policy)
    first, few = OrderedPolicy(policy), slice(0, 32)
    trainer = trainer_log_probs(policy, prompts, answers, softmax)
    invariant = trainer_log_probs(first, prompts, answers, ordered_log_softmax)
    torch.testing.assert_close(invariant[mask], trainer[mask])  # the same function
    assert first.passes == [[128, 8]]  # 4 tokens of a prompt and 4 of the 5 tokens of an answer
    print(f"{mask.sum()} tokens: the sampler compared with the trainer")
    for name, engine, log_softmax, reference, batches in (
        ("ordinary kernels", policy, softmax, trainer, (128, 8, 1)),
        ("first to last", first, ordered_log_softmax, invariant, (128, 8, 1)),
        ("in 2 parts", OrderedPolicy(policy, 2), ordered_log_softmax, invariant, (128,)),
    ):
        for batch in batches:
            which = slice(None) if batch == 128 else few
            chosen = mask[which]
            log_probs = sampler_log_probs(
                engine, prompts[which], answers[which], log_softmax, batch
            )
            off = (log_probs - reference[which])[chosen].abs()
            other, units = (off > 0).sum().item(), off.max().item() * 1e7
            assert other == (log_probs != reference[which])[chosen].sum()
            # the printed number must be the largest difference, and not the mean
            assert (off.double() * 1e7 <= units).all() and (units > 0.1 or other == 0)
            if engine is first:
                passes = [[batch, 4], *[[batch, 1]] * 4] * (len(log_probs) // batch)
                assert first.passes[-len(passes) :] == passes
                assert other == 0 and torch.equal(log_probs[chosen], reference[which][chosen])
                print(f"  {name:16}  batch {batch:3}: 0 of {chosen.sum()} differ")
            else:
                assert other > 0 or engine is policy
                print(
                    f"  {name:16}  batch {batch:3}: ≈{other} of {chosen.sum()} differ,"
                    f" by at most ≈{units:.0f} units of 1e-7"
                )
            assert off.max() < 1e-5


if __name__ == "__main__":
    main()
