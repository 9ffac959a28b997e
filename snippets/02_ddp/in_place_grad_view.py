"""Can't detach views in-place: what gradient_as_bucket_view=True changes about p.grad.

With it, p.grad is a window into DDP's bucket: one copy of the gradients fewer, in memory and
in time. The window is not yours. `detach_()` on it raises, and a gradient that you keep is
overwritten by the next backward pass, without an error.

    (no flag)    p.grad.detach_(), as old code does before p.grad.zero_()
    --keep       a reference to the gradient of each step is kept
    --fix       neither: zero_grad() of the optimizer, and a clone of what is kept
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def old_zero_grad(model: nn.Module) -> None:
    """What optimizers did once, and hand-written training loops still do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def kept_gradients(ddp: DistributedDataParallel, clone: bool, device: torch.device) -> list:
    """Keep the gradient of each of four steps; return pairs (as it was then, as it is now)."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    kept = []
    for _ in range(4):
        ddp(torch.randn(4, 2, device=device)).square().mean().backward()
        gradient = ddp.module.weight.grad
        kept.append((f"{gradient.norm():.4f}", gradient.clone() if clone else gradient))
        optimizer.step()
        optimizer.zero_grad()  # p.grad = None; the kept tensor still is a window
    return [(then, f"{gradient.norm():.4f}") for then, gradient in kept]


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
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    device = start()
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same data on each rank: the point is the memory
    model = nn.Linear(2, 1).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    failed = False
    if args.keep or args.fix:
        pairs = kept_gradients(ddp, clone=args.fix, device=device)
        failed = any(then != now for then, now in pairs)
        if rank == 0:
            for step, (then, now) in enumerate(pairs):
                print(f"step {step}: norm {then} when kept, {now} at the end")
            sys.stdout.flush()
    else:
        ddp(torch.randn(4, 2, device=device)).square().mean().backward()
        try:
            old_zero_grad(model)
        except RuntimeError as error:
            failed = True
            if rank == 0:
                print(f"{type(error).__name__}: {error}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
