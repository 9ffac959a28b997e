"""A rank fails, and all ranks start over within their processes: no new Python, no new torch.

Rank 2 of four raises an error after the all-reduce of step 5 and before its update. The other
ranks have finished step 5 and wait in step 6, where they get an error because rank 2 closes its
connections. Every rank catches its error, destroys its process group, writes its step into the
store under the number of the new round, and forms a new group. The ranks stopped at different
steps, so all return to the oldest of them, step 4. For this, each rank keeps one older state.

The program compares the result with an undisturbed run, bit for bit. A third run leaves out the
return to the common step, and its ranks end with different weights. The ranks are forked, so
torch is imported once. Linux and macOS only.
"""

# ruff: noqa: E402

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

BEGAN = time.process_time()
import torch
import torch.distributed as dist
import torch.distributed.nn  # import it now: imported after init, it keeps the group alive

IMPORT_SECONDS = time.process_time() - BEGAN  # of a processor

RANKS, STEPS, VICTIM, AT, WIDTH = 4, 9, 2, 5, 64
LIMIT = timedelta(seconds=60)


def form_group(store: dist.Store, round_number: int, rank: int, ranks: int) -> None:
    """A new process group for this round. Its keys differ from those of earlier rounds."""
    keys = dist.PrefixStore(f"round {round_number}", store)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=ranks, timeout=LIMIT)


def oldest_step(store: dist.Store, round_number: int, rank: int, step: int) -> int:
    """The step at which all ranks can start this round; waits until every rank has come."""
    keys = [f"round {round_number}, step of rank {r}" for r in range(RANKS)]
    store.set(keys[rank], str(step))
    store.wait(keys, LIMIT)
    return min(int(store.get(key)) for key in keys)


