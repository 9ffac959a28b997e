"""Host memory of each rank, for five ways to load a checkpoint file into a sharded model.

Linux reports three numbers in /proc/self: all memory that a process has mapped (Rss), its
private pages (Anonymous), and Pss. In Pss, a page that k processes map counts as 1/k of a page,
so the sum of Pss over the ranks is the memory that the machine needs. The columns show how much
each way adds. Compare the last rank in all rows. Everything stays on the CPU, because this
program measures host memory.

Needs: pip install safetensors
"""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

try:
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError:
    sys.exit("this program needs: pip install safetensors")

WIDTH, LAYERS = 1024, 8  # layers of 4 MiB
FILE = 4 * WIDTH * WIDTH * LAYERS / 2**20  # MiB


def truth(layer: int) -> torch.Tensor:
    """The weight of a layer. Each row contains a different number."""
    rows = torch.arange(WIDTH, dtype=torch.float32) + WIDTH * layer
    return rows[:, None].expand(WIDTH, WIDTH).contiguous()


def new_model(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def sharded(device: str) -> nn.Module:
    """The sharded model. From the meta device, its shards are allocated but not filled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = new_model(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh).to_empty(device="cpu") if device == "meta" else model


# --8<-- [start:ways]
def every_rank_loads() -> nn.Module:
    model = new_model("cpu")
    model.load_state_dict(torch.load("model.pt"))  # two copies, until this line ends
    return model


def every_rank_maps() -> nn.Module:
    model = new_model("meta")
    model.load_state_dict(torch.load("model.pt", mmap=True), assign=True)
    return model


def rank_0_broadcasts() -> nn.Module:
    model = sharded("meta")
    state = torch.load("model.pt", mmap=True) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


def shards_from_slices() -> nn.Module:
    model = sharded("meta")
    with safe_open("model.safetensors", framework="pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            n, rank = dist.get_world_size(), dist.get_rank()
            whole = file.get_slice(name)  # no bytes are read yet
            each = -(-whole.get_shape()[0] // n)  # as chunk(): the last may have fewer rows
            parameter.to_local().copy_(whole[rank * each : (rank + 1) * each])
    return model


def shards_from_dcp() -> nn.Module:
    model = sharded("meta")
    state = model.state_dict()  # DTensors: each rank asks for its own rows
    dcp.load(state, checkpoint_id="model.dcp")
    return model


# --8<-- [end:ways]


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


def reading(name: str) -> float:
    """A line of this process's smaps_rollup, in MiB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(name)


def peak() -> float:
    """The largest Rss of this process since the last reset, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(way: Callable[[], nn.Module]) -> tuple[float, float, float]:
    """What one way adds on this rank: peak Rss, and later private pages and Pss, in MiB."""
    way()  # a first call, so that imports and caches do not count
    gc.collect()  # a sharded module has reference cycles
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    names = ("Rss", "Anonymous", "Pss")
    rss, own, share = (reading(name) for name in names)
    model = way()
    sums = [parameter.detach().sum() for parameter in model.parameters()]  # reads every page
    del sums
    dist.barrier()
    added = peak() - rss, reading("Anonymous") - own, reading("Pss") - share
    for name, parameter in model.named_parameters():
        wanted = truth(int(name.partition(".")[0]))
        if isinstance(parameter, DTensor):
            wanted = wanted.chunk(dist.get_world_size())[dist.get_rank()]
            parameter = parameter.to_local()
        assert torch.equal(parameter, wanted), name
    dist.barrier()
    return added


def main() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        sys.exit("this program reads /proc/self/smaps_rollup, which only Linux has")
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed memory is returned
    init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = {f"{layer}.weight": truth(layer) for layer in range(LAYERS)}
    dcp.save(whole, checkpoint_id="model.dcp")
    if rank == 0:
        torch.save(whole, "model.pt")
        save_file(whole, "model.safetensors")
        print(f"N = {n}, a model of {FILE:.0f} MiB; added MiB on rank 0 and on rank {n - 1}")
        print("                      at the peak       private pages       Pss")
    del whole
    dist.barrier()  # all files are complete
    shard = FILE / n
    ways = {  # expected private pages of a rank, and an upper limit for its peak
        every_rank_loads: (FILE, 2.2 * FILE),
        every_rank_maps: (0, 1.2 * FILE),
        rank_0_broadcasts: (shard, shard + (FILE if rank == 0 else FILE / LAYERS) + 4),
        shards_from_slices: (shard, shard + 1.2 * FILE),
        shards_from_dcp: (shard, shard + FILE / 2),
    }
    for way, (own, most) in ways.items():
        measured: list = [None] * n
        dist.all_gather_object(measured, ours := measure(way))
        assert abs(ours[1] - own) < FILE / 10 and ours[0] < most, (way.__name__, ours)
        if rank == 0:
            columns = zip(measured[0], measured[-1], strict=True)
            row = "".join(f"  ≈{first:6.0f}  ≈{last:6.0f}" for first, last in columns)
            print(f"{way.__name__:18}{row}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
