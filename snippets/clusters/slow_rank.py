"""A straggler, found by two numbers from each rank, and fixed by giving it fewer rows.

Three ranks share a batch of 48 rows. Then rank 1 needs three times as long for a row (a hot
GPU, a neighbour on its cores). All ranks have the same time per step, so each measures its
*own* part, up to the collective, and gathers it. Then rows are dealt by speed: the gradient
stays the same, for each rank's sum counts by its rows.

A sleep plays the kernel, so that two cores can play three GPUs. The ranks are forked, so torch
is imported once. Linux and macOS only.
"""

import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, ROWS, SLOW, TIMES_SLOWER, PER_ROW = 3, 48, 1, 3, 0.003
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


# --8<-- [start:step]
def step(rank: int, share: list[int], sick: bool) -> tuple[torch.Tensor, float, float]:
    """One step on this rank's rows: the mean gradient, own time, time in the collective."""
    before = time.perf_counter()
    first = sum(share[:rank])
    x, y = X[first : first + share[rank]], Y[first : first + share[rank]]
    weights = torch.zeros(4, requires_grad=True)
    ((x @ weights - y) ** 2).sum().backward()  # a sum: each row counts once
    time.sleep(share[rank] * PER_ROW * (TIMES_SLOWER if sick and rank == SLOW else 1))
    arrived = time.perf_counter()  # on a GPU: after a synchronise, or by events
    dist.all_reduce(weights.grad)
    weights.grad /= ROWS
    return weights.grad, arrived - before, time.perf_counter() - arrived


def gather_times(own: list[float], waited: list[float]) -> torch.Tensor:
    """Every rank's medians, [ranks, 2]: 8 bytes from each, once in a hundred steps."""
    mine = torch.tensor([statistics.median(own), statistics.median(waited)])
    table = [torch.empty(2) for _ in range(RANKS)]
    dist.all_gather(table, mine)
    return torch.stack(table)


def stragglers(table: torch.Tensor) -> list[int]:
    own = table[:, 0]
    return (own > 1.5 * own.median()).nonzero().flatten().tolist()


def deal(table: torch.Tensor, share: list[int]) -> list[int]:
    """Rows in proportion to each rank's rows per second; all ranks compute the same."""
    speed = torch.tensor(share) / table[:, 0]
    exact = speed / speed.sum() * ROWS
    dealt = exact.floor().long()
    for rank in (exact - dealt).argsort(descending=True)[: ROWS - int(dealt.sum())]:
        dealt[rank] += 1  # the rows that are left, to those who lost most in rounding
    return dealt.tolist()


# --8<-- [end:step]


def phase(rank: int, share: list[int], sick: bool) -> dict:
    dist.barrier()
    results = [step(rank, share, sick) for _ in range(5)]
    gradients, own, waited = zip(*results, strict=True)
    table = gather_times(list(own), list(waited))
    return {"gradient": gradients[0], "table": table, "share": share}


def run(rank: int) -> list[dict]:
    even = [ROWS // RANKS] * RANKS
    phases = [phase(rank, even, sick=False), phase(rank, even, sick=True)]
    found = stragglers(phases[-1]["table"])
    share = deal(phases[-1]["table"], even) if found else even
    return [*phases, phase(rank, share, sick=True)]


def fork_rank(rank: int, folder: Path, work: Callable) -> int:
    """Start a process that is this rank, and writes what `work(rank)` returns; its number."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # whatever happens, no rank outlives this
        store = dist.FileStore(str(folder / "store"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        (folder / f"found.{rank}").write_bytes(pickle.dumps(work(rank)))
        dist.barrier()
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(ranks: list[int]) -> list[int]:
    """Exit statuses, below 0 for a signal; if this process is interrupted, they end too."""
    statuses: list[int] = []
    try:
        for pid in ranks:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses
    finally:
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("slow_rank.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert not any(wait_for([fork_rank(rank, folder, run) for rank in range(RANKS)]))
        ranks = [pickle.loads((folder / f"found.{r}").read_bytes()) for r in range(RANKS)]

    names = ("healthy", f"rank {SLOW} is slow", "rows dealt by speed")
    steps = []
    for phases, what in zip(zip(*ranks, strict=True), names, strict=True):
        table = phases[0]["table"]
        steps.append(table.sum(1).max().item())
        print(f"{what}: step ≈{steps[-1] * 1e3:.0f} ms")
        for rank, (own, waited) in enumerate((table * 1e3).tolist()):
            rows = phases[0]["share"][rank]
            times = f"own ≈{own:.0f} ms, in all_reduce ≈{waited:.0f} ms"
            print(f"  rank {rank}: ≈{rows} rows, {times}")
        for other in phases:
            torch.testing.assert_close(other["gradient"], ranks[0][0]["gradient"])
    weights = torch.zeros(4, requires_grad=True)
    ((X @ weights - Y) ** 2).mean().backward()
    torch.testing.assert_close(ranks[0][0]["gradient"], weights.grad)
    twice_as_fast = torch.tensor([[1.0, 0], [1.0, 0], [1.0, 0]])  # with twice as many rows
    assert deal(twice_as_fast, [12, 12, 24]) == [12, 12, 24]
    found = stragglers(ranks[0][1]["table"])
    print(f"own time above 1.5 medians: rank {found}")
    predicted = (TIMES_SLOWER * (RANKS - 1) + 1) / RANKS
    gain = steps[1] / steps[2]
    print(f"the slow step over the fixed one: predicted {predicted:.1f}, ≈{gain:.1f}")
    print("gradient in all three, on all ranks: the same")
    assert not stragglers(ranks[0][0]["table"]) and found == [SLOW]
    waits = ranks[0][1]["table"][:, 1]
    assert waits.argmin() == SLOW  # and that is the one with the healthiest profile
    assert gain > 1.4


if __name__ == "__main__":
    main()
