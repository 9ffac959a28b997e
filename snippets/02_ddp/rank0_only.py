"""Validating the DDP wrapper on rank 0 alone hangs, or works by luck: when, and why.

The forward of the wrapper broadcasts the buffers (here a running mean) from rank 0: on the
first forward, and on each forward that follows a forward with gradients enabled. The mode
eval() makes no difference. So a validation on rank 0 alone starts a broadcast that the other
ranks do not expect:

    --case barrier     under no_grad, then a barrier: rank 0 waits in its broadcast, and the
                       other ranks wait in the barrier
    --case gradients   without no_grad: every batch of the validation broadcasts, and rank 0
                       starts more broadcasts than the other ranks
    --case lucky       under no_grad, without a barrier: the first validation batch broadcasts,
                       and the next training step of rank 0 does not, so the counts are equal

    --fix              validate ddp.module, which calls no collective
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Center(nn.Module):
    """Subtract a running mean: a normalization with one buffer.

    BatchNorm has three buffers of two dtypes. DDP sends them in two broadcasts, and either of
    the two may report the time-out.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def train(ddp: DistributedDataParallel) -> None:
    ddp.train()
    ddp(torch.randn(8, 4)).square().mean().backward()


def validate(model: nn.Module, gradients: bool) -> None:
    model.eval()
    statistics = [buffer.clone() for buffer in model.buffers()]
    assert statistics[0].all()  # training has changed the running mean
    with contextlib.nullcontext() if gradients else torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 4))
    torch.testing.assert_close([*model.buffers()], statistics, rtol=0, atol=0)  # unchanged


def run(ddp: DistributedDataParallel, case: str, fix: bool, group: dist.ProcessGroup) -> None:
    for _ in range(2):  # now DDP has done its one-time work: it has rebuilt its buckets
        train(ddp)
    with count_broadcasts("validation"):
        if dist.get_rank() == 0:
            validate(ddp.module if fix else ddp, gradients=case == "gradients")
    if case == "barrier":
        dist.barrier(group)
    with count_broadcasts("the next step"):
        train(ddp)


counts: dict[str, int] = {}


@contextlib.contextmanager
def count_broadcasts(phase: str) -> Iterator[None]:
    """Store in `counts` how many broadcasts this rank starts in a phase of the run."""
    with torch.profiler.profile() as profile:
        yield
    names = [event.name for event in profile.events()]
    counts[phase] = names.count("c10d::broadcast_")


def where(error: Exception) -> str:
    """The last line of this file in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.line for frame in frames if frame.filename == __file__][-1]


def main() -> int:
    parser = argparse.ArgumentParser()
    cases = ["barrier", "gradients", "lucky"]
    parser.add_argument("--case", choices=cases, default="barrier")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("rank0_only.py needs 2 ranks or more, started by torchrun")

    # The program uses gloo even if there are GPUs: a time-out of gloo is an exception, and a
    # time-out of NCCL ends the process. The default group gathers the reports. DDP has a group
    # with a short timeout, shortest on rank 0, so that rank 0 is always the first to give up.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Center(4))
    ddp = DistributedDataParallel(model, process_group=group)
    try:
        run(ddp, args.case, args.fix, group)
        report = "completed; broadcasts in "
        report += ", in ".join(f"{phase}: {number}" for phase, number in counts.items())
        # on every rank the two broadcasts or none must match those of the other ranks
        lucky = [1, 0] if rank == 0 else [0, 1]
        assert [*counts.values()] == ([0, 1] if args.fix else lucky), counts
    except RuntimeError as error:
        # gloo's message begins with a file and a line of its source, which differ by release
        message = str(error).splitlines()[0].rpartition("] ")[2]
        report = f"stuck in `{where(error)}`"
        if rank == 0:
            report += f"\n{type(error).__name__}: {message}"

    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0:
        for r, text in enumerate(reports):
            print(f"rank {r}: {text}")
        sys.stdout.flush()
    dist.barrier()  # rank 0 has printed before any rank exits with an error
    return 1 if any("stuck" in text for text in reports) else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
