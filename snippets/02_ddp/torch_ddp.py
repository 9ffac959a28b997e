"""PyTorch's `DistributedDataParallel` (DDP) equals one process, and logs how it forms buckets.

The loss of every step equals the loss of one process with the whole batch. Then the log of DDP
shows its buckets. During the first backward, all gradients are in one bucket. After it, DDP
forms new buckets that follow the order in which the gradients became ready. The layers of this
model are defined in the opposite order of their use, so DDP cannot guess this order from the
definition.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS = 240, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it


class Upside(nn.Module):
    """Four layers that are defined in the reverse order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 8)
        self.third = nn.Linear(256, 256)
        self.second = nn.Linear(256, 256)
        self.first = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = layer(x).relu()
        return self.head(x)


def wrap(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        # A bucket is closed when it has this many MiB. The default is 25, and 1 for the first.
        bucket_cap_mb=0.25,
        # .grad is a view into the bucket. This saves 4Ψ bytes (fp32) and the copy back.
        gradient_as_bucket_view=True,
        # You promise that every step uses the same parameters in the same way. DDP then
        # learns in the first step which parameters are unused, and it allows reentrant
        # activation checkpointing.
        static_graph=True,
        # Not set here: forward_sync_buffers=False (new in torch 2.13) stops the broadcast of
        # rank 0's buffers before a forward. The deprecated broadcast_buffers=False also
        # excludes them from the broadcast in the constructor. device_ids=[local_rank] would
        # move the inputs to the accelerator; this program moves them itself.
    )


def describe_buckets(ddp: DistributedDataParallel) -> None:
    """Print the buckets before and after the first backward, from the log of DDP."""
    log = ddp._get_ddp_logging_data()  # private, but the documentation uses it
    names = [name for name, _ in ddp.module.named_parameters()]

    def named(indices: str) -> str:
        return ", ".join(names[int(i)] for i in indices.replace(",", " ").split())

    print(f"first backward: a single bucket of {int(log['bucket_sizes']) / 1024:.1f} KiB")
    print(f"gradients came: {named(log['prev_iteration_grad_ready_order_indices'])}")
    sizes = log["rebuilt_bucket_sizes"].split(", ")
    contents = log["rebuilt_per_bucket_param_indices"].split(", ")
    stored = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
    assert len(stored) == len(sizes)  # the gradients are views into the buckets
    assert log.get("static_graph")
    for size, indices in zip(sizes, contents, strict=True):
        print(f"since then:     {int(size) / 1024:.1f} KiB with {named(indices)}")


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


def train(model: nn.Module, shard: slice, device: torch.device) -> list[torch.Tensor]:
    """Train on a shard of every batch; return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    generator = torch.Generator().manual_seed(1234)  # the same batches on every rank
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 64, generator=generator)[shard].to(device)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :8].tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    alone = Upside().to(device)
    torch.manual_seed(rank)  # different weights on every rank; DDP broadcasts those of rank 0
    ddp = wrap(Upside().to(device))

    rows = []  # the number of samples in each forward of this rank
    ddp.module.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    losses = torch.stack(train(ddp, slice(rank * BATCH // n, (rank + 1) * BATCH // n), device))
    dist.all_reduce(losses)
    assert rows == [BATCH // n] * STEPS  # this rank computed its own shard and nothing else
    losses_alone = torch.stack(train(alone, slice(0, BATCH), device))
    torch.testing.assert_close(losses / n, losses_alone)

    if rank == 0:
        print("DDP:         " + " ".join(f"{loss:.4f}" for loss in (losses / n).tolist()))
        print("one process: " + " ".join(f"{loss:.4f}" for loss in losses_alone.tolist()))
        describe_buckets(ddp)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
