"""Parameters changed after wrapping: DDP reduces those it met in its constructor, no others.

Each change is made on a fresh two-layer model after it was wrapped (or before, with --fix),
then the model is trained for three steps, on different data on each rank:

    unfreeze   a frozen layer gets requires_grad_(True)
    add        the model gains a new layer
    assign     load_state_dict(assign=True) puts new parameters in place of the old
    freeze     a layer gets requires_grad_(False): now DDP waits for it

    --fix     change first, then wrap (or wrap once more)
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build(change: str, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    if change == "unfreeze":
        model[0].requires_grad_(False)
    return model


def apply_change(model: nn.Sequential, change: str, device: torch.device) -> None:
    torch.manual_seed(1)
    if change == "unfreeze":
        model[0].requires_grad_(True)
    elif change == "add":
        model.append(nn.Linear(4, 4).to(device))
    elif change == "assign":
        checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(checkpoint, assign=True)
    else:
        model[0].requires_grad_(False)


def train(ddp: DistributedDataParallel, device: torch.device) -> None:
    torch.manual_seed(2 + dist.get_rank())
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(8, 4, device=device)).square().mean().backward()
        optimizer.step()


def drifted(model: nn.Module) -> list[str]:
    """Names of the parameters which are not bit for bit the same on every rank."""
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
    rank = dist.get_rank()

    failed = False
    for change in ("unfreeze", "add", "assign", "freeze"):
        model = build(change, device)
        if args.fix:
            apply_change(model, change, device)
        ddp = DistributedDataParallel(model)
        if not args.fix:
            apply_change(model, change, device)
        assert not drifted(model)  # as yet

        try:
            train(ddp, device)
            names = drifted(model)
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, names)
            assert all(names == other for other in of_ranks)  # every rank is told the same
            failed = failed or bool(names)
            result = f"drifted: {', '.join(names) or 'nothing'}"
        except RuntimeError as error:
            failed = True
            result = f"{type(error).__name__}: {str(error).split('. ')[0]}. …"
        if rank == 0:
            print(f"{change:10}{result}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
