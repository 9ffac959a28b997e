"""Finds a rank that is only 1.25 times as slow as the others, and gives it fewer rows.

Three ranks share a batch of 480 rows. Then rank 1 needs 1.25 times as long for each row, like a
GPU at 80% of its clock. A step takes equally long on all ranks. So each rank measures its own
time, which is its time outside all collectives. Look at the two results in which the slow rank
is not found: with a threshold that is too high, and with ranks that meet several times in a
step.

The gradients and the collectives are real. The time is not: a virtual clock adds up the times
of the kernels, each with a random deviation of 5%. So a busy machine cannot change the result.
In your own training, use `time.perf_counter()` or CUDA events, as the page explains.

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import os
import pickle
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, ROWS, SLOW, TIMES_SLOWER = 3, 480, 1, 1.25
PER_ROW, DEVIATION, TRANSFER, STEPS = 0.0003, 0.05, 0.002, 100
THRESHOLD = 1.1
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


# --8<-- [start:clock]
class Clock:
    """The virtual clock of one rank, in seconds."""

    def __init__(self, rank: int) -> None:
        self.now, self.random = 0.0, random.Random(rank)

    def compute(self, seconds: float) -> None:
        self.now += seconds * self.random.gauss(1, DEVIATION)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks. It ends on all ranks when the slowest rank has arrived."""
        dist.all_reduce(tensor)
        arrival = torch.tensor(self.now, dtype=torch.float64)
        dist.all_reduce(arrival, op=dist.ReduceOp.MAX)
        self.now = arrival.item() + TRANSFER


# --8<-- [end:clock]


# --8<-- [start:step]
def step(clock: Clock, rank: int, share: list[int], factor: float, meetings: int) -> dict:
    """One step on this rank's rows: the mean gradient, and the measured times."""
    start, waited, gradient = clock.now, 0.0, torch.zeros(4)
    first = sum(share[:rank])
    mine = slice(first, first + share[rank])
    parts = [rows[mine].tensor_split(meetings) for rows in (X, Y)]
    for x, y in zip(*parts, strict=True):
        weights = torch.zeros(4, requires_grad=True)
        ((x @ weights - y) ** 2).sum().backward()  # a sum, so that each row counts once
        clock.compute(len(x) * PER_ROW * factor)
        arrived = clock.now
        clock.all_reduce(weights.grad)
        waited += clock.now - arrived
        gradient += weights.grad
    before_the_collective = arrived - start  # with several meetings it includes waits
    return {
        "gradient": gradient / ROWS,
        "before the collective": before_the_collective,
        "outside collectives": clock.now - start - waited,
        "in collectives": waited,
    }


# --8<-- [end:step]


def gather_medians(times: list[float]) -> torch.Tensor:
    """Every rank's median over many steps, [ranks]: 4 bytes from each rank."""
    medians = [torch.empty(1) for _ in range(RANKS)]
    dist.all_gather(medians, torch.tensor([statistics.median(times)]))
    return torch.cat(medians)


def stragglers(own: torch.Tensor, threshold: float = THRESHOLD) -> list[int]:
    """The ranks whose own time is larger than that of the median rank by the threshold."""
    return (own > threshold * own.median()).nonzero().flatten().tolist()


def deal(own: torch.Tensor, share: list[int]) -> list[int]:
    """Rows in proportion to each rank's rows per second; all ranks compute the same."""
    speed = torch.tensor(share) / own
    exact = speed / speed.sum() * ROWS
    dealt = exact.floor().long()
    for rank in (exact - dealt).argsort(descending=True)[: ROWS - int(dealt.sum())]:
        dealt[rank] += 1  # the remaining rows, to the ranks that lost most in rounding
    return dealt.tolist()


def phase(rank: int, share: list[int], factor: float, meetings: int = 1) -> dict:
    """100 steps: the gradient, and the medians of all ranks for each time, [ranks]."""
    clock = Clock(rank)
    steps = [
        step(clock, rank, share, factor if rank == SLOW else 1, meetings) for _ in range(STEPS)
    ]
    keys = ("before the collective", "outside collectives", "in collectives")
    result = {key: gather_medians([each[key] for each in steps]) for key in keys}
    single = [gather_medians([each["outside collectives"]]) for each in steps]
    alarms = sum(bool(stragglers(own)) for own in single)
    return result | {
        "gradient": steps[0]["gradient"],
        "share": share,
        "step": clock.now / STEPS,
        "single steps": alarms,
    }


