"""What is bit-equal between runs and what is not; and one seed per rank for dropout.

The same seed and the same N give the same bits, in this process and in the next launch. Another
N adds the same numbers up in another order, so the last bits differ. Same global batch and same
start everywhere below.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, STEPS = 48, 20


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


def make_model(seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def train(seed: int, device: torch.device) -> torch.Tensor:
    """Train with DDP on the same global batches for every N; return the parameters."""
    model = DDP(make_model(seed, device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = []  # that this rank computes with
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for _ in range(STEPS):
        x = torch.randn(ROWS, 32, generator=generator).to(device)
        y = torch.randn(ROWS, 8, generator=generator).to(device)
        optimizer.zero_grad()
        F.mse_loss(model(x.chunk(n)[rank]), y.chunk(n)[rank]).backward()
        optimizer.step()
    assert rows == [ROWS // n] * STEPS  # its shard, no more
    return flat(model)


def same_on_all_ranks(tensor: torch.Tensor, device: torch.device) -> bool:
    tensor = tensor.to(device)
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return all(torch.equal(other, tensor) for other in everyones)


def describe(difference: torch.Tensor) -> str:
    largest = difference.abs().max().item()
    return "bit-equal" if largest == 0 else f"largest difference ≈{largest:.0e}"


def main() -> None:
    if ROWS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the batch of {ROWS} rows must divide among the ranks")
    device = start()
    # ask for deterministic kernels: an error where an operation has none, as put_ here
    torch.use_deterministic_algorithms(True)
    with suppress(RuntimeError):
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        raise AssertionError("put_ raised nothing")
    rank, n = dist.get_rank(), dist.get_world_size()
    report = print if rank == 0 else lambda *_, **__: None

    assert describe(torch.tensor([-2.0, 1.0])) == "largest difference ≈2e+00"
    parameters = train(0, device)
    report(f"N = {n}, the run again in this process: {describe(train(0, device) - parameters)}")
    for earlier in sorted(Path().glob("parameters_*.pt")):
        difference = torch.load(earlier, weights_only=True) - parameters
        report(
            f"N = {n} against the launch with N = {earlier.stem[-1]}: {describe(difference)}"
        )
    dist.barrier()  # all have read before rank 0 writes
    if rank == 0:
        torch.save(parameters, f"parameters_{n}.pt")

    # seeds which differ by rank do no harm to parameters: DDP starts with rank 0's
    model = make_model(seed=rank, device=device)
    before = same_on_all_ranks(flat(model), device)
    model = DDP(model)
    report(f"one seed per rank, parameters same on all ranks before DDP: {before}, ", end="")
    report(f"after: {same_on_all_ranks(flat(model), device)}")

    # dropout wants them to differ: with one seed, each rank drops the same units
    ones = torch.ones(1000, device=device)
    torch.manual_seed(0)
    same = same_on_all_ranks(F.dropout(ones), device)
    report(f"dropout after manual_seed(0): same mask on all ranks: {same}")
    torch.manual_seed(0 + rank)
    same = same_on_all_ranks(F.dropout(ones), device)
    report(f"dropout after manual_seed(0 + rank): same mask on all ranks: {same}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
