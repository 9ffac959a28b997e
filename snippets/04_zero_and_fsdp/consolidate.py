"""One file from a sharded checkpoint, made in two ways. A plain model loads either file.

While the ranks run: get_model_state_dict with full_state_dict gathers one parameter after the
other, and cpu_offload moves each whole parameter to the host memory of rank 0. The other ranks
get an empty dict.

Later and without ranks: dcp_to_torch_save reads the folder of a distributed checkpoint in one
process. Look at the number of entries on each rank.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


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
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    model = fully_shard(Net().to(device), mesh=mesh)
    x = torch.randn(4, WIDTH).to(device)
    with torch.no_grad():
        expected = model(x).cpu()

    # --8<-- [start:one_file]
    # The first way, while the ranks run. This is a collective, so every rank must call it.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(whole, "gathered.pt")

    # The second way, later and in one process. Every rank has written its shards before.
    dcp.save({"model": get_model_state_dict(model), "step": 0}, checkpoint_id="checkpoint")
    if rank == 0:
        dcp_to_torch_save("checkpoint", "converted.pt")
    # --8<-- [end:one_file]

    entries: list[int] = [0] * n
    dist.all_gather_object(entries, len(whole))
    if rank == 0:
        print(f"entries of the full state dict on each rank: {entries}")
        for name in ("gathered.pt", "converted.pt"):
            state = torch.load(name)
            if name == "converted.pt":  # it contains all entries of the folder
                assert state["step"] == 0
                state = state["model"]
            assert all(type(x) is torch.Tensor and x.is_cpu for x in state.values())
            plain = Net()
            plain.load_state_dict(state)  # no torch.distributed from here on
            torch.testing.assert_close(plain(x.cpu()), expected)
            torch.manual_seed(0)  # the parameters that the model had before it was sharded
            for loaded, initial in zip(plain.parameters(), Net().parameters(), strict=True):
                assert torch.equal(loaded, initial)
            size = sum(tensor.nbytes for tensor in state.values())
            print(f"{name:13} {size:,} bytes of tensors; equal in a plain model")
        assert len(model.up.weight.to_local()) == -(-4 * WIDTH // n)  # this rank's rows
        shards = [file.stat().st_size for file in Path("checkpoint").glob("*.distcp")]
        assert len(shards) == n and max(shards) < 1.2 * sum(shards) / n  # from every rank
        print(f"sum over the sharded files ≈{sum(shards):,} bytes")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
