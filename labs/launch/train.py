"""One training script for every launcher, from torchrun to Slurm, Kubernetes and Ray.

It asks its surroundings for nothing but RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, which all of them set. What makes it safe to launch anywhere:

- the data depend on the step and the global batch alone, so any number of ranks that divides
  the batch trains the same model;
- it saves every few steps, and once more when a signal says that its time is over (SIGTERM from
  Slurm, Kubernetes and torchrun; SIGUSR1 where a scheduler is told to send it);
- a checkpoint gets its name when it is whole, so a killed job leaves the one before;
- it resumes from the newest checkpoint without being told to.

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
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, WIDTH = 48, 32  # the global batch: ranks share it, so it does not grow with them
STOPPED = 75  # sysexits' "try again later": the launcher may tell it from a failure


# --8<-- [start:signals]
class TimeIsUp:
    """Remembers that a signal came. Signals reach ranks at different moments, or only one of
    them, so all ranks ask together whether it is time to leave."""

    def __init__(self) -> None:
        self.came = False
        if threading.current_thread() is threading.main_thread():  # in Ray it is not
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        self.came = True

    def for_anyone(self, device: torch.device) -> bool:
        flag = torch.tensor(float(self.came), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag.item() > 0


# --8<-- [end:signals]


# --8<-- [start:checkpoint]
def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint under another name, force it to the disk, then give it its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, folder / f"step{step:06d}.pt")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one; return the next step."""
    newest = max(folder.glob("step*.pt"), default=None)
    if newest is None:
        return 0
    state = torch.load(newest, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# --8<-- [end:checkpoint]


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the step's global batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = x.roll(1, 1).tanh() + 0.1 * torch.randn(BATCH, WIDTH, generator=generator)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    return x[rows].to(device), y[rows].to(device)


def own_device() -> torch.device:
    """One accelerator per local rank where there are enough, otherwise the CPU."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if torch.accelerator.device_count() < here:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local)
    return torch.device(torch.accelerator.current_accelerator().type, local)


def train(options: argparse.Namespace) -> float | None:
    """Train in the default process group; return the final loss, None where time was up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = own_device()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = resume(options.checkpoints, model, optimizer)
    wrapped = DistributedDataParallel(model)
    time_is_up = TimeIsUp()
    if rank == 0:
        # where it resumes depends on when it was stopped: measured, not computed
        start = f"resumed at step ≈{first}" if first else "from the beginning"
        print(f"{ranks} rank{'s' * (ranks > 1)}, {start}", flush=True)

    for step in range(first, options.steps):
        x, y = batch(step, device)
        loss = F.mse_loss(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.pause)
        stop = time_is_up.for_anyone(device)
        if rank == 0 and (stop or (step + 1) % options.every == 0):
            save(options.checkpoints, step + 1, model, optimizer)
        if stop and step + 1 < options.steps:
            dist.barrier()  # nobody leaves before the checkpoint is there
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
        "--checkpoints", type=Path, required=True, help="a folder all nodes see"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--every", type=int, default=20, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step lasts longer")
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
            f"start me with a launcher ({', '.join(missing)} not set), such as:",
            file=sys.stderr,
        )
        print("  torchrun --nproc-per-node=2 train.py --checkpoints saved", file=sys.stderr)
        return 1
    if BATCH % int(os.environ["WORLD_SIZE"]):
        print(
            f"{BATCH} rows cannot be shared by {os.environ['WORLD_SIZE']} ranks",
            file=sys.stderr,
        )
        return 1
    dist.init_process_group(dist.get_default_backend_for_device(own_device()))
    loss = train(options)
    dist.destroy_process_group()
    return STOPPED if loss is None else 0


if __name__ == "__main__":
    sys.exit(main())
