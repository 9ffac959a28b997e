"""ZeRO-1 from scratch: each rank keeps Adam's state only for its own shard of the parameters.

Every rank has all parameters and all gradients. A reduce-scatter gives each rank the mean
gradient of its own shard. Adam updates this shard, and an all-gather distributes the updated
shards. Together they send as many bytes as one all-reduce.

The program trains the same model in three ways: in one process, with ZeRO-1, and with torch's
ZeroRedundancyOptimizer behind DDP. Compare the lines `sends`: the operating system counts the
bytes that each process writes to its sockets, and the program prints the mean over the ranks
next to the formula. ZeroRedundancyOptimizer sends 50% more than ZeRO-1.

The program counts bytes only with gloo on Linux.
"""

import copy
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

BATCH, STEPS = 48, 4  # the batch of all ranks together; 1, 2, 3 and 4 divide it
ELEMENT = 8  # bytes: float64, so that the order in which partial sums are added does not show


class Flat:
    """Parameters of one dtype as views of one tensor, which is padded and cut into N shards."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.n = parameters, dist.get_world_size()
        self.sizes = [p.numel() for p in parameters]
        self.sizes.append(-sum(self.sizes) % self.n)  # padding
        pieces = [p.detach().flatten() for p in parameters]
        self.whole = torch.cat([*pieces, pieces[0].new_zeros(self.sizes[-1])])
        for p, view in zip(parameters, self.whole.split(self.sizes), strict=False):
            p.data = view.view_as(p)
        self.shard = nn.Parameter(self.whole.chunk(self.n)[dist.get_rank()])  # also a view

    def reduce_gradients(self) -> None:
        """Give the shard the mean gradient of all ranks."""
        gradient = torch.zeros_like(self.whole)
        for p, piece in zip(self.parameters, gradient.split(self.sizes), strict=False):
            if p.grad is None:
                raise RuntimeError("no gradient in this backward for some parameters")
            piece.copy_(p.grad.flatten())
        # Each rank receives its shard's gradients from all ranks, and adds them. With NCCL,
        # reduce_scatter_tensor sends the same bytes. Gloo's reduce-scatter sends twice as many.
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient)
        self.shard.grad = received.view(self.n, -1).mean(0)

    def gather(self) -> None:
        """Give every rank the shards of all ranks."""
        dist.all_gather(list(self.whole.chunk(self.n)), self.shard.detach())


class ZeRO1:
    """The optimizer `kind(parameters, **options)`, with 1/N of its state on each rank.

    All ranks must begin with the same model. `kind` must update each element independently, as
    SGD, Adam and RMSprop do. LAMB, Muon and Adafactor do not, because they use whole matrices.
    Each parameter that requires a gradient must have a dense gradient in `step`. A learning
    rate scheduler needs the attribute `optimizer`, which has the state of this rank's shard.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], kind: type[Optimizer], **options: object
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        dtypes = dict.fromkeys(p.dtype for p in self.parameters)
        self.flats = [Flat([p for p in self.parameters if p.dtype == d]) for d in dtypes]
        self.optimizer = kind([flat.shard for flat in self.flats], **options)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for flat in self.flats:
            flat.reduce_gradients()
        self.optimizer.step()  # updates Ψ/N elements, with moments for Ψ/N elements
        for flat in self.flats:
            flat.gather()


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the moments in this rank's Adam, without its step counters."""
    return sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in optimizer.state.values())


def bytes_written() -> int:
    """Return the bytes that this process has written so far, sockets included."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


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
    counted = device.type == "cpu" and Path("/proc/self/io").exists()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    alone = nn.Sequential(nn.Linear(61, 1000), nn.GELU(), nn.Linear(1000, 61)).to(device)
    ours, ddp = copy.deepcopy(alone), DistributedDataParallel(copy.deepcopy(alone))
    psi = sum(p.numel() for p in alone.parameters())
    ring = (n - 1) / n  # the fraction of a tensor that a rank sends in an all-gather
    runs = {  # model, optimizer, part of the batch, sent elements from the formula
        "one process": (alone, Adam(alone.parameters(), lr=0.01), slice(None), 0),
        "ZeRO-1": (ours, ZeRO1(ours.parameters(), Adam, lr=0.01), slice(rank, None, n), 2),
        "DDP + ZeroRedundancyOptimizer": (
            ddp,
            ZeroRedundancyOptimizer(ddp.parameters(), Adam, lr=0.01),
            slice(rank, None, n),
            3,
        ),
    }
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 61).to(device)
        sent = {}  # in this step, in units of Ψ elements
        for name, (model, optimizer, mine, _) in runs.items():
            assert len(inputs[mine]) == (BATCH if model is alone else BATCH // n)
            dist.barrier()
            before = bytes_written() if counted else 0
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[mine]), inputs[mine].sin()).backward()
            optimizer.step()
            after = bytes_written() if counted else 0
            sent[name] = torch.tensor((after - before) / (ELEMENT * psi), device=device)

    for model in (ours, ddp.module):
        for parameter, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter, truth)
    (flat,) = runs["ZeRO-1"][1].flats
    memory = {x.untyped_storage().data_ptr() for x in (flat.shard, *ours.parameters())}
    assert memory == {flat.whole.data_ptr()}  # all are views of one tensor
    ours[0].bias.grad = None
    try:
        runs["ZeRO-1"][1].step()
    except RuntimeError as error:
        assert "no gradient" in str(error)
    else:
        raise AssertionError("a missing gradient did not raise an error")
    if rank == 0:
        print(f"N = {n}, Ψ = {psi:,}; after {STEPS} steps of Adam all three models are equal")
        print("moments on rank 0, and elements that a rank sends in a step, in units of Ψ:")
    for name, (model, optimizer, _, times) in runs.items():
        dist.all_reduce(sent[name])  # a broadcast loads the ranks unequally: take the mean
        mean, formula = sent[name].item() / n, times * ring
        assert not counted or formula <= mean <= 1.05 * formula + 0.05, (name, mean)
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "optim", optimizer))
        on_ranks = [0] * n
        dist.all_gather_object(on_ranks, state_bytes(inner) // (2 * ELEMENT))
        if model is ddp:  # each parameter is on one rank
            assert sum(on_ranks) == psi
            assert n != 4 or sorted(on_ranks) == [61, 1000, 61_000, 61_000]
        else:  # equal shards, with padding
            assert on_ranks == [-(-psi // n) if model is ours else psi] * n
        if rank == 0:
            moments = 2 * on_ranks[0] / psi
            measured = f"≈{mean:.2f}" if counted else "not counted"
            print(f"{name}: moments {moments:.3f}")
            print(f"  sends {measured}, formula {times}(N-1)/N = {formula:.2f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
