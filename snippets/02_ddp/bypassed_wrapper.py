"""Calling ddp.module(x) instead of ddp(x) trains every rank alone, and no error is raised.

The forward of the wrapper tells DDP that a backward pass will follow. The forward of the module
inside does not, so the hooks of DDP do nothing, and each rank trains on its own data only. The
loss falls on every rank, which is why this mistake is hard to notice.

    (no flag)   calls the module inside the wrapper
    --fix       calls the wrapper

At the end, the program compares the parameters with a plain training loop in one process, which
uses neither DDP nor autograd: on the data of this rank alone, or on the data of all ranks.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS, LEARNING_RATE = 51, 16, 0.1


def drifted(model: nn.Module) -> list[str]:
    """Names of the parameters that are not bit for bit the same on every rank.

    If they are the same, their largest value over the ranks equals their smallest value. This
    costs two all-reduces of the parameters. Call it on every rank, every thousand steps or so.
    """
    names = []
    for name, parameter in model.named_parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            names.append(name)
    return names


def trained_plainly(
    weight: torch.Tensor, bias: torch.Tensor, data: torch.Tensor, truth: torch.Tensor
) -> list[torch.Tensor]:
    """Gradient descent in float64, with the gradient of linear regression as a formula."""
    weight, bias, truth = weight.double(), bias.double(), truth.double()
    for x in data.double():  # [steps, rows, 8]
        error = x @ weight.T + bias - x @ truth
        weight = weight - LEARNING_RATE * 2 * error.T @ x / len(x)
        bias = bias - LEARNING_RATE * 2 * error.mean(0)
    return [weight, bias]


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(device)
    initial = [p.detach().clone() for p in model.parameters()]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    truth = torch.randn(8, 1, device=device)
    torch.manual_seed(1 + rank)  # each rank has its own data
    data = torch.stack([torch.randn(ROWS, 8, device=device) for _ in range(STEPS)])

    for step, x in enumerate(data):
        prediction = ddp(x) if args.fix else ddp.module(x)
        loss = (prediction - x @ truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step in (0, 10, 50):
            losses = [torch.empty_like(loss) for _ in range(n)]
            dist.all_gather(losses, loss.detach())
            names = drifted(ddp.module)
            if rank == 0:
                about = "≈" if step == 50 else ""  # by then, rounding decides
                of_ranks = ", ".join(f"{about}{value.item():.3g}" for value in losses)
                print(f"step {step:2}: loss of each rank {of_ranks};", end=" ")
                print(f"drifted: {', '.join(names) or 'nothing'}", flush=True)

        if step == 10:  # the losses are still far from zero, so different data would show
            data_of_ranks = [torch.empty_like(data) for _ in range(n)]
            dist.all_gather(data_of_ranks, data)
            seen = torch.cat(data_of_ranks, dim=1) if args.fix else data
            expected = trained_plainly(*initial, seen[: step + 1], truth)
            for parameter, value in zip(model.parameters(), expected, strict=True):
                ours = parameter.detach().double()
                torch.testing.assert_close(ours, value, rtol=0, atol=1e-5)
            if rank == 0:
                of = "all ranks" if args.fix else "rank 0 alone"
                print(f"         rank 0 has the model of one process on the data of {of}")

    if args.fix and n > 1:  # `drifted` must find a difference in the last bit of one element
        with torch.no_grad():
            if rank == 0:
                model.bias.copy_(torch.nextafter(model.bias, torch.ones_like(model.bias)))
        assert drifted(ddp.module) == ["bias"]

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if names else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
