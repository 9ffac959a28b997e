"""DDP with hooks: all-reduce each gradient as soon as it is ready, during the backward pass.

`register_post_accumulate_grad_hook` registers a function that autograd calls when it has
written the `.grad` of a parameter. Our function starts an asynchronous all-reduce and returns,
so the communication runs while backward computes the other gradients. `wait` comes before the
optimizer, which needs the sums.

In the output, compare the order in which the parameters are defined with the order in which
their gradients become ready. Backward starts with the layer that forward used last. In this
model, `head` is defined first and used last, so its gradient is ready first.
"""

import os
import sys
import time
from functools import partialmethod
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

BATCH, STEPS = 240, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it


class HookedDDP(nn.Module):
    """In each backward pass, every parameter that requires a gradient must get one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.in_flight: dict[nn.Parameter, dist.Work] = {}
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.launch)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def launch(self, parameter: nn.Parameter) -> None:
        if parameter in self.in_flight:  # a second backward pass changed a gradient being sent
            raise RuntimeError("call wait() after each backward")
        # Collectives have no names. The third all-reduce of one rank is combined with the third
        # of every other rank. So all ranks must run the same layers in the same order.
        self.in_flight[parameter] = dist.all_reduce(parameter.grad, async_op=True)

    def wait(self) -> None:
        """Wait for all sums and divide them by N. Call this before the optimizer."""
        missing = [name for p, name in self.names.items() if p not in self.in_flight]
        for parameter, work in self.in_flight.items():
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.in_flight.clear()
        if missing:
            raise RuntimeError(f"no gradient in this backward pass for {', '.join(missing)}")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 8)
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


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

    torch.manual_seed(rank)
    model = Network().to(device)
    start = model.first.weight.detach().clone()
    ddp = HookedDDP(model)
    assert torch.equal(start, model.first.weight) == (rank == 0)  # rank 0 keeps its weights
    reference = Network().to(device)  # trained by one process on the whole batch
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.9)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=1.0, momentum=0.9)

    rows = []  # the number of samples in each forward of this rank
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    launched = []  # the number of all-reduces in this step when each gradient is ready
    for parameter in ddp.names:
        parameter.register_post_accumulate_grad_hook(
            lambda _: launched.append(counter.call_count)
        )
    waits = mock.Mock(side_effect=dist.Work.wait)
    torch.manual_seed(1234)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64).to(device)
        targets = inputs[:, :8].tanh()

        shard = slice(rank * BATCH // n, (rank + 1) * BATCH // n)
        # --8<-- [start:traced]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs[shard]), targets[shard])
        if rank == n - 1:
            time.sleep(0.05)  # the other ranks have launched everything by then, and must wait
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counter,
            mock.patch.object(dist.Work, "wait", partialmethod(waits)),
        ):
            loss.backward()
            if step == 0 and rank == 0:
                ready = [ddp.names[parameter] for parameter in ddp.in_flight]
                print("defined: " + ", ".join(ddp.names.values()))
                print("ready:   " + ", ".join(ready))
                print(f"{counter.call_count} all-reduces were launched during backward")
            assert not waits.called  # no hook waits for an all-reduce
            ddp.wait()
        assert waits.call_count == 6
        waits.reset_mock()
        optimizer.step()
        # --8<-- [end:traced]

        reference_optimizer.zero_grad()
        nn.functional.mse_loss(reference(inputs), targets).backward()
        reference_optimizer.step()

    assert rows == [BATCH // n] * STEPS  # this rank computed its shard only
    assert launched == [1, 2, 3, 4, 5, 6] * STEPS  # each gradient was sent at once
    for ours, expected in zip(ddp.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)

    assert not HookedDDP(nn.Linear(2, 2).to(device).requires_grad_(False)).names  # all frozen

    def first_alone() -> None:
        model.first(inputs[shard]).sum().backward()  # no gradient for `head` and `second`

    for mistake, message in (
        (ddp.wait, "no gradient in this backward pass for head.weight, head.bias, second"),
        (first_alone, "call wait() after each backward"),
    ):
        first_alone()
        try:
            mistake()
        except RuntimeError as error:
            assert message in str(error)
        else:
            raise AssertionError(f"this error was not raised: {message}")
    for work in ddp.in_flight.values():
        work.wait()
    if rank == 0:
        print(f"world size {n}, parameters after {STEPS} steps: equal to one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
