"""DDP sends gradients in the type of the parameters, so autocast does not change the traffic.

A communication hook sees every bucket before it is sent. Autocast changes the types of
operators and not of parameters, so DDP sends fp32. A 16-bit model or a hook that compresses
changes the type of the message.

Look at the columns "wire" and "bytes per parameter".
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported here, because after init it would keep the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

H, BATCH = 64, 48
LOW = torch.bfloat16
NAMES = {torch.float32: "fp32", LOW: "bf16"}


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


def step(device: torch.device, low_model: bool, autocast: bool, compress: bool) -> list[str]:
    """Make one step; return four types, and the bytes of the messages per parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)).to(device)
    model = model.to(LOW) if low_model else model
    exact = copy.deepcopy(model).double()  # sees the samples of all ranks at once
    model = DistributedDataParallel(model)
    seen: dict[str, object] = {"bytes": 0}

    # --8<-- [start:hook]
    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        wire = (buffer.to(LOW) if compress else buffer) / dist.get_world_size()
        seen.update(bucket=buffer.dtype, wire=wire.dtype, bytes=seen["bytes"] + wire.nbytes)
        future = dist.all_reduce(wire, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    model.register_comm_hook(None, hook)
    # --8<-- [end:hook]
    x = torch.randn(dist.get_world_size(), BATCH, H, device=device)
    x = x.to(LOW if low_model else torch.float32)
    with torch.autocast(device.type, LOW, enabled=autocast):
        loss = model(x[dist.get_rank()]).float().square().mean()
    loss.backward()
    weight = model.module[0].weight
    exact(x.double()).square().mean().backward()
    right = exact[0].weight.grad
    error = ((weight.grad.double() - right).norm() / right.norm()).item()
    assert 1e-3 < error < 0.02 if low_model or autocast else error < 1e-5, error
    types = (weight.dtype, seen["bucket"], seen["wire"], weight.grad.dtype)
    psi = sum(p.numel() for p in model.parameters())
    return [NAMES[t] for t in types] + [f"{seen['bytes'] / psi:.0f}"]


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in ("1", "2", "3", "4"):
        sys.exit("start with: torchrun --nproc-per-node=2 ddp_precision.py (1 to 4 ranks)")
    device = init_distributed()
    rows = {
        "fp32": step(device, False, False, False),
        "autocast": step(device, False, True, False),
        "autocast + bf16 hook": step(device, False, True, True),
        "model.bfloat16()": step(device, True, False, False),
    }
    assert rows["autocast"] == rows["fp32"]  # types and bytes
    if dist.get_rank() == 0:
        print("                      weights  bucket  wire  grad  bytes per parameter")
        for name, (weights, bucket, wire, grad, size) in rows.items():
            print(f"{name:20}  {weights:7}  {bucket:6}  {wire:4}  {grad:4}  {size:>19}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
