"""A state dict that rank 0 saves alone contains only the shards of rank 0, without any error.

local.pt   the local parts of the DTensors in model.state_dict() on rank 0
whole.pt   the fix: all ranks gather whole tensors on rank 0, and rank 0 saves them

Compare the number of elements in the two files.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

H = 48


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))


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


def main() -> None:
    device = init_distributed()
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = new_model().to(device)
    psi = sum(p.numel() for p in model.parameters())
    fully_shard(model, mesh=mesh)
    if rank == 0:
        local = {k: v.to_local() for k, v in model.state_dict().items()}
        torch.save(local, "local.pt")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)  # on every rank: it gathers
    if rank == 0:
        torch.save(whole, "whole.pt")
        for name in ("local", "whole"):
            state, plain = torch.load(f"{name}.pt"), new_model()
            print(f"{name}.pt: {sum(t.numel() for t in state.values()):,} of {psi:,} elements")
            try:
                plain.load_state_dict(state)
                print("  loads into a plain model")
            except RuntimeError as error:
                print(f"  {chr(10).join(str(error).splitlines()[:2])}")
        torch.manual_seed(0)
        assert all(map(torch.equal, plain.parameters(), new_model().parameters()))
    else:
        assert whole == {}


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
