"""Slows down one link: all ranks wait equally long, and a test of each pair finds the link.

Four ranks sum a tensor in a ring. Then each message on the link between ranks 1 and 2 takes
40 ms longer, and the link can carry only one message at a time. Each rank's own time stays the
same, and all ranks spend equally long in the collective. The table that finds a slow rank
therefore finds none (slow_link.svg shows both cases). Pings between the two ranks of each pair
find the link. A ring in a different order avoids it.

The messages are real. The times are not: each message carries the virtual time of its arrival,
so a busy machine cannot change the result. The ranks are forked, so torch is imported once.
Linux and macOS only.
"""

import itertools
import os
import pickle
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, LINK = 4, {1, 2}
COMPUTE, TRANSFER, DELAY = 0.02, 0.001, 0.04  # seconds
link_is_slow = False
clock = 0.0  # the virtual time of this rank, in seconds


# --8<-- [start:send]
def send(tensor: torch.Tensor, to: int) -> list[dist.Work]:
    """Send a tensor, and the virtual time of its arrival. The sender is busy until then."""
    global clock
    clock += TRANSFER + (DELAY if link_is_slow and {dist.get_rank(), to} == LINK else 0)
    arrival = torch.tensor([clock], dtype=torch.float64)
    return [dist.isend(tensor, to), dist.isend(arrival, to)]


def receive(tensor: torch.Tensor, source: int) -> None:
    """Receive a tensor. If this rank is early, it waits until the tensor arrives."""
    global clock
    arrival = torch.empty(1, dtype=torch.float64)
    dist.recv(tensor, source)
    dist.recv(arrival, source)
    clock = max(clock, arrival.item())


# --8<-- [end:send]


def ring_all_reduce(tensor: torch.Tensor, ring: list[int]) -> None:
    """Sum over the ranks in place, in a ring (chapter 01 derives the algorithm)."""
    n, place = len(ring), ring.index(dist.get_rank())
    after, before = ring[(place + 1) % n], ring[(place - 1) % n]
    chunks = tensor.chunk(n)
    incoming = torch.empty_like(chunks[0])
    for turn in range(2 * (n - 1)):
        late = turn >= n - 1  # in these turns, finished chunks are copied
        sending = send(chunks[(place - turn + late * n) % n], after)
        receive(incoming, before)
        for work in sending:
            work.wait()
        chunk = chunks[(place - turn - 1) % n]
        chunk.copy_(incoming) if late else chunk.add_(incoming)


def ping_all_pairs() -> torch.Tensor:
    """Round trip of every pair in seconds, [ranks, ranks], in n-1 rounds of n/2 pairs.

    The rounds are those of a tournament: rank n-1 keeps its seat, and after each round the
    other ranks move on by one seat.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, small = torch.zeros(n), torch.zeros(1)
    for turn in range(n - 1):
        seats = [n - 1] + [(turn + i) % (n - 1) for i in range(n - 1)]
        pairs = [{seats[i], seats[n - 1 - i]} for i in range(n // 2)]
        (partner,) = next(pair for pair in pairs if rank in pair) - {rank}
        trips = []
        for _ in range(5):
            before = clock
            if rank < partner:
                sending = send(small, partner)
                receive(small, partner)
            else:
                receive(small, partner)
                sending = send(small, partner)
            for work in sending:
                work.wait()
            trips.append(clock - before)
        mine[partner] = min(trips[1:])  # in trip 0, the partner may still be busy
    rows = [torch.empty(n) for _ in range(n)]
    dist.all_gather(rows, mine)
    table = torch.stack(rows)
    return (table + table.T) / 2  # the mean of the measurements at both ends


def best_ring(trips: torch.Tensor) -> list[int]:
    """The ring whose slowest link is faster than the slowest link of any other ring."""
    rings = ([0, *rest] for rest in itertools.permutations(range(1, len(trips))))
    return min(rings, key=lambda ring: max(trips[a, b] for a, b in links(ring)))


def links(ring: list[int]) -> list[tuple[int, int]]:
    return list(zip(ring, ring[1:] + ring[:1], strict=True))


def phase(ring: list[int], slow_rank: int | None = None) -> torch.Tensor:
    """Every rank's median of own time and time in the collective, [ranks, 2]."""
    global clock
    start = torch.tensor([clock], dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX)  # all ranks start at the same time
    clock = start.item()
    own, waited = [], []
    for _ in range(9):
        gradient = torch.full((4000,), dist.get_rank() + 1.0)
        seconds = COMPUTE * (6 if dist.get_rank() == slow_rank else 1)
        clock += seconds
        arrived = clock
        ring_all_reduce(gradient, ring)
        assert (gradient == sum(range(1, RANKS + 1))).all()
        own.append(seconds)
        waited.append(clock - arrived)
    rows = [torch.empty(2) for _ in range(RANKS)]
    dist.all_gather(rows, torch.tensor([statistics.median(own), statistics.median(waited)]))
    return torch.stack(rows)


