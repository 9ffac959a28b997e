"""DeepSpeed's offload: optimizer and parameters in host memory, the same losses.

On a GPU, offload_optimizer keeps the fp32 copy, both moments and the gradients in host memory
and runs AdamW there; offload_param keeps the shards of the parameters there, too. On a CPU all
memory is host memory, so what this shows is the configuration, its errors, and equality.

NVMe needs libaio's headers, to compile DeepSpeed's async_io: nvme_bytes.py has them. Without
them you get the error that is shown last; the program asks for it as on such a machine.

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
    os.environ["DS_ACCELERATOR"] = "cpu"  # as start() does; DeepSpeed asks when imported

try:
    import deepspeed
    import deepspeed.ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
except ImportError:
    sys.exit("this program needs: pip install deepspeed")
# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, BATCH, WIDTH = 3, 8, 64


# --8<-- [start:train]
def train(
    offload: dict, device: torch.device, torch_adamw: bool = True
) -> tuple[list[float], tuple[bool, bool]]:
    """Losses of three steps of stage 3; whether optimizer and parameters were offloaded."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0} | offload,
        "zero_force_ds_cpu_optimizer": not torch_adamw,
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH).to(device)
        loss = nn.functional.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        losses.append(round(loss.item(), 4))
    places = engine.optimizer.offload_optimizer, engine.optimizer.offload_param
    engine.destroy()
    return losses, places


# --8<-- [end:train]


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
    device = start()
    show = print if dist.get_rank() == 0 else lambda *_: None
    pinned = device.type != "cpu"  # pinned memory is for copies to a GPU
    host = {"device": "cpu", "pin_memory": pinned}
    kept, places = train({}, device)
    assert not any(places)
    show(f"no offload:                          {kept}")
    ways = {
        "optimizer on the CPU:": {"offload_optimizer": host},
        "optimizer, parameters on the CPU:": {"offload_optimizer": host, "offload_param": host},
    }
    for name, offload in ways.items():
        losses, places = train(offload, device)
        assert losses == kept and places == (True, "parameters" in name)
        show(f"{name:36} {losses}")

    try:
        train({"offload_optimizer": host}, device, torch_adamw=False)
    except Exception as error:
        text = str(error).split(". ")[0]
        text = text.replace("optimizer (", "optimizer\n  (").replace("'>) ", "'>)\n  ")
        show("torch's AdamW, zero_force_ds_cpu_optimizer left at true:")
        show(f"  {type(error).__name__}:\n  {text}.")

    AsyncIOBuilder.has_function = lambda *_, **__: False  # a machine without libaio-dev
    try:
        AsyncIOBuilder().jit_load(verbose=False)  # as initialize does for NVMe
    except RuntimeError as error:
        text = str(error).split(" None")[0].replace("compatible due", "compatible\n  due")
        show(f"NVMe without libaio's headers:\n  {type(error).__name__}: {text}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
