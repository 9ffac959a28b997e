"""DPO trains on pairs of answers without sampling, and both answers can become less likely.

Part 1 minimizes the loss for six possible answers in float64. The result is the policy that
maximizes reward minus KL divergence, which has a closed form. Part 2 trains the small model on
pairs that differ in one bracket. All margins become positive, but the probability of both
answers falls, and other wrong answers receive it. A term that keeps the right answer likely
prevents this.
"""

import copy
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, STEPS, BETA, KEEP = 4, 50, 0.1, 0.3
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


def log_probs_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token of the answers in one forward pass, [n, new]."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]


def answer_mask(answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each token up to and including the first END, 0.0 for padding, [n, new]."""
    is_end = (answers == END).int()
    return (is_end.cumsum(1) - is_end == 0).float()


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


def sequence_log_probs(policy: Policy, prompts, answers) -> torch.Tensor:
    """The log-probability of each whole answer up to its END, [n]."""
    return (log_probs_of(policy, prompts, answers) * answer_mask(answers)).sum(1)


# --8<-- [start:loss]
def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta: float):
    """The mean loss of the pairs, and the margin of each pair. All inputs are [n]."""
    reward_chosen = beta * (chosen - reference_chosen)  # the implicit rewards
    reward_rejected = beta * (rejected - reference_rejected)
    margin = reward_chosen - reward_rejected
    return -F.logsigmoid(margin).mean(), margin


# --8<-- [end:loss]


def closed_form() -> None:
    """Minimize the loss for all pairs of six answers; compare with the optimal policy."""
    rng = torch.Generator().manual_seed(0)
    reference = torch.randn(6, generator=rng, dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([1.0, 0.4, 0.0, -0.3, 0.7, -0.8], dtype=torch.float64)
    pairs = list(itertools.permutations(range(6), 2))
    first, second = torch.tensor(pairs).T
    share = (rewards[first] - rewards[second]).sigmoid()  # Bradley-Terry: first is preferred
    beta, logits = 0.5, torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        policy, loss = logits.log_softmax(0), torch.zeros((), dtype=torch.float64)
        for i, (a, b) in enumerate(pairs):
            ours = policy[[a]], policy[[b]], reference[[a]], reference[[b]]
            loss = loss + share[i] * dpo_loss(*ours, beta)[0]
        loss.backward()
        return loss

    optimizer.step(closure)
    found = logits.detach().softmax(0)
    optimum = reference.exp() * (rewards / beta).exp()
    optimum /= optimum.sum()
    print("reference   reward   minimum of the DPO loss   optimal policy")
    for row in zip(reference.exp(), rewards, found, optimum, strict=True):
        print("{:9.3f}   {:6.1f}   {:23.4f}   {:14.4f}".format(*map(float, row)))
    torch.testing.assert_close(found, optimum, rtol=1e-5, atol=1e-7)
    implicit = beta * (found.log() - reference)  # equals the reward up to one constant
    torch.testing.assert_close(implicit - implicit[0], rewards - rewards[0], rtol=0, atol=1e-5)

    def objective(policy: torch.Tensor) -> torch.Tensor:
        """The mean reward minus beta times the KL divergence from the reference."""
        return policy @ rewards - beta * policy @ (policy.log() - reference)

    for _ in range(100):  # the objective is lower for every other policy
        other = logits.detach() + 0.1 * torch.randn(6, generator=rng, dtype=torch.float64)
        assert objective(other.softmax(0)) < objective(found)
    best = beta * (reference.exp() @ (rewards / beta).exp()).log()  # beta log Z
    torch.testing.assert_close(objective(found), best, rtol=1e-9, atol=0)


def check_probabilities() -> None:
    """The probabilities of all answers of at most three tokens must add up to 1."""
    torch.manual_seed(1)
    answers = set()
    for tokens in itertools.product(range(len(TOKENS)), repeat=3):
        cut = tokens.index(END) + 1 if END in tokens else 3
        answers.add(tokens[:cut] + (PAD,) * (3 - cut))
    rows = torch.tensor(sorted(answers))
    prompts = torch.tensor([[2, 3]]).expand(len(rows), 2)
    with torch.no_grad():
        total = sequence_log_probs(Policy(), prompts, rows).exp().sum()
    torch.testing.assert_close(total, torch.ones(()))


def reference_model(seed: int) -> Policy:
    """A policy that already solves the task, by supervised training on right answers."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    policy = Policy()
    pretrain(policy, LENGTH, rng)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(60):
        prompts = draw_prompts(64, LENGTH, rng)
        optimizer.zero_grad()
        (-log_probs_of(policy, prompts, right_answers(prompts)).mean()).backward()
        optimizer.step()
    return policy


def right_answers(prompts: torch.Tensor) -> torch.Tensor:
    return F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)


def table_row(loss, margin, chosen, rejected) -> tuple[float, ...]:
    """Return the loss, the fraction of positive margins, and the three mean probabilities."""
    p = [float(x.exp().mean()) for x in (chosen, rejected)]
    positive = float((margin > 1e-4).float().mean())  # before the training all are 0
    return float(loss), positive, *p, 1 - sum(p)


