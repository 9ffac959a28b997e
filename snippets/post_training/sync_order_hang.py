"""A weight sync hangs if the sampler ranks start it at different tokens.

Ranks 0 and 1 train, and ranks 2 and 3 sample with tensor parallelism. There are three groups:
the trainer ranks gather each bucket, rank 0 broadcasts it to the sampler ranks, and the sampler
ranks do an all-reduce for each token. Each sampler rank itself reads the request for new
weights.

    same token       both sampler ranks read the request before token 2, and all ranks finish
    different token  rank 3 reads it one token later: a hang, which ends with a time-out
    leader decides   rank 3 is late again, but rank 2 tells it before each token what to do
    leader is late   rank 2 reads the request one token later than rank 3, and still decides

The program uses gloo, in which the root of a broadcast waits for all receivers. NCCL copies a
small tensor to its own buffers, so the root can continue, and other calls can hang.

If the machine stops a rank for seconds, a call can reach its limit before the ranks wait for
each other. A thread of each rank measures such stops. After a stop of one second or more, the
program repeats the case "different token".
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TOKENS, BUCKETS, SIZE = 5, 2, 1024  # SIZE is the number of elements of a bucket
CASES = ("same token", "different token", "leader decides", "leader is late")


class Clock(threading.Thread):
    """Wakes up every 20 ms, and measures the longest time without waking up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self.stop = 0.0, threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self.stop.wait(0.02):
            self.longest, last = max(self.longest, time.monotonic() - last), time.monotonic()

    def __enter__(self) -> "Clock":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        self.join()


class Groups:
    """The three groups. Records the collective that this rank has entered."""

    def __init__(self, hangs: bool) -> None:
        self.rank, self.log, self.started = dist.get_rank(), [], None
        # every rank creates all groups, member or not, in the same order
        members = [0, 1], [2, 3], [0, 2, 3]
        groups = [dist.new_group(ranks, timeout=timedelta(seconds=60)) for ranks in members]
        self.trainers, self.samplers, self.transfer = groups
        # Lower the limit only now, because a rank may need more time to join a group. Rank 2
        # keeps its long limit, so its call ends with the time-out of rank 0.
        set_timeout = getattr(dist, "set_timeout", None)
        set_timeout = set_timeout or dist.distributed_c10d._set_pg_timeout  # older releases
        for ranks, group in zip(members, groups, strict=True):
            if hangs and self.rank in ranks and self.rank != 2:
                set_timeout(timedelta(seconds=3), group)

    def gather(self, bucket: int) -> torch.Tensor:
        self.log.append(f"the all-gather of bucket {bucket}")
        half = weights(bucket).chunk(2)[self.rank].clone()
        halves = [torch.empty_like(half) for _ in range(2)]
        dist.all_gather(halves, half, group=self.trainers)
        return torch.cat(halves)

    def broadcast(self, bucket: int, flat: torch.Tensor) -> torch.Tensor:
        self.log.append(f"the broadcast of bucket {bucket}")
        dist.broadcast(flat, src=0, group=self.transfer)
        return flat

    def all_reduce(self, token: int) -> None:
        self.log.append(f"the all-reduce of token {token}")
        part = torch.tensor([float(self.rank)])
        dist.all_reduce(part, group=self.samplers)
        assert part.item() == 5.0  # 2 + 3

    def follow_leader(self, request: bool, token: int) -> bool:
        """Every sampler rank does what rank 2 has decided."""
        self.log.append(f"the decision before token {token}")
        decision = torch.tensor([int(request)])
        dist.broadcast(decision, src=2, group=self.samplers)
        return bool(decision.item())


def weights(bucket: int) -> torch.Tensor:
    """The new weights of a bucket, [SIZE], which all ranks can compute to check them."""
    return torch.arange(SIZE) + 10_000.0 * bucket


# --8<-- [start:roles]
def trainer_rank(groups: Groups) -> list[torch.Tensor]:
    """Gather each bucket on both trainer ranks. Rank 0 also sends it."""
    buckets = []
    for bucket in range(BUCKETS):
        buckets.append(groups.gather(bucket))
        if groups.rank == 0:
            groups.broadcast(bucket, buckets[-1])
    return buckets


def sampler_rank(groups: Groups, request_at: int, follow: bool) -> list[torch.Tensor]:
    """Write TOKENS tokens, and receive new weights between two of them."""
    buckets: list[torch.Tensor] = []
    for token in range(TOKENS):
        start = token >= request_at and not buckets
        if follow:
            start = groups.follow_leader(start, token)
        if start:
            groups.started = token
            buckets = [groups.broadcast(i, torch.empty(SIZE)) for i in range(BUCKETS)]
        groups.all_reduce(token)
    return buckets


# --8<-- [end:roles]


def run(case: str) -> tuple[str, int | None, int | None]:
    """Return a report, the token of the request, and the token of the sync on this rank."""
    groups = Groups(hangs=case == "different token")
    late = groups.rank == {"same token": None, "leader is late": 2}.get(case, 3)
    request_at = None if groups.rank < 2 else 3 if late else 2
    dist.barrier()
    try:
        if groups.rank < 2:
            received = trainer_rank(groups)
        else:
            received = sampler_rank(groups, request_at, case.startswith("leader"))
        torch.testing.assert_close(received, [weights(index) for index in range(BUCKETS)])
    except RuntimeError as error:
        message = (
            str(error).split("] ")[-1].partition(" [")[0]
        )  # without the address of the peer
        report = f"waits in {groups.log[-1]}\n    {message}"
    else:
        report = f"finished, {len(groups.log)} collectives"
    return report, request_at, groups.started


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("start this program with: torchrun --nproc-per-node=4 sync_order_hang.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # the default group only collects the reports
    for case in CASES:
        hang, results = case == "different token", [None] * 4
        for _ in range(20):
            with Clock() as clock:
                result = run(case)
            dist.all_gather_object(results, (*result, clock.longest))
            reports, reads, starts, longest = zip(*results, strict=True)
            if not hang or max(longest) < 1.0:  # otherwise, a rank was stopped for a second
                break
        if dist.get_rank() == 0:
            print(f"{case}:")
            for rank, report in enumerate(reports):
                print(f"  rank {rank} {report}")
            print(f"  tokens of ranks 2 and 3: request {reads[2:]}, sync {starts[2:]}")
        assert [report.startswith("waits") for report in reports] == [hang] * 4
        assert reads[2:] == {"same token": (2, 2), "leader is late": (3, 2)}.get(case, (2, 3))
        start = reads[2]  # rank 2 starts the sync when it has read the request
        assert starts[2:] == ((start, None) if hang else (start, start))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
