"""A rank is killed, and the survivors form a smaller group and continue.

Rank 2 of four ends by SIGKILL before the all-reduce of step 5. The survivors get an error and
write their rank into the store. Then they wait for a while, because they do not know how many
ranks will come. Each proposes the list of ranks that it sees, the store accepts one proposal,
and all follow it. A rank that is not in the list must end.

What changes with N? The batch of 12 rows is divided again, into four rows for each of three
ranks, and the sum is divided by 12. So the result is still that of one process on 12 rows. The
program also tries two other rules with three rows for each rank: to divide by the new number of
ranks, and to divide by the old one.

torch has `shrink_group` for this, which only NCCL supports. The program prints gloo's error.
The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # import it now: imported after init, it keeps the group alive
from torch.distributed.distributed_c10d import shrink_group

RANKS, STEPS, VICTIM, AT, WIDTH, ROWS = 4, 9, 2, 5, 64, 12
LIMIT = timedelta(seconds=60)
LAST_CALL = 5.0  # seconds; long, so that a busy machine excludes no rank


def members(
    store: dist.Store, round_number: int, rank: int, last_call: float = LAST_CALL
) -> list[int]:
    """The ranks of this round, in order. Every rank that returns has the same list."""
    came = f"round {round_number}, came: "
    store.set(f"{came}{rank}", "")
    time.sleep(last_call)
    seen = [r for r in range(RANKS) if store.check([f"{came}{r}"])]
    proposal = ",".join(map(str, seen))
    # the first proposal decides: compare_set changes the value only if there is none
    decision = store.compare_set(f"round {round_number}, members", "", proposal).decode()
    ranks = [int(r) for r in decision.split(",")]
    if rank not in ranks:
        raise SystemExit(f"rank {rank} came too late: the others continue without it")
    return ranks


def form_group(store: dist.Store, round_number: int, rank: int, ranks: int) -> None:
    """A new process group for this round. Its keys differ from those of earlier rounds."""
    keys = dist.PrefixStore(f"round {round_number}", store)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=ranks, timeout=LIMIT)


def batch(step: int) -> torch.Tensor:
    """The global batch of a step, which is the same for any number of ranks."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)


def sum_of_gradients(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.T @ (x @ weights - x.sin().sum(1))


def gradient_of(weights: torch.Tensor, step: int) -> torch.Tensor:
    """The mean over the global batch. It does not use the old number of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = sum_of_gradients(weights, batch(step)[rank::ranks])
    dist.all_reduce(total)
    return total / ROWS


def other_rules(weights: torch.Tensor, step: int) -> list[float]:
    """The length of two wrong gradients, as fractions of the right one.

    Each rank uses 3 rows. The sum is divided by the new and by the old number of ranks.
    """
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), ROWS // RANKS
    total = sum_of_gradients(weights, batch(step)[rank * rows : (rank + 1) * rows])
    dist.all_reduce(total)
    right = sum_of_gradients(weights, batch(step)[: ranks * rows]) / (ranks * rows)
    return [float((total / rows / n).norm() / right.norm()) for n in (ranks, RANKS)]


def train(store: dist.Store, rank: int) -> dict:
    weights, done, said, rules, groups = torch.zeros(WIDTH, dtype=torch.float64), 0, "", [], []
    for round_number in range(3):
        ranks = members(store, round_number, rank) if round_number else list(range(RANKS))
        form_group(store, round_number, ranks.index(rank), len(ranks))
        groups.append(ranks)
        try:
            if round_number:
                steps = [None] * len(ranks)
                dist.all_gather_object(steps, done)
                assert steps == [AT - 1] * len(
                    ranks
                )  # otherwise use the rule of restart_in_process.py
                rules = other_rules(weights, done + 1)
            else:
                try:
                    shrink_group([VICTIM])
                except TypeError as error:
                    said = str(error)
            for number in range(done + 1, STEPS + 1):
                if (rank, number) == (VICTIM, AT):
                    os.kill(os.getpid(), signal.SIGKILL)
                weights = weights - 0.01 * gradient_of(weights, number)
                done = number
            break
        except RuntimeError:  # a connection is closed
            pass
        finally:
            dist.destroy_process_group()
    return {"weights": weights, "groups": groups, "said": said, "rules": rules}


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


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("smaller_group.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    server, port = fork_store()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [fork_saving_rank(r, port, folder, train) for r in range(RANKS)]
        statuses = wait_for(pids)
        os.kill(server, signal.SIGKILL)
        survivors = [r for r in range(RANKS) if r != VICTIM]
        results = [torch.load(folder / f"rank.{r}", weights_only=True) for r in survivors]
    print(f"exit statuses: {statuses}")
    assert statuses == [0 if r != VICTIM else -signal.SIGKILL for r in range(RANKS)]
    print(f"groups that the ranks formed: {results[0]['groups']}")
    assert all(r["groups"] == [list(range(RANKS)), survivors] for r in results)

    # one process on the whole batch, which shares no communication with the ranks
    alone = torch.zeros(WIDTH, dtype=torch.float64)
    for number in range(1, STEPS + 1):
        rows = [(row @ alone - row.sin().sum()) * row for row in batch(number)]
        alone = alone - 0.01 * torch.stack(rows).mean(0)
    worst = max(float((r["weights"] - alone).abs().max()) for r in results)
    print("12 rows over the ranks that are left: as one process on 12 rows, within 1e-12")
    assert worst < 1e-12 and float(alone.abs().max()) > 0.1
    by_new, by_old = results[0]["rules"]
    print(f"3 rows for each rank, divided by the new N: {by_new:.2f} of the mean over 9 rows")
    print(f"3 rows for each rank, divided by the old N: {by_old:.2f} of it")
    assert abs(by_new - 1) < 1e-12 and abs(by_old - 0.75) < 1e-12
    print(f"shrink_group on gloo: {results[0]['said']}")
    assert "does not support shrinking operations" in results[0]["said"]

    # a rank that comes after the decision reads it, and ends
    late = dist.HashStore()
    late.set("round 1, members", ",".join(map(str, survivors)))
    try:
        members(late, 1, VICTIM, last_call=0.0)
    except SystemExit as end:
        print(f"a late rank: {end}")
    else:
        raise AssertionError("a rank joined that is not in the list")


if __name__ == "__main__":
    main()
