"""Expected to have finished reduction in the prior iteration: a parameter gets no gradient.

DDP starts the all-reduce of a bucket when every gradient in the bucket has arrived. If a
parameter takes no part in the loss, its gradient never arrives, and its bucket is never sent.
The first backward ends without an error, but its gradients were not averaged. The second
forward raises the error.

    (no flag)                      the error
    --fix find_unused_parameters   DDP searches the graph of every step for unused parameters
    --fix static_graph             DDP learns the unused parameters once; they must not change
    --alternate                    the heads take turns, so the unused head changes in each step
    --by-rank                      ranks with an odd number use head b, the others use head a
    --cost                         measures the time of one step with the three settings

After each backward, the program computes the gradient of each rank's data without DDP, and
compares the gradients of DDP with the sum over all ranks, divided by the number of ranks.
"""

import argparse
import copy
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    """One body and two heads. Each forward uses one of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head_a = nn.Linear(8, 1)
        self.head_b = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        head = self.head_b if use_b else self.head_a
        return head(torch.relu(self.body(x)))


def mean_over_ranks(model: TwoHeads, x: torch.Tensor, use_b: bool) -> dict[str, torch.Tensor]:
    """The sum of the gradients of all ranks, divided by their number, without DDP.

    A parameter that no rank uses is left out.
    """
    n = dist.get_world_size()
    inputs, choices = [torch.empty_like(x) for _ in range(n)], [None] * n
    dist.all_gather(inputs, x)
    dist.all_gather_object(choices, use_b)
    model = copy.deepcopy(model)
    model.zero_grad()
    for shard, choice in zip(inputs, choices, strict=True):
        model(shard, choice).square().mean().backward()  # adds to .grad
    return {name: p.grad / n for name, p in model.named_parameters() if p.grad is not None}


def train(
    ddp: DistributedDataParallel, alternate: bool, by_rank: bool, x: torch.Tensor
) -> None:
    """Three backward passes; each rank has its own data, x: [steps, rows, 8]."""
    for step, batch in enumerate(x):
        ddp.zero_grad()
        use_b = (alternate and step % 2 == 1) or (by_rank and dist.get_rank() % 2 == 1)
        ddp(batch, use_b).square().mean().backward()

        model = ddp.module
        expected = mean_over_ranks(model, batch, use_b)
        ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        averaged = ours.keys() == expected.keys() and all(
            torch.allclose(ours[name], expected[name], rtol=1e-4, atol=1e-6) for name in ours
        )
        fixed = ddp.find_unused_parameters or ddp.static_graph
        assert averaged == (fixed or dist.get_world_size() == 1)  # on every rank
        absent = [name for name, p in model.named_parameters() if p.grad is None]
        if dist.get_rank() == 0:
            print(f"step {step}: gradients averaged over all ranks: {averaged};", end=" ")
            print(f"grad is None: {', '.join(absent) or 'nowhere'}", flush=True)


def cost(device: torch.device) -> None:
    """Print the median time of a step of a deep model in which every parameter is used."""
    settings = {
        "default": {},
        "find_unused_parameters": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    }
    x, weight = torch.randn(4, 16, device=device), dist.get_rank() + 1
    runs: dict[str, tuple[DistributedDataParallel, list[float]]] = {}
    for name, options in settings.items():
        layers = [layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.ReLU())]
        runs[name] = (DistributedDataParallel(nn.Sequential(*layers).to(device), **options), [])
    for step in range(20):
        for ddp, times in runs.values():  # in turns: a busy machine slows down all alike
            start = time.perf_counter()
            (weight * ddp(x).sum()).backward()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            if step >= 5:
                times.append(time.perf_counter() - start)
    medians = {name: sorted(times)[len(times) // 2] for name, (_, times) in runs.items()}
    logs = {name: ddp._get_ddp_logging_data() for name, (ddp, _) in runs.items()}
    for name in ("find_unused_parameters", "static_graph"):  # on in its own run only
        assert {run for run, log in logs.items() if log.get(name)} == {name}
    # Each row adds the weight of its rank to the gradient of the last bias, where the ReLU is
    # active. The timed steps must have averaged this over the ranks, whose mean is (n + 1) / 2.
    expected = 20 * len(x) * (dist.get_world_size() + 1) / 2
    for ddp, _ in runs.values():
        largest = ddp.module[-2].bias.grad.max().item()
        assert abs(largest - expected) < 1e-3 * expected
    if dist.get_rank() == 0:
        print("150 linear layers, all of them used")
        for name, median in medians.items():
            ratio = median / medians["default"]
            assert 0.1 < ratio < 10
            print(f"{name:22}  ≈{1e3 * median:.1f} ms per step  ≈{ratio:.2f} × default")


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
    parser.add_argument("--fix", choices=["find_unused_parameters", "static_graph"])
    parser.add_argument("--alternate", action="store_true")
    parser.add_argument("--by-rank", action="store_true")
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()

    device = init_distributed()

    failed = False
    torch.manual_seed(dist.get_rank())
    if args.cost:
        cost(device)
    else:
        options = {args.fix: True} if args.fix else {}
        ddp = DistributedDataParallel(TwoHeads().to(device), **options)
        on = [name for name in ("find_unused_parameters", "static_graph") if getattr(ddp, name)]
        assert on == ([args.fix] if args.fix else [])
        forwards = []  # one entry for each completed forward
        ddp.register_forward_hook(lambda *_: forwards.append(None))
        try:
            train(ddp, args.alternate, args.by_rank, torch.randn(3, 4, 8, device=device))
        except RuntimeError as error:
            failed = True
            assert args.fix or len(forwards) == 1  # the second forward has raised the error
            if dist.get_rank() == 0:
                print(f"{type(error).__name__}: {error}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