def gradient_of(weights: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """The gradient of a least-squares loss on the rows of this step and rank."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, WIDTH, generator=random)
    return x.T @ (x @ weights - x.sin().sum(1)) / 8


class Run:
    """The state of one rank: it outlives every process group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.done = rank, 0
        self.state = torch.zeros(2, WIDTH)  # weights and momentum
        self.before = self.state.clone()  # the state one step earlier
        self.fault_to_come = rank == VICTIM

    def step(self, number: int, fault: bool) -> None:
        gradient = gradient_of(self.state[0], number, self.rank)
        dist.all_reduce(gradient)
        if fault and self.fault_to_come and number == AT:
            self.fault_to_come = False
            raise RuntimeError("a fault that does not come back")
        self.before = self.state.clone()
        self.state[1].mul_(0.9).add_(gradient / RANKS)
        self.state[0].sub_(0.01 * self.state[1])
        self.done = number

    def return_to(self, step: int) -> None:
        """Undo the newest step if the others have not finished it."""
        if self.done != step:
            assert self.done == step + 1, "the ranks are more than one step apart"
            self.state, self.done = self.before.clone(), step


def train(store: dist.Store, rank: int, fault: bool, agree: bool) -> dict:
    run, stopped, caught, restart = Run(rank), 0, 0.0, 0.0
    for round_number in range(3):
        start = oldest_step(store, round_number, rank, run.done)
        form_group(store, round_number, rank, RANKS)
        if agree:
            run.return_to(start)
        try:
            for number in range(start + 1, STEPS + 1):
                run.step(number, fault)
                if caught and not restart:
                    restart = time.perf_counter() - caught
            break
        except RuntimeError:  # its own, or the error of a closed connection
            stopped, caught = run.done, time.perf_counter()
        finally:
            dist.destroy_process_group()  # closes the connections, so the others notice
    return {
        "state": run.state,
        "rounds": round_number + 1,
        "stopped": stopped,
        "start": start,  # of the last round
        "restart": restart,
        "process": os.getpid(),
    }


def fork_store() -> tuple[int, int]:
    """Start a process that serves a store and does not train; its number and its port.

    The store has a thread. If it ran in this process, a fork could copy a lock that is taken.
    """
    receive, send = os.pipe()
    if pid := os.fork():
        os.close(send)
        port = int(os.read(receive, 16))
        os.close(receive)
        return pid, port
    try:
        signal.alarm(120)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(send, str(store.port).encode())
        signal.pause()
    finally:
        os._exit(1)


def fork_saving_rank(rank: int, port: int, folder: Path, work: Callable, *given) -> int:
    """Start a process that saves what `work(store, rank, *given)` returns; its number."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(120)  # no rank outlives this
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's warnings
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
        torch.save(work(store, rank, *given), folder / f"rank.{rank}")
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


def run_all(fault: bool, agree: bool = True) -> list[dict]:
    """Train once on forked ranks."""
    server, port = fork_store()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [fork_saving_rank(r, port, folder, train, fault, agree) for r in range(RANKS)]
        statuses = wait_for(pids)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        assert statuses == [0] * RANKS, statuses
        results = [torch.load(folder / f"rank.{r}", weights_only=True) for r in range(RANKS)]
    assert [r["process"] for r in results] == pids  # no rank has started a new process
    return results


def run_and_count() -> list[dict]:
    """Train with agree=False. The clock counts the completed calls of torch.distributed."""
    calls: list[str] = []

    def counting(name: str) -> Callable:
        call = getattr(dist, name)
        return lambda *given, **options: [call(*given, **options), calls.append(name)]

    names = ("init_process_group", "destroy_process_group", "all_reduce")
    with (
        mock.patch.multiple(dist, **{name: counting(name) for name in names}),
        mock.patch.object(time, "perf_counter", lambda: len(calls)),
    ):
        return run_all(fault=True, agree=False)


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("restart_in_process.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    undisturbed = run_all(fault=False)
    restarted = run_all(fault=True)
    careless = run_and_count()

    print(f"rounds, undisturbed: {[r['rounds'] for r in undisturbed]}")
    print(f"rounds, with a fault: {[r['rounds'] for r in restarted]}")
    stopped = [r["stopped"] for r in restarted]
    print(f"steps finished when the error came: {stopped}")
    print(f"so all return to step {restarted[0]['start']}")
    assert [r["start"] for r in restarted] == [AT - 1] * RANKS  # not to the beginning
    assert stopped == [AT if r != VICTIM else AT - 1 for r in range(RANKS)]
    assert [r["rounds"] for r in undisturbed] == [1] * RANKS
    assert [r["rounds"] for r in restarted] == [2] * RANKS
    assert [(r["rounds"], r["start"]) for r in careless] == [(2, AT - 1)] * RANKS
    # the restart ends the old group, forms a new group, and completes a step
    assert [r["restart"] for r in careless] == [3] * RANKS

    store, ranks = dist.HashStore(), range(RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        for oldest in ranks:  # the oldest rank need not be the rank that failed
            steps = [AT - (rank == oldest) for rank in ranks]
            starts = pool.map(oldest_step, [store] * RANKS, [oldest] * RANKS, ranks, steps)
            assert [*starts] == [AT - 1] * RANKS

    same = [torch.equal(r["state"], undisturbed[0]["state"]) for r in restarted]
    print(f"same bits as the undisturbed run: {same}")
    assert all(same)
    weights = momentum = torch.zeros(WIDTH)
    for step in range(1, STEPS + 1):  # the same training in one process
        total = sum(gradient_of(weights, step, rank) for rank in range(RANKS))
        momentum = 0.9 * momentum + total / RANKS
        weights = weights - 0.01 * momentum
    torch.testing.assert_close(undisturbed[0]["state"], torch.stack([weights, momentum]))
    assert not torch.equal(*(gradient_of(weights, 1, rank) for rank in (0, 1)))  # unequal rows
    same = [torch.equal(r["state"], undisturbed[0]["state"]) for r in careless]
    apart = (careless[VICTIM]["state"][0] - careless[0]["state"][0]).abs().max()
    print(f"without the return to a common step: {same}")
    assert not any(same) and apart > 1e-3

    seconds = max(r["restart"] for r in restarted)
    print(f"from the error to the first finished step: ≈{seconds:.2f} s")
    print(f"not repeated: {RANKS} starts of Python, {RANKS} imports of torch", end="")
    print(f" (≈{IMPORT_SECONDS:.1f} s of a core)")


if __name__ == "__main__":
    main()
