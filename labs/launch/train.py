"""One training script for every launcher, from torchrun to Slurm, Kubernetes and Ray.

It reads only RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
all of these launchers set. Four properties make it safe to launch anywhere:

- The data of a step depend only on the step and on the global batch. So every number of ranks
  that divides the batch trains the same model.
- It saves a checkpoint every few steps, and also when a signal asks it to stop (SIGTERM from
  Slurm, Kubernetes and torchrun, or SIGUSR1 if a scheduler is configured to send it).
- A checkpoint gets its final name only when it is complete. If the job is killed during a save,
  the checkpoint before it is still there.
- It resumes from the newest checkpoint without an option.

    torchrun --nproc-per-node=2 train.py --checkpoints saved
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # import it before init: afterwards it would keep the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, WIDTH = 48, 32  # BATCH is the global batch, which the ranks share
STOPPED = 75  # "try again later" in sysexits.h, so a launcher can distinguish it from a failure


# --8<-- [start:signals]
class StopRequest:
    """Records that this rank has received a signal, and shares this with all ranks."""

    def __init__(self) -> None:
        self.received = False
        if threading.current_thread() is threading.main_thread():  # false under Ray
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self.record)

    def record(self, number: int, frame: object) -> None:
        self.received = True

    def on_any_rank(self, device: torch.device) -> bool:
        """Return on every rank whether at least one rank has received a signal."""
        flag = torch.tensor(float(self.received), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag.item() > 0


# --8<-- [end:signals]


# --8<-- [start:checkpoint]
def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a temporary file, flush it to the disk, and then give it its final name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, folder / f"step{step:06d}.pt")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint if there is one, and return the next step."""
    newest = max(folder.glob("step*.pt"), default=None)
    if newest is None:
        return 0
    state = torch.load(newest, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# --8<-- [end:checkpoint]


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of this rank: its rows of the global batch of this step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = x.roll(1, 1).tanh() + 0.1 * torch.randn(BATCH, WIDTH, generator=generator)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    return x[rows].to(device), y[rows].to(device)


def own_device() -> torch.device:
    """Return one accelerator per local rank if there are enough, otherwise the CPU."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if torch.accelerator.device_count() < here:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local)
    return torch.device(torch.accelerator.current_accelerator().type, local)


def train(options: argparse.Namespace) -> float | None:
    """Train in the default process group. Return the final loss, or None after a signal."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = own_device()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = resume(options.checkpoints, model, optimizer)
    wrapped = DistributedDataParallel(model)
    stop_request = StopRequest()
    if rank == 0:
        # the step depends on the moment of the signal, so it is printed as a measured number
        start = f"resumed at step ≈{first}" if first else "from the beginning"
        print(f"{ranks} rank{'s' * (ranks > 1)}, {start}", flush=True)

    for step in range(first, options.steps):
        x, y = batch(step, device)
        loss = F.mse_loss(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.pause)
        stop = stop_request.on_any_rank(device)
        if rank == 0 and (stop or (step + 1) % options.every == 0):
            save(options.checkpoints, step + 1, model, optimizer)
        if stop and step + 1 < options.steps:
            dist.barrier()  # no rank exits before the checkpoint is complete
            if rank == 0:
                print(f"time is up: saved step ≈{step + 1}, leaving", flush=True)
            return None

    with torch.no_grad():
        x, y = batch(10**6, device)
        final = F.mse_loss(model(x), y)
    dist.all_reduce(final)
    if rank == 0:
        print(f"step {options.steps}, loss {final.item() / ranks:.5f}", flush=True)
    return final.item() / ranks


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="a folder that all nodes share"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--every", type=int, default=20, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="additional seconds per step")
    parser.add_argument(
        "--local_rank", "--local-rank", help=argparse.SUPPRESS
    )  # DeepSpeed adds it
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    if missing := [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ
    ]:
        print(
            f"start this program with a launcher ({', '.join(missing)} not set), for example:",
            file=sys.stderr,
        )
        print("  torchrun --nproc-per-node=2 train.py --checkpoints saved", file=sys.stderr)
        return 1
    if BATCH % int(os.environ["WORLD_SIZE"]):
        print(
            f"{BATCH} rows cannot be divided equally among {os.environ['WORLD_SIZE']} ranks",
            file=sys.stderr,
        )
        return 1
    dist.init_process_group(dist.get_default_backend_for_device(own_device()))
    loss = train(options)
    dist.destroy_process_group()
    return STOPPED if loss is None else 0


if __name__ == "__main__":
    sys.exit(main())
