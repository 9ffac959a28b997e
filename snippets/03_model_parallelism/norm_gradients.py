"""Under sequence parallelism, the gradients of the norms must be summed over the ranks.

A norm sees only the tokens of its rank, so its gradient is one term of a sum of t terms. This
holds for every parameter that works on these tokens. The weights are copies and must stay
equal, so the terms must be added before the optimizer step.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn import functional as F

TOKENS, H, STEPS = 96, 48, 30  # 1, 2, 3 and 4 ranks divide the tokens


def spread(tensor: torch.Tensor) -> float:
    """The largest difference between the copies of a tensor on two ranks."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return (torch.stack(copies).amax(0) - torch.stack(copies).amin(0)).max().item()


def sum_over_ranks(module: nn.Module) -> None:
    """The fix: one all-reduce of all such gradients together, after backward."""
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(total.view_as(g))


def train(device: torch.device, summed: bool) -> tuple[float, float, float]:
    """Compare a norm with one process: first gradient, last weights, difference of ranks."""
    rank, t = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, target = torch.randn(2, TOKENS, H).to(device)
    # the layer after the norm, equal on all ranks
    weight = (torch.randn(H, H) / H**0.5).to(device)
    norm, alone = nn.LayerNorm(H).to(device), nn.LayerNorm(H).to(device)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for module in (norm, alone)]
    ours, whole = (slice(rank * TOKENS // t, (rank + 1) * TOKENS // t), slice(None))
    first = 0.0
    for step in range(STEPS):
        for module, tokens in ((norm, ours), (alone, whole)):
            module.zero_grad()
            error = F.tanh(module(x[tokens]) @ weight) - target[tokens]
            (error.square().sum() / (TOKENS * H)).backward()
        if summed:
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
                sum_over_ranks(norm)
            assert spy.call_count == 1  # weight and bias are sent together
        if step == 0:
            terms = norm.weight.grad.clone()
            if not summed:
                # the weights are still equal, so these are terms of the whole gradient
                dist.all_reduce(terms)
            torch.testing.assert_close(terms, alone.weight.grad, rtol=1e-4, atol=1e-6)
            difference = norm.weight.grad - alone.weight.grad
            first = (difference.norm() / alone.weight.grad.norm()).item()
        for optimizer in optimizers:
            optimizer.step()
    last = ((norm.weight - alone.weight).norm() / alone.weight.norm()).item()
    return first, last, spread(norm.weight.detach())


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
    if TOKENS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the {TOKENS} tokens")
    device = init_distributed()
    for summed in (False, True):
        first, last, apart = train(device, summed)
        if dist.get_rank() == 0:
            print("gradients summed over the ranks" if summed else "gradients left as they are")
            for what, error in (("first gradient", first), (f"weights, {STEPS} steps", last)):
                wrong = "as on one process" if error < 1e-4 else f"off by ≈{100 * error:.0f}%"
                print(f"  {what:17}  {wrong}")
            drift = "equal" if apart == 0 else f"≈{apart:.2f} apart"
            print(f"  between ranks      {drift}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
