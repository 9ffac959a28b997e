"""Offloading the optimizer and the parameters to host memory does not change the losses.

On a GPU, offload_optimizer keeps the fp32 copy of the parameters, both moments and the
gradients in host memory, and AdamW runs on the CPU. With offload_param the shards of the
parameters are also in host memory. On a CPU all memory is host memory. There the program
shows a configuration that works, two errors that people meet, and losses that are equal.

Offload to NVMe needs the headers of libaio, with which DeepSpeed compiles its operator
async_io. The program pretends that these headers are missing, and prints the error.

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
    from deepspeed.ops.op_builder import AsyncIOBuilder
except ImportError:
    sys.exit("this program needs: pip install deepspeed")
# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, BATCH, WIDTH = 3, 8, 64


def train(
    offload: dict, device: torch.device, torch_adamw: bool = True
) -> tuple[list[float], tuple[bool, bool]]:
    """Train three steps in stage 3. Return the losses and two flags.

    The flags say whether the engine offloads the optimizer, and whether it offloads parameters.
    """
    # --8<-- [start:config]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0} | offload,
        "zero_force_ds_cpu_optimizer": not torch_adamw,
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)).to(device)
    # with the default eps, Adam would hide a wrong factor in the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # --8<-- [end:config]
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH).to(device)
        loss = nn.functional.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        losses.append(round(loss.item(), 4))
    offloads = engine.optimizer.offload_optimizer, engine.optimizer.offload_param
    states = engine.optimizer.optimizer.state.values()
    moments = {x.device.type for state in states for x in state.values() if x.numel() > 1}
    assert moments == {"cpu" if offloads[0] else device.type}  # a difference on a GPU only
    shards = {p.ds_tensor.device.type for p in engine.module.parameters()}
    assert shards == {"cpu" if offloads[1] else device.type}
    engine.destroy()
    return losses, offloads


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
    device = init_distributed()
    show = print if dist.get_rank() == 0 else lambda *_: None
    pinned = device.type != "cpu"  # pinned memory is for copies to a GPU
    host = {"device": "cpu", "pin_memory": pinned}
    expected, offloads = train({}, device)
    assert not any(offloads)
    show(f"no offload:                          {expected}")
    ways = {
        "optimizer on the CPU:": {"offload_optimizer": host},
        "optimizer, parameters on the CPU:": {"offload_optimizer": host, "offload_param": host},
    }
    for name, offload in ways.items():
        losses, offloads = train(offload, device)
        assert losses == expected and offloads == (True, "parameters" in name)
        show(f"{name:36} {losses}")

    try:
        train({"offload_optimizer": host}, device, torch_adamw=False)
    except Exception as error:
        text = str(error).split(". ")[0]
        text = text.replace("optimizer (", "optimizer\n  (").replace("'>) ", "'>)\n  ")
        show("torch's AdamW with the default zero_force_ds_cpu_optimizer: true")
        show(f"  {type(error).__name__}:\n  {text}.")
    else:
        raise AssertionError("DeepSpeed accepted torch's AdamW")

    AsyncIOBuilder.has_function = lambda *_, **__: False  # a machine without libaio-dev
    try:
        AsyncIOBuilder().jit_load(verbose=False)  # as initialize does for NVMe
    except RuntimeError as error:
        text = str(error).split(" None")[0].replace("compatible due", "compatible\n  due")
        show(f"NVMe without the headers of libaio\n  {type(error).__name__}: {text}")
    else:
        raise AssertionError("DeepSpeed found libaio")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
