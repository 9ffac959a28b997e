"""A checkpoint of 4 ranks is loaded by 4 ranks, by 2 ranks and by 1 rank, bit for bit.

Each rank writes its own shards. One metadata file records which rows of which tensor are in
which file. A rank that loads asks the metadata which files have its rows, so the number of
ranks may change. The program proves two statements:

- Parameters, both Adam moments and step counts are equal bit for bit on any number of ranks.
  The learning rate is that of the save, too.
- Training continues bit for bit on the same number of ranks. On a different number of ranks it
  continues up to rounding, because the gradient is then a sum of different partial sums.

Look at the number of rows of up.weight on rank 0, and compare the losses below each other.
"""

import hashlib
import math
import os
import sys
from pathlib import Path
from unittest import mock

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
RATE = 1e-2  # learning rate before the save


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
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on this rank's part of each batch. Return the losses of the whole batches."""
    rank, n = dist.get_rank(), dist.get_world_size()
    device, losses = next(model.parameters()).device, []
    for step in steps:
        torch.manual_seed(1000 + step)  # the batch depends only on the step
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
    """Write this rank's shards of parameters and moments. Rank 0 writes the metadata last."""
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id="checkpoint")


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill a sharded model and its optimizer from the checkpoint. Return the step."""
    parameters, moments = get_state_dict(model, optimizer)  # tensors for the rows of this rank
    state = {"model": parameters, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return state["step"]


# --8<-- [end:save]


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return four hashes: of all parameters, of all step counts, and of both moments."""
    hashes = {kind: hashlib.sha256() for kind in ("value", "step", "exp_avg", "exp_avg_sq")}
    for parameter in model.parameters():
        for kind, tensor in {"value": parameter, **optimizer.state[parameter]}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            hashes[kind].update(whole.detach().cpu().numpy().tobytes())
    result = {kind: each.hexdigest() for kind, each in hashes.items()}
    assert hashlib.sha256().hexdigest() not in result.values()  # each kind was hashed
    return result


def whole(model: nn.Module) -> list[torch.Tensor]:
    """A copy of every parameter, gathered from all ranks."""
    return [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


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
    if "LOCAL_RANK" not in os.environ or sys.argv[1:] not in (["save"], ["load"]):
        sys.exit("start this with: torchrun --nproc-per-node=4 checkpoint_reshard.py save|load")
    if sys.argv[1] == "load" and not Path("checkpoint/.metadata").exists():
        sys.exit("there is no checkpoint here: run it with `save` first")
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(seed=0 if sys.argv[1] == "save" else 99, device=device)
    rest = range(SAVED_AT, LAST)
    lines = []
    if sys.argv[1] == "save":
        train(model, optimizer, range(SAVED_AT))
        optimizer.param_groups[0]["lr"] = RATE / 2  # as a schedule does
        save(model, optimizer, SAVED_AT)
        saved = digests(model, optimizer)
        losses = train(model, optimizer, rest)  # what an uninterrupted run does next
        reference = {"ranks": n, "saved": saved, "end": whole(model), "losses": losses}
        if rank == 0:
            torch.save(reference, "reference.pt")
            pieces = dcp.FileSystemReader("checkpoint").read_metadata().storage_data.items()
            rows = {piece.relative_path: tensor.offset[0] for tensor, piece in pieces
                    if tensor.fqn == "model.up.weight"}  # fmt: skip
            assert rows == {f"__{r}_0.distcp": r * 4 * WIDTH // n for r in range(n)}
            for file in sorted(Path("checkpoint").iterdir()):
                content = f"up.weight from row {rows.get(file.name)}, and more shards"
                is_metadata = file.name == ".metadata"
                lines.append(f"  {file.name:14} {'metadata' if is_metadata else content}")
        model, optimizer = build(seed=99, device=device)
    else:
        reference = torch.load("reference.pt")

    assert not torch.equal(whole(model)[0], reference["end"][0])  # this is a new model
    read = dcp.FileSystemReader.read_data
    with mock.patch.object(dcp.FileSystemReader, "read_data", autospec=True) as reader:
        reader.side_effect = read
        step = load(model, optimizer)
    elements = [math.prod(x.lengths) for call in reader.mock_calls for x in call.args[1].items]
    own = sum(3 * parameter.to_local().numel() + 1 for parameter in model.parameters())
    assert sum(elements) == own  # values and moments of its own rows, and the step counts
    assert step == SAVED_AT and digests(model, optimizer) == reference["saved"]
    assert optimizer.param_groups[0]["lr"] == RATE / 2  # only set_state_dict sets it
    rows = tuple(model.up.weight.to_local().shape)
    ranks = "1 rank" if n == 1 else f"{n} ranks"
    lines.append(f"{ranks} loaded step {step}: equal bit for bit; up.weight on rank 0 {rows}")
    losses = train(model, optimizer, rest)
    bits = all(map(torch.equal, whole(model), reference["end"]))
    for ours, truth in zip(whole(model), reference["end"], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    # with a different number of ranks, different partial sums change the last bits
    assert bits == (n == reference["ranks"])
    assert losses == reference["losses"] or not bits
    lines.append("continued " + "  ".join(f"{loss:.4f}" for loss in losses))
    lines.append("expected  " + "  ".join(f"{loss:.4f}" for loss in reference["losses"]))
    same = "bit for bit" if bits else "up to rounding"
    lines.append(f"parameters after step {LAST}: equal {same}")
    if rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
