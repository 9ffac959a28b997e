"""Without f, the loss is right and the gradients are wrong: replicated weights drift apart.

A norm before a tensor-parallel MLP gets its gradient through all columns of the first matrix,
and a rank has only a part of them. Without the all-reduce in backward, the norm of each rank
learns from its own part. The loss still falls, and no error is raised. Every step is compared
with the same step in one process.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn import functional as F

TOKENS, H, STEPS = 128, 48, 30  # 1, 2, 3 and 4 ranks divide 4H


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term):
        total = term.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return CopyToRanks.apply(gradient)


def forward(x, norm, columns, rows, with_f: bool) -> torch.Tensor:
    normed = norm(x)
    if with_f:
        normed = CopyToRanks.apply(normed)
    return x + SumOverRanks.apply(F.gelu(normed @ columns) @ rows)


def spread(tensor: torch.Tensor) -> float:
    """The largest difference between the copies of a tensor on two ranks."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return (torch.stack(copies).amax(0) - torch.stack(copies).amin(0)).max().item()


def train(device: torch.device, with_f: bool) -> tuple[list[float], float, float]:
    """Losses, the relative error of the norm's first gradient, and the final difference."""
    rank, t = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, target = torch.randn(2, TOKENS, H).to(device)
    w1, w2 = (torch.randn(H, 4 * H) / H**0.5).to(device), torch.randn(4 * H, H).to(device) / 14
    norm = nn.LayerNorm(H).to(device)
    columns = nn.Parameter(w1.chunk(t, dim=1)[rank].clone())
    rows = nn.Parameter(w2.chunk(t, dim=0)[rank].clone())
    ours = [*norm.parameters(), columns, rows]
    alone = [nn.Parameter(w.detach().clone()) for w in (*ours[:2], w1, w2)]  # in one process
    optimizer = torch.optim.SGD([*ours, *alone], lr=0.5)
    losses, error = [], 0.0
    for step in range(STEPS):
        loss = F.mse_loss(forward(x, norm, columns, rows, with_f), target)
        normed = F.layer_norm(x, (H,), *alone[:2])
        loss_alone = F.mse_loss(x + F.gelu(normed @ alone[2]) @ alone[3], target)
        optimizer.zero_grad()
        (loss + loss_alone).backward()
        if step == 0:
            truth = [p.grad for p in alone]
            error = ((norm.weight.grad - truth[0]).norm() / truth[0].norm()).item()
            for p, true in zip(norm.parameters(), truth, strict=False):
                # without f, only the sum over the ranks is missing
                total = p.grad if with_f else SumOverRanks.apply(p.grad)
                torch.testing.assert_close(total, true, rtol=1e-4, atol=1e-6)
            # the gradients of the MLP are right without f, too
            for p, true, dim in ((columns, truth[2], 1), (rows, truth[3], 0)):
                part = true.chunk(t, dim)[rank]
                torch.testing.assert_close(p.grad, part, rtol=1e-4, atol=1e-6)
        if step == 0 or with_f:  # the forward is right without f, too
            torch.testing.assert_close(loss, loss_alone, rtol=1e-4, atol=0.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, error, spread(norm.weight.detach())


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
    if 4 * H % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {4 * H}")
    device = init_distributed()
    numbers = torch.full((2,), float(dist.get_rank()), device=device)
    assert spread(numbers) == dist.get_world_size() - 1
    for with_f in (False, True):
        losses, error, apart = train(device, with_f)
        if dist.get_rank() == 0:
            print("with f" if with_f else "without f")
            print(f"  loss {losses[0]:.4f} in step 1, {losses[-1]:.4f} in step {STEPS}")
            wrong = "right" if error < 1e-4 else f"wrong by {100 * error:.0f}%"
            print(f"  rank 0's first gradient of the norm: {wrong}")
            drift = "equal on all ranks" if apart == 0 else f"{apart:.3f} apart between ranks"
            print(f"  the norm's weights in the end: {drift}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
