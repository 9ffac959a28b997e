"""Unexpected key(s) in state_dict: "module.…": the wrapper was saved, the plain model loads.

DDP stores your model in its attribute `module`. A state dict names each tensor by the
attributes that lead to it. The name of the first weight is therefore module.0.weight in
`ddp.state_dict()`, and 0.weight in the state dict of the model.

    (no flag)   saves ddp.state_dict() and loads it into the model: the error
    --lenient   the same with strict=False: no error, and nothing is loaded
    --fix       saves ddp.module.state_dict()
    --strip     removes the prefix from a checkpoint that was saved from the wrapper

With the two fixes, the loaded model must give the output of the trained model. With --lenient,
it must still give the output that it gave before loading.
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


def save(path: str, plain: bool) -> nn.Module:
    """Wrap a model, train it for one step, save it from rank 0, and return it."""
    device = init_distributed()
    ddp = DistributedDataParallel(build(seed=0).to(device))
    ddp(torch.ones(2, 4, device=device)).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
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
        consume_prefix_in_state_dict_if_present(state, "module.")  # in place
        assert state._metadata.keys() == build(seed=1).state_dict()._metadata.keys()

    model = build(seed=1)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    initial, expected = model(x), trained.cpu()(x)
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
        loaded = [torch.equal(ours, saved) for ours, saved in pairs]
        failed = not all(loaded)
        assert not torch.allclose(initial, expected)
        assert torch.equal(model(x), initial if args.lenient else expected)
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
