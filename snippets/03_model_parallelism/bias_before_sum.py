"""A row-parallel layer that adds its bias before the all-reduce adds it t times.

The obvious way to build a row-parallel layer is an nn.Linear with a bias on each rank. The term
of each rank then contains the bias, and the sum contains it t times. With new biases, which
are zero or nearly zero, no comparison notices this. With the biases of a trained model it does.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOKENS, H = 64, 48  # 1, 2, 3 and 4 ranks divide H


def bias_in_each_term(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    term = F.linear(x, rows, bias)
    dist.all_reduce(term)
    return term


def bias_after_the_sum(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    term = F.linear(x, rows)
    dist.all_reduce(term)
    return term + bias


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


@torch.no_grad()
def main() -> None:
    if H % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {H}")
    device = init_distributed()
    rank, t = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole, x = nn.Linear(H, H).to(device), torch.randn(TOKENS, H).to(device)
    rows = whole.weight.chunk(t, dim=1)[rank]  # [out, in/t]
    mine = x.chunk(t, dim=1)[rank]
    assert rows.shape == (H, H // t) and mine.shape == (TOKENS, H // t)  # 1/t on each rank
    product = x.double() @ whole.weight.double().T  # without the bias
    for layer, count in ((bias_in_each_term, t), (bias_after_the_sum, 1)):
        for state, bias in (("bias of zeros", 0 * whole.bias), ("trained bias", whole.bias)):
            added = layer(mine, rows, bias) - product  # [tokens, h]
            expected = (count * bias.double()).expand_as(added)  # equal for all tokens
            torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)
            right = torch.allclose(added, bias.double(), atol=1e-5)
            if rank == 0:
                times = (added.mean(dim=0) @ whole.bias.double()) / whole.bias.square().sum()
                result = "equal" if right else f"{times:.2f} times the bias"
                print(f"{layer.__name__:18}  {state:13}  {result}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
