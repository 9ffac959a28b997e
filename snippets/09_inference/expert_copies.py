"""Copies of busy experts even out the load of the GPUs, as in DeepSeek's load balancer.

The busiest GPU sets the time of a layer. The loads are an assumption: expert i gets tokens in
proportion to exp(z_i/2), where z_i is standard normal. The balancer has two greedy steps. First
every free slot gets a copy of the expert whose copies have the largest load. Then the copies go
to GPUs, the heaviest first, always to the GPU with the smallest load that has a free slot.

Small cases are compared with all possible plans. A plan is then tested with the random choices
of single steps, and with loads that have changed.
"""

import heapq
import itertools
import math
import random

EXPERTS, K, BATCH, SPARSE = 256, 8, 128, 58  # BATCH per GPU; SPARSE layers have experts
SPREAD = 0.5
EXPERT = 3 * 7168 * 2048  # bytes of an expert in 8 bits
LINK = 40e9

Plan = list[list[int]]  # the experts of each GPU


# --8<-- [start:plan]
def copies(loads: list[float], slots: int) -> list[int]:
    """Give each free slot to the expert with the largest load per copy; return the counts."""
    if slots < len(loads):
        raise ValueError(f"{len(loads)} experts need a slot each, and there are {slots}")
    count = [1] * len(loads)
    heap = [(-load, i) for i, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        _, i = heap[0]
        count[i] += 1
        heapq.heapreplace(heap, (-loads[i] / count[i], i))
    return count


def pack(weights: list[float], packs: int) -> list[list[int]]:
    """Put items into packs of equal size: the heaviest first, into the lightest free pack."""
    packed: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        room = [p for p in range(packs) if len(packed[p]) < len(weights) // packs]
        lightest = min(room, key=total.__getitem__)
        packed[lightest].append(i)
        total[lightest] += weights[i]
    return packed


def place(loads: list[float], gpus: int, slots: int) -> Plan:
    """Return a plan that may put a copy on any GPU."""
    count = copies(loads, slots)
    experts = [i for i, c in enumerate(count) for _ in range(c)]
    packed = pack([loads[i] / count[i] for i in experts], gpus)
    return [[experts[j] for j in gpu] for gpu in packed]


def place_by_node(loads: list[float], gpus: int, slots: int, nodes: int, groups: int) -> Plan:
    """Return a plan that keeps each group of experts on one node."""
    if len(loads) % groups or gpus % nodes or slots % nodes:
        raise ValueError("groups must divide the experts, and nodes the GPUs and the slots")
    size = len(loads) // groups
    weight = [sum(loads[g * size : (g + 1) * size]) for g in range(groups)]
    plan = []
    for node in pack(weight, nodes):
        here = [i for g in node for i in range(g * size, (g + 1) * size)]
        inside = place([loads[i] for i in here], gpus // nodes, slots // nodes)
        plan += [[here[i] for i in gpu] for gpu in inside]
    return plan


# --8<-- [end:plan]


def busiest(plan: Plan, loads: list[float]) -> float:
    """Load of the busiest GPU over the mean, if copies of an expert share its load evenly."""
    count = [0] * len(loads)
    for i in itertools.chain(*plan):
        count[i] += 1
    return max(sum(loads[i] / count[i] for i in gpu) for gpu in plan) * len(plan) / sum(loads)


def in_order(gpus: int, slots: int) -> Plan:
    """Return a plan that ignores the loads: experts in order, free slots for the first ones."""
    experts = sorted(i % EXPERTS for i in range(slots))
    return [experts[g * slots // gpus : (g + 1) * slots // gpus] for g in range(gpus)]


def one_step(plan: Plan, loads: list[float], generator: random.Random) -> float:
    """Return the same for one step of random choices, whose tokens use the copies in turn."""
    where: list[list[int]] = [[] for _ in loads]
    for gpu, experts in enumerate(plan):
        for i in experts:
            where[i].append(gpu)
    tokens = [0] * len(plan)
    for turn, i in enumerate(
        generator.choices(range(len(loads)), loads, k=len(plan) * BATCH * K)
    ):
        tokens[where[i][turn % len(where[i])]] += 1
    return max(tokens) * len(plan) / sum(tokens)


# --8<-- [start:brute]
def least_copies(loads: list[float], slots: int) -> float:
    """Return the smallest possible load of the busiest copy, over all numbers of copies."""
    counts = itertools.product(range(1, slots + 1), repeat=len(loads))
    return min(max(load / c for load, c in zip(loads, count, strict=True))
               for count in counts if sum(count) == slots)  # fmt: skip


def least(loads: list[float], gpus: int, each: int) -> float:
    """Return the smallest `busiest` of all plans."""
    sets = list(itertools.combinations_with_replacement(range(len(loads)), each))
    plans = itertools.combinations_with_replacement(sets, gpus)
    return min(busiest(plan, loads) for plan in plans
               if len(set(itertools.chain(*plan))) == len(loads))  # fmt: skip


# --8<-- [end:brute]


def draw(generator: random.Random, experts: int = EXPERTS) -> list[float]:
    return [math.exp(generator.gauss(0, SPREAD)) for _ in range(experts)]


def main() -> None:
    generator = random.Random(0)
    worse = []
    for _ in range(25):
        loads = draw(generator, 5)
        count = copies(loads, 8)
        greedy = max(load / c for load, c in zip(loads, count, strict=True))
        assert math.isclose(greedy, least_copies(loads, 8))
        worse.append(busiest(place(loads, 4, 8), loads) / least(loads, 4, 2))
    assert min(worse) > 1 - 1e-9 and max(worse) < 1.4
    best = sum(w < 1 + 1e-9 for w in worse)
    print(f"{len(worse)} cases of 5 experts and 8 slots on 4 GPUs, compared with all plans:")
    print("  other numbers of copies never give a smaller load of the busiest copy")
    print(f"  {best} plans are the best; in the worst case the busiest GPU has "
          f"{max(worse):.2f} times the smallest load")  # fmt: skip

    loads = draw(generator)
    times = max(loads) * EXPERTS / sum(loads)
    print(f"{EXPERTS} experts, the busiest with {times:.1f} times the mean load")
    print("load of the busiest GPU over the mean:")
    print("GPUs  more copies  experts each  in order  by node  anywhere  in single steps")
    rows = {}
    tried = (32, 0), (32, 32), (32, 128), (72, 32), (72, 104), (144, 32), (320, 64)
    for gpus, more in tried:
        slots = EXPERTS + more
        plan = place(loads, gpus, slots)
        assert sorted({i for gpu in plan for i in gpu}) == list(range(EXPERTS))
        steps = [one_step(plan, loads, generator) for _ in range(2)]
        node = ""
        if gpus == 32:  # 8 groups of experts, on 4 nodes
            node = f"{busiest(place_by_node(loads, gpus, slots, 4, 8), loads):.2f}"
        rows[gpus, more] = busiest(in_order(gpus, slots), loads), busiest(plan, loads)
        print(f"{gpus:4} {more:12} {slots // gpus:13} {rows[gpus, more][0]:9.2f} {node:>8} "
              f"{rows[gpus, more][1]:9.2f} {sum(steps) / len(steps):16.2f}")  # fmt: skip
    assert all(after < before for before, after in rows.values())
    print(f"one more expert on each GPU, in {SPARSE} layers: {SPARSE * EXPERT / 1e9:.2f} GB")

    gpus, slots = 72, 288
    plan, noise = place(loads, gpus, slots), draw(generator)
    print("the same for 72 GPUs and 288 slots, after the loads have changed:")
    print("correlation  old plan  new plan  moved to a GPU  at 40 GB/s")
    for rho in (0.99, 0.9, 0.5):
        now = [math.exp(rho * math.log(a) + (1 - rho**2) ** 0.5 * math.log(b))
               for a, b in zip(loads, noise, strict=True)]  # fmt: skip
        new = place(now, gpus, slots)
        old, fresh = busiest(plan, now), busiest(new, now)
        arrived = max(len(set(a) - set(b)) for a, b in zip(new, plan, strict=True))
        size = arrived * SPARSE * EXPERT
        print(f"{rho:11} {old:9.2f} {fresh:9.2f} {size / 1e9:12.1f} GB {size / LINK:9.2f} s")
        assert fresh < old


if __name__ == "__main__":
    main()
