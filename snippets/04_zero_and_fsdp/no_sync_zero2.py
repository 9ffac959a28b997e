"""no_sync of a DeepSpeed engine: ZeRO-2 and ZeRO-3 refuse it. Accumulation works without it.

no_sync postpones the reduction of gradients to the last micro-batch, so each rank must keep a
whole gradient. In stages 2 and 3 a rank keeps only its own part, which it gets from a reduction
after every micro-batch. The engine accumulates by itself: call backward and step for every
micro-batch, and it makes an optimizer step after gradient_accumulation_steps of them.

Stages 0 and 1 accept no_sync. The engine counts calls of step, and there is one call for all
micro-batches. So the configuration must say that gradient_accumulation_steps is 1. Otherwise
step waits for more calls and changes nothing, without an error.

Each way is compared with one process that has the whole batch. SGD shows a wrong factor in the
gradients, which Adam would hide.

Needs: pip install deepspeed
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: a later import would keep the group alive
from torch import nn

logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, with the date
warnings.simplefilter("ignore")
if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
    # DeepSpeed uses the GPU with the number LOCAL_RANK, so its ranks cannot share a GPU.
    os.environ |= {"DS_ACCELERATOR": "cpu", "NCCL_MULTI_RANK_GPU_ENABLE": "0"}

try:
    import deepspeed
    import deepspeed.ops
except ImportError:
    sys.exit("this program needs: pip install deepspeed")
# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

PARTS, BATCH, WIDTH = 3, 36, 8  # micro-batches, samples of all ranks, features


# --8<-- [start:ways]
def with_no_sync(engine: deepspeed.DeepSpeedEngine, parts: list[torch.Tensor]) -> None:
    """Accumulate as with DDP: only the last backward reduces gradients. Call step once."""
    for number, x in enumerate(parts):
        last = number == len(parts) - 1
        with contextlib.nullcontext() if last else engine.no_sync():
            loss = nn.functional.mse_loss(engine(x), x)
            # with one accumulation step, the engine does not divide the loss
            engine.backward(loss / PARTS if engine.gradient_accumulation_steps() == 1 else loss)
    engine.step()


def by_the_engine(engine: deepspeed.DeepSpeedEngine, parts: list[torch.Tensor]) -> None:
    """The engine counts the micro-batches. Only the last call of step changes parameters."""
    for x in parts:
        loss = nn.functional.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()


# --8<-- [end:ways]


Way = Callable[[deepspeed.DeepSpeedEngine, list[torch.Tensor]], None]


def first_update(way: Way, stage: int, steps: int, device: torch.device) -> str:
    """Compare the update with that of one process; return the result or the error."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    before = model.weight.detach().clone()
    batch = torch.randn(BATCH, WIDTH).to(device)
    (truth,) = torch.autograd.grad(nn.functional.mse_loss(model(batch), batch), model.weight)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // n // PARTS,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert engine.zero_optimization_stage() == stage
    try:
        way(engine, list(batch.chunk(n * PARTS)[rank * PARTS : (rank + 1) * PARTS]))
    except AssertionError as error:
        return f"{type(error).__name__}\n  {error}"
    moved = before - model.weight.detach()
    if not moved.any():
        return "no error, and no parameter has changed"
    torch.testing.assert_close(moved, truth, rtol=1e-3, atol=1e-6)
    return "the same step as one process"


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
    if BATCH % (PARTS * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"three times the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    cases = (
        (with_no_sync, 2, PARTS),
        (with_no_sync, 3, PARTS),
        (with_no_sync, 1, PARTS),
        (with_no_sync, 1, 1),
        (by_the_engine, 2, PARTS),
        (by_the_engine, 3, PARTS),
    )
    for way, stage, steps in cases:
        result = first_update(way, stage, steps, device)
        refused, works = "incompatible" in result, result == "the same step as one process"
        assert refused == (way is with_no_sync and stage >= 2)
        assert works == (way is by_the_engine or steps == 1)
        if dist.get_rank() == 0:
            print(f"{way.__name__}, stage {stage}, accumulation steps {steps}: {result}")
    for steps, expected in ((1, "the same step"), (PARTS, "no error, and no parameter")):
        assert first_update(with_no_sync, 0, steps, device).startswith(expected)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
