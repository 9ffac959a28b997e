"""DistributedDataParallel in ten lines: broadcast once, all-reduce every gradient, divide.

Every rank holds the whole model and a shard of the batch. If all ranks start from the same
parameters and apply the same averaged gradient, they stay the same for ever, and the same as
one process that sees the whole batch. The program trains both and compares.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

BATCH, STEPS = 240, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it


class NaiveDDP(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():  # parameters and saved buffers
            dist.broadcast(tensor, src=0)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Call before the step; backward must have reached all that trains."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # others would wait for it
                    raise RuntimeError(f"no gradient in this backward for {name}")
                dist.all_reduce(parameter.grad)  # the sum over ranks, in place
                parameter.grad /= dist.get_world_size()


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
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)  # on purpose: every rank starts from different weights
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)
    ).to(device)
    model.register_buffer("origin", torch.tensor(rank, device=device))
    ddp = NaiveDDP(model)
    alone = copy.deepcopy(model)  # one process with the whole batch
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.9)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=1.0, momentum=0.9)

    rows = []  # that this rank computes with
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    torch.manual_seed(1234)  # the same data on every rank
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64).to(device)
        targets = inputs[:, :8].tanh()

        shard = slice(rank * BATCH // n, (rank + 1) * BATCH // n)
        loss = nn.functional.mse_loss(ddp(inputs[shard]), targets[shard])
        optimizer.zero_grad()
        loss.backward()
        ddp.average_gradients()
        optimizer.step()

        loss_alone = nn.functional.mse_loss(alone(inputs), targets)
        optimizer_alone.zero_grad()
        loss_alone.backward()
        optimizer_alone.step()

        mean_loss = loss.detach() / n
        dist.all_reduce(mean_loss)  # for the report only
        if rank == 0:
            print(f"step {step}: loss {mean_loss.item():.4f}, alone {loss_alone.item():.4f}")

    assert rows == [BATCH // n] * STEPS  # its shard, no more
    assert model.origin.item() == 0  # rank 0's buffers have won too
    for ours, truth in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, truth)
    if rank == 0:
        count = len(list(ddp.parameters()))
        print(f"{count} all-reduces per step, one for each parameter tensor")
        print(f"world size {n}, parameters after {STEPS} steps: equal to one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
