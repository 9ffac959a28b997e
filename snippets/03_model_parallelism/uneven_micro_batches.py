"""A batch that m does not divide: the receive buffers of a pipeline stage have one shape.

A PipelineStage takes the shape of a micro-batch from the first one and receives all of them
into buffers of this shape. 30 samples make micro-batches of 8, 8, 7 and 7. The third one
arrives in a buffer of 8 rows, whose last row is old, and its target has 7 rows.

    (no flag)   30 samples, m = 4
    --fix      the remaining samples are dropped, as by a DataLoader with drop_last=True
"""

import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

SAMPLES, HIDDEN, M = 30, 16, 4


def main() -> int:
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 uneven_micro_batches.py")
    warnings.simplefilter("ignore")  # mse_loss warns about the two sizes before they fail
    # gloo, also with GPUs: its timeout raises an exception, and NCCL's ends the process.
    # A second group runs the operations that may fail; the default group ends in order.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=5))

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    batch, target = pairs = torch.randn(2, SAMPLES, HIDDEN)
    if "--fix" in sys.argv:
        batch, target = batch[: SAMPLES // M * M], target[: SAMPLES // M * M]
    true_loss = mse_loss(whole(pairs[0, : len(batch)]), pairs[1, : len(batch)])
    true_gradients = torch.autograd.grad(true_loss, list(whole[rank].parameters()))

    rows: set[int] = set()  # of all micro-batches that this rank's module gets
    whole[rank].register_forward_pre_hook(lambda _, inputs: rows.add(len(inputs[0])))
    assert len(batch) == len(target)

    stage = PipelineStage(whole[rank], rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=M, loss_fn=mse_loss)
    losses: list[torch.Tensor] = []
    failed = False
    try:
        inputs = (batch,) if rank == 0 else ()
        schedule.step(*inputs, target=target if rank == 1 else None, losses=losses)
    except RuntimeError as error:  # on rank 0: no rank sends it a gradient any more
        failed = True
        if rank == 1:
            print(f"rank 1: {type(error).__name__}: {error}", flush=True)
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean().detach(), true_loss.detach())
        print(f"{len(batch)} samples in {M} micro-batches: the loss of one process", flush=True)
    if not failed:
        gradients = tuple(parameter.grad for parameter in whole[rank].parameters())
        torch.testing.assert_close(gradients, true_gradients)
    # the buffers have the rows of the first micro-batch, also for a shorter one
    assert rank == 0 or rows == {-(-len(batch) // M)}
    dist.barrier()
    return int(failed)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
