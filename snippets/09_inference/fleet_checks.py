"""The fleet's simulator beside what is known: a queue's formula, a plan, and single steps."""

import random

from capacity import Load, Model, plan
from fleet import CACHE, EFFICIENCY, MULTIPLIED, PARAMETERS, Fleet, serve
from fleet_trace import Request
from prefill_apart import after, arrivals
from prefill_apart import serve as stepwise


def one_at_a_time() -> None:
    """One slot is a queue with one server: Lindley's recursion, and the mean's formula."""
    dice, clock, requests = random.Random(0), 0.0, []
    for n in range(20_000):
        clock += dice.expovariate(1.0)
        requests.append(Request(n, clock, n, 0, 0, 1, round(dice.lognormvariate(4, 0.8))))
    run = serve(Fleet(1, slots=1, keep=False, attention=False), requests)
    gpu, free, services, queued = run.gpus[0], 0.0, [], []
    for job in run.jobs:
        n = job.request.answer  # steps, with contexts of 1, 2, … n
        services.append(n * (gpu.fixed + gpu.token) + gpu.context_token * n * (n + 1) / 2)
        queued.append(max(0.0, free - job.arrival))
        free = max(free, job.arrival) + services[-1]
        assert abs(job.last - free) < 1e-6
    count = len(services)
    mean, square = sum(services) / count, sum(x * x for x in services) / count
    load = mean * count / requests[-1].arrival
    formula = load / (1 - load) * square / (2 * mean)
    wait = sum(queued) / count
    print(
        f"one slot, {load:.0%} load: waits {wait:.2f} s, by Pollaczek-Khinchine {formula:.2f}"
    )
    assert abs(wait / formula - 1) < 0.1


def against_steps() -> None:
    """The neighbours: a simulation that goes step by step, and the plan with a pencil."""
    theirs = arrivals(6.0, 1000)
    ours = [Request(n, r.arrival, n, 0, 0, r.prompt, r.answer) for n, r in enumerate(theirs)]
    stepwise(theirs, 512, after)
    run = serve(Fleet(1, keep=False, attention=False, slots=10**6), ours)
    first = {job.request.number: job.first for job in run.jobs}
    worst = max(abs(first[n] - r.first) for n, r in enumerate(theirs))
    print(
        "1,000 requests, step by step and by events: first tokens equal to a billionth of 1 s"
    )
    assert worst < 1e-9

    load, model = Load(50, 2000, 300, 0.050), Model("8B", PARAMETERS, MULTIPLIED, CACHE, 1)
    planned = plan(model, load, 2, EFFICIENCY)
    many = [Request(n, 0.0, n, 0, 0, load.prompt, load.answer) for n in range(3000)]
    batch = min(planned["by_memory"], planned["by_gap"])
    served = serve(Fleet(1, keep=False, attention=False, slots=batch, budget=4096), many)
    rate = len(many) / served.end
    print(f"a full server: {rate:.2f} requests/s, {planned['served']:.2f} with a pencil")
    assert abs(rate / planned["served"] - 1) < 0.02


def main() -> None:
    one_at_a_time()
    against_steps()


if __name__ == "__main__":
    main()
