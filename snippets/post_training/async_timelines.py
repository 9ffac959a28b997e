"""Runs one trainer and three samplers as real processes in three ways, and draws who waits.

The policy closes brackets. It really samples and really trains, and `time.sleep` stretches both
to fixed durations, as if the model were large. Look at the share of the time in which each side
waits, next to the share that the formula predicts, and at the age: the number of training steps
between the weights that sampled an answer and the step that uses it. Draws async_timelines.svg.
"""

import heapq
import math
import multiprocessing
import sys
import time
from itertools import pairwise

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2

SAMPLERS, STEPS = 3, 8
GROUPS = 6  # groups of eight answers in a batch; a sampler samples one group at a time
TRAIN = 0.18  # seconds of a training step
# seconds to sample a group: most are short, and one of six is long
SAMPLE = [0.06, 0.06, 0.12, 0.06, 0.3, 0.06]
BOUND = {"synchronous": 0, "one step off": 1, "asynchronous": 2}  # the largest allowed age
LATE = 4  # in the asynchronous run, this group lasts until newer weights exist
LENGTH, GROUP = 3, 8  # brackets of a prompt, and answers of a group


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


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


# --8<-- [start:sampler]
def sampler_process(which: int, permits, results, versions: list[Policy], newest) -> None:
    """Sample one group for each permit, which names a version of the weights or none."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(100 + which)
    while (permit := permits.get()) is not None:
        index, version = permit
        with newest.get_lock():  # the trainer learns the version before it makes the next one
            if newest.value < 0:
                return
            named = version is not None
            version = version if named else newest.value
            results.put((index, version, which, None, None))
            begin = time.monotonic()
        prompts = draw_prompts(1, LENGTH, rng).repeat(GROUP, 1)
        answers, log_probs = sample(versions[version], prompts, LENGTH + 1, rng)
        sleep_until(begin + SAMPLE[index % GROUPS])
        while index == LATE and not named and newest.value == version:
            time.sleep(0.001)  # one long answer ends only after the next step, on any machine
        times = begin, time.monotonic()
        content = [each.tolist() for each in (prompts, answers, log_probs)]
        results.put((index, version, which, times, content))


# --8<-- [end:sampler]


def train(policy: Policy, optimizer, groups: list[tuple], versions: list[Policy]) -> None:
    """Make one step of GRPO, after a check that the named weights sampled each answer."""
    begin = time.monotonic()
    data = [[torch.tensor(each) for each in content] for *_, content in groups]
    for (_, version, *_), (prompts, answers, log_probs) in zip(groups, data, strict=True):
        with torch.no_grad():
            again = log_probs_of(versions[version], prompts, answers) * answer_mask(answers)
        torch.testing.assert_close(again, log_probs)
    prompts, answers, old = (torch.cat(each) for each in zip(*data, strict=True))
    advantages = group_advantages(rewards_of(prompts, answers), GROUP)
    new, mask = log_probs_of(policy, prompts, answers), answer_mask(answers)
    loss = clipped_loss(new, old, advantages, mask)
    terms = []  # the same loss with a loop over the tokens of the samplers
    logs = [row for *_, (_, _, log_probs) in groups for row in log_probs]
    lengths = mask.sum(1).int().tolist()
    for row, sampled, a, n in zip(
        new.tolist(), logs, advantages.tolist(), lengths, strict=True
    ):
        ratios = [math.exp(x - y) for x, y in zip(row[:n], sampled[:n], strict=True)]
        terms += [min(ratio * a, min(max(ratio, 0.8), 1.2) * a) for ratio in ratios]
    assert math.isclose(loss.item(), -sum(terms) / len(terms), abs_tol=1e-5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sleep_until(begin + TRAIN)


# --8<-- [start:chosen]
def chosen_groups(started: dict[int, int], untrained: dict, step: int, bound: int) -> list[int]:
    """Return the groups of this step, or an empty list if the step must wait.

    `started` has the version of all groups that no step has used, and `untrained` has those of
    them that have ended, in the order of their ends. A group of the age `bound` would be too
    old in the next step, so this step waits for it.
    """
    due = [i for i, version in started.items() if version <= step - bound]
    assert len(due) <= GROUPS, "more old groups are left than a step can use"
    if len(untrained) < GROUPS or not untrained.keys() >= set(due):
        return []
    return due + [i for i in untrained if i not in due][: GROUPS - len(due)]


# --8<-- [end:chosen]


# --8<-- [start:trainer]
def run(mode: str, state: dict) -> tuple[list[tuple], list[tuple], list[dict], dict]:
    """Return (begin, end) of each step, all groups, each step's ages, and times of permits."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    permits, results = context.SimpleQueue(), context.SimpleQueue()
    newest = context.Value("i", 0)
    versions = [Policy().share_memory() for _ in range(STEPS + 1)]
    policy = Policy()
    for each in (policy, versions[0]):
        each.load_state_dict(state)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    queues = permits, results, versions, newest
    samplers = [
        context.Process(target=sampler_process, args=(k, *queues), daemon=True)
        for k in range(SAMPLERS)
    ]
    for process in samplers:
        process.start()
    issued, started, untrained = 0, {}, {}  # groups by number
    steps, finished, used, permitted = [], [], [], {}

    def allow(batches: int, version: int | None) -> None:
        nonlocal issued
        while issued < batches * GROUPS:
            permitted[issued] = time.monotonic()
            permits.put((issued, version))
            issued += 1

    def receive() -> None:
        group = results.get()
        if group[-1] is None:
            started[group[0]] = group[1]
        else:
            untrained[group[0]] = group
            finished.append(group)

    for step in range(STEPS):
        if mode == "asynchronous":  # an answer gets the newest weights when it starts
            allow(step + 1 + BOUND[mode], version=None)
            assert issued > (step + 1) * GROUPS  # otherwise the group LATE would never end
        else:
            allow(step + 1, version=step)
        while True:
            while not results.empty():
                receive()
            if batch := chosen_groups(started, untrained, step, BOUND[mode]):
                break
            receive()
        begin = time.monotonic()
        if mode == "one step off" and step + 1 < STEPS:  # sample the next batch meanwhile
            allow(step + 2, version=step)
        train(policy, optimizer, [untrained[i] for i in batch], versions)
        for i in batch:
            del untrained[i]
        used.append({i: step - started.pop(i) for i in batch})
        versions[step + 1].load_state_dict(policy.state_dict())
        with newest.get_lock():
            steps.append((begin, time.monotonic()))
            newest.value = step + 1
    with newest.get_lock():
        newest.value = -1  # the samplers stop
    for _ in samplers:
        permits.put(None)
    for process in samplers:
        process.join()
    while not results.empty():  # groups that no step uses
        receive()
    weights = [each.head.weight for each in versions]
    assert all(not torch.equal(a, b) for a, b in pairwise(weights))
    return steps, finished, used, permitted


