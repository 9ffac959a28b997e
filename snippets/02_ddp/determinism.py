"""The same seed and the same number of ranks give the same bits; another number does not.

Every launch trains on the same global batches from the same start, and compares its parameters
with the launches before it. With another number of ranks the gradients are the same sums, but
the additions have a different order, so the last bits differ. Two checks show that this is all
that differs: one process that uses no DDP agrees with every launch up to rounding, and in
float64 the difference shrinks as the rounding does.

The lines about dropout show why each rank needs a seed of its own for random masks.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, STEPS = 48, 20


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


def make_model(seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def global_batches(dtype: torch.dtype, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The inputs and targets of every step. They are the same for every number of ranks."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = (torch.randn(ROWS, width, generator=generator) for width in (32, 8))
        yield [x.to(device, dtype), y.to(device, dtype)]


def train(seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Train with DDP, each rank on its shard of the global batches; return the parameters."""
    model = DDP(make_model(seed, device).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = []  # the number of rows that this rank computes with, for each step
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for x, y in global_batches(dtype, device):
        optimizer.zero_grad()
        F.mse_loss(model(x.chunk(n)[rank]), y.chunk(n)[rank]).backward()
        optimizer.step()
    assert rows == [ROWS // n] * STEPS  # its shard, no more
    return flat(model)


def train_alone(seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same training in one process, without DDP and without an optimizer."""
    model = make_model(seed, device).to(dtype)
    for x, y in global_batches(dtype, device):
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return flat(model)


def different_on_ranks(tensor: torch.Tensor, device: torch.device) -> int:
    """Return the number of distinct tensors on the ranks, which is 1 if all are equal."""
    tensor = tensor.to(device)
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return len({tuple(other.tolist()) for other in everyones})


def describe(difference: torch.Tensor) -> str:
    largest = difference.abs().max().item()
    return "bit-equal" if largest == 0 else f"largest difference ≈{largest:.0e}"


def main() -> None:
    if ROWS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the batch of {ROWS} rows must divide among the ranks")
    device = init_distributed()
    # Ask for deterministic kernels. An operation that has none, such as put_, then raises.
    torch.use_deterministic_algorithms(True)
    with suppress(RuntimeError):
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        raise AssertionError("put_ raised nothing")
    rank, n = dist.get_rank(), dist.get_world_size()
    report = print if rank == 0 else lambda *_, **__: None

    assert describe(torch.tensor([-2.0, 1.0])) == "largest difference ≈2e+00"
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        parameters = train(0, dtype, device)
        again = describe(train(0, dtype, device) - parameters)
        report(f"{name}, N = {n}, trained again in this process: {again}")
        torch.testing.assert_close(parameters, train_alone(0, dtype, device))
        assert not torch.allclose(parameters, train(1, dtype, device))  # another seed shows
        for earlier in sorted(Path().glob(f"{name}_*.pt")):
            difference = torch.load(earlier, weights_only=True) - parameters
            launch = f"the launch with N = {earlier.stem[-1]}"
            report(f"{name}, N = {n}, compared with {launch}: {describe(difference)}")
        dist.barrier()  # all ranks have read the files before rank 0 writes
        if rank == 0:
            torch.save(parameters, f"{name}_{n}.pt")

    # A seed per rank does no harm to the parameters: DDP broadcasts those of rank 0.
    model = make_model(seed=rank, device=device)
    before = different_on_ranks(flat(model), device)
    model = DDP(model)
    after = different_on_ranks(flat(model), device)
    report(f"one seed per rank: {before} different models before DDP, {after} after it")
    assert (before, after) == (n, 1)
    assert torch.equal(flat(model), flat(make_model(0, device)))  # rank 0 had this seed

    # Dropout needs different seeds: with one seed, every rank drops the same units.
    ones = torch.ones(1000, device=device)
    torch.manual_seed(0)
    masks = different_on_ranks(F.dropout(ones), device)
    report(f"dropout after manual_seed(0): different masks on {n} ranks: {masks}")
    assert masks == 1
    torch.manual_seed(0 + rank)
    masks = different_on_ranks(F.dropout(ones), device)
    report(f"dropout after manual_seed(0 + rank): different masks on {n} ranks: {masks}")
    assert masks == n


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
