"""Which collectives can DDP and FSDP2 hide? Those that are launched before other computation.

The program trains one model in four ways, with DDP and with FSDP2, and records a trace of one
step of each way. The functions of `exposed.py` compute the exposed time of each collective. The
line `launched` shows the order in which the host of rank 0 launches its work in this step:

    p  a matrix product      g  an all-gather          c  a copy of what was gathered
    r  an all-reduce         s  a reduce-scatter          to the weights of the layer
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from exposed import covered, exposed, init_distributed, read
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

LAYERS, WIDTH, BATCH = 6, 512, 256
MIB = 4 * WIDTH * WIDTH / 2**20  # the size of the weights of a layer, in float32
LETTERS = {
    "aten::mm": "p",
    "c10d::allreduce_": "r",
    "c10d::_allgather_base_": "g",
    "c10d::_reduce_scatter_base_": "s",
    "fsdp::split_with_sizes_copy": "c",
}
# the names in the trace: of gloo, and of NCCL. gloo runs a reduce-scatter as an all-reduce
NAMES = {
    "all_reduce": ("all_reduce", "allreduce", "AllReduce"),
    "all_gather": ("all_gather", "_allgather_base", "AllGather"),
    "reduce_scatter": ("all_reduce", "reduce_scatter", "_reduce_scatter_base", "ReduceScatter"),
}


# --8<-- [start:ways]
class Stack(nn.Module):
    """Linear layers. With `ahead`, each layer is gathered before the previous layer runs."""

    def __init__(self, ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ahead = ahead
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:  # [BATCH, WIDTH] -> [BATCH, WIDTH]
        for i, layer in enumerate(self.layers):
            if self.ahead and i + 1 < LAYERS:
                self.layers[i + 1].unshard(async_op=True)
            x = layer(x) * 3**0.5  # the initial weights divide the standard deviation by √3
        return x


def ddp(device: torch.device, mib: float) -> nn.Module:
    return DDP(Stack().to(device), bucket_cap_mb=mib)


def fsdp2(device: torch.device, mesh: DeviceMesh, ahead: bool) -> nn.Module:
    model = Stack(ahead).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# --8<-- [end:ways]


def record_step(model: nn.Module, device: torch.device) -> tuple[list[dict], float, float]:
    """The trace, the seconds and the loss of step 3. DDP rebuilds its buckets after step 1."""
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(BATCH, WIDTH).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # on a GPU, this waits for all kernels of the step

    first, _ = step(), step()
    with profile(activities=activities, record_shapes=True) as profiler:
        before = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - before
    assert loss < 0.97 * first
    events = []
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return events, seconds, loss


# --8<-- [start:launches]
def launches(events: list[dict]) -> tuple[str, dict[str, set[int]]]:
    """The letters of all launches in their order, and the sizes of the inputs by letter."""
    spans = [e for e in events if e.get("ph") == "X" and e["name"] in LETTERS]
    order, sizes = "", {letter: set() for letter in LETTERS.values()}
    for e in sorted(spans, key=lambda e: e["ts"]):
        letter, shapes = LETTERS[e["name"]], e["args"]["Input Dims"]
        order += letter
        # an all-reduce receives a list of tensors, the other collectives an output and an input
        if letter in "rgs":
            sizes[letter].add(prod(shapes[0][0] if letter == "r" else shapes[1]))
    return order, sizes


# --8<-- [end:launches]


def show(events: list[dict], seconds: float, on_cpu: bool) -> str:
    """Print the analysis of a step, and return the order of its launches."""
    order, sizes = launches(events)
    table, count = exposed(events), Counter(order)
    communication, computation = read(events)
    both = covered(computation + [span for spans in communication.values() for span in spans])
    print(f"  launched: {order}")
    print(f"  step ≈{1e3 * seconds:.2f} ms, computation ≈{1e3 * covered(computation):.2f} ms")
    for name, letter in {"all_reduce": "r", "all_gather": "g", "reduce_scatter": "s"}.items():
        if count[letter]:
            [(calls, total, alone)] = [table.pop(each) for each in NAMES[name] if each in table]
            [size] = sizes[letter]
            assert calls == count[letter] and 0 <= alone <= total * (1 + 1e-9)
            print(
                f"  {name:14} calls: {calls:2} of {4 * size / 2**20:.2f} MiB, "
                f"≈{1e3 * total:.2f} ms, exposed ≈{1e3 * alone:.2f} ms"
            )
    assert not table, "the trace contains a collective that the host did not launch"
    if on_cpu:
        assert both < 1.05 * seconds  # computation and exposed time together fit into the step
    return order


def main() -> None:
    if os.environ.get("WORLD_SIZE") == "1":
        sys.exit(
            "a single rank has nothing to send: torchrun --nproc-per-node=2 " + sys.argv[0]
        )
    torch.set_num_threads(1)
    device = init_distributed()
    n, on_cpu = dist.get_world_size(), device.type == "cpu"
    mesh = init_device_mesh(device.type, (n,))
    ways = {
        "DDP, one bucket per layer": lambda: ddp(device, MIB),
        "DDP, one bucket for all layers": lambda: ddp(device, LAYERS * MIB),
        "FSDP2": lambda: fsdp2(device, mesh, ahead=False),
        "FSDP2, each layer gathered ahead": lambda: fsdp2(device, mesh, ahead=True),
    }
    orders, losses = [], []
    for name, wrap in ways.items():
        events, seconds, loss = record_step(wrap(), device)
        losses.append(loss)
        if dist.get_rank() == 0:
            print(name)
            orders.append(show(events, seconds, on_cpu))
        dist.barrier()
    torch.testing.assert_close(losses, losses[:1] * 4, rtol=1e-4, atol=0)
    if dist.get_rank() == 0:
        # a layer has one product forward and two backward; the first layer has one backward
        assert all(order.count("p") == 3 * LAYERS - 1 for order in orders)
        early = [order[: order.rindex("p")].count("r") for order in orders[:2]]
        print(f"all-reduces before the last product: {early[0]} of {LAYERS}, {early[1]} of 1")
        assert early == [LAYERS - 1, 0]
        assert [order.count("r") for order in orders] == [LAYERS, 1, 0, 0]
        # without `ahead`, no product is between the all-gather of a layer and its copy
        forwards = [LAYERS * "gcp", "gg" + (LAYERS - 2) * "cpg" + "cpcp"]
        # FSDP2 launches the next all-gather of backward before the two products of a layer
        backward = "gcg" + (LAYERS - 2) * "ppscg" + "ppscps"
        assert orders[2:] == [forward + backward for forward in forwards]
        print("the losses of the four ways are equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
