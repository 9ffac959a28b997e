"""A NaN on one rank is a NaN on all ranks one step later; two checks find the first rank.

Three ranks train a linear model. In step 4, rank 1 reads a damaged row. After the all-reduce,
the gradients and weights of all ranks are NaN, so they do not show which rank was the first.
Therefore each rank appends one flag for every rank to its gradient. The all-reduce adds each
element separately, so a NaN in the gradient does not reach the flags, and they name the rank.

    bare     no check: the first NaN loss of each rank
    guarded  all ranks leave the step out, and the result equals a run without that batch
    alone    a wrong fix: only rank 1 sends zeros, and the mean becomes too small
    TORCH_DIST_NAN_CHECK=1    torch checks what each rank sends (since torch 2.14)

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import math
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, STEPS, ROWS, GUILTY, AT = 3, 8, 6, 1, 4
TRUTH = torch.tensor([1.0, -2.0, 3.0])


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 3, generator=generator)
    y = x @ TRUTH
    if (rank, step) == (GUILTY, AT):
        x[2, 0] = float("nan")  # for example 0 divided by 0
    return x, y


def local(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple:
    """Loss and gradient of this rank's rows."""
    weights = weights.clone().requires_grad_()
    loss = ((x @ weights - y) ** 2).mean()
    loss.backward()
    return loss.item(), weights.grad


# --8<-- [start:guard]
def reduce_guarded(gradient: torch.Tensor) -> list[int]:
    """Average over the ranks in place. Return the ranks whose gradient was not finite."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flags = torch.zeros(n)
    flags[rank] = float(not gradient.isfinite().all())
    packed = torch.cat([gradient, flags])  # n more numbers in a bucket of millions
    dist.all_reduce(packed)
    gradient.copy_(packed[:-n] / n)
    return packed[-n:].nonzero().flatten().tolist()


# --8<-- [end:guard]


def train(rank: int, how: str) -> tuple[torch.Tensor, list[str]]:
    """Final weights, and what this rank reports."""
    weights, reports = torch.zeros(3), []
    for step in range(1, STEPS + 1):
        if how == "without" and step == AT:
            continue  # the expected result of `guarded`
        loss, gradient = local(weights, *batch(rank, step))
        if how == "alone" and not gradient.isfinite().all():
            gradient.zero_()
        if how == "guarded":
            if guilty := reduce_guarded(gradient):
                reports.append(f"step {step}: not finite on rank {guilty}, left out by all")
                continue
        else:
            dist.all_reduce(gradient)
            gradient /= RANKS
        weights -= 0.1 * gradient
        if not math.isfinite(loss) and not reports:
            reports.append(f"the first NaN loss is in step {step}")
    return weights, reports


# --8<-- [start:check]
def train_with_check(folder: Path, rank: int) -> None:
    """Train without a guard. TORCH_DIST_NAN_CHECK=1 was set before the group was created."""
    dist.all_reduce(torch.tensor([math.inf]))  # infinity is not reported
    weights = torch.zeros(3)
    for step in range(1, STEPS + 1):
        _, gradient = local(weights, *batch(rank, step))
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            (folder / f"error.{rank}").write_text(f"step {step}: {error}")
            os._exit(1)  # its connections close, and the other ranks get an error, too
        weights -= 0.1 * gradient / RANKS
    assert weights.isnan().all()  # a release without the check


# --8<-- [end:check]


def compare_with_torchs_check() -> None:
    """Print what each rank reports, or that this release has no such check."""
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = partial(train_with_check, folder)
        statuses = wait_for([fork_rank(rank, folder, work) for rank in range(RANKS)])
        errors = {int(path.suffix[1:]): path.read_text() for path in folder.glob("error.*")}
    print("TORCH_DIST_NAN_CHECK=1")
    if torch.__version__ < "2.14":
        assert statuses == [0] * RANKS and not errors
        print("  this release of torch does not have the check, which is new in torch 2.14")
        return
    assert statuses == [1] * RANKS
    for rank, error in sorted(errors.items()):
        step, _, message = error.partition(": ")
        assert step == f"step {AT}" and ("NaN" in message) == (rank == GUILTY)
        what = message.splitlines()[0] if rank == GUILTY else "an error of the connection"
        print(f"  rank {rank}: {step}: {what}")


def every_way(rank: int) -> dict[str, tuple]:
    assert reduce_guarded(torch.full((3,), math.inf if rank == GUILTY else 1.0)) == [GUILTY]
    return {how: train(rank, how) for how in ("bare", "guarded", "without", "alone")}


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
        sys.exit("nan_rank.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert not any(wait_for([fork_rank(rank, folder, every_way) for rank in range(RANKS)]))
        ranks = [pickle.loads((folder / f"result.{r}").read_bytes()) for r in range(RANKS)]

    print("bare")
    for rank, results in enumerate(ranks):
        assert results["bare"][0].isnan().all()
        weights, reports = results["bare"]
        print(f"  rank {rank}: {reports[0]}; weights {weights.tolist()}")
        assert reports[0].endswith(f"step {AT + (rank != GUILTY)}")
    print("guarded")
    for rank, results in enumerate(ranks):
        weights, reports = results["guarded"]
        assert reports == [f"step {AT}: not finite on rank [{GUILTY}], left out by all"]
        assert torch.equal(weights, results["without"][0])
        assert (weights - TRUTH).norm() < TRUTH.norm()  # closer than at the start
        print(f"  rank {rank}: {reports[0]}")
    print("  the final weights are bit for bit those of a run without that batch")

    # the wrong fix: in step 4, the sum of two gradients is divided by three
    assert ranks[0]["alone"][0].isfinite().all()
    weights = torch.zeros(3)
    for step in range(1, STEPS + 1):
        brought = [local(weights, *batch(rank, step))[1] for rank in range(RANKS)]
        if step == AT:
            honest = [gradient for rank, gradient in enumerate(brought) if rank != GUILTY]
            brought[GUILTY] = torch.zeros(3)
            sent = torch.stack(brought).mean(0)
        weights -= 0.1 * torch.stack(brought).mean(0)
    torch.testing.assert_close(weights, ranks[0]["alone"][0])
    ratio = (sent.norm() / torch.stack(honest).mean(0).norm()).item()
    print("alone")
    print(f"  step {AT}: the gradient is {ratio:.3f} of the mean of ranks 0 and 2")
    assert abs(ratio - (RANKS - 1) / RANKS) < 1e-5
    compare_with_torchs_check()


if __name__ == "__main__":
    main()
