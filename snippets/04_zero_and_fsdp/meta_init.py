"""With the meta device you can shard a model that is too large for every single rank.

Parameters on the meta device have shapes but no memory. fully_shard shards them, and to_empty
allocates only the shards of this rank. After that, every value must be written: by an
initialization, or from a state dict that rank 0 has and broadcasts tensor by tensor. With
--forget the program skips to_empty and everything after it, and shows the error.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

BATCH, H, LAYERS = 12, 48, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def sharded_on_meta(mesh: DeviceMesh) -> Model:
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def initialise(model: Model) -> None:
    """Draw each whole tensor from the same seed on every rank, and keep this rank's rows."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # one layer at a time
            whole = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            for ours, drawn in zip(module.parameters(), whole.parameters(), strict=True):
                rows = distribute_tensor(  # without communication
                    drawn.detach(), ours.device_mesh, ours.placements, src_data_rank=None
                )
                with torch.no_grad():
                    ours.to_local().copy_(rows.to_local())


def same_shards(model: Model) -> bool:
    """Return whether all ranks have the same values in their shard of the first weight."""
    ours = model.blocks[0].up.weight.to_local().detach()
    shards = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, ours)
    return all(torch.equal(shard, shards[0]) for shard in shards)


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
    if H % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {H}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    plain = Model()
    psi = sum(p.numel() for p in plain.parameters())
    inputs = torch.ones(BATCH, H, device=device)

    model = sharded_on_meta(mesh)
    if "--forget" in sys.argv:
        try:
            model(inputs)
        except RuntimeError as error:
            if rank == 0:
                print(f"RuntimeError: {error}", flush=True)
            dist.barrier()
            return 1
    model.to_empty(device=device)
    allocated = sum(p.to_local().nbytes for p in model.parameters())
    initialise(model)
    for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor().cpu(), truth)

    loaded = sharded_on_meta(mesh)
    loaded.to_empty(device=device)
    state = plain.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded, state, options=options)
    for ours, truth in zip(loaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor().cpu(), truth)
    output = loaded(inputs).mean().item()

    naive = sharded_on_meta(mesh)
    naive.to_empty(device=device)
    torch.manual_seed(0)
    for module in naive.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    same = same_shards(naive)
    assert same or device.type != "cpu"
    assert n == 1 or not same_shards(model)
    spread = H**-0.5 / 3**0.5  # of values between -1/√h and 1/√h
    assert 0.9 < naive.blocks[0].up.weight.to_local().std() / spread < 1.1  # they were drawn
    assert allocated == 4 * psi // n
    if rank == 0:
        formula = 4 * psi // n
        print(f"N = {n}, Ψ = {psi:,}: a rank allocated {allocated:,} bytes, 4Ψ/N = {formula:,}")
        print("initialised from one seed: equal to the plain model")
        print(f"loaded from rank 0: equal to the plain model, mean output {output:.4f}")
        if device.type == "cpu":
            print(f"reset_parameters on a CPU: every rank drew the same shard: {same}")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # DTensor's caches hold the mesh, which holds the group, to the very end
