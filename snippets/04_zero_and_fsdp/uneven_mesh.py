"""A whole state dict is loaded into FSDP2 over TP: the ranks divide 8 rows, but not 9 rows.

For each number of rows, the program loads in three ways. Every rank has the dict, or rank 0 has
it and sends it, or the dict goes through a checkpoint of DCP. Four ranks form a mesh of 2 × 2.
Look at the line in which the load ends at an assertion. The line after the loads shows that
such a model cannot even compute its forward pass.
"""

import logging
import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WHOLE = StateDictOptions(full_state_dict=True)
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


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


def model(rows: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, rows), nn.GELU(), nn.Linear(rows, 6))


def cut(whole: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    parallelize_module(whole, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(whole, mesh=mesh["dp"])


# --8<-- [start:load]
def from_every_rank(target: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    set_model_state_dict(target, dict(whole), options=WHOLE)


def from_rank_0(target: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    given = dict(whole) if dist.get_rank() == 0 else {}
    set_model_state_dict(target, given, options=SENT)


def through_dcp(target: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Each rank reads its own rows, from a folder that all ranks can read."""
    dcp.save(whole, checkpoint_id="whole")
    shards = get_model_state_dict(target)  # no copies: dcp.load fills the model
    dcp.load(shards, checkpoint_id="whole")


# --8<-- [end:load]


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("uneven_mesh.py needs 4 ranks: torchrun --nproc-per-node=4 uneven_mesh.py")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    report = print if dist.get_rank() == 0 else lambda *_: None
    for rows in (8, 9):
        whole = model(rows, seed=0).to(device).state_dict()
        for load in (from_every_rank, from_rank_0, through_dcp):
            other = model(rows, seed=1).to(device)
            assert not any(torch.equal(whole[name], p) for name, p in other.named_parameters())
            target = cut(other, mesh)
            try:
                load(target, whole)
            except AssertionError as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                report(f"{rows} rows {load.__name__:16} AssertionError in {last.name}")
                assert (rows, load, str(error)) == (9, from_every_rank, "")
                continue
            found = get_model_state_dict(target, options=WHOLE)
            assert all(torch.equal(found[name], whole[name]) for name in found)
            report(f"{rows} rows {load.__name__:16} equal")
        try:
            error = None
            target(torch.ones(4, 6, device=device))
        except RuntimeError as caught:
            error = str(caught).splitlines()[0]
        report(f"{rows} rows, forward: {error or 'no error'}")
        assert (error is None) == (rows == 8)
    given = dict(whole)
    set_model_state_dict(cut(model(rows, 1).to(device), mesh), given, options=SENT)
    changed = [name for name, value in given.items() if isinstance(value, DTensor)]
    report(f"the dict that was passed: {len(changed)} of {len(given)} values are DTensors now")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
