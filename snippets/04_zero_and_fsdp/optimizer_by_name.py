"""Optimizer states saved by name and loaded by number: one error, three silent losses of state.

get_optimizer_state_dict names the states after the parameters: state.up.weight.step. The state
dict of the optimizer itself numbers them: state.0.step. dcp.load reads only the keys of the
state dict that you pass to it, so these keys decide what happens:

1. The optimizer has made a step. Its state dict asks for state.0.step, and the load fails.
2. The optimizer is new. Its state dict asks for no state, and the load succeeds.
3. allow_partial_load=True skips every key that the checkpoint does not have, here all states.
4. The fix: get_optimizer_state_dict, dcp.load, set_optimizer_state_dict.
5. The fix after a trial backward: a parameter has a gradient, so no states are created.

Each resumed run is compared with the run that was never interrupted. The program also shows
that get_optimizer_state_dict changes a new optimizer: its step count becomes 1.
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
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, TRAINED, MORE = 16, 40, 3  # features, steps before the save, steps after it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def sharded(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = fully_shard(Net().to(device), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int
) -> float:
    """Train for some steps; return the last loss of this rank."""
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, WIDTH).to(next(model.parameters()).device)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def load_by_number(
    model: nn.Module, optimizer: torch.optim.Optimizer, partial: bool = False
) -> None:
    state = {"optimizer": optimizer.state_dict()}  # wrong: asks for state.0.step
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    dcp.load(state, checkpoint_id="checkpoint", planner=planner)
    optimizer.load_state_dict(state["optimizer"])


def load_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id="checkpoint")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


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
    show = print if dist.get_rank() == 0 else lambda *_: None
    model, optimizer = sharded(device)
    train_steps(model, optimizer, 0, TRAINED)
    optimizer.param_groups[0]["lr"] /= 4  # as a schedule does
    names = get_optimizer_state_dict(model, optimizer)
    parameters = get_model_state_dict(model)
    dcp.save({"model": parameters, "optimizer": names}, checkpoint_id="checkpoint")
    moments = {
        name: optimizer.state[parameter]["exp_avg"].to_local().clone()
        for name, parameter in model.named_parameters()
    }
    truth = [train_steps(model, optimizer, TRAINED + step, 1) for step in range(MORE)]
    keys = dcp.FileSystemReader("checkpoint").read_metadata().state_dict_metadata
    show("in the checkpoint:", next(key for key in keys if key.endswith(".step")))

    cases = (
        ("1. by number, after a step", load_by_number, {}, 1),
        ("2. by number, a new optimizer", load_by_number, {}, 0),
        ("3. by number, allow_partial_load", load_by_number, {"partial": True}, 1),
        ("4. by name", load_by_name, {}, 0),
        ("5. by name, after a trial backward", load_by_name, {}, None),
    )
    for what, load, options, steps in cases:
        fresh, resumed = sharded(device)
        if steps:
            train_steps(fresh, resumed, 0, steps)
        if steps is None:
            fresh(torch.ones(1, WIDTH, device=device)).sum().backward()  # a gradient remains
        try:
            load(fresh, resumed, **options)
        except CheckpointException as error:  # a BaseException: `except Exception` misses it
            cause, _ = error.failures[dist.get_rank()]
            show(f"{what}:\n   {type(cause).__name__}: {cause}")
            assert steps and not options, "only the first case may fail"
            continue
        parameters = get_model_state_dict(fresh)
        dcp.load({"model": parameters}, checkpoint_id="checkpoint")
        set_model_state_dict(fresh, parameters)
        state = {name: resumed.state[p] for name, p in fresh.named_parameters()}
        equal = all(
            "exp_avg" in s and torch.equal(s["exp_avg"].to_local(), moments[name])
            for name, s in state.items()
        )
        made = {int(s["step"]) if "step" in s else 0 for s in state.values()}
        resumed.zero_grad()
        losses = [train_steps(fresh, resumed, TRAINED + step, 1) for step in range(MORE)]
        same = losses == truth
        show(f"{what}: no error")
        rate = resumed.param_groups[0]["lr"]
        show(f"   steps of the optimizer: {made.pop()}, learning rate: {rate}")
        show(f"   continues as if it had not been interrupted: {same}")
        assert not made, "all parameters have made the same number of steps"
        assert losses[0] == truth[0], "the parameters are those of the checkpoint"
        assert equal == same == (load is load_by_name and steps == 0)
    fresh, resumed = sharded(device)
    assert not resumed.state
    get_optimizer_state_dict(fresh, resumed)
    counts = {int(state["step"]) for state in resumed.state.values()}
    show(f"a new optimizer after get_optimizer_state_dict alone: step count {counts.pop()}")
    train_steps(fresh, resumed, 0, 1)
    untouched, never_asked = sharded(device)
    train_steps(untouched, never_asked, 0, 1)
    pairs = zip(fresh.parameters(), untouched.parameters(), strict=True)
    assert not any(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
