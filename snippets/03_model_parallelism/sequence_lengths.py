"""A pipeline stage keeps the shapes of its first step, so a different length fails.

A PipelineStage allocates its receive buffers in the first step. In the second step the batch is
shorter. It arrives in a part of the buffer, and backward sends a gradient of the old shape.

    (no flag)   one stage for all steps: steps of 8 and 6 tokens
    --fix       a length is padded to the next of a few, with a stage and a schedule for each
"""

import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import pad

HIDDEN, M, LENGTHS, BUCKETS = 16, 2, (8, 6, 12, 8, 5), (8, 16)


def squares(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that are not padding."""
    if output.shape[:2] != mask.shape:  # the error must come from the pipeline
        return output.square().mean()
    return (output.square().mean(-1) * mask).sum() / mask.sum()


# --8<-- [start:of_length]
def of_length(tokens: int, module: nn.Module, rank: int, group: dist.ProcessGroup, kept: dict):
    """The schedule for this length. The first call creates a new stage of the same module."""
    if tokens not in kept:
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
        kept[tokens] = ScheduleGPipe(stage, n_microbatches=M, loss_fn=squares)
    return kept[tokens]


# --8<-- [end:of_length]


def main() -> int:
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 sequence_lengths.py")
    warnings.simplefilter("ignore")  # about a stage that is created twice
    # gloo, also with GPUs: its timeout raises an exception, and NCCL's ends the process.
    # A second group runs the operations that may fail; the default group ends in order.
    dist.init_process_group("gloo")
    rank, fix = dist.get_rank(), "--fix" in sys.argv
    group = dist.new_group(timeout=timedelta(seconds=20 if fix or rank == 0 else 2))

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    kept: dict = {}
    used = set()  # the schedules
    failed = False
    for length in LENGTHS:
        batch = torch.randn(4, length, HIDDEN)  # the same on both ranks
        padded = min(size for size in BUCKETS if size >= length) if fix else length
        mask = pad(torch.ones(4, length), (0, padded - length))
        inputs = pad(batch, (0, 0, 0, padded - length))
        schedule = of_length(padded if fix else 0, whole[rank], rank, group, kept)
        used.add(schedule)
        losses: list[torch.Tensor] = []
        whole[rank].zero_grad()
        try:
            schedule.step(
                *((inputs,) if rank == 0 else ()),
                target=mask if rank == 1 else None,
                losses=losses,
            )
        except RuntimeError as error:
            failed = True
            if rank == 0:
                print(f"{length} tokens: {type(error).__name__}:", flush=True)
                lines = [line.strip() for line in str(error).splitlines()[:4]]
                for line in lines:
                    if line and not line.startswith("Stage output"):  # differs between releases
                        print(f"  {line.partition(', grad')[0]}", flush=True)
            break
        loss = squares(whole(batch), torch.ones(4, length))
        truth = torch.autograd.grad(loss, list(whole[rank].parameters()))
        ours = tuple(parameter.grad for parameter in whole[rank].parameters())
        torch.testing.assert_close(ours, truth)
        if rank == 1:
            torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
            print(f"{length} tokens, padded to {padded}: loss {loss:.4f}", flush=True)
        dist.barrier()  # this line is printed before the next step fails
    if not failed and rank == 1:
        print(f"stages on this rank: {len(used)}", flush=True)
    dist.barrier()
    return int(failed)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
