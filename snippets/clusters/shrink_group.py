"""Two of four ranks leave a running job, and the other ranks continue in smaller groups.

Rank 1 leaves as planned after step 3. It adds a notice to the all-reduce of the gradient, so
all ranks receive the notice. No operation is running: shrink_group with SHRINK_DEFAULT. In step
7, rank 2 does not call the all-reduce. After a limit, the other ranks stop waiting, agree on
the ranks that still answer, and call shrink_group with SHRINK_ABORT. Then they repeat the step
without rank 2. Of torch's backends, only NCCL can shrink. With gloo, the ranks form a new group
instead.

`rank` is always the rank that torchrun gave to the process. `number` is the rank in the current
group, which changes. After an abort, wait() of the all-reduce may return as if the sum were
complete. Therefore the remaining ranks never use this sum. A rank that leaves ends with status
0, because after any other status, torchrun ends all ranks.

    --way abort    on NCCL too, abort the group and form a new one
"""

import argparse
import faulthandler
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

RANKS, STEPS, WIDTH, ROWS = 4, 9, 8, 12
LEAVER, LEAVES_AFTER = 1, 3
STUCK, STUCK_AT = 2, 7
FLAGS = {c10d.SHRINK_DEFAULT: "SHRINK_DEFAULT", c10d.SHRINK_ABORT: "SHRINK_ABORT"}
ALL_REDUCE_LIMIT = 5.0  # seconds; then a rank stops waiting for an all-reduce
LAST_CALL = 5.0  # seconds; both limits are long, so a busy machine excludes no rank


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def init_with_limits() -> torch.device:
    """Join the process group so that no wait is endless, also with NCCL. Return the device.

    With NCCL, a time-out raises an exception, as with gloo. TORCH_NCCL_BLOCKING_WAIT=0 restores
    the default of NCCL: a watchdog thread aborts the process. New tensors are on the device.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # a new group connects its ranks at once
    device = init_distributed()
    if device.type == "cuda":
        torch.set_default_device(device)
        # A call that blocks before its kernel starts has no timeout: print its line, and exit.
        faulthandler.dump_traceback_later(60, exit=True)
    return device


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


def rows_of(step: int) -> torch.Tensor:
    """The global batch of a step, on the CPU. It is the same for any number of ranks."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64, device="cpu")


