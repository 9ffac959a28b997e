"""A NaN on one rank is a NaN on all of them one step later: which rank brought it?

Three ranks train a linear model. In step 4 rank 1 reads a damaged row. After the all-reduce all
gradients and weights are NaN everywhere, and no rank looks guiltier than another. So look
before: each rank appends one flag for every rank to its gradient. NaN does not spread from one
element of a sum to another, and one and the same all-reduce says who it was.

    bare     what happens
    guarded  the step is left out by all ranks alike; the rest equals a run without that batch
    alone    the wrong fix: the guilty rank alone sends zeros, and the mean is too small

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
        x[2, 0] = float("nan")  # a row that was half written, a division of 0 by 0
    return x, y


def local(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple:
    """Loss and gradient of this rank's rows."""
    weights = weights.clone().requires_grad_()
    loss = ((x @ weights - y) ** 2).mean()
    loss.backward()
    return loss.item(), weights.grad


# --8<-- [start:guard]
def reduce_guarded(gradient: torch.Tensor) -> list[int]:
    """Average over the ranks in place; the ranks that brought something not finite."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flags = torch.zeros(n)
    flags[rank] = float(not gradient.isfinite().all())
    packed = torch.cat([gradient, flags])  # n numbers more in a bucket of millions
    dist.all_reduce(packed)
    gradient.copy_(packed[:-n] / n)
    return packed[-n:].nonzero().flatten().tolist()


# --8<-- [end:guard]


def train(rank: int, how: str) -> tuple[torch.Tensor, list[str]]:
    """Final weights, and what this rank has to say."""
    weights, said = torch.zeros(3), []
    for step in range(1, STEPS + 1):
        if how == "without" and step == AT:
            continue  # the truth that `guarded` is held to
        loss, gradient = local(weights, *batch(rank, step))
        if how == "alone" and not gradient.isfinite().all():
            gradient.zero_()
        if how == "guarded":
            if guilty := reduce_guarded(gradient):
                said.append(f"step {step}: not finite on rank {guilty}, left out by all")
                continue
        else:
            dist.all_reduce(gradient)
            gradient /= RANKS
        weights -= 0.1 * gradient
        if not math.isfinite(loss) and not said:
            said.append(f"the first loss that is no number: step {step}")
    return weights, said


def every_way(rank: int) -> dict[str, tuple]:
    assert reduce_guarded(torch.full((3,), math.inf if rank == GUILTY else 1.0)) == [GUILTY]
    return {how: train(rank, how) for how in ("bare", "guarded", "without", "alone")}


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
        sys.exit("nan_rank.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert not any(wait_for([fork_rank(rank, folder, every_way) for rank in range(RANKS)]))
        ranks = [pickle.loads((folder / f"found.{r}").read_bytes()) for r in range(RANKS)]

    print("bare")
    for rank, results in enumerate(ranks):
        assert results["bare"][0].isnan().all()
        weights, said = results["bare"]
        print(f"  rank {rank}: {said[0]}; weights {weights.tolist()}")
        assert said[0].endswith(f"step {AT + (rank != GUILTY)}")
    print("guarded")
    for rank, results in enumerate(ranks):
        weights, said = results["guarded"]
        assert said == [f"step {AT}: not finite on rank [{GUILTY}], left out by all"]
        assert torch.equal(weights, results["without"][0])
        assert (weights - TRUTH).norm() < TRUTH.norm()  # nearer than at the start
        print(f"  rank {rank}: {said[0]}")
    print("  final weights, bit for bit those of a run without that batch: True")

    # the wrong fix, in the step in question: the sum of two divided by three
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
    print(f"  step {AT}: the gradient is {ratio:.3f} of the mean of those who have one")
    assert abs(ratio - (RANKS - 1) / RANKS) < 1e-5


if __name__ == "__main__":
    main()
