"""Shows what old samples cost: seconds of a step, and the learning curve of a small policy.

A batch is at most k training steps old. A larger k hides the longest answer, so steps take less
time. But older samples teach less, so more steps are needed. The column "after 40 minutes"
shows which k reaches the highest reward in the same time. The ratio of probabilities in the
objective corrects old samples; the last row shows the same training without it. `--seeds 16`
trains with 16 seeds. Draws staleness_and_reward.svg.
"""

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from statistics import fmean

import matplotlib
import torch
import torch.nn.functional as F
from torch import nn

matplotlib.use("svg")
import matplotlib.pyplot as plt

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, PROMPTS, GROUP, UPDATES = 3, 4, 16, 2  # UPDATES: optimizer steps for each batch
STEPS, EARLY, SEEDS = 40, 16, 4  # --seeds gives a different number of seeds
FIRST, LAST = 30, 60  # simulated_step() measures the steps from FIRST to LAST - 1
TRAIN, SLOTS, ANSWERS = 60.0, 160, 512  # seconds of a step; running answers; answers of a step
TIME = 40 * 60.0  # seconds after which the curves are compared


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


def ignored_tokens(new, old, advantages) -> torch.Tensor:
    """True for each token whose ratio has left the range in the direction of the advantage."""
    high = (new - old > math.log(1.2)) & (advantages[:, None] > 0)
    low = (new - old < math.log(0.8)) & (advantages[:, None] < 0)
    return high | low


def ignored_share(new, old, advantages, mask) -> float:
    """The share of ignored tokens among the tokens whose answer has an advantage."""
    used = mask * (advantages[:, None] != 0)
    return float((ignored_tokens(new, old, advantages) * used).sum() / used.sum())


# --8<-- [start:learn]
def learn(state: dict, seed: int, age: int, corrected: bool) -> tuple[list[float], float]:
    """Train with samples from weights that are `age` steps old.

    The first `age` steps use the initial weights, because no weights are older. Without
    correction, the ratio compares with the weights of the trainer, as if they had sampled the
    answers. Returns the expected reward before each step and at the end, and the share of
    tokens that the clipped objective ignores in the first update of a batch.
    """
    rng = torch.Generator().manual_seed(seed)
    policy, sampler = Policy(layers=1), Policy(layers=1)
    policy.load_state_dict(state)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, fused=True)
    versions: deque[tuple[int, dict]] = deque(maxlen=age + 1)
    every, rewards, ignored = every_prompt(LENGTH), [], []
    for step in range(STEPS):
        rewards.append(exact_rewards(policy, every).mean().item())
        now = {name: each.clone() for name, each in policy.state_dict().items()}
        versions.append((step, now))
        version, weights = versions[0]  # the oldest that is allowed
        assert step - version == min(step, age)
        sampler.load_state_dict(weights)
        prompts = draw_prompts(PROMPTS, LENGTH, rng).repeat_interleave(GROUP, 0)
        answers, old = sample(sampler, prompts, LENGTH + 1, rng)
        advantages = group_advantages(rewards_of(prompts, answers), GROUP)
        mask = answer_mask(answers)
        if not corrected:
            with torch.no_grad():
                old = log_probs_of(policy, prompts, answers)
        for update in range(UPDATES):
            new = log_probs_of(policy, prompts, answers)
            if update == 0 and (advantages != 0).any():
                ignored.append(ignored_share(new, old, advantages, mask))
            optimizer.zero_grad()
            clipped_loss(new, old, advantages, mask).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    rewards.append(exact_rewards(policy, every).mean().item())
    return rewards, sum(ignored) / len(ignored)


# --8<-- [end:learn]


def duration_of_answer(rng: random.Random) -> float:
    """Draw the duration of one answer: 20 s on average, at most 120 s."""
    return min(rng.lognormvariate(math.log(20) - 0.32, 0.8), 120)


def last_end(durations: list[float], slots: int) -> float:
    """Return when the last of these answers ends. A free slot takes the next answer."""
    ends = durations[:slots]
    heapq.heapify(ends)
    for duration in durations[slots:]:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


