"""Count before you time: the FLOPs of a step by module, its collectives by kind, without a GPU.

FlopCounterMode counts products as they are dispatched; CommDebugMode counts collectives of
DTensors. A fake process group answers for the ranks that are not there.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
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
    layer, x = whole[0], torch.randn(B, H)  # the residual and relu cost no product: not counted
    reference = nn.Sequential(layer.up, nn.ReLU(), layer.down)
    torch.testing.assert_close(layer(x) - x, reference(x))
    with FlopCounterMode(display=False, depth=3) as counter:
        whole(torch.randn(B, H)).sum().backward()
    weights = sum(p.numel() for p in whole.parameters() if p.dim() == 2)
    for name, operators in sorted(counter.get_flop_counts().items()):
        print(f"  {name:18} {sum(operators.values()) / 1e6:6.2f} MFLOP")
    # the first layer's input wants no gradient: one product of B x H by H x 4H is not done
    expected = 6 * B * weights - 2 * B * H * 4 * H
    print(f"counted {counter.get_total_flops()}, 6 x batch x weights less one: {expected}")
    assert counter.get_total_flops() == expected


# --8<-- [end:flops]


# --8<-- [start:comms]
def count_collectives() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    split = model()
    for layer in split:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    counter = CommDebugMode()
    with counter:
        split(torch.randn(B, H, requires_grad=True)).sum().backward()
    for operation, count in counter.get_comm_counts().items():
        print(f"  {operation}: {count}")
    # one in forward behind each row, one in backward before each column
    print(f"counted {counter.get_total_counts()}, 2 x layers: {2 * LAYERS}")
    assert counter.get_total_counts() == 2 * LAYERS


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
