"""Each rank keeps its shard and a copy of another rank's shard, so a lost rank needs no disk.

Four ranks train with sharded weights and momentum, as under FSDP: each rank has a quarter.
Every third step, rank r also sends its shard to a rank of the other node, which keeps it in
memory. Rank 2 is killed. A new process takes its place and gets the shard from the rank with
the copy; the other ranks return to the same step. Every rank keeps two generations, because a
rank can die in the middle of a copy: then some ranks have the new generation and some do not.

All results are compared with an undisturbed run, bit for bit. If both ranks of a pair die, the
shards are lost, and every rank reports it. The last part counts which failures lose data.
The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # import it now: imported after init, it keeps the group alive

RANKS, GPUS_PER_NODE, STEPS, EVERY, WIDTH = 4, 2, 11, 3, 64
LIMIT, LOST = timedelta(seconds=60), -1


def holder(rank: int) -> int:
    """The rank that has the copy of this rank's shard: the same GPU of the other node."""
    return (rank + GPUS_PER_NODE) % RANKS


def owner(rank: int) -> int:
    """The rank of whose shard this rank has a copy."""
    return (rank - GPUS_PER_NODE) % RANKS


def form_group(store: dist.Store, round_number: int, rank: int, ranks: int) -> None:
    """A new process group for this round. Its keys differ from those of earlier rounds."""
    keys = dist.PrefixStore(f"round {round_number}", store)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=ranks, timeout=LIMIT)


Deaths = dict[int, tuple[int, str]]  # rank -> the round and the place at which it is killed


