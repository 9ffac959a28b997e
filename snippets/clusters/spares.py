"""Computes how many spare nodes a job needs: the nodes in repair are a Poisson number.

Nodes fail at the rate of the Llama 3 run. In 76% of the failures (hardware and network in its
table) the node needs a repair, which lasts a day on average (assumed). The distribution of the
repair times does not matter, so the program simulates three very different ones.
"""

import heapq
import math
import random

PER_NODE = 54 * 24 * 2048 / 419  # hours between failures of a node
TAKEN_OUT, REPAIR = 0.76, 24.0  # fraction of failures that need a repair; hours


# --8<-- [start:poisson]
def spares_needed(mean: float, risk: float) -> int:
    """The smallest k for which P(more than k nodes are in repair) is at most `risk`."""
    k, term = 0, math.exp(-mean)
    beyond = 1 - term
    while beyond > risk:
        k += 1
        term *= mean / k
        beyond -= term
    return k


# --8<-- [end:poisson]


def simulate(nodes: int, spares: int, shape: float, days: int) -> tuple[float, float]:
    """Mean number of nodes in repair; fraction of the time with more of them than spares."""
    rng = random.Random(nodes)
    scale = REPAIR / math.gamma(1 + 1 / shape)
    between = PER_NODE / nodes / TAKEN_OUT
    clock, sum_out, too_many, back = 0.0, 0.0, 0.0, []
    fails = rng.expovariate(1 / between)
    while clock < days * 24:
        now = min(fails, back[0]) if back else fails
        sum_out += len(back) * (now - clock)
        too_many += (len(back) > spares) * (now - clock)
        clock = now
        if now == fails:
            heapq.heappush(back, now + rng.weibullvariate(scale, shape))
            fails = now + rng.expovariate(1 / between)
        else:
            heapq.heappop(back)
    return sum_out / clock, too_many / clock


def poisson_tail(mean: float, k: int) -> float:
    """P(a Poisson number is larger than k), as a sum of logarithms of factorials."""
    log_terms = (i * math.log(mean) - mean - math.lgamma(i + 1) for i in range(k + 1))
    return 1 - sum(map(math.exp, log_terms))


def main() -> None:
    print("        nodes in repair       spares that suffice    time with too few; repairs:")
    print(" nodes  predicted simulated   99%, 99.9% of time     irregular, random, regular")
    for nodes in (2, 125, 2_048, 12_500):
        mean = nodes / PER_NODE * TAKEN_OUT * REPAIR
        spares, more = spares_needed(mean, 0.01), spares_needed(mean, 0.001)
        days = {2: 400_000, 125: 20_000, 2_048: 4_000, 12_500: 800}[nodes]
        seen = [simulate(nodes, spares, shape, days) for shape in (0.6, 1.0, 5.0)]
        for out, short in seen:
            assert abs(out / mean - 1) < 0.1, nodes
            assert short < 0.01, nodes
            # 0.002: about three standard errors of the longest simulation's share
            assert abs(short - poisson_tail(mean, spares)) < 0.002, nodes
        assert spares == 0 or poisson_tail(mean, spares - 1) > 0.01, "fewer would suffice"
        assert poisson_tail(mean, more) <= 0.001 < poisson_tail(mean, more - 1)
        short = " ".join(f"{share:.2%}" for _, share in seen)
        print(
            f"{nodes:6,}  {mean:9.3f} {seen[1][0]:9.3f}   {spares:4} {more:4}"
            f"  ({more / nodes:5.1%})      {short}"
        )


if __name__ == "__main__":
    main()