def run(rank: int) -> list[dict]:
    even = [ROWS // RANKS] * RANKS
    healthy, slow = phase(rank, even, 1), phase(rank, even, TIMES_SLOWER)
    own = slow["outside collectives"]
    share = deal(own, even) if stragglers(own) else even
    return [
        healthy,
        slow,
        phase(rank, share, TIMES_SLOWER),
        phase(rank, even, TIMES_SLOWER, meetings=4),
    ]


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


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("slow_rank.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert not any(wait_for([fork_rank(rank, folder, run) for rank in range(RANKS)]))
        ranks = [pickle.loads((folder / f"result.{r}").read_bytes()) for r in range(RANKS)]

    healthy, slow, dealt, several = ranks[0]
    names = ("healthy", f"rank {SLOW} is slow", "rows dealt by speed")
    for result, what in zip((healthy, slow, dealt), names, strict=True):
        print(f"{what}: a step takes {result['step'] * 1e3:.1f} ms")
        for rank in range(RANKS):
            own, waited = (
                result[key][rank] * 1e3 for key in ("outside collectives", "in collectives")
            )
            times = f"own time {own:.1f} ms, in all_reduce {waited:.1f} ms"
            print(f"  rank {rank}: {result['share'][rank]} rows, {times}")

    own = slow["outside collectives"]
    print("which rank is a straggler?")
    print(f"  own time above {THRESHOLD} medians: {stragglers(own)}")
    print(f"  own time above 1.5 medians: {stragglers(own, 1.5)}")
    alarms = healthy["single steps"]
    print(f"  healthy, but judged by one step: a false alarm in {alarms} of {STEPS} steps")
    late, apart = several["before the collective"], several["outside collectives"]
    ratios = [times[SLOW].item() / times.median().item() for times in (late, apart)]
    print("and if the ranks meet four times in a step?")
    print(f"  time up to the last collective: {ratios[0]:.2f} medians, {stragglers(late)}")
    print(f"  time outside all collectives: {ratios[1]:.2f} medians, {stragglers(apart)}")
    assert stragglers(own) == stragglers(apart) == [SLOW]
    assert not stragglers(healthy["outside collectives"])
    assert not stragglers(own, 1.5) and not stragglers(late)
    assert alarms > 0  # so one step is not enough
    assert torch.equal(own, slow["before the collective"])  # with one meeting they are the same
    assert slow["in collectives"].argmin() == SLOW  # the slow rank waits least

    predicted = (TIMES_SLOWER * (RANKS - 1) + 1) / RANKS
    gain = (own.max() / dealt["outside collectives"].max()).item()
    print(f"longest own time, even shares over dealt rows: {gain:.2f}; formula {predicted:.2f}")
    assert abs(gain - predicted) < 0.03  # the medians of 100 steps deviate by about 1%
    for results in ranks:
        for result, first in zip(results, ranks[0], strict=True):
            torch.testing.assert_close(result["gradient"], healthy["gradient"])
            assert result["step"] == first["step"]  # all ranks end each step at the same time
    for result, factor in ((healthy, 1), (slow, TIMES_SLOWER), (dealt, TIMES_SLOWER)):
        nominal = torch.tensor(result["share"]) * PER_ROW  # without the random deviation
        nominal[SLOW] *= factor
        torch.testing.assert_close(result["outside collectives"], nominal, rtol=0.03, atol=0)
        both = result["outside collectives"] + result["in collectives"]
        torch.testing.assert_close(both, both.new_full([3], result["step"]), rtol=0.03, atol=0)
    assert stragglers(torch.tensor([1.0, 1.2, 1.0, 1.6, 1.0])) == [1, 3]  # not the mean
    weights = torch.zeros(4, requires_grad=True)
    ((X @ weights - Y) ** 2).mean().backward()
    torch.testing.assert_close(healthy["gradient"], weights.grad)
    equally_long = torch.ones(3)  # rank 2 does twice as many rows in the same time
    assert deal(equally_long, [120, 120, 240]) == [120, 120, 240]
    print("the gradient is the same in all runs and on all ranks")


if __name__ == "__main__":
    main()
