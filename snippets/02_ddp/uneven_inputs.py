"""With unequal numbers of batches, DDP waits until a timeout; `Join` lets all ranks finish.

Rank r has 6 - r batches. Without Join, rank 0 waits for gradients that the other ranks never
send. With Join, a rank that has no batch left answers each remaining all-reduce with zeros.
Look at the weight of the last batch, and at the state of Adam, which Join does not make equal.
Run it with three ranks: with two, a weight of 1/2 could also be a weight of 1/N.
(With NCCL the timeout raises no exception. Its watchdog thread ends the process.)
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

TIMEOUT = timedelta(seconds=3)  # the default is 30 minutes with gloo, 10 with NCCL


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


def build(device: torch.device, group=None) -> tuple[DDP, torch.optim.Optimizer, list]:
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 4).to(device), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    batches = [
        (torch.randn(16, 8, device=device), torch.randn(16, 4, device=device))
        for _ in range(6 - dist.get_rank())
    ]
    return model, optimizer, batches


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> None:
    x, y = batch
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def without_join(device: torch.device) -> None:
    model, optimizer, batches = build(device, dist.new_group(timeout=TIMEOUT))
    for number, batch in enumerate(batches, 1):
        try:
            step(model, optimizer, batch)
        except RuntimeError as error:
            if dist.get_rank() == 0:
                reason = str(error).rpartition("] ")[2]  # without the C++ source's path
                print(f"rank 0, batch {number} of 6: {type(error).__name__}: {reason}")
                sys.exit(1)  # torchrun now ends the others
            break
    time.sleep(60)  # this rank does something else, for example an evaluation


def train_with_join(
    model: DDP, optimizer: torch.optim.Optimizer, batches: list, divide_by_n: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train one uneven epoch; return each batch's gradient before and after the all-reduce."""
    gradients = []
    with Join([model], divide_by_initial_world_size=divide_by_n):
        for x, y in batches:
            loss = F.mse_loss(model.module(x), y)
            local = parameters_to_vector(torch.autograd.grad(loss, model.module.parameters()))
            step(model, optimizer, (x, y))
            averaged = parameters_to_vector(p.grad for p in model.module.parameters())
            gradients.append((local, averaged))
    return gradients


def gathered(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(gradients: list[tuple[torch.Tensor, torch.Tensor]], divide_by_n: bool) -> None:
    """Each step must add up the gradients of the ranks that still have a batch."""
    by_rank = gathered([local.cpu() for local, _ in gradients])
    for number, (_, averaged) in enumerate(gradients):
        present = [locals_[number] for locals_ in by_rank if number < len(locals_)]
        expected = sum(present) / (len(by_rank) if divide_by_n else len(present))
        torch.testing.assert_close(averaged.cpu(), expected)


def adam_steps(optimizer: torch.optim.Optimizer) -> list[int]:
    """The number of steps that Adam has made, for each rank."""
    return gathered(int(next(iter(optimizer.state.values()))["step"]))


def agree(model: nn.Module) -> bool:
    """Whether every rank has exactly the parameters of rank 0."""
    by_rank = gathered(parameters_to_vector(model.parameters()).detach().cpu())
    return all(torch.equal(parameters, by_rank[0]) for parameters in by_rank)


def with_join(device: torch.device) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    report = print if rank == 0 else lambda *_: None

    for divide_by_n in (True, False):
        model, optimizer, batches = build(device)
        gradients = train_with_join(model, optimizer, batches, divide_by_n)
        check(gradients, divide_by_n)
        local, averaged = gradients[-1]
        weight = (averaged.norm() / local.norm()).item()
        report(f"divide_by_initial_world_size={divide_by_n}:")
        report(f"  only rank 0 has a 6th batch; its weight is {weight:.3f} (1/N = {1 / n:.3f})")
        report(f"  after Join, all ranks have the same parameters: {agree(model)}")

    steps = adam_steps(optimizer)
    report(f"steps that Adam has made, by rank: {steps}")
    if n == 1:
        return
    # Join has broadcast the model, but not the optimizer's state
    step(model, optimizer, batches[0])
    report(f"after one more step on every rank: the same parameters: {agree(model)}")

    # the fix: after Join, also take the optimizer's state of the rank with the most batches
    model, optimizer, batches = build(device)
    train_with_join(model, optimizer, batches, divide_by_n=False)
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    optimizer.load_state_dict(state[0])
    step(model, optimizer, batches[0])
    assert adam_steps(optimizer) == [max(steps) + 1] * n
    report(f"with the optimizer's state broadcast before this step: {agree(model)}")


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 5:
        sys.exit("rank r has 6 - r batches, so at most 5 ranks")
    device = init_distributed()
    if "--without-join" in sys.argv:
        without_join(device)
    else:
        with_join(device)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