# --8<-- [end:trainer]


def last_end(durations: list[float], slots: int) -> float:
    """Return when the last of these answers ends. A free slot takes the next answer."""
    ends = durations[:slots]
    heapq.heapify(ends)
    for duration in durations[slots:]:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


# --8<-- [start:predicted]
def predicted_step(mode: str) -> float:
    """Return the seconds of a step. Only asynchronous steps need not wait for a whole batch."""
    if mode == "asynchronous":
        return max(sum(SAMPLE) / SAMPLERS, TRAIN)
    batch = last_end(SAMPLE, SAMPLERS)
    return batch + TRAIN if mode == "synchronous" else max(batch, TRAIN)


def works(step: float) -> tuple[float, float]:
    """The shares of a step in which the trainer works, and in which a sampler works."""
    return TRAIN / step, sum(SAMPLE) / SAMPLERS / step


# --8<-- [end:predicted]


def inside(times: tuple[float, float], begin: float, end: float) -> float:
    return max(0.0, min(times[1], end) - max(times[0], begin))


def draw(runs: dict[str, tuple]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "timelines", "font.size": 12}
    figure, all_axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True)
    for axes, (mode, (steps, finished, *_)) in zip(all_axes, runs.items(), strict=True):
        zero = min(times[0] for *_, times, _ in finished)
        for number, (begin, end) in enumerate(steps):
            axes.barh(SAMPLERS, end - begin, 0.75, begin - zero, color="#c2410c", ec="white")
            axes.text((begin + end) / 2 - zero, SAMPLERS, number + 1, color="white",
                      ha="center", va="center", fontsize=10)  # fmt: skip
        for _, version, which, (begin, end), _ in finished:
            lane = SAMPLERS - 1 - which
            axes.barh(lane, end - begin, 0.75, begin - zero, color="#0b6e99", ec="white")
            axes.text((begin + end) / 2 - zero, lane, version, color="white",
                      ha="center", va="center", fontsize=9)  # fmt: skip
        lanes = [f"sampler {k}" for k in range(SAMPLERS, 0, -1)]
        axes.set_yticks(range(SAMPLERS + 1), [*lanes, "trainer"])
        axes.set_title(mode, fontsize=12, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("seconds; a sampler's bar shows the version of its weights")
    figure.tight_layout()
    figure.savefig("async_timelines.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    # group 0 was started with version 1, and all others have ended: step 3 waits for group 0
    versions = {0: 1} | dict.fromkeys(range(1, 2 * GROUPS), 2)
    ended = dict.fromkeys(range(1, 2 * GROUPS), ())
    assert chosen_groups(versions, ended, 2, bound=2) == list(range(1, GROUPS + 1))
    assert chosen_groups(versions, ended, 3, bound=2) == []
    assert chosen_groups(versions, ended | {0: ()}, 3, bound=2) == list(range(GROUPS))
    torch.manual_seed(0)
    policy = Policy()
    pretrain(policy, LENGTH, torch.Generator().manual_seed(0))
    state = {name: each.detach().clone() for name, each in policy.state_dict().items()}
    print(f"{STEPS} steps of {TRAIN} s, {SAMPLERS} samplers, {GROUPS} groups of answers a step")
    print(f"{'':15}seconds of a step   trainer works   samplers work   mean age, allowed")
    runs = {}
    for mode in BOUND:
        steps, finished, used, permitted = runs[mode] = run(mode, state)
        step = predicted_step(mode)
        expected = works(step)
        begin, end = steps[0][1], steps[-1][1]  # without the first step, which fills the queue
        busy = sum(inside(times, begin, end) for *_, times, _ in finished)
        trains = sum(inside(times, begin, end) for times in steps)
        measured = trains / (end - begin), busy / (end - begin) / SAMPLERS
        period = (end - begin) / (STEPS - 1)
        ages = [age for groups in used for age in groups.values()]
        row = f"{mode:14}{step:9.2f} ≈{period:5.2f}  "
        for share, found in zip(expected, measured, strict=True):
            row += f"{share:9.0%} ≈{found:4.0%} "
        about = "≈" if mode == "asynchronous" else " "
        print(f"{row:64} {about}{sum(ages) / len(ages):.2f}, {BOUND[mode]}")
        # These checks are true on any machine, because a sleep never ends early. In the mode
        # "one step off", the trainer permits the next batch only after a step has started.
        least = TRAIN if mode == "asynchronous" else step
        assert end - steps[0][0] >= (STEPS - 1) * least + TRAIN
        assert max(measured) < 1.001  # no process works for longer than the whole time
        assert trains >= (STEPS - 1) * TRAIN
        if mode == "synchronous":  # all samples of these steps are inside this time
            assert period >= step
            assert measured[1] * period >= sum(SAMPLE) / SAMPLERS
        for index, _, _, times, _ in finished:
            assert times[1] - times[0] >= SAMPLE[index % GROUPS]
        assert len(ages) == STEPS * GROUPS and max(ages) <= BOUND[mode]
        overlap = {
            i: sum(inside(times, *each) for each in steps) for i, _, _, times, _ in finished
        }
        if mode == "asynchronous":  # a long answer delays only itself
            late = {step: ages[LATE] for step, ages in enumerate(used) if LATE in ages}
            for number, age in late.items():
                assert overlap[LATE] > 0 and number >= age >= 1
            # a sampler uses the newest weights of the moment in which its answers start
            for _, version, _, times, _ in finished:
                assert version == sum(done <= times[0] for _, done in steps)
        else:  # a step uses the groups that were started together, and all have one age
            own = [i // GROUPS == number for number, groups in enumerate(used) for i in groups]
            assert all(own) and ages == [
                min(k, BOUND[mode]) for k in range(STEPS) for _ in range(GROUPS)
            ]
            for i, _, _, times, _ in finished:
                quick = times[0] - permitted[i] < TRAIN / 2  # else the step may be over
                if mode == "synchronous" or i < GROUPS:
                    assert overlap[i] == 0
                elif quick:
                    assert overlap[i] > 0
    draw(runs)


if __name__ == "__main__":
    main()
