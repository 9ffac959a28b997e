"""If the loss of a micro-batch is not divided by m, the gradients are m times too large.

GPipe runs on two ranks. The logged loss is the mean over micro-batches, so its curve shows
nothing at first. The gradients are m times those of the whole batch, and no error is raised.
Adam hides even this factor.

    (no flag)   backward of the micro-batch's mean loss
    --fix      divided by m
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.functional import mse_loss

BATCH, HIDDEN, M = 32, 16, 8


def step(stage: nn.Module, batch: torch.Tensor, target: torch.Tensor, scale: float) -> float:
    """GPipe over two ranks; the mean loss on rank 1, and 0 on rank 0."""
    rank, kept, logged = dist.get_rank(), [], 0.0
    for x, y_true in zip(batch.chunk(M), target.chunk(M), strict=True):
        if rank == 1:
            dist.recv(x := torch.empty_like(x), 0)
            x.requires_grad_()
        y = stage(x)
        if rank == 0:
            dist.send(y.detach(), 1)
        else:
            loss = mse_loss(y, y_true)
            logged += loss.item() / M
            y = loss * scale
        kept.append((x, y))
    for x, y in kept:
        grad = None
        if rank == 0:
            dist.recv(grad := torch.empty_like(y), 1)
        torch.autograd.backward(y, grad)
        if rank == 1:
            dist.send(x.grad, 0)
    return logged


def main() -> int:
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 unscaled_loss.py")
    dist.init_process_group("gloo")
    rank, fix = dist.get_rank(), "--fix" in sys.argv
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
    batch, target = torch.randn(2, BATCH, HIDDEN)
    true_loss = mse_loss(whole(batch), target)
    true_loss.backward()
    stage = whole[:2] if rank == 0 else whole[2:]
    truth = torch.cat([p.grad.flatten() for p in stage.parameters()])
    stage.zero_grad()

    logged = step(stage, batch, target, 1 / M if fix else 1.0)
    ours = torch.cat([p.grad.flatten() for p in stage.parameters()])
    ratio = (ours.norm() / truth.norm()).item()
    torch.testing.assert_close(ours, ratio * truth, rtol=1e-4, atol=1e-5)
    assert abs(ratio - (1 if fix else M)) < 1e-3  # on both stages
    if rank == 1:
        same = abs(logged - true_loss.item()) < 1e-5
        print(f"logged loss right: {same}; gradients × {ratio:.2f}", flush=True)
    dist.barrier()
    return int(abs(ratio - 1) > 1e-3)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
