"""torch.distributed.pipelining: six schedules give the loss and gradients of one process.

You cut the model and wrap each part in a PipelineStage. The schedule cuts the batch, sends,
receives, and divides the gradients by the number of micro-batches.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import mse_loss

LAYERS, BATCH, HIDDEN, M = 8, 24, 32, 8  # 1, 2 and 4 ranks, with 1 or 2 stages each
ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


def train_step(
    schedule_class: type, whole: nn.Module, batch: torch.Tensor, target: torch.Tensor, **options
) -> tuple[list[nn.Module], torch.Tensor]:
    """Run one step of a schedule. Return this rank's stages and the mean loss."""
    rank, p = dist.get_rank(), dist.get_world_size()
    count = p if schedule_class in ONE_STAGE else 2 * p
    share = LAYERS // count
    v_shaped = schedule_class in V_SHAPED  # the second stages go back through the ranks
    places = (rank, count - 1 - rank) if v_shaped else range(rank, count, p)
    last = 0 if v_shaped else p - 1
    stages = [
        PipelineStage(whole[i * share : (i + 1) * share], i, count, batch.device)
        for i in places
    ]
    stages_or_one = stages[0] if schedule_class in ONE_STAGE else stages
    schedule = schedule_class(stages_or_one, n_microbatches=M, loss_fn=mse_loss, **options)
    for stage in stages:
        stage.submod.zero_grad()

    losses: list[torch.Tensor] = []  # filled on the rank of the last stage
    # for the first stage; the last stage gets the target
    inputs = (batch,) if rank == 0 else ()
    schedule.step(*inputs, target=target if rank == last else None, losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else batch.new_zeros(())
    dist.broadcast(loss, last)
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
    if os.environ.get("WORLD_SIZE") not in {"2", "4"}:
        sys.exit("start with 2 or 4 ranks: torchrun --nproc-per-node=2 pipelining_api.py")
    device = init_distributed()
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model and batch on every rank
    layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(LAYERS)]
    whole = nn.Sequential(*layers).to(device)
    batch, target = torch.randn(2, BATCH, HIDDEN, device=device)
    true_loss = mse_loss(whole(batch), target)
    true_loss.backward()
    truth = {name: tensor.grad.clone() for name, tensor in whole.named_parameters()}
    names = {id(tensor): name for name, tensor in whole.named_parameters()}

    def ratio(modules: list[nn.Module]) -> float:
        """The factor between our gradients and the true ones, equal for all parameters."""
        ours = [t for module in modules for t in module.parameters()]
        flat = torch.cat([t.grad.flatten() for t in ours])
        true = torch.cat([truth[names[id(t)]].flatten() for t in ours])
        factor = (flat.norm() / true.norm()).item()
        torch.testing.assert_close(flat, factor * true, rtol=1e-4, atol=1e-5)
        return factor

    events: list[str] = []  # forwards and backwards of layers, gradients accumulated

    def forward_ran(_module, _inputs, y: torch.Tensor) -> None:
        if y.requires_grad:  # in torch 2.11 a stage infers its shapes without gradients
            events.append("F")
            y.register_hook(lambda _: events.append("B"))

    for layer in layers:
        layer.register_forward_hook(forward_ran)
    for parameter in whole.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("W"))

    orders: dict[type, tuple[str, ...]] = {}  # the events of each schedule on this rank
    whole_backward = (*ONE_STAGE, ScheduleInterleaved1F1B)
    old_gloo = device.type == "cpu" and torch.__version__.startswith("2.11.")
    for schedule_class in (*whole_backward, ScheduleInterleavedZeroBubble, *V_SHAPED):
        if old_gloo and schedule_class in V_SHAPED:
            if rank == 0:
                name = schedule_class.__name__
                print(f"{name:29}  torch 2.11: a rank sends to itself, gloo cannot")
            continue
        events.clear()
        modules, loss = train_step(schedule_class, whole, batch, target)
        torch.testing.assert_close(loss, true_loss.detach())
        factor = ratio(modules)
        assert abs(factor - 1) < 1e-4
        orders[schedule_class] = tuple(events)
        seen = [events[:i] for i in range(len(events))]
        live = max(ran.count("F") - ran.count("B") for ran in seen) * p / LAYERS
        assert schedule_class is not ScheduleGPipe or live >= M
        # PipelineStage runs one more forward, to infer its shapes
        assert schedule_class is not Schedule1F1B or live <= p - rank + 1
        apart = events.count("W") < 2 * M * LAYERS // p  # a W alone calls no hook
        assert apart == (schedule_class not in whole_backward)
        if rank == 0:
            name, count = schedule_class.__name__, len(modules)
            print(f"{name:29}  stages per rank {count}: loss and gradients of one process")

    assert len(set(orders.values())) == len(orders)  # each schedule has its own order
    if not old_gloo:  # DualPipeV runs B and W apart in fewer backward passes
        zbv, dual_pipe_v = (orders[schedule_class].count("W") for schedule_class in V_SHAPED)
        assert zbv < dual_pipe_v
    modules, _ = train_step(Schedule1F1B, whole, batch, target, scale_grads=False)
    factor = ratio(modules)
    if rank == 0:
        print(f"scale_grads=False with a mean loss, m = {M}: gradients × {factor:.2f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
