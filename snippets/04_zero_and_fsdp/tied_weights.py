"""Tied weights stay tied under fully_shard only if both modules are in the same unit.

The embedding and the output layer of a language model often share one matrix. fully_shard
replaces the parameters of one unit at a time. With two units, each unit gets its own shard of
the matrix. torch 2.12 and newer refuse to run such a model. torch 2.11 trains two separate
matrices without any warning. Look at Ψ: it grows by one matrix.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

BATCH, LENGTH, VOCABULARY, H, STEPS = 24, 8, 64, 32, 5  # 1, 2, 3 and 4 ranks divide the batch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, H)
        self.block = nn.Linear(H, H)
        self.head = nn.Linear(H, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # [V, h], one matrix for both

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(self.embed(tokens))))


def unsharded(model: Tied, mesh: DeviceMesh) -> None:
    pass


def cut_apart(model: Tied, mesh: DeviceMesh) -> None:
    for module in (model.embed, model.block, model.head, model):
        fully_shard(module, mesh=mesh)


def kept_together(model: Tied, mesh: DeviceMesh) -> None:
    fully_shard(model.block, mesh=mesh)
    fully_shard([model.embed, model.head], mesh=mesh)  # one unit of two modules
    fully_shard(model, mesh=mesh)


def train(model: Tied, tokens: torch.Tensor) -> tuple[list[float], float]:
    """Return the loss of each SGD step as a mean over ranks, and this rank's last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])  # [b, s, V]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses, loss.item()


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
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH)).to(device)
    truth: list[float] = []
    for shard in (unsharded, cut_apart, kept_together):
        torch.manual_seed(1)
        model = Tied().to(device)
        shard(model, mesh)
        alone = shard is unsharded
        parameters = sum(p.numel() for p in model.parameters())
        tied = model.embed.weight is model.head.weight
        assert isinstance(model.embed, FSDPModule) == (shard is not unsharded)
        if rank == 0:
            print(f"{shard.__name__}: tied {tied}, Ψ = {parameters:,}")
        try:
            losses, own = train(model, tokens if alone else tokens[rank::n])
        except ValueError as error:
            assert shard is cut_apart and not tied
            if rank == 0:
                print("  " + str(error).replace(". ", ".\n  "))
            continue
        assert (abs(own - losses[-1]) < 1e-5) == alone or n == 1
        truth = truth or losses
        equal = all(abs(ours - right) < 1e-4 for ours, right in zip(losses, truth, strict=True))
        assert tied == equal == (shard is not cut_apart)
        if rank == 0:
            print("  losses", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