def train(reference: Policy, keep: float) -> tuple[list[tuple[float, ...]], int]:
    """Train with DPO plus `keep` times the supervised loss of the right answers.

    Returns one row before and one row after the training (loss, fraction of the pairs with a
    positive margin, mean probability of the right, of the wrong and of all other answers), and
    the bytes of the log-probabilities of the reference.
    """
    policy = copy.deepcopy(reference)
    prompts = torch.tensor(list(itertools.product((OPENING, OPENING + 1), repeat=LENGTH)))
    right = right_answers(prompts)
    wrong = right.clone()
    wrong[:, -2] = 2 * CLOSING + 1 - wrong[:, -2]  # the other closing bracket
    assert bool(((wrong != right).sum(1) == 1).all())  # each pair differs in one bracket
    assert wrong[:, :-1].min() >= CLOSING
    with torch.no_grad():  # once, before the training: two numbers per pair
        known = [sequence_log_probs(reference, prompts, x) for x in (right, wrong)]

    optimizer, rows = torch.optim.AdamW(policy.parameters(), lr=1e-3), []
    twice, both = prompts.repeat(2, 1), torch.cat([right, wrong])
    for step in range(STEPS + 1):
        chosen, rejected = sequence_log_probs(policy, twice, both).chunk(2)
        loss, margin = dpo_loss(chosen, rejected, *known, BETA)
        if step in (0, STEPS):
            rows.append(table_row(loss.detach(), margin, chosen.detach(), rejected.detach()))
        optimizer.zero_grad()
        (loss - keep * chosen.mean() / (LENGTH + 1)).backward()
        optimizer.step()
    for values, answers in zip(known, (right, wrong), strict=True):  # still the same numbers
        with torch.no_grad():
            assert torch.equal(values, sequence_log_probs(reference, prompts, answers))
    return rows, sum(values.nbytes for values in known)


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


def draw(bars: dict[str, tuple[float, ...]]) -> str:
    """Above: one step of DPO. Below: where the probability is before and after."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 334" '
        'font-family="system-ui, sans-serif">',
        svg_label(4, 18, "One step of DPO", INK, 15, 'font-weight="600"'),
        svg_box(
            4,
            30,
            150,
            ["pairs in a file:", "prompt [[((", "chosen ))]]", "rejected ))])"],
            MUTED,
        ),
        svg_arrow(154, 54, 200),
        svg_arrow(154, 96, 200),
        svg_box(200, 30, 190, ["policy: log p of both"], BLUE),
        svg_box(200, 78, 190, ["reference: log p of both", "(never changes)"], MUTED),
        svg_arrow(390, 54, 432),
        svg_arrow(390, 96, 432),
        svg_box(
            432, 33, 140, ["margin: how", "much more the", "chosen answer", "gained"], BLUE
        ),
        svg_arrow(572, 72, 606),
        svg_box(606, 50, 110, ["loss, gradient"], BLUE),
        svg_label(4, 170, "Mean probability of the answers", INK, 15, 'font-weight="600"'),
    ]
    for row, (name, values) in enumerate(bars.items()):
        y, left = 184 + 44 * row, 200.0
        parts.append(svg_label(4, y + 20, name))
        for label, value, colour in zip(
            ("right", "wrong of the pair", "other"), values, (BLUE, MUTED, ORANGE), strict=True
        ):
            width = round(500 * value, 1)
            style = f'fill="{colour}" fill-opacity="0.25" stroke="{colour}"'
            parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="30" {style}/>')
            if width > 60:
                parts.append(svg_label(left + 6, y + 20, label))
            left = round(left + width, 1)
    parts += [svg_label(200, 328, "0"), svg_label(442, 328, "0.5"), svg_label(694, 328, "1")]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    torch.set_num_threads(1)
    assert right_answers(torch.tensor([[2, 3, 3]])).tolist() == [[5, 5, 4, END]]  # ([[ -> ]])$
    closed_form()
    check_probabilities()
    zeros, margins = torch.zeros(1), torch.tensor([-9.0, 0.0, 1.0, 2.0])  # a negative mean
    assert table_row(zeros, margins, zeros, zeros)[1] == 0.5
    print(f"\n{STEPS} steps on {2**LENGTH} pairs: the mean probability of an answer")
    print("seed   loss        step   loss     margin above 0   right    wrong    other")
    bars, ends = {}, set()
    for seed in (0, 1, 2):
        reference = reference_model(seed)
        for keep in (0.0, KEEP):
            name = "DPO + SFT" if keep else "DPO"
            rows, stored = train(reference, keep)
            for step, row in zip((0, STEPS), rows, strict=True):
                values = "≈{:.3f}   {:14.0%}   ≈{:.3f}   ≈{:.0e}   ≈{:.3f}"
                print(f"{seed:4}   {name:9}   {step:4}   " + values.format(*row))
            (first, none, right, wrong, other), (last, ordered, *after) = rows
            assert none == 0.0 and right > 0.95 and ordered == 1.0 and after[1] < wrong / 10
            for parts in ((right, wrong, other), after):  # each answer is counted once
                assert abs(sum(parts) - 1) < 1e-5, rows
            ends.add(last)
            assert last < 0.8 * first and abs(first - math.log(2)) < 1e-4
            if keep:
                assert after[0] > 0.9, rows
            else:
                assert after[0] < right - 0.1 and after[2] > other + 0.1, rows
            if seed == 0:
                bars.setdefault("before", (right, wrong, other))
                bars[f"after {name}"] = tuple(after)
    weights = sum(p.nbytes for p in reference.parameters())
    print(f"reference log-probabilities: {stored} bytes; a reference model: {weights:,} bytes")
    assert stored == 2**LENGTH * 2 * 4 and len(ends) == 6  # each seed has its own model
    with open("dpo.svg", "w", encoding="utf-8") as file:
        file.write(draw(bars))


if __name__ == "__main__":
    main()
