"""DDP expects same model across all ranks: what its constructor compares, and what it does not.

The constructor compares the number, the sizes and the strides of the parameters that need a
gradient, in the order in which they were registered. It does not compare names, dtypes or
buffers, and it does not notice a different order of layers with equal shapes.

    --case count    rank 1 has one more layer: every rank raises an error
    --case shape    rank 1 has a wider layer: rank 1 raises an error
    --case stride   rank 1 stores its weight transposed: the same happens
    --case order    rank 1 registers two layers in a different order: no error
    --case dtype    rank 1 builds its model in float64: no error
    --case buffer   rank 1 has one more buffer: no error, and its running mean is wrong

    --check         compares names, shapes and dtypes first: every rank raises an error
    --fix           every rank builds the same model, and the check passes
"""

import argparse
import os
import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    """Two projections of the same shape; `swapped` registers them in a different order."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("key", "query") if swapped else ("query", "key"):
            self.add_module(name, nn.Linear(4, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.query(x)) * self.key(x)).sum(1)


def build(case: str, odd: bool) -> nn.Module:
    """The model of this rank; `odd` is true only on rank 1."""
    torch.manual_seed(0)
    if case == "count":
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3 if odd else 2)])
    if case == "shape":
        return nn.Sequential(nn.Linear(4, 9 if odd else 8), nn.Linear(9 if odd else 8, 1))
    if case == "stride":
        model = nn.Linear(4, 8)
        if odd:
            model.weight.data = model.weight.data.T.contiguous().T  # equal values and sizes
        return model
    if case == "dtype":
        return nn.Linear(4, 1).to(torch.float64 if odd else torch.float32)
    if case == "buffer":
        layer, norm = nn.Linear(4, 1), nn.BatchNorm1d(1)
        norm.running_mean.fill_(0.5)
        norm.running_var.fill_(2.0)
        if odd:
            layer.register_buffer("scale", torch.ones(1))  # before the buffers of BatchNorm
        return nn.Sequential(layer, norm).eval()
    return Attention(swapped=odd)


def check_same_model(model: nn.Module) -> int:
    """Return the number of tensors; if the models differ, raise an error on every rank."""
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items()]
    of_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, mine)
    for rank, other in enumerate(of_rank):
        if len(other) != len(of_rank[0]):
            raise ValueError(
                f"rank 0 has {len(of_rank[0])} tensors, rank {rank} has {len(other)}"
            )
        for ours, theirs in zip(of_rank[0], other, strict=True):
            if ours != theirs:
                raise ValueError(f"rank 0 has {ours}, rank {rank} has {theirs}")
    return len(mine)


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """The output of the model of each rank for the same input."""
    x = torch.linspace(-1, 1, 8).view(2, 4).to(next(model.parameters()).dtype)
    with torch.no_grad():
        mine = model(x).flatten().double()
    of_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, mine)
    return of_rank


def query_gets_key(ddp: DistributedDataParallel) -> bool:
    """Whether DDP averages the gradient of rank 0's query with that of rank 1's key."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x = torch.randn(2, 4)
    with ddp.no_sync():
        ddp(x).sum().backward()
    mine = torch.stack([ddp.module.query.weight.grad, ddp.module.key.weight.grad])
    local = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(local, mine)
    ddp.zero_grad()
    ddp(x).sum().backward()
    mixed = sum(local[r][1 if r == 1 else 0] for r in range(n)) / n  # rank 1: the key
    ours = ddp.module.key.weight.grad if rank == 1 else ddp.module.query.weight.grad
    assert not torch.allclose(mixed, sum(gradients[0] for gradients in local) / n)
    return torch.allclose(ours, mixed)


def running_mean_gets_variance(model: nn.Sequential) -> bool:
    """Whether the running mean of rank 1 is the running variance of rank 0."""
    mine = torch.cat([model[1].running_mean, model[1].running_var])
    of_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, mine)
    assert of_rank[0].tolist() == [0.5, 2.0]  # rank 0 keeps its running mean and variance
    return of_rank[1][0].item() == of_rank[0][1].item()


def main() -> int:
    parser = argparse.ArgumentParser()
    cases = ["count", "shape", "stride", "order", "dtype", "buffer"]
    parser.add_argument("--case", choices=cases, default="count")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("different_models.py compares ranks: start it with 2 or more, by torchrun")

    checked = args.check or args.fix
    many = int(os.environ["WORLD_SIZE"]) > 2
    if args.case in ("buffer", "dtype") and not checked and many:
        sys.exit(f"--case {args.case} without --check needs 2 ranks: with more, gloo may fail")

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    model = build(args.case, odd=rank == 1 and not args.fix)
    before = outputs(model)
    if args.case in ("stride", "dtype", "buffer"):  # equal outputs, until DDP changes them
        assert torch.allclose(before[1], before[0], atol=1e-6)
    with suppress(ValueError):
        sizes = (2, 4) if rank == 1 else (4, 2)  # two shapes with the same number of elements
        check_same_model(nn.Linear(*sizes, bias=False))
        raise AssertionError("the check did not compare the shapes")
    try:
        equal_tensors = check_same_model(model) if checked else 0
        ddp = DistributedDataParallel(model)
    except (RuntimeError, ValueError) as error:
        everywhere = isinstance(error, ValueError) or args.case == "count"
        if everywhere:
            raised: list = [None] * dist.get_world_size()
            dist.all_gather_object(raised, type(error))
            assert raised == [type(error)] * len(raised)  # every rank raised the same error
        if rank == 1:
            print(f"rank 1: {type(error).__name__}: {error}", flush=True)
        if everywhere:
            dist.barrier()  # wait until rank 1 has printed
        return 1

    of_rank = outputs(model)
    assert torch.equal(of_rank[0], before[0])  # DDP has not changed the model of rank 0
    assert equal_tensors == (len(model.state_dict()) if args.fix else 0)  # the check has passed
    if rank == 0:
        print("DDP raised no error. The same input gives these outputs:")
        for r, output in enumerate(of_rank):
            print(f"  rank {r}: {', '.join(f'{value:.4f}' for value in output.tolist())}")
        sys.stdout.flush()
    if args.case == "order":
        mixed = query_gets_key(ddp)
        assert mixed == (not args.fix)
        if mixed and rank == 0:
            print("DDP averages the query of rank 0 with the key of rank 1", flush=True)
    if args.case == "buffer":
        shifted = running_mean_gets_variance(model)
        assert shifted == (not args.fix)
        if shifted and rank == 0:
            print("The running mean of rank 1 is the running variance of rank 0", flush=True)
    dist.barrier()
    return 0 if all(torch.equal(output, of_rank[0]) for output in of_rank) else 1


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
