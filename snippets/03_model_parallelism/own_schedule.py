"""V-Half and V-Min, which torch does not have, run by torch's own pipeline runtime.

The lists of operations become a table with a row for each rank. `3F0` is the forward of stage 3
for micro-batch 0, `3I0` is its B (torch calls it I, for input), and `3W0` is its W. The runtime
adds the sends and receives. The program compares loss and gradients with one process. It also
counts what autograd keeps on each rank, which must not exceed p // 2 + 1 and (p + 4) // 3
micro-batches.
"""

import csv
import itertools
import math
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

LAYERS, BATCH, HIDDEN, M = 16, 48, 32, 12  # 2, 4 and 8 ranks, with 2 stages each


class Op(NamedTuple):
    kind: str  # F, B or W
    micro: int  # micro-batch
    stage: int  # 0 … p-1, or 0 … pv-1 where each rank holds v chunks


Schedule = list[list[Op]]  # the operations of each rank, in its order


def v_half(p: int, m: int) -> Schedule:
    """A V with half of ZB-V's memory. On each way down, a micro-batch waits on each rank."""
    return from_block(p, m, p // 2 + 1, v_half_starts)


def v_half_starts(p: int, r: int) -> tuple[int, ...]:
    """Return when rank r starts F0, F1, B1 and B0 of micro-batch 0, in units of a chunk's F."""
    gap = 0 if p % 2 else 3  # so that a rank's four operations use different units of six
    return 2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r


def v_min(p: int, m: int) -> Schedule:
    """The shortest V: down, up, down and up again without waiting."""
    return from_block(p, m, (p + 4) // 3, v_min_starts)


def v_min_starts(p: int, r: int) -> tuple[int, ...]:
    """Return when rank r starts F0, F1, B1 and B0 of micro-batch 0, in units of a chunk's F."""
    gap = 0 if p % 3 else 2
    return r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r


def from_block(p: int, m: int, most: int, starts: Callable) -> Schedule:
    """Repeat the path of one micro-batch every six units of time, then remove the gaps.

    starts(p, r) returns when rank r starts F0, F1, B1 and B0 of micro-batch 0. A rank runs its
    forwards in the order of the repeated path, and its B too. Each runs as early as its input
    and the limit of `most` live micro-batches allow. Where neither can run, a W runs.
    """
    queues = []  # for each rank: its F, its B and its W, with their begin
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        block = list(zip("FFBB", (down, up, up, down), starts(p, r), strict=True))
        steps = sorted((t + 6 * i, Op(kind, i, s)) for i in range(m) for kind, s, t in block)
        forwards, backwards = ([step for step in steps if step[1].kind == k] for k in "FB")
        weights = [(math.inf, op._replace(kind="W")) for _, op in backwards]
        queues.append([forwards, backwards, weights])
    schedule: Schedule = [[] for _ in range(p)]
    while any(itertools.chain(*queues)):
        ended = {op for ops in schedule for op in ops}
        for ops, rank in zip(schedule, queues, strict=True):
            live = sum((op.kind == "F") - (op.kind == "W") for op in ops)
            ready = [
                (begin, op)
                for begin, op in (queue[0] for queue in rank if queue)
                if needs(op, 2 * p) <= ended and (op.kind != "F" or live < 2 * most)
            ]
            if ready:
                ops.append(min(ready)[1])
                rank["FBW".index(ops[-1].kind)].pop(0)
    return schedule


def needs(op: Op, stages: int) -> set[Op]:
    """Return the operations that must end before `op` can begin."""
    if op.kind == "F":
        return {op._replace(stage=op.stage - 1)} if op.stage else set()
    if op.kind == "W":
        return {op._replace(kind="B")}
    last = op.stage == stages - 1
    return {op._replace(kind="F") if last else op._replace(stage=op.stage + 1)}


def peak_live(ops: list[Op], v: int) -> Fraction:
    """Most micro-batches whose activations a rank holds at once: from F to W, or to B."""
    release = "W" if any(op.kind == "W" for op in ops) else "B"
    live = peak = 0
    for op in ops:
        live += (op.kind == "F") - (op.kind == release)
        peak = max(peak, live)
    return Fraction(peak, v)  # a chunk's activations are 1/v of a rank's


class Layer(nn.Module):
    """Linear and Tanh, and a count of the activations that autograd keeps, two per call."""

    kept = most = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.note, lambda box: box[0]):
            return self.linear(x).tanh()

    @staticmethod
    def note(saved: torch.Tensor) -> "Box":
        box = Box([saved.detach()])  # without its graph, which would keep it alive
        if saved.shape[0] == BATCH // M:  # and not a weight
            Layer.kept += 1
            Layer.most = max(Layer.most, Layer.kept)
            weakref.finalize(box, Layer.gone)
        return box

    @staticmethod
    def gone() -> None:
        Layer.kept -= 1


class Box(list):
    """A list that reports when it is freed."""


def action(op: Op) -> str:
    """The name that torch uses. Its own B is a whole backward and includes W."""
    return f"{op.stage}{op.kind.replace('B', 'I')}{op.micro}"


def train_step(
    table: Schedule, whole: nn.Module, batch: torch.Tensor, target: torch.Tensor
) -> tuple[list[nn.Module], torch.Tensor]:
    """Run one step in the order of `table`. Return this rank's stages and the mean loss."""
    rank, p = dist.get_rank(), dist.get_world_size()
    share = LAYERS // (2 * p)
    example = torch.empty(BATCH // M, HIDDEN, device=batch.device, requires_grad=True)
    stages = [
        PipelineStage(
            whole[i * share : (i + 1) * share], i, 2 * p, batch.device,
            input_args=(example,), output_args=example,
        )
        for i in (rank, 2 * p - 1 - rank)
    ]  # fmt: skip
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=M, loss_fn=mse_loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as file:
        for ops in table:
            csv.writer(file).writerow(map(action, ops))
        file.flush()
        schedule._load_csv(file.name)
    losses: list[torch.Tensor] = []
    first_and_last = (batch,) if rank == 0 else ()  # of the V
    schedule.step(*first_and_last, target=target if rank == 0 else None, losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else batch.new_zeros(())
    dist.broadcast(loss, 0)
    return [stage.submod for stage in stages], loss


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
    if os.environ.get("WORLD_SIZE") not in {"2", "4", "8"}:
        sys.exit("start with 2, 4 or 8 ranks: torchrun --nproc-per-node=4 own_schedule.py")
    few = torch.accelerator.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.__version__.startswith("2.11.") and few:
        sys.exit("torch 2.11 has a rank send to itself where its two stages meet: gloo cannot")
    device = init_distributed()
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model and batch on every rank
    whole = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device)
    batch, target = torch.randn(2, BATCH, HIDDEN, device=device)
    true_loss = mse_loss(whole(batch), target)
    true_loss.backward()
    truth = [parameter.grad.clone() for parameter in whole.parameters()]
    if rank == 0:
        print(f"p = {p}, m = {M}")
    for build in (v_half, v_min):
        table = build(p, M)
        whole.zero_grad()
        Layer.kept = Layer.most = 0
        modules, loss = train_step(table, whole, batch, target)
        torch.testing.assert_close(loss, true_loss.detach())
        mine = {id(t) for module in modules for t in module.parameters()}
        for parameter, gradient in zip(whole.parameters(), truth, strict=True):
            assert (parameter.grad is not None) == (id(parameter) in mine)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, gradient)
        counted: list = [None] * p
        dist.all_gather_object(counted, Layer.most / (2 * LAYERS // p))
        listed = [float(peak_live(ops, 2)) for ops in table]
        for ours, torchs in zip(listed, counted, strict=True):
            assert 0 <= ours - torchs <= 0.5, (listed, counted)
        assert Layer.kept == 0
        if rank == 0:
            print(f"{build.__name__}: rank 0 runs", *map(action, table[0][:8]), "…")
            print("  loss and gradients of one process; most live, rank 0…:")
            print("  by the list ", *(f"{n:g}" for n in listed))
            print("  autograd's  ", *(f"{n:g}" for n in counted))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
