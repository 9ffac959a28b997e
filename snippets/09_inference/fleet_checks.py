"""Check the simulator of a fleet against a queueing formula, single steps and a plan.

1. A GPU that serves one request at a time is a queue with one server. Each answer must end when
   Lindley's recursion says, and the mean wait must be close to the Pollaczek-Khinchine formula.
2. prefill_apart.py simulates one GPU step by step. The first tokens must come at equal times.
3. capacity.py computes how many requests a full server can serve. The rates must agree.
"""

import random

from capacity import Load, Model, plan
from fleet import CACHE_BYTES, EFFICIENCY, MATMUL_PARAMETERS, PARAMETERS, Fleet, serve
from fleet_trace import Request
from prefill_apart import after, arrivals
from prefill_apart import serve as stepwise


def single_server() -> None:
    """Compare a GPU that serves one request at a time with a queue with one server."""
    rng, clock, requests = random.Random(0), 0.0, []
    for n in range(20_000):
        clock += rng.expovariate(1.0)
        requests.append(Request(n, clock, n, 0, 0, 1, round(rng.lognormvariate(4, 0.8))))
    fleet = Fleet(gpus=1, max_sequences=1, prefix_caching=False, count_attention=False)
    result = serve(fleet, requests)
    gpu, free, services, waits = result.gpus[0], 0.0, [], []
    for job in result.jobs:
        n = job.request.answer  # steps, with contexts of 1, 2, … n
        step = gpu.weights_cost + gpu.token_cost
        services.append(n * step + gpu.context_cost * n * (n + 1) / 2)
        waits.append(max(0.0, free - job.arrival))
        free = max(free, job.arrival) + services[-1]
        assert abs(job.last_token - free) < 1e-6
    count = len(services)
    mean, square = sum(services) / count, sum(x * x for x in services) / count
    load = mean * count / requests[-1].arrival
    formula = load / (1 - load) * square / (2 * mean)
    wait = sum(waits) / count
    print(
        f"one request at a time, load {load:.0%}: mean wait {wait:.2f} s, "
        f"Pollaczek-Khinchine {formula:.2f} s"
    )
    assert abs(wait / formula - 1) < 0.1


def single_steps() -> None:
    """Compare with a simulation that executes every step."""
    for rate, count in ((0.5, 300), (6.0, 1000)):  # idle between requests, and always busy
        theirs = arrivals(rate, count)
        ours = [
            Request(n, r.arrival, n, 0, 0, r.prompt, r.answer) for n, r in enumerate(theirs)
        ]
        executed = []  # tokens of each step

        def cost(tokens: float, context: float, executed: list[float] = executed) -> float:
            executed.append(tokens)
            return after(tokens, context)

        stepwise(theirs, 512, cost)
        assert sum(executed) == sum(r.prompt + r.answer - 1 for r in theirs)
        fleet = Fleet(gpus=1, max_sequences=10**6, prefix_caching=False, count_attention=False)
        first = {job.request.number: job.first_token for job in serve(fleet, ours).jobs}
        assert max(abs(first[n] - r.first) for n, r in enumerate(theirs)) < 1e-9
    print(f"{count:,} requests, every step executed: first tokens differ by < 1e-9 s")


def full_server() -> None:
    """Compare a server that always has enough requests with the plan."""
    load, model = (
        Load(50, 2000, 300, 0.050),
        Model("8B", PARAMETERS, MATMUL_PARAMETERS, CACHE_BYTES, 1),
    )
    planned = plan(model, load, 2, EFFICIENCY)
    many = [Request(n, 0.0, n, 0, 0, load.prompt, load.answer) for n in range(3000)]
    batch = min(planned["by_memory"], planned["by_gap"])
    fleet = Fleet(
        gpus=1,
        max_sequences=batch,
        token_budget=4096,
        prefix_caching=False,
        count_attention=False,
    )
    rate = len(many) / serve(fleet, many).end
    print(f"a full server: {rate:.2f} requests/s, the plan says {planned['served']:.2f}")
    assert abs(rate / planned["served"] - 1) < 0.02


def main() -> None:
    single_server()
    single_steps()
    full_server()


if __name__ == "__main__":
    main()
