"""Calling ddp.module(x) in place of ddp(x): training without synchronization, and no error.

Each backward pass is announced to DDP by the forward of the wrapper. A forward of the module
inside is never announced, so DDP's gradient hooks do nothing: every rank trains alone on its
share of the data. The loss falls on every rank, which is why nobody notices.

    --fix    call the wrapper
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def drifted(model: nn.Module) -> list[str]:
    """Names of the parameters which are not bit for bit the same on every rank.

    The largest value over the ranks is then equal to the smallest everywhere. It costs two
    all-reduces of the parameters. Call it on every rank, every thousand steps or so.
    """
    names = []
    for name, parameter in model.named_parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            names.append(name)
    return names


def start() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < local_world or torch.backends.mps.is_available():
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=device)
    return device


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 1).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    truth = torch.randn(8, 1, device=device)
    torch.manual_seed(1 + rank)  # each rank has its own data

    for step in range(51):
        x = torch.randn(16, 8, device=device)
        prediction = ddp(x) if args.fix else ddp.module(x)
        loss = (prediction - x @ truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step in (0, 10, 50):
            losses = [torch.empty_like(loss) for _ in range(n)]
            dist.all_gather(losses, loss.detach())
            names = drifted(ddp.module)
            if rank == 0:
                about = "≈" if step == 50 else ""  # by then rounding decides
                of_ranks = ", ".join(f"{about}{value.item():.3g}" for value in losses)
                print(f"step {step:2}: loss of each rank {of_ranks};", end=" ")
                print(f"drifted: {', '.join(names) or 'nothing'}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if names else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
