"""A model cut by layers over p ranks: one rank works at a time, so (p-1)/p of the time is idle.

In forward, each rank sends its activations to the next rank. In backward, each rank sends the
gradient of its input to the previous rank. The graph of autograd ends at the cut, so each rank
starts its own backward with the gradient that it received. The gradients equal those of the
unsplit model. A sleep makes every forward last 40 ms and every backward 80 ms on any machine,
and each rank records when it worked.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.functional import mse_loss

LAYERS, BATCH, HIDDEN = 12, 24, 32  # 1, 2, 3 and 4 ranks divide the layers
FORWARD, BACKWARD = 0.040, 0.080  # seconds


def split_step(
    stage: nn.Module, batch: torch.Tensor, target: torch.Tensor, spans: list
) -> torch.Tensor | None:
    """Run one forward and one backward through all ranks. The last rank returns the loss.

    The first rank uses `batch` [b, h], and the last rank uses `target` [b, h]. The gradients
    are added to those of the stage, and (begin, end) of this rank's work to `spans`.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    # --8<-- [start:forward]
    x = batch
    if rank > 0:
        x = torch.empty_like(batch)
        dist.recv(x, rank - 1)
        x.requires_grad_()  # a leaf of this rank's graph: rank - 1 needs its .grad

    begin = time.monotonic()
    y = stage(x)
    loss = mse_loss(y, target) if rank == last else None
    pad(begin, FORWARD, spans)
    # --8<-- [end:forward]

    # --8<-- [start:backward]
    grad = None
    if rank < last:
        dist.send(y.detach(), rank + 1)
        grad = torch.empty_like(y)
        dist.recv(grad, rank + 1)

    begin = time.monotonic()
    torch.autograd.backward(y if loss is None else loss, grad)
    pad(begin, BACKWARD, spans)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    # --8<-- [end:backward]
    return loss


def pad(begin: float, seconds: float, spans: list) -> None:
    """Sleep until `seconds` after `begin`, and add the span to `spans`."""
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    spans.append((begin, time.monotonic()))


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

    mse_loss(whole(batch), target).backward()  # the unsplit model, on every rank
    share = LAYERS // p
    stage = whole[rank * share : (rank + 1) * share]
    truth = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()

    split_step(stage, batch, target, [])  # connects the ranks
    stage.zero_grad()
    spans: list[tuple[float, float]] = []
    dist.barrier()
    split_step(stage, batch, target, spans)
    for ours, theirs in zip(stage.parameters(), truth, strict=True):
        torch.testing.assert_close(ours.grad, theirs)

    every: list = [None] * p
    dist.all_gather_object(every, spans)
    if rank == 0:
        first = min(begin for begin, _ in every[0])
        length = max(end for _, end in every[0]) - first
        print(f"{p} ranks, {share} layers each: gradients equal to the unsplit model")
        for r, (f, b) in enumerate(every):
            start_f, start_b = 1e3 * (f[0] - first), 1e3 * (b[0] - first)
            before = p * FORWARD + (p - 1 - r) * BACKWARD  # at least, and a backward after it
            assert start_f > 999 * r * FORWARD - 1 and start_b > 999 * before - 1
            assert start_b < 1e3 * (length - 0.999 * BACKWARD)
            assert min(f[1] - f[0] for f, _ in every) < 0.8 * (b[1] - b[0])
            print(
                f"  rank {r}: forward from ≈{start_f:.0f} ms, backward from ≈{start_b:.0f} ms"
            )
        # a sleep is never too short, so the ranks worked one after the other
        assert length > 0.999 * p * (FORWARD + BACKWARD), length
        busy = sum(end - begin for spans in every for begin, end in spans)
        idle = 1 - busy / (p * length)
        assert idle > (p - 1) / p - 0.001  # one rank works at a time; the machine adds delays
        print(f"idle: (p-1)/p = {(p - 1) / p:.1%}, measured ≈{idle:.1%}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
