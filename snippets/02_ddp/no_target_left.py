"""The gradient norm is NaN because a micro-batch has no target left: a mean over zero tokens.

Each rank accumulates two micro-batches. In the second one of rank 1 the prompt fills the whole
length, so the mask of the targets is empty. A masked mean then divides 0 by 0, and its gradient
is NaN. The all-reduce of DDP gives the NaN to all ranks. In the output, compare the gradient
with that of one process that has the same tokens.

    (no flag)    the mean over the targets of each micro-batch
    --clamp      divide by at least 1: finite, and wrong
    --fix        divide by the number of targets of all micro-batches of all ranks
"""

import argparse
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: a later import would keep the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, WIDTH, LENGTH, MICRO_BATCHES = 20, 8, 12, 2
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # inputs, targets, mask: [2, LENGTH]


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


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)).to(device)


def batches_of(rank: int, device: torch.device) -> list[Batch]:
    """Two micro-batches of two sequences; the mask is 0 for prompts and for padding."""
    batches = []
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * rank + number)
        words = torch.randint(WORDS, (2, LENGTH + 1), generator=generator)
        prompt = LENGTH if (rank, number) == (1, 1) else 2 + 3 * number + rank
        mask = (torch.arange(LENGTH) >= prompt).float().expand(2, LENGTH)
        batches.append((words[:, :-1].to(device), words[:, 1:].to(device), mask.to(device)))
    return batches


# --8<-- [start:losses]
def per_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of every target that the mask keeps, and 0 for the others: [2 * LENGTH]."""
    inputs, targets, mask = batch
    scores = model(inputs).flatten(0, 1)
    return F.cross_entropy(scores, targets.flatten(), reduction="none") * mask.flatten()


def mean_of_batch(losses: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return losses.sum() / mask.sum() / MICRO_BATCHES  # 0 / 0 where no target is left


def clamped_mean(losses: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return losses.sum() / mask.sum().clamp(min=1) / MICRO_BATCHES


def part_of_all(losses: torch.Tensor, _: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return losses.sum() * dist.get_world_size() / total.clamp(min=1)  # DDP divides by N


# --8<-- [end:losses]


# --8<-- [start:accumulate]
def accumulate(ddp: DDP, batches: list[Batch], mean) -> None:
    """The gradients of all micro-batches; one all-reduce counts the targets of the step."""
    total = torch.stack([mask.sum() for _, _, mask in batches]).sum()
    dist.all_reduce(total)  # before the first backward, and equal on all ranks
    for number, batch in enumerate(batches, 1):
        with nullcontext() if number == len(batches) else ddp.no_sync():
            mean(per_token(ddp, batch), batch[2], total).backward()


# --8<-- [end:accumulate]


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def reference(n: int, device: torch.device) -> torch.Tensor:
    """The gradient of one process: the mean over the selected targets, without a mask."""
    model, scores, targets = make_model(device), [], []
    for rank in range(n):
        for inputs, wanted, mask in batches_of(rank, device):
            scores.append(model(inputs)[mask.bool()])
            targets.append(wanted[mask.bool()])
    F.cross_entropy(torch.cat(scores), torch.cat(targets)).backward()
    return gradients(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clamp", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("no_target_left.py needs 2 ranks or more, started by torchrun")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    mean = part_of_all if args.fix else clamped_mean if args.clamp else mean_of_batch
    ddp = DDP(make_model(device))
    accumulate(ddp, batches_of(rank, device), mean)
    ours, truth = gradients(ddp), reference(n, device)

    norms = [torch.zeros((), device=device) for _ in range(n)]
    dist.all_gather(norms, ours.norm())
    error = ((ours - truth).norm() / truth.norm()).item()
    if rank == 0:
        targets = [[int(mask.sum()) for *_, mask in batches_of(r, device)] for r in range(n)]
        print(f"targets in the micro-batches of each rank: {targets}")
        print(f"{mean.__name__}: gradient norms {[round(norm.item(), 4) for norm in norms]}")
        print(f"  one process: norm {truth.norm():.4f}, difference {100 * error:.1f}%")
    if args.fix:
        torch.testing.assert_close(ours, truth)
        nothing = torch.zeros(3, device=device)  # if no rank has a target, the step changes 0
        assert part_of_all(nothing, nothing, nothing.sum()) == 0
    elif args.clamp:
        assert all(norm.isfinite() for norm in norms) and error > 0.1
    else:
        assert all(norm.isnan() for norm in norms)  # on every rank


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
