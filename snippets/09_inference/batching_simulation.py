"""Static, dynamic and continuous batching under the same load: throughput against latency.

A simulation step by step. A step lasts c0 + c1 · tokens + c2 · context, with rounded constants
of an earlier run of step_cost.py. Arrivals are random or come in bursts, and lengths are
log-normal. Draws batching_simulation.svg.
"""

import math
import random
from collections import deque
from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

STEP, TOKEN, CONTEXT = 210e-6, 12e-6, 0.24e-6  # seconds; of context: each token
SLOTS, REQUESTS, PATIENCE = 16, 800, 0.010


@dataclass
class Request:
    arrival: float
    prompt: int
    output: int
    done: int = 0  # tokens of the answer so far
    first: float = 0.0
    last: float = 0.0


def load(rate: float, bursty: bool) -> list[Request]:
    """Requests at `rate` a second on average; a burst is eight requests at one moment."""
    dice, clock, requests = random.Random(0), 0.0, []
    for number in range(REQUESTS):
        if not bursty:
            clock += dice.expovariate(rate)
        elif number % 8 == 0:
            clock += dice.expovariate(rate / 8)
        prompt = min(128, 1 + round(dice.lognormvariate(math.log(24), 0.6)))
        output = min(256, 1 + round(dice.lognormvariate(math.log(24), 0.9)))
        requests.append(Request(clock, prompt, output))
    return requests


# --8<-- [start:policies]
def continuous(requests: list[Request]) -> None:
    """Before every step, fill the free slots; a request leaves when it is finished."""
    waiting, running, clock = deque(requests), [], 0.0
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].arrival)
        new = []
        while waiting and len(running) + len(new) < SLOTS and waiting[0].arrival <= clock:
            new.append(waiting.popleft())
        tokens = len(running) + sum(r.prompt for r in new)
        running += new
        clock += STEP + TOKEN * tokens + CONTEXT * sum(r.prompt + r.done for r in running)
        running = [r for r in running if not token(r, clock)]


def whole_batches(requests: list[Request], patience: float) -> None:
    """Wait until a batch is full, or its oldest request has waited for `patience`; run it.

    A batch is a rectangle: prompts are padded to the longest prompt, and rows that have
    finished are computed until all rows have finished.
    """
    waiting, clock = deque(requests), 0.0
    while waiting:
        full = waiting[min(SLOTS, len(waiting)) - 1].arrival
        clock = max(clock, min(full, waiting[0].arrival + patience))
        batch = [waiting.popleft()]
        while waiting and len(batch) < SLOTS and waiting[0].arrival <= clock:
            batch.append(waiting.popleft())
        rows, width = len(batch), max(r.prompt for r in batch)
        clock += STEP + (TOKEN + CONTEXT) * rows * width
        running = [r for r in batch if not token(r, clock)]
        while running:
            width += 1
            clock += STEP + TOKEN * rows + CONTEXT * rows * width
            running = [r for r in running if not token(r, clock)]


def token(request: Request, clock: float) -> bool:
    """Give the request its next token. Returns whether the answer is complete."""
    request.done += 1
    request.first = request.first or clock
    request.last = clock
    return request.done == request.output


# --8<-- [end:policies]

POLICIES = {
    "static": lambda requests: whole_batches(requests, math.inf),
    "dynamic": lambda requests: whole_batches(requests, PATIENCE),
    "continuous": continuous,
}


def run(policy: str, rate: float, bursty: bool) -> tuple[float, float, float, float]:
    """Tokens per second; TTFT at the median and the 99th percentile; mean latency a token."""
    requests = load(rate, bursty)
    POLICIES[policy](requests)
    assert all(r.done == r.output and r.first > r.arrival for r in requests)
    ttft = sorted(r.first - r.arrival for r in requests)
    tokens = sum(r.output for r in requests)
    latency = sum((r.last - r.arrival) / r.output for r in requests) / REQUESTS
    return (
        tokens / max(r.last for r in requests),
        ttft[REQUESTS // 2],
        ttft[int(0.99 * REQUESTS)],
        latency,
    )


def draw(curves: dict[str, list[tuple[float, float]]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "batching", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    colours = {"static": "#52525b", "dynamic": "#c2410c", "continuous": "#0f766e"}
    places = {"static": (1.4, 25), "dynamic": (4.6, 8), "continuous": (9.5, 0.62)}
    for policy, points in curves.items():
        axes.plot(*zip(*points, strict=True), "o-", color=colours[policy], markersize=5)
        axes.text(*places[policy], policy, color=colours[policy])
    axes.set(xlabel="throughput, thousand tokens/s", ylabel="mean latency per token, ms")
    axes.set(yscale="log", xlim=(0, None), yticks=[1, 10, 100], yticklabels=[1, 10, 100])
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)
    figure.tight_layout()
    figure.savefig("batching_simulation.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("arrivals  requests/s  policy      tokens/s   TTFT p50      p99   latency a token")
    results = {}
    for bursty, rate in ((False, 100), (True, 100), (False, 1000)):
        for policy in POLICIES:
            results[policy, bursty, rate] = tokens, p50, p99, latency = run(
                policy, rate, bursty
            )
            print(
                f"{'bursts' if bursty else 'random':8} {rate:8}    {policy:10} {tokens:9.0f} "
                f"{1e3 * p50:7.1f} ms {1e3 * p99:6.0f} ms {1e3 * latency:8.2f} ms"
            )
    curves = {
        policy: [
            (rate_point[0] / 1e3, 1e3 * rate_point[3])
            for rate in (20, 50, 100, 150, 200, 300, 400, 500, 600, 1000)
            for rate_point in [run(policy, rate, bursty=False)]
        ]
        for policy in POLICIES
    }
    draw(curves)
    overload = {policy: results[policy, False, 1000][0] for policy in POLICIES}
    outputs = [r.output for r in load(1000, bursty=False)]
    longest = [max(outputs[i : i + SLOTS]) for i in range(0, REQUESTS, SLOTS)]
    mean, width = sum(outputs) / REQUESTS, sum(longest) / len(longest)
    print(
        f"an answer has {mean:.0f} tokens on average, the longest of {SLOTS} has {width:.0f}: "
        f"{mean / width:.0%} of a batch is of use"
    )
    gain = overload["continuous"] / overload["static"]
    print(f"at overload, continuous gives {gain:.1f} times the tokens of static batches")
    assert gain > width / mean, "the gain is smaller than the padding of the answers"
    same = [results[policy, False, 100][0] for policy in POLICIES]
    assert max(same) < 1.05 * min(same), "below overload, the throughput differs"
    for bursty in (False, True):
        ttft = [results[policy, bursty, 100][1] for policy in POLICIES]
        assert ttft[2] < ttft[1] < ttft[0]


if __name__ == "__main__":
    main()
