"""Samples per second of every version of DDP in this chapter, including PyTorch's.

Without communication, each rank trains alone: this is the upper limit. The versions are one
blocking all-reduce per parameter after backward, one asynchronous all-reduce per parameter
during backward, `MiniDDP` with buckets, and PyTorch's DDP. They take turns, one step each, so
that a slow second of the machine affects all of them. The program prints the median of a few
rounds. In the output, compare the versions with the upper limit and with each other.
"""

import copy
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64  # per rank
ROUNDS = 3
BUCKET_MB = 4
MIB = 2**20


class Alone(nn.Module):
    """No communication: the upper limit. The result is wrong."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def after_backward(self) -> None:
        pass


class Naive(Alone):
    """One blocking all-reduce per parameter, after backward (naive.py)."""

    def after_backward(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Hooked(Alone):
    """One asynchronous all-reduce per parameter, during backward (hooks.py)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.in_flight = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter: nn.Parameter) -> None:
        self.in_flight.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def after_backward(self) -> None:
        for parameter, work in self.in_flight:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.in_flight.clear()


class MiniDDP(Alone):
    """Buckets, views and overlap (mini_ddp.py), without the checks and `no_sync`."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float) -> None:
        super().__init__(module)
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(list(module.parameters())):
            if sum(p.nbytes for p in groups[-1]) >= bucket_cap_mb * MIB:
                groups.append([])
            groups[-1].append(parameter)
        self.flats, self.place = [], {}
        for number, group in enumerate(groups):
            lengths = [p.numel() for p in group]
            self.flats.append(torch.zeros(sum(lengths), device=group[0].device))
            for parameter, view in zip(group, self.flats[-1].split(lengths), strict=True):
                self.place[parameter] = number, view.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        self.sizes = [len(group) for group in groups]
        self.waiting, self.works = self.sizes.copy(), []

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        number, view = self.place[parameter]
        torch.mul(parameter.grad, 1 / dist.get_world_size(), out=view)
        parameter.grad = view
        self.waiting[number] -= 1
        while len(self.works) < len(self.flats) and self.waiting[len(self.works)] == 0:
            work = dist.all_reduce(self.flats[len(self.works)], async_op=True)
            self.works.append(work)

    def after_backward(self) -> None:
        for work in self.works:
            work.wait()
        self.waiting, self.works = self.sizes.copy(), []


class TorchDDP(Alone):
    """PyTorch's DDP. Its `backward` returns when all gradients are averaged."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float) -> None:
        super().__init__(
            DistributedDataParallel(
                module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
            )
        )


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


def trainer(model: Alone, inputs: torch.Tensor) -> Callable[[], float]:
    """Return a function that trains for one step and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> float:
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        model.after_backward()
        optimizer.step()
        dist.barrier()  # a step lasts until the slowest rank has finished
        return time.perf_counter() - begin

    return run


def check_clock() -> None:
    """The clock starts after a barrier, and stops after the communication and a barrier."""
    model, events = Alone(nn.Linear(2, 2)), []

    def noted(owner: object, name: str) -> mock._patch:
        call = getattr(owner, name)

        def note(*arguments: object) -> object:
            events.append(name)
            return call(*arguments)

        return mock.patch.object(owner, name, note)

    run = trainer(model, torch.ones(1, 2))
    with (
        noted(dist, "barrier"),
        noted(time, "perf_counter"),
        noted(model, "forward"),
        noted(model, "after_backward"),
    ):
        run()
    step = ["forward", "after_backward"]
    assert events == ["barrier", "perf_counter", *step, "barrier", "perf_counter"]


def main() -> None:
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    torch.manual_seed(rank)
    inputs = torch.rand(BATCH, 512, device=device)

    def fresh() -> nn.Module:
        return copy.deepcopy(model)

    models = {
        "no communication": Alone(fresh()),
        "naive": Naive(fresh()),
        "per-parameter hooks": Hooked(fresh()),
        "MiniDDP": MiniDDP(fresh(), BUCKET_MB),
        "torch DDP": TorchDDP(fresh(), BUCKET_MB),
    }
    runs = {name: trainer(model, inputs) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    check_clock()
    calls = []  # of dist.all_reduce in a step; PyTorch's DDP calls the C++ function instead
    for run in runs.values():  # warm up, and let PyTorch's DDP fill its buckets again
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
            run()
        calls.append(spy.call_count)
    assert calls == [0, 24, 24, 3, 0]
    for _ in range(ROUNDS):
        for name, run in runs.items():
            seconds[name].append(run())

    truth = list(models["torch DDP"].parameters())
    for name in ("naive", "per-parameter hooks", "MiniDDP"):
        for ours, theirs in zip(models[name].parameters(), truth, strict=True):
            torch.testing.assert_close(ours, theirs)
    alone = models["no communication"].parameters()  # each rank has learned its own data
    assert n == 1 or not all(map(torch.equal, alone, truth))
    rows = torch.tensor(len(inputs), device=device)
    dist.all_reduce(rows)

    if rank == 0:
        size = sum(p.nbytes for p in truth) / MIB
        print(
            f"{n} ranks, {size:.1f} MiB of gradients in {len(truth)} tensors; all results equal"
        )
        speed = {name: n * BATCH / statistics.median(times) for name, times in seconds.items()}
        for name, samples in speed.items():
            assert math.isclose(samples * statistics.median(seconds[name]), rows.item())
            print(f"{name:>20}: ≈{samples:.0f} samples/s")
        print(f"MiniDDP / torch DDP: ≈{speed['MiniDDP'] / speed['torch DDP']:.2f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
