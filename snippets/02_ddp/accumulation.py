"""Gradient accumulation with `no_sync` needs one all-reduce per step, with the same gradient.

The first two functions give the gradient of one process with the big batch, and they differ in
the number of all-reduces. The other three functions contain a mistake. None of the mistakes
raises an error: one of them costs time, and two of them make the gradient wrong.
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES, ROWS = 4, 8  # per rank and optimizer step


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


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def synchronize_always(ddp: DDP, batches: list) -> None:
    """Correct, but every micro-batch waits for an all-reduce of the gradients so far."""
    for x, y in batches:
        (F.mse_loss(ddp(x), y) / len(batches)).backward()


def synchronize_last(ddp: DDP, batches: list) -> None:
    """Correct: forward and backward of all micro-batches but the last are in no_sync."""
    for number, (x, y) in enumerate(batches, 1):
        with nullcontext() if number == len(batches) else ddp.no_sync():
            (F.mse_loss(ddp(x), y) / len(batches)).backward()


def forward_outside(ddp: DDP, batches: list) -> None:
    """Mistake: only backward is in no_sync. DDP decides in forward, so it synchronizes."""
    for number, (x, y) in enumerate(batches, 1):
        loss = F.mse_loss(ddp(x), y) / len(batches)
        with nullcontext() if number == len(batches) else ddp.no_sync():
            loss.backward()


def never_synchronize(ddp: DDP, batches: list) -> None:
    """Mistake: the last micro-batch is in no_sync too, so each rank keeps its own gradient."""
    with ddp.no_sync():
        for x, y in batches:
            (F.mse_loss(ddp(x), y) / len(batches)).backward()


def forget_to_divide(ddp: DDP, batches: list) -> None:
    """Mistake: a sum of means. It acts like a learning rate that is several times larger."""
    for number, (x, y) in enumerate(batches, 1):
        with nullcontext() if number == len(batches) else ddp.no_sync():
            F.mse_loss(ddp(x), y).backward()


def counting_hook(
    buckets: list[int], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Do what DDP does without a hook, and record each bucket: one all-reduce per bucket."""
    buckets.append(bucket.index())
    return allreduce_hook(None, bucket)


def record_no_sync(ddp: DDP) -> list[bool]:
    """Return a list to which each backward adds whether it is inside no_sync."""
    seen = []
    bias = ddp.module[0].bias
    bias.register_hook(lambda _: seen.append(not ddp.require_backward_grad_sync))
    return seen


def main() -> None:
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n * MICRO_BATCHES * ROWS, 16, generator=generator).to(device)
    y = torch.randn(n * MICRO_BATCHES * ROWS, 4, generator=generator).to(device)

    def gradients_of_one_process(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model = make_model(device)
        F.mse_loss(model(x), y).backward()
        return gradients(model)

    truth = gradients_of_one_process(x, y)
    my_x, my_y = x.chunk(n)[rank], y.chunk(n)[rank]
    batches = list(zip(my_x.split(ROWS), my_y.split(ROWS), strict=True))
    wrong = {
        never_synchronize: gradients_of_one_process(my_x, my_y),
        forget_to_divide: MICRO_BATCHES * truth,
    }
    if rank == 0:
        print(f"{MICRO_BATCHES} micro-batches per step, 1 bucket; gradient against one process")
    for way in (
        synchronize_always,
        synchronize_last,
        forward_outside,
        never_synchronize,
        forget_to_divide,
    ):
        ddp, buckets = DDP(make_model(device)), []
        ddp.register_comm_hook(buckets, counting_hook)
        in_no_sync = record_no_sync(ddp)
        way(ddp, batches)
        first, last = way is not synchronize_always, way is never_synchronize
        assert in_no_sync == [first] * (MICRO_BATCHES - 1) + [last]

        ours = gradients(ddp)
        torch.testing.assert_close(ours, wrong.get(way, truth))
        if way not in wrong:
            verdict = "equal"
        else:
            error, ratio = (ours - truth).norm() / truth.norm(), ours.norm() / truth.norm()
            verdict = f"off by {100 * error.item():.1f}%, {ratio.item():.2f} times as long"
        if rank == 0:
            print(f"{way.__name__:>18}: {len(buckets)} all-reduce(s), {verdict}")
        # without any all-reduce, each rank has a different gradient and would drift away
        everywhere = [torch.empty_like(ours) for _ in range(n)]
        dist.all_gather(everywhere, ours)
        same = all(torch.equal(gradient, ours) for gradient in everywhere)
        assert same == (way is not never_synchronize or n == 1), way.__name__


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
