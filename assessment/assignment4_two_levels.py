"""Assignment 4: gradients across two nodes, by a fast network within and a slow one between.

    python assessment/assignment4_two_levels.py

Ranks on one node talk over NVLink, nodes over something ten times slower. So gradients are
added up in two levels, sent in bf16 without losing what is rounded away, and, if that is still
too slow, weights are averaged every few steps instead. Four processes stand for two nodes.
"""

import multiprocessing
import sys
import tempfile
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn


def make_groups(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group of this rank's node, and its rail: the ranks of one place in every node.

    Nodes have `local` ranks each, in the order of ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # >>> solution 1: every rank takes part in making every group, and keeps two of them
    # hint: new_group is collective: also ranks that are not in the group must call it
    nodes = [list(range(first, first + local)) for first in range(0, world, local)]
    rails = [list(range(place, world, local)) for place in range(local)]
    node, rail = (
        [dist.new_group(ranks) for ranks in groups][index]
        for groups, index in ((nodes, rank // local), (rails, rank % local))
    )
    return node, rail
    # <<< solution


def all_reduce_two_levels(flat: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup):
    """Sum `flat` (any length) over all ranks in place; 1/local of it goes between the nodes."""
    local = dist.get_world_size(node)
    # >>> solution 2: pad, reduce_scatter_tensor in the node, all_reduce on the rail, all-gather
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % local))
    piece = padded.new_empty(len(padded) // local)
    dist.reduce_scatter_tensor(piece, padded, group=node)
    dist.all_reduce(piece, group=rail)
    dist.all_gather_into_tensor(padded, piece, group=node)
    flat.copy_(padded[: len(flat)])
    # <<< solution


@dataclass
class Feedback:
    """What a hook keeps: for each bucket what rounding has taken so far."""

    residual: dict[int, torch.Tensor] = field(default_factory=dict)


def bf16_hook(state: Feedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the mean of the bucket over all ranks, sent as bf16.

    What rounding takes from a gradient is added to the next one (error feedback). The hook does
    not wait: it returns the future of the fp32 mean.
    """
    world, gradient = dist.get_world_size(), bucket.buffer()
    # >>> solution 3: add the residual, round, store the new residual, send, return a future
    left = state.residual.get(bucket.index())
    wanted = gradient if left is None else gradient + left
    sent = (wanted / world).bfloat16()
    state.residual[bucket.index()] = wanted - sent.float() * world
    work = dist.all_reduce(sent, async_op=True)

    def finish(_: torch.futures.Future) -> torch.Tensor:
        return gradient.copy_(sent)

    return work.get_future().then(finish)
    # <<< solution


class LocalSGD:
    """Each rank trains alone, and every `every` steps the weights become their mean."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.optimizer, self.every, self.steps = optimizer, every, 0

    def step(self) -> None:
        # >>> solution 4: the optimizer's step, count it, average when the count says so
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()
        # <<< solution

    @torch.no_grad()
    def average(self) -> None:
        """All weights become the mean over the ranks, by one collective."""
        # >>> solution 4: one flat tensor, all_reduce, divide, copy back
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        flat = torch.cat([p.reshape(-1) for p in weights])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, mean in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            p.copy_(mean.view_as(p))
        # <<< solution


# --8<-- [start:main]
class Bucket:
    """As much of dist.GradBucket as a hook sees."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return 0


def train(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two collectives
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    torch.manual_seed(rank)
    gradient = torch.randn(1001)
    whole = gradient.clone()
    dist.all_reduce(whole)

    node, rail = make_groups(local=2)
    two_levels = gradient.clone()
    all_reduce_two_levels(two_levels, node, rail)
    torch.testing.assert_close(two_levels, whole)

    state, sums = Feedback(), torch.zeros(2, 1001)
    for _ in range(64):  # one gradient again and again, with feedback and without
        for i, memory in enumerate((state, Feedback())):
            sums[i] += bf16_hook(memory, Bucket(gradient.clone())).wait()
    errors = (sums / 64 - whole / 4).norm(dim=1) / (whole / 4).norm()
    assert errors[0] < errors[1]  # what is left is the sum's own rounding, in bf16, too

    model = nn.Linear(8, 8)
    trainer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=4)
    apart = []
    for _ in range(8):
        model(torch.randn(16, 8)).square().sum().backward()
        trainer.step()
        trainer.optimizer.zero_grad()
        weights = [torch.empty(8, 8) for _ in range(4)]
        dist.all_gather(weights, model.weight.detach())
        apart.append(any(not torch.equal(w, weights[0]) for w in weights))
    if rank == 0:
        print("two levels: the sum of one all-reduce, with half of the bytes between the nodes")
        print(f"64 gradients in bf16: off by ≈{errors[1]:.0e}, with feedback ≈{errors[0]:.0e}")
        print("local SGD:", " ".join("apart" if a else "equal" for a in apart), flush=True)
    dist.destroy_process_group()


# --8<-- [end:main]


def kindly(rank: int, store: str) -> None:
    try:
        train(rank, store)
    except NotImplementedError as error:
        sys.exit(f"a blank: {error}" if rank == 0 else 1)


def main() -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=kindly, args=(r, f"{folder}/store")) for r in range(4)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))


if __name__ == "__main__":
    main()
