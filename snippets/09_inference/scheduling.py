"""Five orders of a queue under one load: first come, shortest first, with ageing, and others.

Continuous batching gets at times more requests than it can serve. Shortest first needs the
length of an answer in advance. A server has only a guess, and our guess is wrong by up to a
factor of two. Time is simulated.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

STEP, TOKEN, CONTEXT = 210e-6, 12e-6, 0.24e-6  # seconds; of context: each token
SLOTS, REQUESTS, RATE = 16, 2000, 520


@dataclass
class Job:
    arrival: float
    prompt: int
    output: int
    guess: float
    done: int = 0
    last: float = 0.0


def jobs(rate: float = RATE) -> list[Job]:
    dice, clock, requests = random.Random(0), 0.0, []
    for _ in range(REQUESTS):
        clock += dice.expovariate(rate)
        prompt = min(128, 1 + round(dice.lognormvariate(math.log(24), 0.6)))
        output = min(256, 1 + round(dice.lognormvariate(math.log(24), 0.9)))
        guess = output * 2 ** dice.uniform(-1, 1)
        requests.append(Job(clock, prompt, output, guess))
    return requests


# --8<-- [start:orders]
POLICIES: dict[str, Callable[[Job, float], float]] = {  # the lowest goes first
    "first come": lambda r, now: r.arrival,
    "shortest": lambda r, now: r.output,
    "shortest guess": lambda r, now: r.guess,
    "guess, ageing": lambda r, now: r.guess - 1500 * (now - r.arrival),
    "longest": lambda r, now: -r.output,
}
# --8<-- [end:orders]


def serve(requests: list[Job], policy: Callable[[Job, float], float]) -> None:
    """Continuous batching; before each step the policy decides who gets the free slots."""
    clock, arrived = 0.0, 0
    waiting: list[Job] = []
    running: list[Job] = []
    while arrived < len(requests) or waiting or running:
        if not waiting and not running:
            clock = max(clock, requests[arrived].arrival)
        while arrived < len(requests) and requests[arrived].arrival <= clock:
            waiting.append(requests[arrived])
            arrived += 1
        now = clock
        waiting.sort(key=lambda r: policy(r, now))
        free = SLOTS - len(running)
        new, waiting = waiting[:free], waiting[free:]
        tokens = len(running) + sum(r.prompt for r in new)
        running += new
        clock += STEP + TOKEN * tokens + CONTEXT * sum(r.prompt + r.done for r in running)
        for r in running:
            r.done += 1
            r.last = clock
        running = [r for r in running if r.done < r.output]


def alone(r: Job) -> float:
    """Seconds of a request that is alone in the server: prefill, then a token per step."""
    steps = r.output - 1
    context = steps * r.prompt + steps * (steps + 1) / 2
    return STEP + (TOKEN + CONTEXT) * r.prompt + steps * (STEP + TOKEN) + CONTEXT * context


def main() -> None:
    requests = jobs(rate=1e6)  # all at once: the highest rate of the server
    serve(requests, POLICIES["first come"])
    most = REQUESTS / max(r.last for r in requests)
    print(f"{RATE} requests/s to a server that can do {most:.0f}")
    assert 0.9 * most < RATE < most
    print("policy           mean latency      p50       p99    worst   slowdown p99")
    mean, worst = {}, {}
    for name, policy in POLICIES.items():
        requests = jobs()
        serve(requests, policy)
        assert all(r.done == r.output for r in requests)
        latency = sorted(r.last - r.arrival for r in requests)
        serve([first := replace(requests[0], done=0)], policy)
        assert math.isclose(first.last - first.arrival, alone(first))
        slowdown = sorted((r.last - r.arrival) / alone(r) for r in requests)
        assert slowdown[0] > 1 - 1e-9, "a request is faster than alone"
        mean[name], worst[name] = sum(latency) / REQUESTS, latency[-1]
        print(
            f"{name:14} {1e3 * mean[name]:11.0f} ms {1e3 * latency[REQUESTS // 2]:6.0f} ms "
            f"{1e3 * latency[int(0.99 * REQUESTS)]:6.0f} ms {1e3 * worst[name]:5.0f} ms "
            f"{slowdown[int(0.99 * REQUESTS)]:10.0f}"
        )
    half = {}
    for name, policy in POLICIES.items():
        requests = jobs(RATE / 2)
        serve(requests, policy)
        half[name] = sum(r.last - r.arrival for r in requests) / REQUESTS
    print(f"at half the load: {1e3 * min(half.values()):.0f} ms with each of the five")
    assert max(half.values()) < 1.01 * min(half.values()), (
        "without a queue, the order does not matter"
    )
    assert mean["shortest"] < mean["shortest guess"] < mean["first come"] < mean["longest"]
    assert worst["shortest"] > worst["first come"], "the longest requests wait longer"
    assert mean["guess, ageing"] < mean["first come"]
    assert worst["guess, ageing"] < worst["shortest guess"]


if __name__ == "__main__":
    main()
