"""A checkpoint saved by 4 ranks is loaded by 2 ranks and by 1, and no bit of it is lost.

Each rank writes its own shards; one metadata file says which rows of which tensor lie where.
A rank that loads reads the rows it needs from whichever files hold them, so the number of ranks
is no part of the checkpoint. What is claimed, exactly:

- parameters, both Adam moments and the step counts are equal bit for bit, on any number of
  ranks;
- training goes on bit for bit with the same number of ranks; with another number it goes on up
  to rounding, since a mean over 4 ranks and a mean over 2 add in another order.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BATCH, WIDTH = 24, 48
SAVED_AT, LAST = 3, 6  # steps


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def build(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Regressor().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on this rank's part of each step's batch; return the loss of the whole batch."""
    rank, n = dist.get_rank(), dist.get_world_size()
    device, losses = next(model.parameters()).device, []
    for step in steps:
        torch.manual_seed(1000 + step)  # the batch depends on the step and on nothing else
        x = torch.randn(BATCH, WIDTH)[rank * BATCH // n : (rank + 1) * BATCH // n].to(device)
        assert len(x) == BATCH // n
        loss = nn.functional.mse_loss(model(x), x[:, :8].tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / n
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


# --8<-- [start:save]
def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every rank writes its shards of parameters and moments; rank 0 the metadata, last."""
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id="checkpoint")


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill a model and an optimizer, sharded in whatever way they are, from the checkpoint."""
    parameters, moments = get_state_dict(model, optimizer)  # where each row is wanted
    state = {"model": parameters, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return state["step"]


# --8<-- [end:save]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of every bit of the whole parameters, both moments and the step counts."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


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
    if "LOCAL_RANK" not in os.environ or sys.argv[1:] not in (["save"], ["load"]):
        sys.exit("start this with: torchrun --nproc-per-node=4 checkpoint_reshard.py save|load")
    if sys.argv[1] == "load" and not Path("checkpoint/.metadata").exists():
        sys.exit("there is no checkpoint here: run it with `save` first")
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(seed=0 if sys.argv[1] == "save" else 99, device=device)
    rest = range(SAVED_AT, LAST)
    lines = []
    if sys.argv[1] == "save":
        train(model, optimizer, range(SAVED_AT))
        save(model, optimizer, SAVED_AT)
        saved = digest(model, optimizer)
        losses = train(model, optimizer, rest)  # what an uninterrupted run does next
        reference = {"digest": saved, "end": whole(model), "losses": losses}
        if rank == 0:
            torch.save(reference, "reference.pt")
            for file in sorted(Path("checkpoint").iterdir()):
                kind = "metadata" if file.name == ".metadata" else "shards of one rank"
                lines.append(f"  {file.name:14} {kind}")
        model, optimizer = build(seed=99, device=device)
    else:
        reference = torch.load("reference.pt")

    step = load(model, optimizer)
    assert digest(model, optimizer) == reference["digest"]
    rows = tuple(model.up.weight.to_local().shape)
    ranks = "1 rank" if n == 1 else f"{n} ranks"
    lines.append(f"{ranks} loaded step {step}: equal bit for bit; up.weight on rank 0 {rows}")
    losses = train(model, optimizer, rest)
    bits = all(map(torch.equal, whole(model), reference["end"]))
    for ours, truth in zip(whole(model), reference["end"], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    if sys.argv[1] == "save":
        assert bits and losses == reference["losses"]
    lines.append("went on   " + "  ".join(f"{loss:.4f}" for loss in losses))
    lines.append("expected  " + "  ".join(f"{loss:.4f}" for loss in reference["losses"]))
    same = "bit for bit" if sys.argv[1] == "save" else "up to rounding"
    lines.append(f"parameters after step {LAST}: equal {same}")
    if rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
