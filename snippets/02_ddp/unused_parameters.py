"""Expected to have finished reduction in the prior iteration: a branch that no rank takes.

DDP starts the all-reduce of a bucket when every gradient in it has arrived. A parameter that
takes no part in the loss never reports, so its bucket is never sent: the first backward ends
without an error and with gradients that were not averaged; the second forward raises.

    (no flag)                       the error
    --fix find_unused_parameters   DDP looks for the absent parameters in every graph
    --fix static_graph             DDP learns them once; the set must stay the same
    --alternate                     the two heads take turns, so the set changes each step
    --cost                          time of one step under the three settings
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    """One body and two heads; a call uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head_a = nn.Linear(8, 1)
        self.head_b = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        head = self.head_b if use_b else self.head_a
        return head(torch.relu(self.body(x)))


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return all(torch.equal(copies[0], copy) for copy in copies)


def train(ddp: DistributedDataParallel, alternate: bool, device: torch.device) -> None:
    """Three backward passes; each rank has its own data."""
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(4, 8, device=device)
        ddp(x, use_b=alternate and step % 2 == 1).square().mean().backward()

        model = ddp.module
        averaged = equal_on_all_ranks(model.body.weight.grad)
        absent = [name for name, p in model.named_parameters() if p.grad is None]
        if dist.get_rank() == 0:
            print(f"step {step}: body.weight.grad equal on all ranks: {averaged},", end=" ")
            print(f"grad is None: {', '.join(absent)}", flush=True)


def cost(device: torch.device) -> None:
    """Median time of a step of a deep model in which every parameter is used."""
    settings = {
        "default": {},
        "find_unused_parameters": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    }
    x = torch.randn(4, 16, device=device)
    runs: dict[str, tuple[DistributedDataParallel, list[float]]] = {}
    for name, options in settings.items():
        layers = [layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.ReLU())]
        runs[name] = (DistributedDataParallel(nn.Sequential(*layers).to(device), **options), [])
    for step in range(20):
        for ddp, times in runs.values():  # in turns, so that a busy machine hits all alike
            start = time.perf_counter()
            ddp(x).sum().backward()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            if step >= 5:
                times.append(time.perf_counter() - start)
    medians = {name: sorted(times)[len(times) // 2] for name, (_, times) in runs.items()}
    logs = {name: ddp._get_ddp_logging_data() for name, (ddp, _) in runs.items()}
    for name in ("find_unused_parameters", "static_graph"):  # each is on where its name is
        assert {run for run, log in logs.items() if log.get(name)} == {name}
    if dist.get_rank() == 0:
        print("150 linear layers, all of them used")
        for name, median in medians.items():
            ratio = median / medians["default"]
            assert 0.1 < ratio < 10
            print(f"{name:22}  ≈{1e3 * median:.1f} ms per step  ≈{ratio:.2f} × default")


def start() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < local_world or torch.backends.mps.is_available():
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=device)
    return device


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", choices=["find_unused_parameters", "static_graph"])
    parser.add_argument("--alternate", action="store_true")
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()

    device = start()

    failed = False
    torch.manual_seed(dist.get_rank())
    if args.cost:
        cost(device)
    else:
        options = {args.fix: True} if args.fix else {}
        ddp = DistributedDataParallel(TwoHeads().to(device), **options)
        try:
            train(ddp, args.alternate, device)
        except RuntimeError as error:
            failed = True
            if dist.get_rank() == 0:
                print(f"{type(error).__name__}: {error}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
