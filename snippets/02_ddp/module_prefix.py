"""Unexpected key(s) in state_dict: "module.…": a checkpoint of the wrapper, a plain model.

DDP keeps your model in its attribute `module`, and a state dict names tensors by attribute:
`ddp.state_dict()` says module.0.weight where the model says 0.weight.

    (no flag)    saves ddp.state_dict() and loads it into the model
    --lenient    the same with strict=False: nothing is raised, and nothing is loaded
    --fix       saves ddp.module.state_dict()
    --strip      fixes a checkpoint that is already on disk
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


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


def save(path: str, plain: bool) -> nn.Module:
    """Wrap a model, save it from rank 0, return the model."""
    device = start()
    ddp = DistributedDataParallel(build(seed=0).to(device))
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict() if plain else ddp.state_dict(), path)
    dist.barrier()  # the file is complete
    return ddp.module


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--strip", action="store_true")
    parser.add_argument("--lenient", action="store_true")
    args = parser.parse_args()

    trained = save("checkpoint.pt", plain=args.fix)
    state = torch.load("checkpoint.pt", map_location="cpu", weights_only=True)
    if args.strip:
        consume_prefix_in_state_dict_if_present(state, "module.")  # in place, metadata too

    model = build(seed=1)
    rank = dist.get_rank()
    failed = False
    try:
        report = model.load_state_dict(state, strict=not args.lenient)
    except RuntimeError as error:
        failed = True
        if rank == 0:
            print(f"{type(error).__name__}: {error}", flush=True)
    else:
        pairs = zip(model.parameters(), trained.parameters(), strict=True)
        loaded = [torch.equal(ours, saved.cpu()) for ours, saved in pairs]
        failed = not all(loaded)
        if rank == 0:
            print(f"missing {len(report.missing_keys)}, ", end="")
            print(f"unexpected {len(report.unexpected_keys)}, ", end="")
            print(f"loaded {sum(loaded)} of {len(loaded)} parameters", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
