"""Six forms of a checkpoint are loaded into FSDP1 and FSDP2, on a different number of ranks.

    torchrun --nproc-per-node=2 conversions.py save
    torchrun --nproc-per-node=3 conversions.py load

`save` writes one model in four forms: a DCP folder by FSDP1, a DCP folder by FSDP2, one whole
file, and safetensors as on the Hub. Two more forms are made from these: a DCP folder from the
file, and safetensors from the shards that accelerate would save. `load` fills FSDP1 and FSDP2
from each form, compares every element, and makes one more step to see whether the moments were
loaded. Look at which forms contain the moments.

Needs: pip install safetensors accelerate
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 is deprecated
WIDTH = 10  # not a multiple of the three ranks that load


def new_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def sharded(kind: str, seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.AdamW]:
    model = new_model(seed).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if kind == "FSDP1":
        model = FSDP1(model, device_id=device, device_mesh=mesh, use_orig_params=True)
    else:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


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


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """One step on the same data on every rank, so that the result does not depend on N."""
    torch.manual_seed(0)
    model(torch.randn(8, WIDTH).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, gathered on every rank: only possible for a small model."""
    state = get_model_state_dict(model)  # DTensors, also from FSDP1 with a mesh
    return {name: shard.full_tensor().cpu() for name, shard in state.items()}


# --8<-- [start:save]
def save(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=kind)
    if kind == "FSDP1":
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(whole, "whole.pt")
        torch_save_to_dcp("whole.pt", "whole.dcp")  # what `format_utils torch_to_dcp` calls
    hub = dcp.HuggingFaceStorageWriter("hub", save_distributed=True, enable_consolidation=True)
    dcp.save(get_model_state_dict(model), storage_writer=hub)
    dcp.save({"model": parameters}, checkpoint_id="pytorch_model_fsdp_0")  # as accelerate does


# --8<-- [end:save]


# --8<-- [start:load]
def load(source: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if source == "whole.pt":
        state = torch.load(source, mmap=True) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    elif source in ("whole.dcp", "hub", "merged"):
        state = get_model_state_dict(model)
        reader = None if source == "whole.dcp" else dcp.HuggingFaceStorageReader(source)
        dcp.load(state, storage_reader=reader, checkpoint_id=source)
        set_model_state_dict(model, state)
    else:
        parameters, states = get_state_dict(model, optimizer)
        dcp.load({"model": parameters, "optimizer": states}, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)


# --8<-- [end:load]


def main() -> None:
    if sys.argv[1:] not in (["save"], ["load"]):
        sys.exit("say what to do: conversions.py save, then conversions.py load")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("at least 2 ranks: FSDP1 on one does not shard")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    for kind in ("FSDP1", "FSDP2"):
        if sys.argv[1] == "save":
            model, optimizer = sharded(kind, 1, device)
            step(model, optimizer, device)
            save(model, optimizer, kind)
            if rank == 0:
                print(f"{kind}: saved by {n} ranks")
            continue
        truth, of_truth = sharded(kind, 1, device)
        step(truth, of_truth, device)
        saved = gathered(truth)
        step(truth, of_truth, device)
        further = gathered(truth)
        for source in ("FSDP1", "FSDP2", "whole.pt", "whole.dcp", "hub", "merged"):
            model, optimizer = sharded(kind, 2, device)
            load(source, model, optimizer)
            loaded = gathered(model)
            step(model, optimizer, device)
            stepped = gathered(model)
            if rank == 0:
                torch.testing.assert_close(loaded, saved)
                same = all(torch.allclose(stepped[name], further[name]) for name in further)
                assert same == source.startswith("FSDP")
                what = "and moments" if same else "alone, no moments in it"
                print(f"{source:9} into {kind} on {n} ranks: parameters {what}")
    if sys.argv[1] == "load":
        try:
            model.load_state_dict(torch.load("whole.pt"))
        except RuntimeError as error:
            line = str(error).splitlines()[1].partition("exception occurred : ('")[2]
            assert "got mixed torch.Tensor and DTensor" in line, error
            if rank == 0:
                print(f"load_state_dict of the whole file: {line.partition(',')[0]}")
        else:
            raise AssertionError("plain tensors were copied into DTensors")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
