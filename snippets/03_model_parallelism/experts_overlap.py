"""A simulation of two micro-batches that hide each other's dispatch and combine.

In each layer a micro-batch runs attention (a), sends its tokens (d), runs its experts (e) and
gets the results (c). With one micro-batch, the GPU is idle while the link is busy. Two
micro-batches that alternate, A0 A1 E0 E1, hide most of this time.

No GPU and no link is used. The simulation computes when each operation can begin, and a second
version runs the same order with sleeps in two threads. The sleeps show that the order respects
all dependencies: they can never finish before the simulation. A real GPU also loses time,
because the kernels that send tokens occupy some of its multiprocessors.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

LAYERS = 12
Costs = tuple[float, float, float, float]  # a, d, e, c in seconds, of a micro-batch in a layer


def order(at_once: int) -> list[tuple[str, int, int]]:
    """The order in which a GPU computes: A or E, the layer, and which of two micro-batches."""
    groups = [[0, 1]] if at_once == 2 else [[0], [1]]
    return [
        (kind, layer, batch)
        for group in groups
        for layer in range(LAYERS)
        for kind in "AE"
        for batch in group
    ]


def simulate(costs: Costs, at_once: int) -> float:
    """Seconds until both are done. The link transfers one dispatch or combine at a time."""
    attend, dispatch, expert, combine = costs
    now = free = 0.0
    arrived: dict[int, float] = {0: 0.0, 1: 0.0}  # when a micro-batch may be computed again
    for kind, _, batch in order(at_once):
        now = max(now, arrived[batch]) + (attend if kind == "A" else expert)
        free = max(free, now) + (dispatch if kind == "A" else combine)
        arrived[batch] = free
    return max(now, free)


def run_with_sleeps(costs: Costs, at_once: int) -> float:
    """Seconds of the same order, with a sleep for each operation and a thread for the link."""
    attend, dispatch, expert, combine = costs
    under_way: dict[int, Future] = {}
    transfers: list[str] = []

    def transfer(seconds: float) -> None:
        transfers.append("begin")
        time.sleep(seconds)
        transfers.append("end")

    with ThreadPoolExecutor(max_workers=1) as link:
        begin = time.perf_counter()
        for kind, _, batch in order(at_once):
            if batch in under_way:
                under_way[batch].result()  # its tokens or results have arrived
            time.sleep(attend if kind == "A" else expert)
            under_way[batch] = link.submit(transfer, dispatch if kind == "A" else combine)
        for exchange in under_way.values():
            exchange.result()
        seconds = time.perf_counter() - begin
    assert transfers == ["begin", "end"] * (4 * LAYERS)  # one transfer at a time
    return seconds


def bound(costs: Costs, at_once: int) -> float:
    """The formula: seconds of two micro-batches, without the two ends of the run."""
    attend, dispatch, expert, combine = costs
    if at_once == 1:
        return 2 * LAYERS * sum(costs)
    return 2 * LAYERS * max(attend + expert, dispatch + combine)


def main() -> None:
    print(f"two micro-batches, {LAYERS} layers: a + e and d + c in ms of one in a layer; then")
    print("ms in all: by the formula, simulated, and with sleeps; the exposed part of the link")
    for name, costs in (
        ("link half of computing", (0.003, 0.002, 0.005, 0.002)),
        ("dispatch longer than attention", (0.003, 0.005, 0.005, 0.001)),
        ("link as long as computing", (0.003, 0.004, 0.005, 0.004)),
        ("link 1.5 times as long", (0.003, 0.006, 0.005, 0.006)),
    ):
        computing, link = 2 * LAYERS * (costs[0] + costs[2]), 2 * LAYERS * (costs[1] + costs[3])
        print(
            f"{name}: {1e3 * (costs[0] + costs[2]):.0f} and {1e3 * (costs[1] + costs[3]):.0f}"
        )
        for at_once, title in ((1, "one after the other"), (2, "two at once")):
            predicted, simulated = bound(costs, at_once), simulate(costs, at_once)
            seen = run_with_sleeps(costs, at_once)
            print(
                f"  {title:20} {1e3 * predicted:.0f}, {1e3 * simulated:.0f}, ≈{1e3 * seen:.0f};"
                f" {(simulated - computing) / link:.0%} exposed"
            )
            assert predicted - costs[3] <= simulated + 1e-9 < 1.2 * predicted
            assert seen >= simulated  # sooner only if an operation did not wait for its input


if __name__ == "__main__":
    main()
