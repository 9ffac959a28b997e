"""BatchNorm under DDP differs from one process; a synchronized layer from scratch fixes this.

BatchNorm normalizes with the statistics of the rank's own shard, so DDP no longer computes
what one process computes. The fix sums three small tensors over the ranks, and gradients flow
through this sum. Look also at the running statistics: only those of rank 0 survive. On three
ranks the shards have different numbers of rows, so that a mean of means would be wrong.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CHANNELS, STEPS = 6, 3


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


class SumOverRanks(torch.autograd.Function):
    """All-reduce in forward. Every rank's loss depends on the sum, so backward sums as well."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.apply(grad)


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the rows of all ranks. Input and output: [rows of this rank, channels]."""

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps, momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            raise ValueError(f"SynchronizedBatchNorm takes [rows, channels], not {[*x.shape]}")
        if not self.training:
            return super().forward(x)
        dtype, x = x.dtype, x.to(self.weight.dtype)  # under autocast the sums stay in fp32
        # one all-reduce of 2 * channels + 1 numbers; the ranks may have different row counts
        count = x.new_tensor([x.shape[0]])
        sums = SumOverRanks.apply(torch.cat([x.sum(0), x.square().sum(0), count]))
        total, total_square, count = sums.split([x.shape[1], x.shape[1], 1])
        mean = total / count
        # E[x²] - E[x]² loses digits if |mean| is much larger than the standard deviation.
        # torch's layer gathers mean, 1/deviation and count of each rank instead, and merges
        # them.
        variance = total_square / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        normed = (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return normed.to(dtype)


def make_model(norm: type[nn.Module], device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, CHANNELS), norm(CHANNELS), nn.Linear(CHANNELS, 2))
    return model.to(device)


def train(model: nn.Module, batches: list, rows: int) -> torch.Tensor:
    """SGD on the mean over `rows` rows of all ranks; return the last output, detached."""
    n = dist.get_world_size() if isinstance(model, DDP) else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        output = model(x)
        # shards may be unequal: a sum over the shard times N / rows, as in mean_of_means.py
        (F.mse_loss(output, y, reduction="sum") * n / rows).backward()
        optimizer.step()
    return output.detach()


def main() -> None:
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    report = print if rank == 0 else lambda *_: None
    generator = torch.Generator().manual_seed(1)
    rows = 26  # 13 + 13 on two ranks, 9 + 9 + 8 on three
    whole = [
        (
            torch.randn(rows, 4, generator=generator).to(device) + 1,
            torch.randn(rows, 2, generator=generator).to(device),
        )
        for _ in range(STEPS)
    ]
    mine = [(x.tensor_split(n)[rank], y.tensor_split(n)[rank]) for x, y in whole]

    # the reference: one process with the whole batch
    alone = make_model(nn.BatchNorm1d, device)
    expected = train(alone, whole, rows).tensor_split(n)[rank]
    gradients = [parameter.grad for parameter in alone.parameters()]
    statistics = list(alone[1].buffers())  # mean, variance, number of batches
    alone.eval()

    plain = DDP(make_model(nn.BatchNorm1d, device))
    output = train(plain, mine, rows)
    distance = (output - expected).square().sum()
    dist.all_reduce(distance)
    size = expected.square().sum()
    dist.all_reduce(size)
    report(f"BatchNorm1d under DDP, {STEPS} steps:")
    report(f"  output off by {100 * (distance / size).sqrt().item():.0f}% from one process")

    def check(model: DDP) -> None:
        torch.testing.assert_close(train(model, mine, rows), expected)
        torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
        torch.testing.assert_close(list(model.module[1].buffers()), statistics)
        # in eval mode the running statistics are used, whatever the batch contains
        torch.testing.assert_close(model.eval()(mine[0][0]), alone(mine[0][0]))
        report("  output, gradients and running statistics equal to one process")

    report("synchronized from scratch:")
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        check(DDP(make_model(SynchronizedBatchNorm, device)))
    assert spy.call_count == 2 * STEPS  # one in each forward, and one in each backward

    # under autocast the input of the layer is bf16, but its sums must be fp32
    short, reference = SynchronizedBatchNorm(4).to(device), nn.BatchNorm1d(4).to(device)
    x = whole[0][0].bfloat16()
    exact = reference(x.float()).tensor_split(n)[rank]
    torch.testing.assert_close(short(x.tensor_split(n)[rank]), exact.bfloat16())
    torch.testing.assert_close(short.running_mean, reference.running_mean)
    torch.testing.assert_close(short.running_var, reference.running_var)

    report("torch.nn.SyncBatchNorm:")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_model(nn.BatchNorm1d, device))
    try:
        check(DDP(model))
    except ValueError as error:  # on a CPU
        report(f"  ValueError: {error}")

    # Which running statistics survive? Look at the plain layer again, after its last step.
    means = [torch.empty_like(plain.module[1].running_mean) for _ in range(n)]
    dist.all_gather(means, plain.module[1].running_mean)
    equal = [torch.equal(mean, means[0]) for mean in means]
    report(f"BatchNorm1d after the last step: running_mean equal to rank 0's, by rank: {equal}")
    plain.eval()
    plain(mine[0][0])  # forward starts with a broadcast of rank 0's buffers, in eval mode too
    torch.testing.assert_close(plain.module[1].running_mean, means[0], rtol=0, atol=0)
    report("after one more forward: every rank has rank 0's, which saw only rank 0's shards")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
