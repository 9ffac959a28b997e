"""Count the bytes that DeepSpeed reads and writes when the optimizer is on NVMe.

In each step DeepSpeed writes the gradients. It then reads them together with the 12 bytes per
parameter of AdamW's state, and writes the new state. A tensor smaller than 1 MiB stays in
memory, whatever the configuration says. The losses are those of training without offload.

Needs: the headers of libaio (Debian: libaio-dev), and DS_BUILD_AIO=1 pip install deepspeed.
Without this variable DeepSpeed compiles its operator in the first run, which takes minutes.
"""

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

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

STEPS, BATCH = 3, 8


# --8<-- [start:count]
def count(moved: dict[str, int]) -> None:
    """Add the bytes of each later request to DeepSpeed's operator to `moved`."""
    operator = AsyncIOBuilder().load()

    class Counting(operator.aio_handle):
        def async_pread(self, buffer, path, offset):
            moved["read"] += buffer.nbytes
            return super().async_pread(buffer, path, offset)

        def async_pwrite(self, buffer, path, offset):
            moved["written"] += buffer.nbytes
            return super().async_pwrite(buffer, path, offset)

    operator.aio_handle = Counting


# --8<-- [end:count]


def run_steps(width: int, offload: dict, device: torch.device, moved: dict[str, int]) -> list:
    """Train in stage 3. Return for each step the loss, the bytes read and the bytes written."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0} | offload,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW is allowed on the CPU
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    moved["offloads"] = engine.optimizer.swap_optimizer  # whether it is configured for NVMe
    rows = []
    for step in range(STEPS):
        moved |= {"read": 0, "written": 0}
        torch.manual_seed(step)
        x = torch.randn(BATCH, width).to(device)
        loss = nn.functional.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        rows.append([round(loss.item(), 4), moved["read"], moved["written"]])
    engine.destroy()
    return rows


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
    if os.environ.get("WORLD_SIZE") != "1":
        sys.exit("this program counts for one rank: torchrun --nproc-per-node=1 nvme_bytes.py")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        sys.exit("this program needs libaio's headers (Debian: apt-get install libaio-dev)")
    device = init_distributed()
    torch.set_num_threads(1)
    moved = {"read": 0, "written": 0}
    count(moved)
    with tempfile.TemporaryDirectory() as folder:
        place = {"device": "nvme", "nvme_path": folder, "pin_memory": device.type != "cpu"}
        nvme = {"offload_optimizer": place}
        small = run_steps(128, nvme, device, moved)
        assert moved["offloads"]  # so DeepSpeed itself decides to move 0 bytes
        in_memory = run_steps(512, {}, device, moved)
        assert not moved["offloads"]
        rows = run_steps(512, nvme, device, moved)
        files = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    psi, large = 2 * (512 * 512 + 512), 2 * 512 * 512  # large: elements in tensors of 1 MiB
    print(f"Ψ = {psi}: two layers 512 wide")
    print("step    loss      read   written (bytes)")
    for step, (loss, read, written) in enumerate(rows, 1):
        print(f"{step:4}  {loss:.4f}  {read:8}  {written:8}")
        assert read == (12 if step > 1 else 4) * psi + 4 * large  # no moments at first
        assert written == 12 * psi + 4 * large
    print(f"in files: {files} = 12 Ψ + 4 · {large}, the state and two gradients")
    assert files == 12 * psi + 4 * large
    assert [row[0] for row in rows] == [row[0] for row in in_memory]
    assert not any(row[1] or row[2] for row in in_memory + small)
    print("losses equal to those without offload")
    print("two layers 128 wide, offloaded: 0 bytes read, 0 written")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps its groups in globals of its modules, to the very end
