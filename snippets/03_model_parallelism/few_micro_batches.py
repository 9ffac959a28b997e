"""Fewer micro-batches than pipeline stages: Schedule1F1B refuses, and two ways out.

Schedule1F1B raises an error when it is constructed with fewer micro-batches than stages. Cut
the batch into more micro-batches, or choose a schedule that accepts fewer of them and leaves
stages idle. Both give the loss and the gradients of one process.

    (no flag)   one micro-batch for two stages, Schedule1F1B
    --fix       the same batch in four micro-batches
    --gpipe     one micro-batch, ScheduleGPipe: for a batch that cannot be cut
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

BATCH, HIDDEN = 8, 16


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--gpipe", action="store_true")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 few_micro_batches.py")
    device = init_distributed()
    rank, p = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)).to(device)
    batch, target = torch.randn(2, BATCH, HIDDEN).to(device)
    true_loss = mse_loss(whole(batch), target)
    truth = torch.autograd.grad(true_loss, list(whole[rank].parameters()))

    calls: list[int] = []  # the samples in each forward of this rank's stage
    whole[rank].register_forward_hook(
        lambda _module, inputs, y: calls.append(len(inputs[0])) if y.requires_grad else None
    )
    # --8<-- [start:schedule]
    m = 4 if args.fix else 1  # micro-batches
    kind = ScheduleGPipe if args.gpipe else Schedule1F1B
    stage = PipelineStage(whole[rank], rank, p, device)
    try:
        schedule = kind(stage, n_microbatches=m, loss_fn=mse_loss)
    except ValueError as error:  # on every rank, before anything is sent
        if rank == 0:
            print(f"ValueError: {error}", flush=True)
        return 1
    losses: list[torch.Tensor] = []
    inputs = (batch,) if rank == 0 else ()
    schedule.step(*inputs, target=target if rank == p - 1 else None, losses=losses)
    # --8<-- [end:schedule]
    gradients = tuple(parameter.grad for parameter in whole[rank].parameters())
    torch.testing.assert_close(gradients, truth)
    assert calls[-m:] == [BATCH // m] * m, calls  # the schedule has used m micro-batches
    if rank == p - 1:
        torch.testing.assert_close(torch.stack(losses).mean().detach(), true_loss.detach())
        print(f"{kind.__name__}, {m} × {BATCH // m} samples: ", end="")
        print("the gradients equal those of one process")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