# --8<-- [start:step_time]
def simulated_step(age: int, batches: list[list[float]]) -> tuple[float, float]:
    """Simulate samplers that may be `age` batches ahead of the trainer.

    Returns the mean seconds of the measured steps, and the mean seconds for which a slot works
    during such a step.
    """
    free, ends, spans = [0.0] * SLOTS, [], []
    for step, batch in enumerate(batches):
        # the batch may start when the weights that make it `age` steps old are there
        allowed = ends[step - age - 1] if step > age else 0.0
        last = 0.0
        for duration in batch:
            end = max(free[0], allowed) + duration
            heapq.heapreplace(free, end)
            spans.append((end - duration, end))
            last = max(last, end)
        ends.append(max(last, ends[-1] if ends else 0.0) + TRAIN)
    since, until = ends[FIRST - 1], ends[LAST - 1]
    work = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans)
    return (until - since) / (LAST - FIRST), work / SLOTS / (LAST - FIRST)


def least_step(age: int, batch: float, work: float) -> float:
    """No step is shorter than its training, than the samplers' work, or than its part of a
    cycle. A cycle starts a batch, waits for its longest answer and trains on the batch, and in
    this time `age` + 1 steps are made.
    """
    return max(TRAIN, work, (batch + TRAIN) / (age + 1))


# --8<-- [end:step_time]


def reward_at(curve: list[float], seconds: float, step: float) -> float:
    """Return the reward after some seconds, as if every step lasted `step` seconds."""
    return curve[min(STEPS, int(seconds / step))]


def largest_fall(curve: list[float]) -> float:
    """How far the reward falls below its highest earlier value."""
    peaks = itertools.accumulate(curve, max)
    return max(peak - reward for peak, reward in zip(peaks, curve, strict=True))


