"""Counts the FLOPs of a step by module and its collectives by kind, without a GPU.

FlopCounterMode counts matrix products when they are dispatched, and CommDebugMode counts the
collectives of DTensors. A fake process group stands for the ranks that do not exist.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: an import after it keeps the group alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

B, H, LAYERS, RANKS = 32, 64, 3, 4


class ResidualMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def model() -> nn.Sequential:
    return nn.Sequential(*(ResidualMLP() for _ in range(LAYERS)))


# --8<-- [start:flops]
def count_flops() -> None:
    whole = model()
    layer, x = whole[0], torch.randn(B, H)  # residual and relu are not counted
    reference = nn.Sequential(layer.up, nn.ReLU(), layer.down)
    torch.testing.assert_close(layer(x) - x, reference(x))
    with FlopCounterMode(display=False, depth=3) as counter:
        whole(torch.randn(B, H)).sum().backward()
    weights = sum(p.numel() for p in whole.parameters() if p.dim() == 2)
    for name, operators in sorted(counter.get_flop_counts().items()):
        print(f"  {name:18} {sum(operators.values()) / 1e6:6.2f} MFLOP")
    # no gradient of the first layer's input: one product of B x H by H x 4H is missing
    expected = 6 * B * weights - 2 * B * H * 4 * H
    total = counter.get_total_flops()
    print(f"counted {total}, 6 x batch x weights minus one product: {expected}")
    assert total == expected


# --8<-- [end:flops]


# --8<-- [start:comms]
def count_collectives() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    split = model()
    for layer in split:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    forward, counter = CommDebugMode(), CommDebugMode()
    with counter:
        with forward:
            loss = split(torch.randn(B, H, requires_grad=True)).sum()
        loss.backward()
    for operation, count in counter.get_comm_counts().items():
        print(f"  {operation}: {count}")
    # one in forward after each row-parallel layer, one in backward before each column-parallel
    print(f"counted {counter.get_total_counts()}, 2 x layers: {2 * LAYERS}")
    print(f"counted in the forward pass {forward.get_total_counts()}, layers: {LAYERS}")
    assert counter.get_total_counts() == 2 * LAYERS and forward.get_total_counts() == LAYERS


# --8<-- [end:comms]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("FlopCounterMode, by module")
    count_flops()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(f"CommDebugMode, {RANKS} tensor-parallel ranks")
    count_collectives()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
