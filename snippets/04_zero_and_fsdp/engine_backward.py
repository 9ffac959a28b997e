"""Call engine.backward(loss), and do not divide the loss: the error and the wrong factor.

engine.backward divides each loss by the number of accumulation steps. With fp16 it also
multiplies the loss by the loss scale. In stages 1 to 3 of DeepSpeed 0.19, hooks do the same
for a plain loss.backward(). In stage 0 there are no such hooks, and DeepSpeed raises an
error. Each update is compared with the update of one process that has the whole batch. If you
divide the loss yourself, it is divided twice and the update is too small. The optimizer is
SGD, because Adam divides a gradient by its size and would hide a wrong factor.

Needs: pip install deepspeed
"""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
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

PARTS, BATCH, WIDTH = 2, 24, 8


def first_update(way: str, stage: int, device: torch.device) -> float | str:
    """Return the factor between this update and that of one process, or the error message."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    before = model.weight.detach().clone()
    batch = torch.randn(BATCH, WIDTH).to(device)
    loss = nn.functional.mse_loss(model(batch), batch)
    (truth,) = torch.autograd.grad(loss, model.weight)

    config = {
        "train_micro_batch_size_per_gpu": BATCH // n // PARTS,
        "gradient_accumulation_steps": PARTS,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert engine.zero_optimization_stage() == stage
    backward, calls = engine.backward, []
    engine.backward = lambda loss: (calls.append(way), backward(loss))  # counts the calls
    # --8<-- [start:loop]
    for part in range(PARTS):
        x = batch.chunk(n * PARTS)[rank * PARTS + part]
        assert len(x) == engine.train_micro_batch_size_per_gpu()
        loss = nn.functional.mse_loss(engine(x), x)
        try:
            if way == "loss.backward()":
                loss.backward()
            elif way == "engine.backward(loss)":
                engine.backward(loss)
            else:  # the loss is divided twice
                engine.backward(loss / PARTS)
            engine.step()
        except Exception as error:
            return f"{type(error).__name__}\n  " + str(error).replace(". ", ".\n  ")
    # --8<-- [end:loop]
    assert len(calls) == (0 if way == "loss.backward()" else PARTS)
    moved = before - model.weight.detach()
    factor = (moved.norm() / truth.norm()).item()
    torch.testing.assert_close(moved, factor * truth, rtol=1e-3, atol=1e-6)  # each element
    return factor


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
        sys.exit(f"twice the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    cases = (  # how backward is called, the stage, the factor; None means an error
        ("loss.backward()", 0, None),
        ("loss.backward()", 1, 1),
        ("loss.backward()", 2, 1),
        ("engine.backward(loss)", 0, 1),
        ("engine.backward(loss)", 2, 1),
        ("engine.backward(loss / 2)", 2, 1 / PARTS),
    )
    for way, stage, expected in cases:
        result = first_update(way, stage, device)
        if expected is None:
            assert isinstance(result, str), f"stage {stage} accepted {way}"
        else:
            assert isinstance(result, float) and abs(result - expected) < 1e-4, result
            result = f"{result:.4f} times the update of one process"
        if dist.get_rank() == 0:
            print(f"stage {stage}, {way}: {result}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
