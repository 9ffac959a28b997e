"""Prefill on separate GPUs: the requests per second and GPU that meet two limits, simulated.

Eight H100 serve Llama 3 8B in three ways. Prompts run whole in the same steps as decodes; or
prompts run in chunks; or some GPUs prefill, the others decode, and the cache is sent between
them. The time of a step is computed from data sheets at half of their rates, in two ways: the
arithmetic starts after the reading, or the weights are read while products compute.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

MULTIPLIED, CACHE = 7.50e9, 128 * 2**10  # Ψ without the embeddings; bytes of a cached token
BANDWIDTH, FLOPS = 0.5 * 3.35e12, 0.5 * 989e12
ROOM = (0.9 * 80e9 - 16.06e9) / CACHE  # tokens that fit into the memory of a GPU
LINK = 50e9  # bytes/s between two GPUs
GPUS, EACH, KEPT = 8, 1000, 0.9  # GPUs; requests for each; fraction in time
TTFT, GAPS = 0.5, (0.100, 0.050, 0.030, 0.020)  # limits, seconds


@dataclass
class Request:
    arrival: float
    prompt: int
    answer: int
    ready: float  # has arrived, or its cache has
    left: int  # tokens of the prompt that have not run
    first: float = 0.0
    begun: int = 0  # the step at which decoding began
    worst: float = 0.0  # longest gap

    @property
    def size(self) -> int:
        return self.prompt + self.answer


@cache
def drawn(count: int) -> list[tuple[float, int, int]]:
    """Requests: the time since the one before, in means; tokens of prompt and answer."""
    dice, requests = random.Random(0), []
    for _ in range(count):
        wait = dice.expovariate(1.0)
        prompt = min(8000, 1 + round(dice.lognormvariate(math.log(1500), 0.6)))
        answer = min(1000, 2 + round(dice.lognormvariate(math.log(200), 0.7)))
        requests.append((wait, prompt, answer))
    return requests


def arrivals(rate: float, count: int, of: int = 1) -> list[Request]:
    """Every ``of``-th request; at a higher rate the same requests are closer together."""
    requests = drawn(count)
    clocks = itertools.accumulate(wait / rate for wait, _, _ in requests)
    chosen = itertools.islice(zip(clocks, requests, strict=True), 0, None, of)
    return [Request(at, prompt, answer, at, prompt) for at, (_, prompt, answer) in chosen]


# --8<-- [start:costs]
def after(tokens: float, context: float) -> float:
    """Seconds of a step that reads weights and caches, and then computes."""
    return (2 * MULTIPLIED + context * CACHE) / BANDWIDTH + 2 * MULTIPLIED * tokens / FLOPS


def during(tokens: float, context: float) -> float:
    """Seconds of a step whose products read weights as they compute, not caches."""
    products = max(2 * MULTIPLIED / BANDWIDTH, 2 * MULTIPLIED * tokens / FLOPS)
    return products + context * CACHE / BANDWIDTH


# --8<-- [end:costs]


def serve(requests: list[Request], budget: float, cost: Callable) -> None:
    """One GPU, continuous batching: a step takes all decodes, then prompts up to the budget."""
    waiting, prompts, begun, number = deque(requests), deque(), [], itertools.count()
    decoding = []  # a heap: the step at which an answer ends, its number, its request
    steps, clock, held, context = [], 0.0, 0, 0  # context: tokens that decodes read
    while waiting or prompts or begun or decoding:
        if not (prompts or begun or decoding):
            clock = max(clock, waiting[0].ready)
        while waiting and waiting[0].ready <= clock and held + waiting[0].size <= ROOM:
            r = waiting.popleft()
            held += r.size
            (prompts if r.left else begun).append(r)
        first = [r for r in begun if not r.first]  # the cache came from another GPU
        for r in begun:
            r.begun = len(steps)
            heapq.heappush(decoding, (r.begun + r.answer - 1, next(number), r))
            context += r.prompt + 1
        tokens, read, begun = len(decoding), context, []
        while prompts and tokens < budget:
            r = prompts[0]
            piece = min(r.left, budget - tokens)
            r.left -= piece
            tokens += piece
            read += r.prompt - r.left
            if not r.left:
                begun.append(prompts.popleft())
        steps.append(cost(tokens, read))
        clock += steps[-1]
        context += len(decoding)
        for r in first + begun:  # the last piece of a prompt gives the first token
            r.first = clock
        while decoding and decoding[0][0] == len(steps):
            r = heapq.heappop(decoding)[2]
            r.worst = max(steps[r.begun :])
            held -= r.size
            context -= r.size


# --8<-- [start:ways]
def together(budget: float, cost: Callable, rate: float) -> list[Request]:
    """Every GPU prefills and decodes; the requests of one GPU."""
    requests = arrivals(rate, GPUS * EACH, GPUS)
    serve(requests, budget, cost)
    return requests


def apart(prefills: int, cost: Callable, rate: float) -> list[Request]:
    """Prompts run one by one on the first free GPU; the requests of one decode GPU.

    The first token is counted when the decode GPU has the cache and has run a step.
    """
    decodes = GPUS - prefills
    requests, free = arrivals(rate, decodes * EACH), [0.0] * prefills
    for r in requests:
        end = max(r.arrival, heapq.heappop(free)) + cost(r.prompt, r.prompt)
        heapq.heappush(free, end)
        r.left, r.ready = 0, end + r.prompt * CACHE / LINK
    mine = sorted(requests, key=lambda r: r.ready)[::decodes]
    serve(mine, math.inf, cost)
    return mine


# --8<-- [end:ways]


def goodput(run: Callable[[float], list[Request]]) -> list[float]:
    """For each limit on gaps, the most requests/s and GPU of which KEPT are in time."""
    shares = {0.0: [1.0] * len(GAPS)}
    for rate in itertools.count(2.0, 0.5):
        served = run(rate * GPUS)[EACH // 4 :]  # without the start, when the server was empty
        in_time = [r.worst for r in served if r.first - r.arrival <= TTFT]
        shares[rate] = [sum(worst <= gap for worst in in_time) / len(served) for gap in GAPS]
        if max(shares[rate]) < KEPT:
            break
    found = []
    for column in range(len(GAPS)):
        points = [(rate, share[column]) for rate, share in shares.items()]
        (low, above), (high, below) = next(
            pair for pair in itertools.pairwise(points) if pair[1][1] < KEPT
        )
        found.append(low + (high - low) * (above - KEPT) / (above - below))
    return found


def main() -> None:
    print(
        f"Llama 3 8B on {GPUS} H100: requests/s for each, of which {KEPT:.0%} have no gap above"
    )
    print(f"a bound, and a first token after {1e3 * TTFT:.0f} ms at most")
    for name, cost in (("arithmetic after reading", after), ("weights read meanwhile", during)):
        ways = {
            "whole": {"": partial(together, math.inf, cost)},
            "chunks": {str(b): partial(together, b, cost) for b in (256, 512, 1024, 2048)},
            "apart": {f"{p}+{GPUS - p}": partial(apart, p, cost) for p in (3, 4, 5)},
        }
        table = {
            way: {setting: goodput(run) for setting, run in settings.items()}
            for way, settings in ways.items()
        }
        print(f"{name + ':':28}whole          chunks         apart   ratio")
        gains = []
        for column, gap in enumerate(GAPS):
            best = [
                max((row[column], setting) for setting, row in settings.items())
                for settings in table.values()
            ]
            gains.append(best[2][0] / max(best[:2])[0])
            (whole, _), (chunks, budget), (split, gpus) = best
            print(
                f"  gap below {1e3 * gap:3.0f} ms {whole:16.1f} {chunks:8.1f} {f'({budget})':7}"
                f" {split:7.1f} ({gpus}) {gains[-1]:7.2f}"
            )
            assert min(chunks, split) > 10 * whole, "a whole prompt is a long gap"
        if cost is after:
            assert gains == sorted(gains) and gains[0] < 1 < gains[1], (
                "separate GPUs help when the limit is tight"
            )
        else:
            assert max(gains) < 1, "a chunk that is hidden behind reading costs nothing"


if __name__ == "__main__":
    main()