class Shard:
    """A quarter of the weights and of the momentum, and another rank's quarter as a copy."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sent = rank, 0
        self.state = torch.zeros(2, WIDTH // RANKS)
        self.own: dict[int, torch.Tensor] = {}  # step: this shard after the step
        self.copies: dict[int, torch.Tensor] = {}  # step: the shard of owner(rank)

    def copy(self, step: int) -> None:
        """Send this shard to its holder. The newest two generations stay."""
        mine, received = self.state.clone(), torch.empty_like(self.state)
        requests = [dist.isend(mine, holder(self.rank)), dist.irecv(received, owner(self.rank))]
        for request in requests:
            request.wait()
        self.sent += mine.nbytes
        self.own[step], self.copies[step] = mine, received
        for kept in (self.own, self.copies):
            for old in sorted(kept)[:-2]:
                del kept[old]

    def restore(self, step: int, lost: list[int]) -> None:
        """Return to `step`; the lost ranks get their shards from the holders."""
        for rank in lost:
            if self.rank == holder(rank):
                dist.send(self.copies[step], rank)
            elif self.rank == rank:
                dist.recv(self.state, holder(rank))
        if self.rank not in lost:
            self.state = self.own[step].clone()
            for kept in (self.own, self.copies):  # a newer generation is not complete
                for newer in [s for s in kept if s > step]:
                    del kept[newer]


def train_step(shard: Shard, number: int) -> None:
    """One sharded step: gather the weights, reduce the gradient, update a quarter."""
    quarters = [torch.empty(WIDTH // RANKS) for _ in range(RANKS)]
    dist.all_gather(quarters, shard.state[0].contiguous())
    weights = torch.cat(quarters)
    random = torch.Generator().manual_seed(1000 * number + shard.rank)
    x = torch.randn(8, WIDTH, generator=random)
    gradient = x.T @ (x @ weights - x.sin().sum(1)) / 8
    dist.all_reduce(gradient)
    mine = gradient.chunk(RANKS)[shard.rank] / RANKS
    shard.state[1].mul_(0.9).add_(mine)
    shard.state[0].sub_(0.01 * shard.state[1])


def train(store: dist.Store, rank: int, round_number: int, deaths: Deaths) -> dict:
    """Train until the end, or until a shard is lost. The last round began after `start`."""
    shard, start = Shard(rank), 0
    while True:
        if round_number:  # a rank was killed
            newest = str(max(shard.own, default=LOST))
            keys = [f"round {round_number}, rank {r}" for r in range(RANKS)]
            store.set(keys[rank], newest)
            store.wait(keys, LIMIT)
            steps = [int(store.get(key)) for key in keys]
            lost = [r for r, step in enumerate(steps) if step == LOST]
            if any(holder(r) in lost for r in lost):
                return {"lost": lost}  # owner and holder are gone, so read the disk
            start = min(step for step in steps if step != LOST)
        form_group(store, round_number, rank, RANKS)
        try:
            if round_number:
                shard.restore(start, lost)
            shard.copy(start)
            for number in range(start + 1, STEPS + 1):
                if deaths.get(rank) == (round_number, f"step {number}"):
                    os.kill(os.getpid(), signal.SIGKILL)
                train_step(shard, number)
                if number % EVERY == 0:
                    if deaths.get(rank) == (round_number, f"copy {number}"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    shard.copy(number)
            return {"state": shard.state, "start": start, "sent": shard.sent}
        except RuntimeError:  # a connection is closed
            round_number += 1
        finally:
            dist.destroy_process_group()


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


def run_all(deaths: Deaths) -> list[dict]:
    """Train once. A rank that ends by a signal is replaced by a new process without state."""
    server, port = fork_store()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = {fork_saving_rank(r, port, folder, train, 0, deaths): r for r in range(RANKS)}
        killed = []
        try:
            while running:
                pid, status = os.wait()
                rank = running.pop(pid)
                if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                    killed.append(rank)
                    following = deaths[rank][0] + 1
                    new = fork_saving_rank(rank, port, folder, train, following, deaths)
                    running[new] = rank
                else:
                    assert status == 0, f"rank {rank} failed"
        finally:
            for pid in [*running, server]:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(server, 0)
        assert sorted(killed) == sorted(deaths)
        return [torch.load(folder / f"rank.{r}", weights_only=True) for r in range(RANKS)]


def fatal(holders: list[int], failed: set[int]) -> bool:
    """Whether a shard is lost: its owner failed, and so did the rank with the copy."""
    return any(rank in failed and holders[rank] in failed for rank in range(len(holders)))


def count(holders: list[int], groups: list[set[int]], at_once: int) -> str:
    """How many choices of `at_once` groups of ranks lose data, of how many."""
    choices = list(itertools.combinations(groups, at_once))
    return f"{sum(fatal(holders, set().union(*c)) for c in choices)} of {len(choices)}"


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("neighbour_copy.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    undisturbed = run_all({})
    shard_bytes = 2 * WIDTH // RANKS * 4
    copies = 1 + STEPS // EVERY
    print(f"a shard is {shard_bytes} bytes; a rank sends it {copies} times in {STEPS} steps")
    assert [r["sent"] for r in undisturbed] == [copies * shard_bytes] * RANKS

    for words, deaths, expected in (
        ("rank 2 killed at step 8", {2: (0, "step 8")}, 6),
        # when rank 3 dies, rank 1 has no copy of step 6, unless it kept the incomplete copy
        ("rank 2 killed at copy 6, then rank 3", {2: (0, "copy 6"), 3: (1, "copy 6")}, 3),
    ):
        found = run_all(deaths)
        same = all(
            torch.equal(found[r]["state"], undisturbed[r]["state"]) for r in range(RANKS)
        )
        print(f"{words}: all return to step {found[0]['start']}, ", end="")
        print(f"same bits: {same}")
        assert same and [r["start"] for r in found] == [expected] * RANKS
    assert undisturbed[0]["state"].abs().min() > 0

    both = run_all({0: (0, "step 8"), 2: (0, "step 8")})
    print(f"ranks 0 and 2 killed at step 8: lost shards {both[0]['lost']}, read the disk")
    assert all(r == {"lost": [0, 2]} for r in both)

    n, nodes = 8, [{2 * k, 2 * k + 1} for k in range(4)]
    ranks = [{r} for r in range(n)]
    print("\n8 ranks on 4 nodes, failures that lose data:")
    print("copy of rank r is on        2 ranks  1 node  2 nodes")
    table = {}
    for name, holders in {
        "the next rank": [(r + 1) % n for r in range(n)],
        "the next node, in a ring": [(r + 2) % n for r in range(n)],
        "a partner node, in pairs": [r ^ 2 for r in range(n)],
    }.items():
        row = [count(holders, ranks, 2), count(holders, nodes, 1), count(holders, nodes, 2)]
        table[name] = row
        print(f"{name:25} {row[0]:>9} {row[1]:>7} {row[2]:>8}")
    assert table["the next rank"] == ["8 of 28", "4 of 4", "6 of 6"]
    assert table["the next node, in a ring"] == ["8 of 28", "0 of 4", "4 of 6"]
    assert table["a partner node, in pairs"] == ["4 of 28", "0 of 4", "2 of 6"]


if __name__ == "__main__":
    main()
