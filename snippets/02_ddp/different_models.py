"""DDP expects same model across all ranks: what it compares, and what it takes on trust.

At construction DDP compares the number, the sizes and the strides of the parameters that
require a gradient, in the order of registration. Names, order among equal shapes, dtypes and
buffers are not compared.

    --case count    rank 1 has one layer more: every rank is told
    --case shape    rank 1 has a wider layer: rank 1 is told, rank 0 waits for it
    --case order    rank 1 registers two layers in the other order: nobody is told
    --case dtype    rank 1 builds its model in float64: nobody is told
    --case buffer   rank 1 has one buffer more: nobody is told

    --check         compare names, sizes and dtypes before wrapping: every rank is told
    --fix          the same model on every rank; the check passes
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    """Two projections of one shape; `swapped` registers them in the other order."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("key", "query") if swapped else ("query", "key"):
            self.add_module(name, nn.Linear(4, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.query(x)) * self.key(x)).sum(1)


def build(case: str, odd: bool) -> nn.Module:
    """The model of this rank; `odd` is true on rank 1 alone."""
    torch.manual_seed(0)
    if case == "count":
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3 if odd else 2)])
    if case == "shape":
        return nn.Sequential(nn.Linear(4, 9 if odd else 8), nn.Linear(9 if odd else 8, 1))
    if case == "dtype":
        return nn.Linear(4, 1).to(torch.float64 if odd else torch.float32)
    if case == "buffer":
        model = nn.Linear(4, 1)
        if odd:
            model.register_buffer("scale", torch.ones(1))
        return model
    return Attention(swapped=odd)


def check_same_model(model: nn.Module) -> None:
    """Raise on every rank, with the first difference, when the models are not the same."""
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items()]
    of_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, mine)
    for rank, other in enumerate(of_rank):
        if len(other) != len(of_rank[0]):
            raise ValueError(f"rank 0 has {len(of_rank[0])} tensors, rank {rank} {len(other)}")
        for ours, theirs in zip(of_rank[0], other, strict=True):
            if ours != theirs:
                raise ValueError(f"rank 0 has {ours}, rank {rank} has {theirs}")


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """What the model of each rank says to the same input."""
    x = torch.linspace(-1, 1, 8).view(2, 4).to(next(model.parameters()).dtype)
    with torch.no_grad():
        mine = model(x).flatten().double()
    of_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, mine)
    return of_rank


def main() -> int:
    parser = argparse.ArgumentParser()
    cases = ["count", "shape", "order", "dtype", "buffer"]
    parser.add_argument("--case", choices=cases, default="count")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("different_models.py compares ranks: start it with 2 or more, by torchrun")

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    model = build(args.case, odd=rank == 1 and not args.fix)
    try:
        if args.check or args.fix:
            check_same_model(model)
        DistributedDataParallel(model)
    except (RuntimeError, ValueError) as error:
        if rank == 1:
            print(f"rank 1: {type(error).__name__}: {error}", flush=True)
        if args.check or args.case == "count":
            dist.barrier()  # every rank raised: wait until rank 1 has printed
        return 1

    of_rank = outputs(model)
    if rank == 0:
        print("DDP raised nothing; the same input gives")
        for r, output in enumerate(of_rank):
            print(f"  rank {r}: {', '.join(f'{value:.4f}' for value in output.tolist())}")
        sys.stdout.flush()
    dist.barrier()
    return 0 if all(torch.equal(output, of_rank[0]) for output in of_rank) else 1


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
