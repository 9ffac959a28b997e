"""How many spare nodes: those in repair are a Poisson number, whatever the repair looks like.

Nodes fail at the rate of the Llama 3 run, 76% of the time for a reason that takes the node out
(hardware and network in its table), and come back after a day on average (assumed).
"""

import heapq
import math
import random

PER_NODE = 54 * 24 * 2048 / 419  # hours between failures of a node
TAKEN_OUT, REPAIR = 0.76, 24.0  # share of failures, hours


# --8<-- [start:poisson]
def spares_needed(mean: float, risk: float) -> int:
    """The least k such that more than k nodes are in repair for under `risk` of the time."""
    k, term = 0, math.exp(-mean)
    beyond = 1 - term
    while beyond > risk:
        k += 1
        term *= mean / k
        beyond -= term
    return k


def simulate(nodes: int, spares: int, shape: float, days: int) -> tuple[float, float]:
    """Mean number of nodes in repair, and share of the time with more of them than spares."""
    dice = random.Random(nodes)
    scale = REPAIR / math.gamma(1 + 1 / shape)
    between = PER_NODE / nodes / TAKEN_OUT
    clock, sum_out, too_many, back = 0.0, 0.0, 0.0, []
    fails = dice.expovariate(1 / between)
    while clock < days * 24:
        now = min(fails, back[0]) if back else fails
        sum_out += len(back) * (now - clock)
        too_many += (len(back) > spares) * (now - clock)
        clock = now
        if now == fails:
            heapq.heappush(back, now + dice.weibullvariate(scale, shape))
            fails = now + dice.expovariate(1 / between)
        else:
            heapq.heappop(back)
    return sum_out / clock, too_many / clock


# --8<-- [end:poisson]


def main() -> None:
    print("        in repair, mean       spares for 99%        short of 99%'s spares; repairs:")
    print(" nodes  predicted simulated   and 99.9% of the time  irregular, memoryless, regular")
    for nodes in (2, 125, 2_048, 12_500):
        mean = nodes / PER_NODE * TAKEN_OUT * REPAIR
        spares, more = spares_needed(mean, 0.01), spares_needed(mean, 0.001)
        days = {2: 400_000, 125: 20_000, 2_048: 4_000, 12_500: 800}[nodes]
        seen = [simulate(nodes, spares, shape, days) for shape in (0.6, 1.0, 5.0)]
        for out, short in seen:
            assert abs(out / mean - 1) < 0.1, nodes
            assert short < 0.01, nodes
        short = " ".join(f"{share:.2%}" for _, share in seen)
        print(
            f"{nodes:6,}  {mean:9.3f} {seen[1][0]:9.3f}   {spares:4} {more:4}"
            f"  ({more / nodes:5.1%})      {short}"
        )


if __name__ == "__main__":
    main()
