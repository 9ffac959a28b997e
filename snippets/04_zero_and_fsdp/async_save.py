"""async_save writes the state at the time of the call, while training continues.

dcp.async_save copies the state to host memory before it returns. This copy is called staging.
A thread then writes the copy. Later steps change the parameters, but they do not change the
copy. The disk of this program does not write before it is allowed to, so the order of events
does not depend on the speed of the machine. Look at the number of files after each event.

The second save goes to a disk that is full. Neither async_save nor the next step reports it.
Only result() raises the error of the thread.

The ranks plan a save together, so the thread runs collectives. It needs a process group that no
other thread uses. Collectives are matched by their order, and nothing orders the collectives of
the thread relative to those of training.
"""

import copy
import errno
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, WIDTH = 5, 32  # steps during the save; features
PATIENCE = 60  # seconds after which a thread that waits for training gives up


class SlowDisk(dcp.FileSystemWriter):
    """The writer of DCP, on a disk that writes nothing before `ready` is set."""

    ready = threading.Event()

    def write_data(self, plan, planner):
        assert threading.current_thread() is not threading.main_thread()
        if not self.ready.wait(PATIENCE):
            raise RuntimeError("training waited for the disk: the save was not asynchronous")
        return super().write_data(plan, planner)


class FullDisk(dcp.FileSystemWriter):
    """The writer of DCP, on a disk without free space."""

    def write_data(self, plan, planner):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def build(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = fully_shard(Net().to(device), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, WIDTH).to(next(model.parameters()).device)
    nn.functional.mse_loss(model(x), x.tanh()).backward()
    optimizer.step()
    optimizer.zero_grad()


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


def files(folder: str) -> int:
    """The number of files in a folder, or 0 if the folder does not exist."""
    return sum(entry.is_file() for entry in Path(folder).rglob("*"))


def main() -> None:
    device = init_distributed()
    show = print if dist.get_rank() == 0 else lambda *_: None
    model, optimizer = build(0, device)
    for _ in range(2):
        step(model, optimizer)
    of_the_call = [p.to_local().clone() for p in model.parameters()]
    moments = copy.deepcopy([optimizer.state[p] for p in model.parameters()])

    # --8<-- [start:save]
    writers = dist.new_group(backend="gloo")  # only the thread uses this group
    parameters, states = get_state_dict(model, optimizer)
    future = dcp.async_save(
        {"model": parameters, "optimizer": states},
        storage_writer=SlowDisk("checkpoint"),
        process_group=writers,
    )
    show(f"async_save has returned: {files('checkpoint')} files")  # the copy is complete
    for _ in range(STEPS):
        step(model, optimizer)  # changes the parameters, but not the copy
    show(f"{STEPS} steps later: {files('checkpoint')} files, done: {future.done()}")
    dist.barrier()  # all ranks have counted the files
    SlowDisk.ready.set()  # only now may the thread write
    future.result()  # call it before the next save and before the program ends
    show(f"result() has returned: {files('checkpoint')} files")
    # --8<-- [end:save]

    assert {state["step"].item() for state in optimizer.state.values()} == {2 + STEPS}
    changed = [p.to_local().clone() for p in model.parameters()]
    fresh, fresh_optimizer = build(1, device)
    parameters, states = get_state_dict(fresh, fresh_optimizer)
    dcp.load({"model": parameters, "optimizer": states}, checkpoint_id="checkpoint")
    set_state_dict(fresh, fresh_optimizer, model_state_dict=parameters, optim_state_dict=states)
    for loaded, then, now in zip(fresh.parameters(), of_the_call, changed, strict=True):
        assert torch.equal(loaded.to_local(), then) and not torch.equal(then, now)
    for parameter, then in zip(fresh.parameters(), moments, strict=True):
        loaded = fresh_optimizer.state[parameter]
        assert loaded.keys() == then.keys() and loaded["step"] == 2
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded[moment].to_local(), then[moment].to_local())
    show("the checkpoint has the parameters and moments of the call, bit for bit")
    show(f"the model has other parameters after {STEPS} more steps")

    # --8<-- [start:full]
    full = {"storage_writer": FullDisk("full"), "process_group": writers}
    future = dcp.async_save({"model": parameters}, **full)  # raises nothing
    step(model, optimizer)  # raises nothing either
    try:
        future.result()
    except CheckpointException as error:  # a BaseException: `except Exception` misses it
        cause, _ = error.failures[0]
        show(f"on a full disk, result() raises {type(error).__name__}: {cause}")
        assert not isinstance(error, Exception)
    # --8<-- [end:full]
    else:
        raise AssertionError("the full disk was not noticed")
    assert not Path("full", ".metadata").exists()
    dist.barrier()
    dist.destroy_process_group(writers)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
