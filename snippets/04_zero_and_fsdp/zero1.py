"""ZeRO-1 from scratch: each rank keeps Adam's state for its shard of the parameters alone.

Every rank holds all parameters and all gradients. A reduce-scatter gives each rank the mean
gradient of its own shard, Adam updates that shard, and an all-gather passes the shards round:
the bytes of one all-reduce. torch's ZeroRedundancyOptimizer runs beside it, behind DDP.
"""

import copy
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, STEPS = 48, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it
ELEMENT = 8  # bytes: float64, so that the order in which partial sums are added does not show


class Flat:
    """Parameters of one dtype as windows into one tensor, which is padded, and cut into N."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.n = parameters, dist.get_world_size()
        self.sizes = [p.numel() for p in parameters]
        self.sizes.append(-sum(self.sizes) % self.n)  # padding
        pieces = [p.detach().flatten() for p in parameters]
        self.whole = torch.cat([*pieces, pieces[0].new_zeros(self.sizes[-1])])
        for p, window in zip(parameters, self.whole.split(self.sizes), strict=False):
            p.data = window.view_as(p)
        self.shard = nn.Parameter(self.whole.chunk(self.n)[dist.get_rank()])  # also a window

    def reduce_gradients(self) -> None:
        gradient = torch.zeros_like(self.whole)
        for p, piece in zip(self.parameters, gradient.split(self.sizes), strict=False):
            if p.grad is None:
                raise RuntimeError("no gradient in this backward for some parameters")
            piece.copy_(p.grad.flatten())
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(gradient.chunk(self.n)))
        self.shard.grad /= self.n

    def gather(self) -> None:
        dist.all_gather(list(self.whole.chunk(self.n)), self.shard.detach())


class ZeRO1:
    """`kind(parameters, **options)`, of whose state each rank keeps 1/N.

    All ranks begin with the same model. `kind` treats every element alone, as SGD, Adam and
    RMSprop do; LAMB, Muon and Adafactor look at whole matrices. Each parameter that requires a
    gradient must have one in `step`, a dense one. A scheduler gets `optimizer`, whose state is
    that of this rank's shard.
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
        self.optimizer.step()  # Ψ/N elements, and the moments of as many
        for flat in self.flats:
            flat.gather()


class CountBytes(TorchDispatchMode):
    """What a ring of ranks has to send, per rank, for every collective that is issued."""

    def __enter__(self) -> "CountBytes":
        self.sent: dict[str, float] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name, n = func.overloadpacket.__name__.rstrip("_"), dist.get_world_size()
            if name == "broadcast":  # passed on N-1 times; the mean over the ranks
                sent = sum(t.nbytes for t in args[0]) * (n - 1) / n
            else:
                whole = args[0][0] if name == "allgather" else args[0]
                size = sum(t.nbytes for t in whole) * (n if name == "reduce_scatter" else 1)
                sent = (2 if name == "allreduce" else 1) * (n - 1) / n * size
            self.sent[name] = self.sent.get(name, 0) + sent
        return func(*args, **(kwargs or {}))


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the moments which this rank's Adam holds (its step counters left out)."""
    return sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in optimizer.state.values())


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


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    alone = nn.Sequential(nn.Linear(61, 120), nn.GELU(), nn.Linear(120, 61)).to(device)
    ours, ddp = copy.deepcopy(alone), DistributedDataParallel(copy.deepcopy(alone))
    psi = sum(p.numel() for p in alone.parameters())
    runs = {  # model, optimizer, share of the batch
        "one process": (alone, Adam(alone.parameters(), lr=0.01), slice(None)),
        "ZeRO-1": (ours, ZeRO1(ours.parameters(), Adam, lr=0.01), slice(rank, None, n)),
        "DDP + ZeroRedundancyOptimizer": (
            ddp,
            ZeroRedundancyOptimizer(ddp.parameters(), Adam, lr=0.01),
            slice(rank, None, n),
        ),
    }
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 61).to(device)
        counts = {}
        for name, (model, optimizer, mine) in runs.items():
            assert len(inputs[mine]) == (BATCH if model is alone else BATCH // n)
            with CountBytes() as counts[name]:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs[mine]), inputs[mine].sin()).backward()
                optimizer.step()

    for model in (ours, ddp.module):
        for parameter, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter, truth)
    if rank == 0:
        print(f"N = {n}, Ψ = {psi:,}; after {STEPS} steps of Adam all three hold equal models")
        print("rank 0 holds, and sends in a step, in units of Ψ elements:")
        for name, (_, optimizer, _) in runs.items():
            inner = getattr(optimizer, "optimizer", getattr(optimizer, "optim", optimizer))
            moments = state_bytes(inner) / (ELEMENT * psi)
            sent = {k: f"{v / (ELEMENT * psi):.3f}" for k, v in counts[name].sent.items()}
            total = sum(counts[name].sent.values()) / (ELEMENT * psi)
            parts = " + ".join(f"{k} {v}" for k, v in sent.items()) or "nothing"
            print(f"{name}: moments {moments:.3f}\n  sends {parts} = {total:.3f}")
        print(f"2/N = {2 / n:.3f}, 2(N-1)/N = {2 * (n - 1) / n:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
