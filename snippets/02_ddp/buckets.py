"""DDP with buckets: one all-reduce sends many gradients, and nothing is copied into a buffer.

An all-reduce takes about α + β·bytes seconds, so each small bias costs the whole latency α. A
bucket is one flat tensor for many gradients. Each `parameter.grad` is a view into the bucket,
so autograd writes the gradient directly into the bucket. Buckets are filled in the reverse of
the order in which the parameters are defined. This is a guess at the order in which backward
computes the gradients.

The views work only as long as nothing replaces them. `optimizer.zero_grad()` does replace them:
by default it sets `.grad = None`. The next gradient is then a new tensor, and the hook copies
it into the bucket. `BucketedDDP` has its own `zero_grad`, which needs no copies.

In the output, compare the number of all-reduces: the result is the same with 4 as with 16.
"""

import copy
import os
import sys
from functools import partialmethod
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

BATCH, STEPS = 240, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it


class Bucket:
    """A flat tensor for the gradients of some parameters. Each `.grad` is a view into it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        self.missing = len(parameters)  # gradients that are not ready yet
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = {p: v.view_as(p) for p, v in zip(parameters, pieces, strict=True)}
        for parameter, view in self.views.items():
            parameter.grad = view


def fill_buckets(parameters: list[nn.Parameter], capacity: int) -> list[Bucket]:
    """Fill buckets of one dtype, last parameter first, until each has `capacity` bytes."""
    groups: list[list[nn.Parameter]] = []
    for p in reversed(parameters):
        last = groups[-1] if groups else []
        if not last or p.dtype != last[0].dtype or sum(q.nbytes for q in last) >= capacity:
            groups.append([])
        groups[-1].append(p)
    return [Bucket(group) for group in groups]


class BucketedDDP(nn.Module):
    """In each backward pass, every parameter that requires a gradient must get one."""

    def __init__(self, module: nn.Module, capacity: int) -> None:
        super().__init__()
        self.module = module
        self.in_flight: list[tuple[Bucket, dist.Work]] = []
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = fill_buckets(trained, capacity)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.mark_ready)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def mark_ready(self, parameter: nn.Parameter) -> None:
        bucket = self.bucket_of[parameter]
        if bucket.missing == 0:  # a second backward pass changed a bucket being sent
            raise RuntimeError("call wait() after each backward")
        view = bucket.views[parameter]
        if parameter.grad is not view:  # after optimizer.zero_grad()
            view.copy_(parameter.grad.to_dense())  # the gradient of an embedding may be sparse
            parameter.grad = view
        bucket.missing -= 1
        if bucket.missing == 0:
            work = dist.all_reduce(bucket.flat, async_op=True)
            self.in_flight.append((bucket, work))

    def wait(self) -> None:
        """Wait for all sums and divide them by N. Call this before the optimizer."""
        for bucket, work in self.in_flight:
            work.wait()
            bucket.flat /= dist.get_world_size()  # all gradients of the bucket at once
        self.in_flight.clear()
        missing = sum(bucket.missing for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        if missing:
            raise RuntimeError(f"no gradient in this backward pass for {missing} parameters")

    def zero_grad(self, set_to_none: bool = False) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()


def average_one_by_one(module: nn.Module) -> None:
    """The naive version, for comparison: one all-reduce for each parameter."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


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
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)
    layers = [nn.Linear(64, 128), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 8)).to(device)
    naive = copy.deepcopy(model)
    start = model[0].weight.detach().clone()
    ddp = BucketedDDP(model, capacity=128 * 1024)
    assert torch.equal(start, model[0].weight) == (rank == 0)  # rank 0 keeps its weights
    naive.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.9)
    optimizer_naive = torch.optim.SGD(naive.parameters(), lr=1.0, momentum=0.9)

    if rank == 0:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for number, bucket in enumerate(ddp.buckets):
            inside = ", ".join(names[p] for p in bucket.parameters)
            print(f"bucket {number}, {bucket.flat.nbytes / 1024:.1f} KiB: {inside}")

    rows = []  # the number of samples in each forward of this rank
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    launched = []  # the number of all-reduces in this step when each bucket is full
    for bucket in ddp.buckets:
        bucket.parameters[-1].register_post_accumulate_grad_hook(
            lambda _: launched.append(counter.call_count)
        )
    waits = mock.Mock(side_effect=dist.Work.wait)
    copies = mock.Mock(side_effect=torch.Tensor.copy_)
    torch.manual_seed(1234)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 64).to(device)
        targets = inputs[:, :8].tanh()
        shard = slice(rank * BATCH // n, (rank + 1) * BATCH // n)

        # --8<-- [start:traced]
        (optimizer if step % 2 else ddp).zero_grad()  # both must work
        assert all((p.grad is None) == (step % 2 == 1) for p in ddp.parameters())
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counter,
            mock.patch.object(dist.Work, "wait", partialmethod(waits)),
            mock.patch.object(torch.Tensor, "copy_", partialmethod(copies)),
        ):
            nn.functional.mse_loss(ddp(inputs[shard]), targets[shard]).backward()
            assert not waits.called  # backward does not wait for a bucket
            ddp.wait()
        assert waits.call_count == 4
        assert copies.call_count == (16 if step % 2 else 0)  # after optimizer.zero_grad() only
        waits.reset_mock()
        copies.reset_mock()
        optimizer.step()
        # --8<-- [end:traced]

        optimizer_naive.zero_grad()
        nn.functional.mse_loss(naive(inputs[shard]), targets[shard]).backward()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counter_naive:
            average_one_by_one(naive)
        optimizer_naive.step()

    assert rows == [BATCH // n] * STEPS  # this rank computed its shard only
    assert launched == [1, 2, 3, 4] * STEPS  # each full bucket was sent at once
    for ours, expected in zip(ddp.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
        of_rank_0 = ours.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        torch.testing.assert_close(ours, of_rank_0)

    frozen = nn.Linear(2, 2).to(device).requires_grad_(False)
    assert BucketedDDP(frozen, 2**20).buckets == []
    kinds = torch.float32, torch.float64
    mixed = fill_buckets([nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds], 2**20)
    assert [bucket.flat.dtype for bucket in mixed] == [torch.float64, torch.float32]

    def backward_twice() -> None:
        for _ in range(2):
            ddp(inputs[shard]).sum().backward()

    def backward_of_one_layer() -> None:
        model[0](inputs[shard]).sum().backward()
        ddp.wait()

    for mistake, message in (
        (backward_of_one_layer, "no gradient in this backward pass for 14 parameters"),
        (backward_twice, "call wait() after each backward"),
    ):
        try:
            mistake()
        except RuntimeError as error:
            assert message in str(error)
        else:
            raise AssertionError(f"this error was not raised: {message}")
    ddp.wait()  # for the sums of the first backward
    if rank == 0:
        print(
            f"all-reduces per step: naive {counter_naive.call_count}, "
            f"in buckets {counter.call_count}"
        )
        print(f"world size {n}, parameters after {STEPS} steps: equal to the naive version")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
