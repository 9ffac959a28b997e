"""A model cut by layers over p ranks, one batch at a time: right, and idle (p-1)/p of the time.

Activations go down the ranks in forward, their gradients come back up in backward. autograd
ends at the cut, so each rank starts its own backward with the gradient that it received. A
sleep makes every stage's forward take 40 ms and its backward 80 ms, on two cores or on ninety,
and each rank notes when it worked.
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
    """One forward and backward through all ranks; the last rank returns the loss.

    `batch` [b, h] enters on the first rank, `target` [b, h] is used on the last. Gradients are
    left in the stage's parameters; `spans` takes (begin, end) of this rank's work.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = batch
    if rank > 0:
        x = torch.empty_like(batch)
        dist.recv(x, rank - 1)
        x.requires_grad_()  # a leaf of this rank's graph: its .grad is what rank - 1 needs

    begin = time.monotonic()
    y = stage(x)
    loss = mse_loss(y, target) if rank == last else None
    pad(begin, FORWARD, spans)

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
    return loss


def pad(begin: float, seconds: float, spans: list) -> None:
    """Sleep until `seconds` after `begin`, and note the span."""
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    spans.append((begin, time.monotonic()))


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
    if LAYERS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {LAYERS} layers")
    device = start()
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
        # a sleep is never shorter than asked for, so the ranks did take turns
        assert length > 0.999 * p * (FORWARD + BACKWARD), length
        busy = sum(end - begin for spans in every for begin, end in spans)
        idle = 1 - busy / (p * length)
        assert idle > (p - 1) / p - 0.001  # one at a time works; more is lost to the machine
        print(f"idle: (p-1)/p = {(p - 1) / p:.1%}, measured ≈{idle:.1%}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