def draw(curves: dict[tuple, list[list[float]]], steps: dict[int, float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "staleness", "font.size": 12}
    figure, both = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True)
    colours = ("#71717a", "#0b6e99", "#c2410c", "#7c3aed")
    for ((age, corrected), rows), colour in zip(curves.items(), colours, strict=True):
        name = f"{age} steps old" + ("" if corrected else ", not corrected")
        line = "-" if corrected else ":"
        middle = [fmean(list(each)) for each in zip(*rows, strict=True)]
        low, high = ([f(each) for each in zip(*rows, strict=True)] for f in (min, max))
        for axes, unit in zip(both, (1.0, steps[age] / 60), strict=True):
            if axes is both[1] and not corrected:
                continue
            times = [unit * k for k in range(STEPS + 1)]
            axes.plot(times, middle, line, color=colour, lw=2, label=name)
            axes.fill_between(times, low, high, color=colour, alpha=0.15, lw=0)
    both[0].set(xlabel="training steps", ylabel="expected reward", ylim=(0, 1.02))
    both[1].set(xlabel="minutes", xlim=(0, STEPS * steps[2] / 60))
    both[0].legend(frameon=False, labelcolor="linecolor", fontsize=10, loc="lower right")
    for axes in both:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("staleness_and_reward.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="number of seeds, 4 by default"
    )
    count = parser.parse_args().seeds
    if count < SEEDS:
        parser.error(f"--seeds must be at least {SEEDS}, or the means say too little")
    rng = random.Random(0)
    # the last batches keep the samplers busy until the last measured step ends
    batches = [[duration_of_answer(rng) for _ in range(ANSWERS)] for _ in range(LAST + 15)]
    batch = fmean([last_end(each, SLOTS) for each in batches[FIRST:LAST]])
    work = ANSWERS * fmean([fmean(each) for each in batches[FIRST:LAST]]) / SLOTS
    print(f"training {TRAIN:.0f} s, work of the samplers {work:.0f} s, ", end="")
    print(f"a batch with its longest answer {batch:.0f} s")
    ages = (0, 1, 2, 3, 4, 8)
    print("highest age allowed" + "".join(f"{age:7}" for age in ages))
    measured = {age: simulated_step(age, batches) for age in ages}
    found = {age: seconds for age, (seconds, _) in measured.items()}
    least = {age: least_step(age, batch, work) for age, (_, work) in measured.items()}
    print("seconds of a step  " + "".join(f"{each:7.1f}" for each in found.values()))
    print("at least           " + "".join(f"{each:7.1f}" for each in least.values()))
    # nothing beats the limit, and the simulation is close to it
    assert all(least[age] * (1 - 1e-9) <= found[age] < 1.05 * least[age] for age in ages)
    assert found[0] > 2.5 * found[2] and found[2] < 1.2 * found[8]
    # a larger age gives nothing any more, because the samplers already work all the time
    assert found[3] == found[4] == found[8]
    assert all(math.isclose(seconds, busy) for seconds, busy in list(measured.values())[3:])
    assert all(abs(busy / work - 1) < 0.02 for _, busy in measured.values())

    # the clipped objective ignores exactly the tokens whose gradient is zero
    torch.manual_seed(0)
    new, old = torch.randn(8, 9).requires_grad_(), torch.randn(8, 9)
    signs = torch.tensor([1.0, -1.0] * 4)
    (gradient,) = torch.autograd.grad(clipped_loss(new, old, signs, torch.ones(8, 9)), new)
    assert torch.equal(gradient == 0, ignored_tokens(new, old, signs))
    assert 10 < (gradient == 0).sum() < 60
    # three of seven tokens: the third answer has no advantage, and 0.0 in the mask is padding
    new = torch.tensor([[0.5, 0.5, 0.0, 0.5], [-0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    used = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    signs = torch.tensor([1.0, -1.0, 0.0])
    assert ignored_share(new, torch.zeros(3, 4), signs, used) == torch.tensor(3 / 7).item()
    assert largest_fall([0.2, 0.9, 0.4, 0.6, 1.0]) == 0.5

    states = []
    for seed in range(count):
        torch.manual_seed(seed)
        policy = Policy(layers=1)
        pretrain(policy, LENGTH, torch.Generator().manual_seed(seed), steps=50)
        states.append({k: each.detach().clone() for k, each in policy.state_dict().items()})
    print()
    print(f"{'':24}expected reward: mean, lowest and highest of {count} seeds")
    heads = "".join(
        f"{f'after {what}':25}" for what in (f"{EARLY} steps", f"{STEPS} steps", "40 minutes")
    )
    print(f"age  ratio used  tokens ignored   {heads}largest fall")
    curves, shares, falls, table = {}, {}, {}, {}
    for age, corrected in ((0, True), (2, True), (8, True), (8, False)):
        runs = [learn(state, seed, age, corrected) for seed, state in enumerate(states)]
        rows = curves[age, corrected] = [curve for curve, _ in runs]
        shares[age, corrected] = fmean([share for _, share in runs])
        falls[age, corrected] = [largest_fall(row) for row in rows]
        cells = [[row[EARLY] for row in rows], [row[STEPS] for row in rows]]
        cells.append([reward_at(row, TIME, found[age]) for row in rows])
        table[age, corrected] = [fmean(cell) for cell in cells]
        text = "".join(f"   ≈{fmean(c):.2f} (≈{min(c):.2f} to ≈{max(c):.2f})" for c in cells)
        about = "≈" if shares[age, corrected] else " "
        name = "yes" if corrected else "no"
        text += f"   ≈{max(falls[age, corrected]):.2f}"
        print(f"{age:3}  {name:10} {about + f'{shares[age, corrected]:.0%}':>14}{text}")
    # fresh samples, and samples treated as fresh, are never ignored in the first update
    assert shares[0, True] == shares[8, False] == 0 < shares[2, True] < shares[8, True]
    # a step with old samples teaches less: compare the mean over all steps and seeds
    area = {key: fmean([fmean(row) for row in rows]) for key, rows in curves.items()}
    assert area[0, True] > area[2, True] > area[8, True]
    # without the correction, the reward rises faster, and the worst seed falls further
    assert area[8, False] > area[8, True]
    assert max(falls[8, False]) > max(falls[8, True])
    timed = {key: row[2] for key, row in table.items()}
    # but after 40 minutes, samples that are two steps old have led to the highest reward
    assert timed[2, True] > max(timed[0, True], timed[8, True])
    for (age, corrected), rows in curves.items():  # the columns, from the mean curve
        middle = [fmean(each) for each in zip(*rows, strict=True)]
        steps = {0: 11, 2: 33, 8: 37}[age]  # in 40 minutes
        assert table[age, corrected] == [middle[16], middle[-1], middle[steps]]
    draw(curves, {age: found[age] for age in (0, 2, 8)})


if __name__ == "__main__":
    main()
