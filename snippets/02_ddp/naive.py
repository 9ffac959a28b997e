"""The simplest DDP: broadcast once, then all-reduce every gradient and divide by N.

Every rank has the whole model and a shard of the batch. All ranks start from the same
parameters and apply the same averaged gradient, so their parameters stay equal. They also equal
the parameters of one process that trains on the whole batch. The program trains both, prints
both losses in each step, and compares the parameters at the end.
"""

import copy
import os
import sys
from unittest import mock

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
        """Replace each gradient by its mean over the ranks. Call this before the optimizer."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # the other ranks would wait for this rank
                    raise RuntimeError(f"no gradient in this backward pass for {name}")
                dist.all_reduce(parameter.grad)  # the sum over all ranks, in place
                parameter.grad /= dist.get_world_size()


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

    torch.manual_seed(rank)  # on purpose: every rank starts with different parameters
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)
    ).to(device)
    model.register_buffer("origin", torch.tensor(rank, device=device))
    start = model[0].weight.detach().clone()
    ddp = NaiveDDP(model)
    # The other ranks have received the parameters of rank 0.
    assert torch.equal(start, model[0].weight) == (rank == 0)
    reference = copy.deepcopy(model)  # trained by one process on the whole batch
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.9)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=1.0, momentum=0.9)

    rows = []  # the number of samples in each forward of this rank
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    torch.manual_seed(1234)  # the same data on every rank
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64).to(device)
        targets = inputs[:, :8].tanh()

        shard = slice(rank * BATCH // n, (rank + 1) * BATCH // n)
        loss = nn.functional.mse_loss(ddp(inputs[shard]), targets[shard])
        optimizer.zero_grad()
        loss.backward()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counter:
            ddp.average_gradients()
        optimizer.step()

        reference_loss = nn.functional.mse_loss(reference(inputs), targets)
        reference_optimizer.zero_grad()
        reference_loss.backward()
        reference_optimizer.step()

        mean_loss = loss.detach() / n
        dist.all_reduce(mean_loss)  # only for the printed line
        if rank == 0:
            print(
                f"step {step}: loss {mean_loss.item():.4f} with DDP, "
                f"{reference_loss.item():.4f} in one process"
            )

    assert rows == [BATCH // n] * STEPS  # this rank computed its shard only
    assert model.origin.item() == 0  # the buffers are those of rank 0, too
    for ours, expected in zip(ddp.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    model[2].bias.grad = None
    try:
        ddp.average_gradients()
    except RuntimeError as error:
        assert str(error).endswith("for 2.bias")
    else:
        raise AssertionError("a missing gradient did not raise an error")
    model[2].bias.requires_grad_(False)
    ddp.average_gradients()  # raises no error: a frozen parameter is skipped
    if rank == 0:
        print(f"{counter.call_count} all-reduces per step, one for each parameter tensor")
        print(f"world size {n}, parameters after {STEPS} steps: equal to one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
