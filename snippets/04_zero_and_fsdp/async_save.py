"""async_save: training goes on while the checkpoint is written, and the copy is of the call.

dcp.async_save copies the state to host memory before it returns (staging); a thread writes
the copy. Steps taken meanwhile change the parameters, not the copy. The disk here is made slow:
each rank's write takes two seconds longer, so that the overlap shows on any machine.

The writing ranks talk to one another, to plan and to agree on the end. They do so in a thread,
so give them a process group of their own: collectives are matched by their order, and nobody
orders those of the thread with those of training.
"""

import copy
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SLOW, STEPS = 2.0, 5  # seconds that the disk takes, at least; steps meanwhile
WIDTH = 32


class SlowDisk(dcp.FileSystemWriter):
    """The writer of DCP, on a disk that takes its time."""

    def write_data(self, plan, planner):
        time.sleep(SLOW)
        return super().write_data(plan, planner)


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


def main() -> None:
    device = start()
    model, optimizer = build(0, device)
    for _ in range(2):
        step(model, optimizer)
    of_the_call = [p.to_local().clone() for p in model.parameters()]
    moments = copy.deepcopy([optimizer.state[p]["exp_avg"] for p in model.parameters()])

    # --8<-- [start:save]
    writers = dist.new_group(backend="gloo")  # the thread's own: never training's group
    parameters, states = get_state_dict(model, optimizer)
    begin = time.perf_counter()
    future = dcp.async_save(
        {"model": parameters, "optimizer": states},
        storage_writer=SlowDisk("checkpoint"),
        process_group=writers,
    )
    returned = time.perf_counter() - begin  # the copy is made, nothing is written yet
    for _ in range(STEPS):
        step(model, optimizer)  # changes the parameters, not the copy
    still_writing = not future.done()
    future.result()  # before the next save, and before the end: raises what the writer raised
    written = time.perf_counter() - begin
    # --8<-- [end:save]

    taken = {state["step"].item() for state in optimizer.state.values()}
    assert taken == {2 + STEPS}
    changed = [p.to_local().clone() for p in model.parameters()]
    fresh, fresh_optimizer = build(1, device)
    parameters, states = get_state_dict(fresh, fresh_optimizer)
    dcp.load({"model": parameters, "optimizer": states}, checkpoint_id="checkpoint")
    set_state_dict(fresh, fresh_optimizer, model_state_dict=parameters, optim_state_dict=states)
    for loaded, then, now in zip(fresh.parameters(), of_the_call, changed, strict=True):
        assert torch.equal(loaded.to_local(), then) and not torch.equal(then, now)
    for parameter, then in zip(fresh.parameters(), moments, strict=True):
        loaded = fresh_optimizer.state[parameter]["exp_avg"]
        assert torch.equal(loaded.to_local(), then.to_local())
    if dist.get_rank() == 0:
        print(
            f"async_save returned after ≈{returned:.2f} s, all written after ≈{written:.2f} s"
        )
        print(f"{STEPS} steps taken meanwhile; still writing after them: {still_writing}")
        print("loaded parameters and moments: equal bit for bit to those of the call")
        print("parameters when the writing ended: others")
    dist.barrier()
    dist.destroy_process_group(writers)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
