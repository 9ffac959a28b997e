"""Two checkpoints without what their authors expect: a new layer, and the optimizer.

1. The model has a layer that it did not have at the save. dcp.load names the first key that is
   missing. The fix lists which keys may be missing, and checks that no other key is missing.
   allow_partial_load alone accepts even the checkpoint of an unrelated model.
2. The optimizer was not saved. Training continues with moments that start at zero, and the loss
   jumps in the second step. Compare how far an element moves in the first step.
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
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, TRAINED, RATE = 32, 300, 3e-3  # features, steps before the save, learning rate


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


def missing_keys(wanted: dict[str, dict], new_layer: str) -> list[str]:
    """Return the wanted keys that the checkpoint does not contain.

    Raise KeyError if one of them is not a key of the new layer.
    """
    saved = dcp.FileSystemReader("checkpoint").read_metadata().state_dict_metadata
    missing = [key for key in wanted["model"] if f"model.{key}" not in saved]
    if not all(key.startswith(new_layer) for key in missing):
        raise KeyError(f"the checkpoint lacks {missing}")
    return missing


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> float:
    """Train for some steps. Return the last loss, averaged over all ranks."""
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
    model = sharded(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    train(model, optimizer, 0, TRAINED)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id="checkpoint")

    # --8<-- [start:structure]
    gated = sharded(device, gated=True)  # this model has an additional layer
    wanted = {"model": get_model_state_dict(gated)}
    try:
        dcp.load(wanted, checkpoint_id="checkpoint")
    except CheckpointException as error:  # a BaseException: `except Exception` misses it
        assert not isinstance(error, Exception)
        (cause, _) = error.failures[dist.get_rank()]
        show(f"1. {type(error).__name__}, of this rank:")
        show(f"   {type(cause).__name__}: {cause}")
    missing = missing_keys(wanted, new_layer="gate.")  # raises if a different key is missing
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, checkpoint_id="checkpoint", planner=planner)
    for key, value in get_model_state_dict(model).items():
        assert torch.equal(wanted["model"][key].to_local(), value.to_local())
    show(f"   with allow_partial_load, these keep their initial values: {', '.join(missing)}")
    # --8<-- [end:structure]
    initial = get_model_state_dict(sharded(device, gated=True))  # from the same seed
    for key in missing:
        assert torch.equal(wanted["model"][key].to_local(), initial[key].to_local())

    unrelated = {"model": {"layers.0.weight": torch.full((4, 4), 7.0)}}
    dcp.load(unrelated, checkpoint_id="checkpoint", planner=planner)  # raises nothing
    assert torch.equal(unrelated["model"]["layers.0.weight"], torch.full((4, 4), 7.0))
    show("   allow_partial_load alone accepts the checkpoint of an unrelated model, too")
    try:
        missing_keys(unrelated, new_layer="gate.")
    except KeyError:
        show("   the list of missing keys rejects it")
    else:
        raise AssertionError("the list accepts an unrelated model")

    runs, moves = [], []
    for with_optimizer in (True, False):
        fresh = sharded(device)
        resumed = torch.optim.AdamW(fresh.parameters(), lr=RATE)
        if with_optimizer:
            parameters, states = get_state_dict(fresh, resumed)
            state = {"model": parameters, "optimizer": states}
            dcp.load(state, checkpoint_id="checkpoint")
            set_state_dict(fresh, resumed, model_state_dict=parameters, optim_state_dict=states)
        else:
            parameters = get_model_state_dict(fresh)
            dcp.load({"model": parameters}, checkpoint_id="checkpoint")
            set_model_state_dict(fresh, parameters)
        before = fresh.up.weight.to_local().clone()
        losses = [train(fresh, resumed, TRAINED, 1)]
        moved = (fresh.up.weight.to_local() - before).detach().abs().median().item() / RATE
        losses += [train(fresh, resumed, TRAINED + step, 1) for step in range(1, 6)]
        runs.append(losses)
        moves.append(moved)
        what = "with optimizer:   " if with_optimizer else "without optimizer:"
        show(f"2. resumed {what} " + " ".join(f"{loss:.5f}" for loss in losses))
        show(f"   first step: the median element moves by {moved:.2f} learning rates")
    expected = [train(model, optimizer, TRAINED + step, 1) for step in range(6)]
    show("   not interrupted:           " + " ".join(f"{loss:.5f}" for loss in expected))
    assert runs[0] == expected and runs[1][0] == expected[0]
    assert sum(runs[1][1:]) > 1.1 * sum(expected[1:])  # the five losses after the first step
    assert moves[0] < 0.5 and 0.98 < moves[1] < 1.02  # Adam without history moves by the rate


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
