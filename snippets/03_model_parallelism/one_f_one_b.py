"""1F1B from send and recv: the gradients of GPipe, with at most p live micro-batches, not m.

Rank r runs p-1-r forwards as a warm-up, then one forward and one backward in turn, and then the
remaining backwards. In the middle, two neighbours have a message for each other at the same
moment, so each rank sends and receives in one batch (PipeDream-flush, Narayanan et al., 2021).
"""

import os
import sys
import weakref
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.functional import mse_loss

LAYERS, BATCH, HIDDEN, M = 12, 24, 32, 8  # 1, 2, 3 and 4 ranks divide the layers


def exchange(outgoing: torch.Tensor | None, incoming: torch.Tensor | None, peer: int) -> None:
    """Send and receive at the same time. A None, or a peer that does not exist, is skipped."""
    if not 0 <= peer < dist.get_world_size():
        return
    ops = []
    if outgoing is not None:
        ops.append(dist.P2POp(dist.isend, outgoing, peer))
    if incoming is not None:
        ops.append(dist.P2POp(dist.irecv, incoming, peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


class OneFOneB:
    """One step of 1F1B for one stage. After `step`, read `loss` and `peak`.

    `loss` is zero on all ranks except the last, and `peak` is the largest number of live
    micro-batches. Raises ValueError if m does not divide the batch, or if a stage before the
    last changes the shape or the dtype of its input.
    """

    def __init__(self, stage: nn.Module, batch: torch.Tensor, target: torch.Tensor, m: int):
        if len(batch) % m:
            raise ValueError(f"{m} micro-batches do not divide a batch of {len(batch)}")
        self.stage, self.m = stage, m
        self.rank, self.p = dist.get_rank(), dist.get_world_size()
        self.batch, self.target = batch.chunk(m), target.chunk(m)  # m times [b/m, h]
        self.live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.loss, self.peak = torch.zeros((), device=batch.device), 0
        self.outputs: list[weakref.ref] = []  # to count those that are still in memory

    def buffer(self) -> torch.Tensor:
        return torch.empty_like(self.batch[0])  # [b/m, h], the same shape at every cut

    def forward(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """Run micro-batch i, and keep what its backward needs. Return the output to send."""
        x = self.batch[i] if self.rank == 0 else x.requires_grad_()
        y = self.stage(x)
        if self.rank == self.p - 1:
            y = mse_loss(y, self.target[i]) / self.m
            self.loss += y.detach()
        elif (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError("every stage but the last must keep shape and dtype")
        self.live[i] = x, y
        self.outputs.append(weakref.ref(y))
        self.peak = max(self.peak, sum(output() is not None for output in self.outputs))
        return y.detach()

    def backward(self, i: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Run the backward of micro-batch i, and return the gradient of its input."""
        x, y = self.live.pop(i)
        if y.requires_grad:  # False on rank 0 if its stage is frozen
            torch.autograd.backward(y, None if self.rank == self.p - 1 else grad)
        return x.grad

    def step(self) -> None:
        previous, following = self.rank - 1, self.rank + 1
        warm_up = min(self.p - 1 - self.rank, self.m)
        for i in range(warm_up):
            exchange(None, x := self.buffer(), previous)
            exchange(self.forward(i, x), None, following)
        steady = self.m - warm_up
        if steady:
            exchange(None, x := self.buffer(), previous)
        for i in range(steady):
            y = self.forward(warm_up + i, x)
            exchange(y, grad := self.buffer(), following)  # an activation for a gradient
            x_grad = self.backward(i, grad)
            x = self.buffer() if i + 1 < steady else None
            exchange(x_grad, x, previous)  # a gradient for an activation
        for i in range(steady, self.m):
            exchange(None, grad := self.buffer(), following)
            exchange(self.backward(i, grad), None, previous)


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
    if LAYERS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {LAYERS} layers")
    device = init_distributed()
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model and batch on every rank
    layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(LAYERS)]
    whole = nn.Sequential(*layers).to(device)
    batch, target = torch.randn(2, BATCH, HIDDEN, device=device)

    true_loss = mse_loss(whole(batch), target)  # the unsplit model, the whole batch
    true_loss.backward()
    share = LAYERS // p
    stage = whole[rank * share : (rank + 1) * share]
    truth = [parameter.grad.clone() for parameter in stage.parameters()]

    order: list[str] = []
    stage.register_forward_hook(lambda *_: order.append("F"))
    next(stage.parameters()).register_post_accumulate_grad_hook(lambda _: order.append("B"))
    start = dist.batch_isend_irecv
    for m in (2, M):  # fewer micro-batches than stages, and more
        stage.zero_grad(), order.clear()
        pipeline = OneFOneB(stage, batch, target, m)
        with mock.patch.object(dist, "batch_isend_irecv", wraps=start) as batches:
            pipeline.step()
        warm_up = min(p - 1 - rank, m)
        steady = m - warm_up
        assert order == warm_up * ["F"] + steady * ["F", "B"] + warm_up * ["B"]
        # a message in each direction: with the next rank, and then with the previous one
        pairs = sum(len(call.args[0]) == 2 for call in batches.call_args_list)
        assert pairs == steady * (rank < p - 1) + max(0, steady - 1) * (rank > 0)
        assert rank == p - 1 or pipeline.loss == 0
        dist.broadcast(pipeline.loss, p - 1)
        torch.testing.assert_close(pipeline.loss, true_loss.detach())
        for ours, theirs in zip(stage.parameters(), truth, strict=True):
            torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-8)

        assert pipeline.peak == min(p - rank, m)
        peaks: list = [None] * p
        dist.all_gather_object(peaks, pipeline.peak)
        if rank == 0:
            print(f"p = {p}, m = {m}: loss and gradients equal to the unsplit model")
            print(f"  most live micro-batches, rank 0 to {p - 1}: {' '.join(map(str, peaks))}")
    wrong = [(stage, batch[:-1], "do not divide")]  # 23 samples
    if rank == 0 < p - 1:
        wrong.append((nn.Linear(HIDDEN, 1, device=device), batch, "must keep shape"))
    for module, samples, message in wrong:
        try:
            OneFOneB(module, samples, target[: len(samples)], M).step()
        except ValueError as error:
            assert message in str(error)
        else:
            raise AssertionError(f"OneFOneB must raise an error: {message}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
