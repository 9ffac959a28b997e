"""Dispatch and combine behind another micro-batch's computation: two at once, one link.

In each layer a micro-batch attends (a), sends its tokens (d), has its experts compute (e) and
gets the results (c). Alone, it computes while the link is idle, and waits while the link is
busy. Two micro-batches in turn, A0 A1 E0 E1, fill each other's waits. Computing and sending
are sleeps here, of the main thread and of one thread for the link, which takes one exchange
after the other. In production the link is a stream of its own, and DeepEP's kernels need few
multiprocessors for it; DeepSeek-V3's DualPipe pairs a forward with a backward (Section 3.2.1).
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

LAYERS = 12
Costs = tuple[float, float, float, float]  # a, d, e, c in seconds, of a micro-batch in a layer


def order(at_once: int) -> list[tuple[str, int, int]]:
    """What is computed, one after the other: (A or E, layer, micro-batch), for two of them."""
    groups = [[0, 1]] if at_once == 2 else [[0], [1]]
    return [
        (kind, layer, batch)
        for group in groups
        for layer in range(LAYERS)
        for kind in "AE"
        for batch in group
    ]


def simulate(costs: Costs, at_once: int) -> float:
    """Seconds by the rules alone: what each step waits for; the link does one at a time."""
    attend, dispatch, expert, combine = costs
    now = free = 0.0
    arrived: dict[int, float] = {0: 0.0, 1: 0.0}  # when a micro-batch may be computed again
    for kind, _, batch in order(at_once):
        now = max(now, arrived[batch]) + (attend if kind == "A" else expert)
        free = max(free, now) + (dispatch if kind == "A" else combine)
        arrived[batch] = free
    return max(now, free)


def measure(costs: Costs, at_once: int) -> float:
    attend, dispatch, expert, combine = costs
    under_way: dict[int, Future] = {}
    with ThreadPoolExecutor(max_workers=1) as link:
        begin = time.perf_counter()
        for kind, _, batch in order(at_once):
            if batch in under_way:
                under_way[batch].result()  # its tokens, or its results, are here
            time.sleep(attend if kind == "A" else expert)
            under_way[batch] = link.submit(time.sleep, dispatch if kind == "A" else combine)
        for exchange in under_way.values():
            exchange.result()
        return time.perf_counter() - begin


def bound(costs: Costs, at_once: int) -> float:
    """No less than this for two micro-batches, but for what overhangs at the two ends."""
    attend, dispatch, expert, combine = costs
    if at_once == 1:
        return 2 * LAYERS * sum(costs)
    return 2 * LAYERS * max(attend + expert, dispatch + combine)


def main() -> None:
    print(f"two micro-batches, {LAYERS} layers: a + e and d + c in ms of one in a layer; then")
    print("ms in all: by the formula, by simulation, and measured; the link's share that shows")
    for name, costs in (
        ("link half of computing", (0.003, 0.002, 0.005, 0.002)),
        ("as long", (0.003, 0.004, 0.005, 0.004)),
        ("half as long again", (0.003, 0.006, 0.005, 0.006)),
    ):
        computing, link = 2 * LAYERS * (costs[0] + costs[2]), 2 * LAYERS * (costs[1] + costs[3])
        print(
            f"{name}: {1e3 * (costs[0] + costs[2]):.0f} and {1e3 * (costs[1] + costs[3]):.0f}"
        )
        for at_once, title in ((1, "one after the other"), (2, "two at once")):
            predicted, simulated = bound(costs, at_once), simulate(costs, at_once)
            seen = measure(costs, at_once)
            print(
                f"  {title:20} {1e3 * predicted:.0f}, {1e3 * simulated:.0f}, ≈{1e3 * seen:.0f};"
                f" {(simulated - computing) / link:.0%} shows"
            )
            assert predicted - costs[3] <= simulated + 1e-9 < 1.2 * predicted
            assert seen >= simulated  # a sleep is never shorter; a busy machine's is longer


if __name__ == "__main__":
    main()
