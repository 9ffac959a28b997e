"""if rank == 0: validate(ddp_model): when it hangs, when it does not, and why.

The forward of the wrapper broadcasts the buffers (BatchNorm's statistics) from rank 0: on the
first forward, and on each one that follows a forward with gradients enabled. eval() makes no
difference. So a validation on rank 0 alone starts a broadcast which the others do not expect:

    --case barrier     under no_grad, then a barrier: rank 0 broadcasts, the others wait there
    --case gradients   no_grad forgotten: every batch broadcasts, rank 0 runs ahead
    --case lucky       under no_grad, no barrier: the first batch broadcasts, the next training
                       step of rank 0 does not, and so the counts agree by luck

    --fix             validate ddp.module, which calls no collective
"""

import argparse
import contextlib
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Center(nn.Module):
    """Subtract a running mean: a normalization with one buffer.

    BatchNorm has three buffers of two dtypes, hence two broadcasts at once, either of which
    may be the one that reports the timeout.
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
    assert statistics[0].all()  # training has moved them
    with contextlib.nullcontext() if gradients else torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 4))
    torch.testing.assert_close([*model.buffers()], statistics, rtol=0, atol=0)  # eval has not


def run(ddp: DistributedDataParallel, case: str, fix: bool, group: dist.ProcessGroup) -> None:
    for _ in range(2):  # DDP's one-time work, the rebuilding of its buckets, is over then
        train(ddp)
    if dist.get_rank() == 0:
        validate(ddp.module if fix else ddp, gradients=case == "gradients")
    if case == "barrier":
        dist.barrier(group)
    train(ddp)


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

    # gloo, also where there are GPUs: its timeout is an exception, NCCL's ends the process.
    # The default group serves to report; DDP has one with a short timeout, shortest on rank 0,
    # so that rank 0 is always the first to give up.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Center(4))
    ddp = DistributedDataParallel(model, process_group=group)
    try:
        run(ddp, args.case, args.fix, group)
        report = "trained; rank 0 validated; trained on"
    except RuntimeError as error:
        # gloo puts the file and line of its source in brackets first: not the same everywhere
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
    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if any("stuck" in text for text in reports) else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
