"""Three checkpoints that do not hold what you think: another model, a shard, no optimizer.

1. The model has changed since the save: dcp.load names the first key that it cannot find. The
   fix says which keys may be missing, and checks that nothing else is.
2. torch.save of what rank 0 holds: the file is written, without a word, and holds a shard.
3. The optimizer was not saved: training goes on, with moments that start at zero.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, TRAINED = 32, 300  # features, steps before the save


class GatedNet(nn.Module):
    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        return self.down(y * torch.sigmoid(self.gate(x)) if self.gate else y)


def sharded(device: torch.device, gated: bool = False) -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return fully_shard(GatedNet(gated).to(device), mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> float:
    """Train for some steps; return the last loss, of all ranks."""
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, WIDTH).to(next(model.parameters()).device)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


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
    show = print if dist.get_rank() == 0 else lambda *_: None
    model = sharded(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, 0, TRAINED)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id="checkpoint")

    # --8<-- [start:structure]
    gated = sharded(device, gated=True)  # has gained a layer since the save
    wanted = {"model": get_model_state_dict(gated)}
    try:
        dcp.load(wanted, checkpoint_id="checkpoint")
    except CheckpointException as error:  # a BaseException: `except Exception` lets it through
        (cause, _) = error.failures[dist.get_rank()]
        show(f"1. {type(error).__name__}, of this rank:")
        show(f"   {type(cause).__name__}: {cause}")
    in_file = dcp.FileSystemReader("checkpoint").read_metadata().state_dict_metadata
    missing = [key for key in wanted["model"] if f"model.{key}" not in in_file]
    assert all(key.startswith("gate.") for key in missing), missing  # the new layer, no other
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, checkpoint_id="checkpoint", planner=planner)
    for key, value in get_model_state_dict(model).items():
        assert torch.equal(wanted["model"][key].to_local(), value.to_local())
    show(f"   fix: allow_partial_load, and left at their start: {', '.join(missing)}")
    # --8<-- [end:structure]

    if dist.get_rank() == 0:
        local = {key: value.to_local() for key, value in model.state_dict().items()}
        torch.save(local, "rank0.pt")  # no error: this is a shard
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)  # every rank calls it
    if dist.get_rank() == 0:
        torch.save(whole, "whole.pt")
        for name in ("rank0.pt", "whole.pt"):
            state = torch.load(name)
            size = sum(tensor.numel() for tensor in state.values())
            print(f"2. {name}: {size:,} elements, up.weight {list(state['up.weight'].shape)}")
        try:
            GatedNet().load_state_dict(torch.load("rank0.pt"))
        except RuntimeError as error:
            line = str(error).splitlines()[1].strip()
            print(f"   {type(error).__name__}: {line.split(',')[0]} …")
        loaded = GatedNet()
        loaded.load_state_dict(torch.load("whole.pt"))
        for key, value in loaded.state_dict().items():
            assert torch.equal(value[: len(local[key])], local[key].cpu())

    jumps = []
    for kept in (True, False):
        fresh = sharded(device)
        resumed = torch.optim.AdamW(fresh.parameters(), lr=3e-3)
        if kept:
            parameters, states = get_state_dict(fresh, resumed)
            state = {"model": parameters, "optimizer": states}
            dcp.load(state, checkpoint_id="checkpoint")
            set_state_dict(fresh, resumed, model_state_dict=parameters, optim_state_dict=states)
        else:
            parameters = get_model_state_dict(fresh)
            dcp.load({"model": parameters}, checkpoint_id="checkpoint")
            set_model_state_dict(fresh, parameters)
        losses = [train(fresh, resumed, TRAINED + step, 1) for step in range(6)]
        jumps.append(losses[1])
        what = "with optimizer:   " if kept else "without optimizer:"
        show(f"3. resumed {what} " + " ".join(f"{loss:.5f}" for loss in losses))
    expected = [train(model, optimizer, TRAINED + step, 1) for step in range(6)]
    show("   not interrupted:           " + " ".join(f"{loss:.5f}" for loss in expected))
    assert jumps[0] == expected[1] and jumps[1] > expected[1]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