def run(rank: int) -> tuple:
    global link_is_slow
    ring = list(range(RANKS))
    healthy, straggler = phase(ring), phase(ring, slow_rank=1)
    link_is_slow = True
    slow, trips = phase(ring), ping_all_pairs()
    detour = best_ring(trips)
    return healthy, straggler, slow, trips, detour, phase(detour)


def fork_rank(rank: int, folder: Path, work: Callable) -> int:
    """Start a process that writes the result of `work(rank)` to a file. Return its pid."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # in any case, the rank ends after this time
        store = dist.FileStore(str(folder / "store"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        (folder / f"result.{rank}").write_bytes(pickle.dumps(work(rank)))
        dist.barrier()
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(ranks: list[int]) -> list[int]:
    """Exit statuses, below 0 for a signal. After an interrupt, the ranks end too."""
    statuses: list[int] = []
    try:
        for pid in ranks:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses
    finally:
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)


def draw(tables: dict[str, torch.Tensor]) -> None:
    """Draw one panel for each table, with a bar for each rank: own time, then all-reduce."""
    import matplotlib  # imported here, because no rank draws

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "slow_link", "font.size": 12}
    figure, panels = plt.subplots(1, len(tables), figsize=(7, 2.5), sharey=True, sharex=True)
    for axes, (what, table) in zip(panels, tables.items(), strict=True):
        own, waited = (table * 1e3).T.tolist()
        axes.barh(range(RANKS), own, color="#0b6e99", height=0.7, label="own time")
        axes.barh(
            range(RANKS), waited, left=own, color="#c2410c", height=0.7, label="all-reduce"
        )
        axes.set(title=what, yticks=range(RANKS))
        axes.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    panels[1].set_xlabel("time in a step (ms)")
    panels[0].legend(frameon=False, loc="center right", fontsize=11)
    figure.tight_layout()
    figure.savefig("slow_link.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("slow_link.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert not any(wait_for([fork_rank(rank, folder, run) for rank in range(RANKS)]))
        result = pickle.loads((folder / "result.0").read_bytes())
    healthy, straggler, slow, trips, detour, fixed = result

    tables = {"healthy": healthy, "a slow rank": straggler, "a slow link": slow}
    draw(tables)
    for what, table in tables.items():
        print(what)
        for rank, (own, waited) in enumerate((table * 1e3).tolist()):
            print(f"  rank {rank}: own {own:.0f} ms, in all_reduce {waited:.0f} ms")
    assert straggler[:, 1].argmin() == 1 and straggler[:, 0].argmax() == 1
    added = 2 * (RANKS - 1) * DELAY
    print(f"predicted: {2 * (RANKS - 1)} delays in a row, so {added * 1e3:.0f} ms more")
    torch.testing.assert_close(slow[:, 0], healthy[:, 0])  # no rank is a straggler
    torch.testing.assert_close(slow[:, 1], healthy[:, 1] + added)  # all wait equally long
    torch.testing.assert_close(fixed, healthy)  # the other ring does not use the link
    print("round trips in ms")
    print("         " + "".join(f"rank {rank:<5}" for rank in range(RANKS)).rstrip())
    for rank, row in enumerate((trips * 1e3).tolist()):
        cells = ["-" if other == rank else f"{trip:.0f}" for other, trip in enumerate(row)]
        print(f"  rank {rank} " + "".join(f"{cell:<10}" for cell in cells).rstrip())
    worst = divmod(int(trips.argmax()), RANKS)
    pairs = itertools.combinations(range(RANKS), 2)
    healthy_trips = [trips[a, b] for a, b in pairs if {a, b} != LINK]
    assert set(worst) == LINK
    torch.testing.assert_close(trips[worst] - max(healthy_trips), torch.tensor(2 * DELAY))
    print(f"the slowest link joins ranks {sorted(worst)}")
    assert LINK not in [set(link) for link in links(detour)]
    gain = (slow.sum(1).max() / fixed.sum(1).max()).item()
    print(f"the ring {detour} avoids it, and a step is {gain:.1f} times as fast")
    assert gain > 10


if __name__ == "__main__":
    main()
