"""A communication hook replaces the all-reduce of a bucket, and can send fewer bytes.

A hook gets a GradBucket and returns a Future of the averaged gradient. The table shows how many
bytes each rank gives to all_reduce per step, and how much each hook changes the training.
PowerSGD follows Vogels, Karimireddy and Jaggi (2019): with rank r it sends r(n + m) numbers for
an n × m matrix. Then the program counts how many sums were rounded more than once in bf16.

Run it with more than two ranks. With two ranks, a hook that divides by two instead of the
number of ranks gives the same result, and a sum is rounded only once.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH, STEPS = 128, 40


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


# DDP accepts a hook without annotations, but refuses a hook with other annotations
def our_bf16_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send the bucket in bfloat16. `group` is the state given to register_comm_hook."""
    small = bucket.buffer().to(torch.bfloat16)
    small.div_(dist.get_world_size(group))  # DDP leaves the averaging to the hook
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    # `then` runs when the sum has arrived; meanwhile backward continues
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def torchs_bf16_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook under a different name: DDP refuses its name where there is no CUDA."""
    return default_hooks.bf16_compress_hook(group, bucket)


@contextmanager
def counted_all_reduce() -> Iterator[list[int]]:
    """Record the bytes of each tensor that a hook gives to dist.all_reduce."""
    sent, original = [], dist.all_reduce

    def counting(tensor: torch.Tensor, *args, **kwargs):
        assert kwargs["async_op"]  # backward does not wait for it
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield sent
    finally:
        dist.all_reduce = original


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 8),
    ).to(device)


def train(
    hook: Callable, state: object, device: torch.device
) -> tuple[int, float, torch.Tensor]:
    """Train; return the bytes of the last step, the loss over all data, and the parameters."""
    model = DDP(make_model(device))
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, WIDTH, generator=generator).to(device)
    y = torch.tanh(x @ torch.randn(WIDTH, 8, generator=generator).to(device) / 4)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    rows = torch.tensor(len(x[mine]), device=device)
    dist.all_reduce(rows)
    assert rows == len(x)  # the ranks share the data: each row is on one rank
    for _ in range(STEPS):
        optimizer.zero_grad()
        with counted_all_reduce() as sent:
            F.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = F.mse_loss(model.module(x), y).item()
        parameters = torch.cat([p.flatten() for p in model.module.parameters()])
    return sum(sent), loss, parameters


def powersgd_bytes(model: nn.Module, rank: int) -> int:
    """Theory: r(n + m) floats if that is less than half of n × m, otherwise n × m floats."""
    total = 0
    for p in model.parameters():
        n, m = p.shape[0], p.numel() // p.shape[0]
        r = min(n, m, rank)
        total += 4 * (r * (n + m) if 2 * r * (n + m) < n * m else n * m)
    return total


def rounded_repeatedly(device: torch.device, size: int = 100_000) -> float:
    """Sum bf16 numbers over the ranks; return the fraction that one rounding cannot explain."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.randn(size, generator=torch.Generator().manual_seed(rank)).bfloat16()
    exact, magnitude = mine.double().to(device), mine.double().abs().to(device)
    total = mine.to(device)
    for tensor in (exact, magnitude, total):
        dist.all_reduce(tensor)  # float64 represents these sums exactly
    # an addition in bf16 rounds by at most 2^-8 of its result, and there are N - 1 additions
    roundings = (n - 1) * 2**-8 / (1 - (n - 1) * 2**-8)
    assert ((total - exact).abs() <= roundings * magnitude).all()
    return (total != exact.bfloat16()).double().mean().item()


def main() -> None:
    device = init_distributed()
    report = print if dist.get_rank() == 0 else lambda *_: None
    initial = torch.cat([p.flatten() for p in make_model(device).parameters()]).detach()

    def power(rank: int) -> PowerSGDState:
        # the first two steps are not compressed, because DDP forms new buckets in them
        return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    world = dist.group.WORLD
    hooks = {
        "fp32": (default_hooks.allreduce_hook, world),
        "fp16": (default_hooks.fp16_compress_hook, world),
        "bf16": (torchs_bf16_hook, world),
        "bf16, ours": (our_bf16_hook, world),
    }
    # if torch finds a GPU, PowerSGD's hook fails for buckets on the CPU
    fits = device.type != "cpu" or not torch.cuda.is_available()
    if fits:
        hooks |= {f"PowerSGD {rank}": (powerSGD_hook, power(rank)) for rank in (1, 4, 16)}
    torchs = default_hooks.bf16_compress_hook
    with mock.patch.object(default_hooks, "bf16_compress_hook", wraps=torchs) as counter:
        results = {name: train(*hook, device) for name, hook in hooks.items()}
    assert counter.called

    plain_bytes, _, plain = results["fp32"]
    assert plain_bytes == 4 * plain.numel()
    report(f"{STEPS} steps   bytes/step  of fp32   loss  parameters differ by")
    for name, (sent, loss, parameters) in results.items():
        # as a fraction of the distance that fp32 training moved the parameters
        far = 100 * ((parameters - plain).norm() / (plain - initial).norm()).item()
        share = sent / plain_bytes
        report(f"{name:11} {sent:8,}    {share:.3f}  {loss:.4f}  ≈{far:.2g}% of the way")
        if name.startswith("PowerSGD"):
            assert sent == powersgd_bytes(make_model(device), int(name.split()[1]))
    assert torch.equal(results["bf16"][2], results["bf16, ours"][2])
    theory = "PowerSGD's bytes = theory" if fits else "PowerSGD fails on a CPU beside a GPU"
    report(f"our bf16 hook = torch's, bit for bit; {theory}")

    differ = rounded_repeatedly(device)
    assert differ == 0 or dist.get_world_size() > 2  # a single addition is rounded only once
    report(f"bf16 sums that differ from the exact sum, rounded once: ≈{100 * differ:.0f}%")

    # range: the largest fp16 number is 65504, and the hooks cast before they divide by N
    report("an element of the gradient is 100000 on every rank; the hooks make of it:")

    def made_of(element: float, hook: Callable) -> float:
        model = DDP(nn.Linear(1, 1, bias=False).to(device))
        model.register_comm_hook(world, hook)
        model(torch.full((1, 1), element, device=device)).sum().backward()
        return model.module.weight.grad.item()

    for name in ("fp16", "bf16"):
        report(f"  {name}: {made_of(1e5, hooks[name][0]):.0f}")
    assert math.isclose(made_of(1e5, default_hooks.allreduce_hook), 1e5, rel_tol=1e-6)  # fp32
    # 3e38 is close to the largest bf16 number: a sum before the division would overflow
    assert math.isclose(made_of(3e38, our_bf16_hook), 3e38, rel_tol=0.01)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
