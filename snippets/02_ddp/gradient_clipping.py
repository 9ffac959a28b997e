"""Clipping before the reduction: every rank clips its own gradient, and the mean is wrong.

Clipping shortens a gradient whose norm is above a limit. If each rank clips its own gradient,
the ranks shorten their gradients by different factors, and a rank with a large gradient counts
less than it should. DDP has averaged the gradients when backward() returns. If you clip then,
every rank computes the same norm and needs no further communication.

    (no flag)   clips on each rank inside no_sync, and averages afterwards
    --fix       clips the gradient that DDP has averaged

Both results are compared with the clipped gradient of one process, which is computed in float64
from the formula for linear regression.
"""

import argparse
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MAX_NORM = 1.0


def clip_then_average(ddp: DistributedDataParallel, x: torch.Tensor, y: torch.Tensor) -> float:
    with ddp.no_sync():
        nn.functional.mse_loss(ddp(x), y).backward()
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return norm.item()


def average_then_clip(ddp: DistributedDataParallel, x: torch.Tensor, y: torch.Tensor) -> float:
    nn.functional.mse_loss(ddp(x), y).backward()
    return nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM).item()


def regression_gradient(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean squared error as one vector in float64, without autograd."""
    x, y, weight, bias = (t.detach().double() for t in (x, y, model.weight, model.bias))
    error = x @ weight.T + bias - y
    return torch.cat([2 * (error.T @ x).flatten() / len(x), 2 * error.mean(0)])


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * min(1.0, MAX_NORM / gradient.norm().item())


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
    x, y = torch.randn(8 * n, 4, device=device), torch.randn(8 * n, 1, device=device)
    y[-8:] += 10  # the last rank has the outliers
    model = nn.Linear(4, 1).to(device)
    ddp = DistributedDataParallel(model)

    whole = regression_gradient(model, x, y)
    truth = clipped(whole)
    shards = [
        regression_gradient(model, *shard) for shard in zip(x.chunk(n), y.chunk(n), strict=True)
    ]
    # What each order must give: the mean of clipped gradients, or the clipped mean.
    of_order = truth if args.fix else sum(map(clipped, shards)) / n
    assert whole.norm() > MAX_NORM  # the limit is reached, so clipping changes the gradient

    step = average_then_clip if args.fix else clip_then_average
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as by_hand:
        norm = step(ddp, x.chunk(n)[rank], y.chunk(n)[rank])
    # the fix needs no all-reduce in addition to that of DDP
    assert by_hand.call_count == (0 if args.fix else 2)
    ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
    torch.testing.assert_close(ours, of_order, rtol=1e-4, atol=1e-6)
    before = (whole if args.fix else shards[rank]).norm().item()
    torch.testing.assert_close(norm, before, rtol=1e-4, atol=0)

    norms = [torch.empty(1, device=device) for _ in range(n)]
    dist.all_gather(norms, torch.tensor([norm], device=device))
    equal = torch.allclose(ours, truth, rtol=1e-4, atol=1e-6)
    assert equal == (args.fix or n == 1)
    if args.fix:
        assert all(torch.equal(value, norms[0]) for value in norms)
    if rank == 0:
        seen = ", ".join(f"{value.item():.3f}" for value in norms)
        cosine = nn.functional.cosine_similarity(ours, truth, dim=0).item()
        print(f"norm before clipping: one process {whole.norm():.3f}, ranks {seen}")
        print(f"norm after:           one process {truth.norm():.3f}, DDP {ours.norm():.3f}")
        print(f"cosine of the two gradients {cosine:.3f}, equal: {equal}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 0 if equal else 1


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
