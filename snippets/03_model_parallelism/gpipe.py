"""GPipe from send and recv: all forwards, then all backwards, with m micro-batches in memory.

The batch is cut into m micro-batches. Each rank keeps the input and the output of every
micro-batch from its forward to its backward, so every rank holds all m at its peak. The loss
and the gradients equal those of the unsplit model on the whole batch (Huang et al., 2019).
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.functional import mse_loss

LAYERS, BATCH, HIDDEN, M = 12, 24, 32, 8  # 1, 2, 3 and 4 ranks divide the layers


def gpipe_step(
    stage: nn.Module, batch: torch.Tensor, target: torch.Tensor, m: int
) -> tuple[torch.Tensor, int]:
    """Run one step over m micro-batches, and add the gradients to those of the stage.

    The first rank uses `batch` [b, h], and the last rank uses `target` [b, h]. Returns the
    loss, which is zero on all other ranks, and the largest number of live micro-batches.
    Raises ValueError if m does not divide the batch, or if a stage before the last changes
    the shape or the dtype of its input.
    """
    if not len(batch) or len(batch) % m:
        raise ValueError(f"{m} micro-batches do not divide a batch of {len(batch)}")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    total, peak = torch.zeros((), device=batch.device), 0

    # --8<-- [start:forwards]
    for i, (x, y_true) in enumerate(zip(batch.chunk(m), target.chunk(m), strict=True)):
        if rank > 0:
            x = torch.empty_like(x)  # [b/m, h], from the previous stage
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            if (y.shape, y.dtype) != (x.shape, x.dtype):
                raise ValueError("every stage but the last must keep shape and dtype")
            dist.send(y.detach(), rank + 1)
        else:
            y = mse_loss(y, y_true) / m  # the mean of the means, for equal sizes
            total += y.detach()
        live[i] = x, y
        peak = max(peak, len(live))
    # --8<-- [end:forwards]

    # --8<-- [start:backwards]
    for i in range(m):
        x, y = live.pop(i)
        grad = None
        if rank < last:
            grad = torch.empty_like(y)  # [b/m, h], from the next stage
            dist.recv(grad, rank + 1)
        if y.requires_grad:  # False on rank 0 if its stage is frozen
            torch.autograd.backward(y, grad)  # adds to .grad: accumulation over micro-batches
        if rank > 0:
            dist.send(x.grad, rank - 1)
    # --8<-- [end:backwards]
    return total, peak


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

    run = mock.Mock(**{"forward.return_value": None, "backward.return_value": None})
    stage.register_forward_hook(run.forward)
    next(stage.parameters()).register_post_accumulate_grad_hook(run.backward)
    with mock.patch.object(dist, "send", wraps=dist.send) as send:  # to count what is sent
        loss, peak = gpipe_step(stage, batch, target, M)
    assert [name for name, *_ in run.mock_calls] == M * ["forward"] + M * ["backward"]
    assert rank == p - 1 or loss == 0
    dist.broadcast(loss, p - 1)
    torch.testing.assert_close(loss, true_loss.detach())
    for ours, theirs in zip(stage.parameters(), truth, strict=True):
        # added to the gradients of the whole model, which are as small as 1e-4
        torch.testing.assert_close(ours.grad, 2 * theirs, rtol=1e-4, atol=1e-8)

    sent = BATCH // M * HIDDEN * 4
    messages = [(call.args[1], call.args[0].nbytes) for call in send.call_args_list]
    down, up = (M * [(peer, sent)] * (0 <= peer < p) for peer in (rank + 1, rank - 1))
    assert messages == down + up  # all activations, then all gradients
    assert peak == M
    wrong = [(stage, batch[:-1], "do not divide"), (stage, batch[:0], "do not divide")]
    if rank == 0 < p - 1:
        wrong.append((nn.Linear(HIDDEN, 1, device=device), batch, "must keep shape"))
        wrong.append((lambda x: stage(x).double(), batch, "must keep shape"))
    for module, samples, message in wrong:
        try:
            gpipe_step(module, samples, target[: len(samples)], M)
        except ValueError as error:
            assert message in str(error)
        else:
            raise AssertionError(f"gpipe_step must raise an error: {message}")
    peaks: list = [None] * p
    dist.all_gather_object(peaks, peak)
    if rank == 0:
        print(f"p = {p}, m = {M}: loss and gradients equal to the unsplit model")
        print(f"most live micro-batches, rank 0 to {p - 1}: {' '.join(map(str, peaks))}")
        print(f"sent at each cut: {2 * M} messages of {sent} bytes, half of them gradients")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