def sum_of_gradients(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.T @ (x @ weights - x.sin().sum(1))


def one_process(steps: int) -> torch.Tensor:
    """The weights after these steps of one process, which uses all rows and no group."""
    weights = torch.zeros(WIDTH, dtype=torch.float64, device="cpu")
    for step in range(1, steps + 1):
        gradients = [(row @ weights - row.sin().sum()) * row for row in rows_of(step)]
        weights = weights - 0.05 * torch.stack(gradients).mean(0)
    return weights


class Job:
    """One rank of the job: its store, its group, its weights, and what it reports."""

    def __init__(self, store: dist.Store, device: torch.device, way: str) -> None:
        self.store, self.device, self.way = store, device, way
        self.rank = int(os.environ["RANK"])  # given by torchrun; it does not change
        self.ranks = list(range(RANKS))  # of the current group, in the order of their numbers
        self.weights = torch.zeros(WIDTH, dtype=torch.float64, device=device)
        self.done, self.report = 0, []

    def start_step(self, step: int) -> tuple[dist.Work, torch.Tensor]:
        """Start the sum of the gradients over the ranks, followed by one notice per number."""
        number, ranks = dist.get_rank(), dist.get_world_size()
        gradient = sum_of_gradients(self.weights, rows_of(step)[number::ranks].to(self.device))
        notices = torch.zeros(ranks, dtype=gradient.dtype, device=self.device)
        notices[number] = (self.rank, step) == (LEAVER, LEAVES_AFTER)
        total = torch.cat([gradient, notices])
        return dist.all_reduce(total, async_op=True), total

    def finish_step(self, step: int, total: torch.Tensor) -> list[int]:
        """Update the weights. Return the numbers of the ranks that leave after this step."""
        self.weights = self.weights - 0.05 * total[:WIDTH] / ROWS  # not the number of ranks
        self.done = step
        return total[WIDTH:].nonzero().flatten().tolist()

    def shrink(self, leaving: list[int], flags: int) -> None:
        """Replace the default group by a group without these numbers."""
        if self.way == "shrink":
            try:
                dist.shrink_group(leaving, shrink_flags=flags)
                self.report.append(f"    shrink_group({leaving}, shrink_flags={FLAGS[flags]})")
            except TypeError as error:  # nothing has changed yet
                assert self.device.type == "cpu", error
                self.report.append(f"    {error}")
                self.way = "abort"
        if self.way == "abort":
            self.form_group(leaving, flags)
        self.ranks = [rank for number, rank in enumerate(self.ranks) if number not in leaving]
        self.check_numbers()

    def check_numbers(self) -> None:
        """Report the numbers in the new group. An all-gather returns their ranks."""
        found = [torch.empty((), dtype=torch.long, device=self.device) for _ in self.ranks]
        dist.all_gather(found, torch.tensor(self.rank, device=self.device))
        assert [rank.item() for rank in found] == self.ranks
        numbers = [f"rank {rank} has number {number}" for number, rank in enumerate(self.ranks)]
        self.report.append(f"    {', '.join(numbers)}")

    def form_group(self, leaving: list[int], flags: int) -> None:
        """Leave the default group, and form a new one with the ranks that stay."""
        stay = [n for n in range(dist.get_world_size()) if n not in leaving]
        number = stay.index(dist.get_rank())
        # destroy_process_group would wait for operations that never end
        pending = flags == c10d.SHRINK_ABORT
        leave = c10d._abort_process_group if pending else dist.destroy_process_group
        leave()
        self.report.append(f"    {leave.__name__}, and then a new group")
        keys = dist.PrefixStore(f"group of {len(stay)}", self.store)
        options = {"store": keys, "rank": number, "world_size": len(stay)}
        if self.device.type == "cpu":
            dist.init_process_group("gloo", **options)
        else:
            dist.init_process_group(device_id=self.device, **options)

    def recover(self, work: dist.Work) -> None:
        """Continue without a rank that has not called this all-reduce."""
        if self.way == "abort":
            dist.group.WORLD.abort()
            ended = ends_within(1.0, work)
            self.report.append(f"    the all-reduce has ended after abort(): {ended}")
            assert ended == (self.device.type != "cpu")  # gloo does nothing
        remaining = members(self.store, 1, self.rank)
        self.report.append(f"    these ranks answered: {remaining}")
        # shrink_group needs the numbers in the current group, not the ranks of torchrun
        leaving = [n for n, rank in enumerate(self.ranks) if rank not in remaining]
        self.shrink(leaving, c10d.SHRINK_ABORT)
        result = "returns, but the sum is not complete"
        try:
            work.wait()
        except RuntimeError as error:
            result = f"raises {type(error).__name__}"
        self.report.append(f"    wait() of this all-reduce {result}")

    def run(self) -> str:
        """Train until the end, or until this rank must leave. Return the reason."""
        while self.done < STEPS:
            step = self.done + 1
            if (self.rank, step) == (STUCK, STUCK_AT):
                self.store.wait(["round 1, members"])  # "stuck" until the others have decided
                try:
                    members(self.store, 1, self.rank, last_call=0.0)
                except SystemExit as late:
                    c10d._abort_process_group()
                    return str(late)
            work, total = self.start_step(step)
            if not ends_within(ALL_REDUCE_LIMIT, work):
                self.report.append(f"step {step}: the all-reduce does not end")
                self.recover(work)
                continue  # repeat the step, because `total` is not complete
            work.wait()
            leaving = self.finish_step(step, total)
            if dist.get_rank() in leaving:
                dist.destroy_process_group()
                return f"rank {self.rank} left as planned"
            if leaving:
                self.report.append(f"step {step}: number {leaving[0]} leaves as planned")
                self.shrink(leaving, c10d.SHRINK_DEFAULT)
        return "end"


def ends_within(seconds: float, work: dist.Work) -> bool:
    """Return whether this operation ends in time. wait() would block until the timeout.

    The loop counts its checks, not the seconds, so a pause of the machine uses up one check.
    """
    for _ in range(round(seconds / 0.01)):
        if work.is_completed():
            return True
        time.sleep(0.01)
    return work.is_completed()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["shrink", "abort"], default="shrink")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", RANKS)) != RANKS:
        sys.exit("shrink_group.py needs 4 ranks, started by torchrun")
    faulthandler.dump_traceback_later(120, exit=True)  # also on gloo, no rank waits longer
    device = init_with_limits()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=60)
    server = dist.TCPStore(address, port, is_master=False, timeout=limit)  # torchrun's
    job = Job(dist.PrefixStore("shrink", server), device, args.way)

    job.start_step(1)[0].wait()  # without a limit, because a GPU needs time for its first step
    reason = job.run()
    worst = (job.weights.cpu() - one_process(job.done)).abs().max()
    assert worst < 1e-12 and job.weights.abs().max() > 0.1
    expected = {LEAVER: LEAVES_AFTER, STUCK: STUCK_AT - 1}
    assert job.done == expected.get(job.rank, STEPS)  # a rank that leaves has these steps
    job.store.set(f"{job.rank} ended", f"{reason}, after step {job.done}")
    if reason != "end":
        assert not dist.is_initialized()  # it has left its group
        return  # with status 0: after any other status, torchrun ends all ranks
    dist.all_reduce(torch.zeros(1, device=device))  # all weights have been compared
    if dist.get_rank() == 0:
        print(*job.report, sep="\n")
        for rank in (LEAVER, STUCK):
            print(job.store.get(f"{rank} ended").decode())
        print("every rank: the weights of one process on 12 rows, within 1e-12")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
