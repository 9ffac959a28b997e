"""Checks an installation: it computes a gradient, and with torchrun a sum over all ranks.

Start it with python, and then with torchrun. If both commands print that the result is right,
the programs of the book run on this machine.
"""

import os

import torch
import torch.distributed as dist


def pick_device() -> torch.device:
    """One accelerator per local rank where there are enough, otherwise the CPU.

    Apple's GPU has no backend for collectives, so several processes use the CPU on a Mac.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        kind = torch.accelerator.current_accelerator().type
        if kind != "mps" or "RANK" not in os.environ:
            torch.accelerator.set_device_index(local_rank)
            return torch.device(kind, local_rank)
    return torch.device("cpu")


def main() -> None:
    device = pick_device()
    weight = torch.full((3, 3), 2.0, device=device, requires_grad=True)
    (weight @ torch.ones(3, 3, device=device)).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 3.0))
    if "RANK" not in os.environ:  # started with python, so there is only one process
        print(f"one process on {device.type}: the gradient is right")
        return

    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, n = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(float(rank + 1), device=device)
    dist.all_reduce(total)
    assert total.item() == n * (n + 1) / 2
    if rank == 0:
        print(f"{n} processes on {device.type} with {dist.get_backend()}: the sum is right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
