"""Three dimensions: DP × PP × TP on 2 × 2 × 2 processes, with the losses of one process.

One mesh gives each rank three groups. TP cuts the matrices of every block over the inner
dimension. A pipeline of two stages runs 1F1B over the middle dimension. Gradients are averaged
over the outer dimension. Each rank has about a quarter of the parameters, and its replica reads
half of the batch.
"""

import copy
import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DP, PP, TP = 2, 2, 2
LAYERS, H, BATCH, MICRO_BATCHES, STEPS = 4, 32, 16, 4, 5


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Average the gradients of this rank's shards over dp, in one message."""
    gradients = [local(p.grad) for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(
        gradients, flat.split([g.numel() for g in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


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
    if int(os.environ.get("WORLD_SIZE", "0")) != DP * PP * TP:
        sys.exit("DP 2 × PP 2 × TP 2: torchrun --nproc-per-node=8 three_dimensions.py")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (DP, PP, TP), mesh_dim_names=("dp", "pp", "tp"))
    dp, pp, tp = (mesh[name].get_local_rank() for name in ("dp", "pp", "tp"))

    torch.manual_seed(0)  # every rank builds the whole model and keeps its part
    whole = nn.Sequential(*(NormedBlock() for _ in range(LAYERS))).to(device)
    batches = [torch.randn(BATCH, H).to(device) for _ in range(STEPS)]

    # --8<-- [start:compose]
    per_stage = LAYERS // PP
    stage_model = copy.deepcopy(whole[pp * per_stage : (pp + 1) * per_stage])
    for block in stage_model:
        parallelize_module(
            block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    stage = PipelineStage(stage_model, pp, PP, device, group=mesh["pp"].get_group())
    loss_of = nn.functional.mse_loss
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    # --8<-- [end:compose]
    optimizer = torch.optim.SGD(stage_model.parameters(), lr=0.2, momentum=0.9)
    live: list[int] = []  # +1 for a forward, -1 for a backward of a micro-batch
    stage_model.register_forward_hook(lambda *_: live.append(1))
    norm = stage_model[0].norm.weight
    norm.register_post_accumulate_grad_hook(lambda _: live.append(-1))
    optimizer_alone = torch.optim.SGD(whole.parameters(), lr=0.2, momentum=0.9)

    losses, losses_alone = [], []
    for x in batches:
        live.clear()
        # --8<-- [start:step]
        mine = x.chunk(DP)[dp]  # both ranks of a tp group have the same tokens
        optimizer.zero_grad()
        if pp == 0:
            schedule.step(mine)
        else:
            micro: list[torch.Tensor] = []
            schedule.step(target=mine.flip(-1), losses=micro)
            loss = torch.stack(micro).mean().detach()
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            losses.append(loss / DP)
        average_gradients(stage_model, mesh["dp"].get_group())
        optimizer.step()
        # --8<-- [end:step]

        loss = loss_of(whole(x), x.flip(-1))
        optimizer_alone.zero_grad()
        loss.backward()
        optimizer_alone.step()
        losses_alone.append(loss.detach())

    # 1F1B: at most two live micro-batches on the first stage, and one on the last
    assert len(live) == 2 * MICRO_BATCHES and max(itertools.accumulate(live)) == PP - pp
    if losses:  # the last stage has them
        assert len(micro) == MICRO_BATCHES
        torch.testing.assert_close(losses, losses_alone, rtol=1e-4, atol=1e-6)
    truth = whole[pp * per_stage : (pp + 1) * per_stage].parameters()
    for ours, want in zip(stage_model.parameters(), truth, strict=True):
        full = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(full, want, rtol=1e-4, atol=1e-5)

    held = sum(local(p).numel() for p in stage_model.parameters())
    total = sum(p.numel() for p in whole.parameters())
    report = (dp, pp, tp, held, [loss.item() for loss in losses])
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, report)
    if dist.get_rank() == 0:
        for rank, (d, p, t, count, _) in enumerate(everyone):
            print(f"rank {rank}: dp {d} pp {p} tp {t}, {count:,} of {total:,} parameters")
        for step, (loss, alone) in enumerate(zip(everyone[-1][4], losses_alone, strict=True)):
            print(f"step {step}: loss {loss:.4f}, alone {alone:.4f}")
        print("losses, and every parameter after the last step, equal one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
