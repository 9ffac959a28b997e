"""Killed in the middle of writing a checkpoint, and resumed to bit-identical parameters.

A checkpoint holds model, optimizer, scheduler, every rank's random state, and the sampler's
epoch and position. One thing that the next step depends on is in no checkpoint: where DDP cuts
its buckets. The file is written beside the old one and then renamed, so there is a whole one at
any time. Run it three times, as the transcript does: without a flag (trains to the end), with
--kill (dies at step 12), with --resume.
"""

import io
import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, SAVE_EVERY, KILL_AT = 4, 8, 4, 12
CHECKPOINT, NEVER_KILLED = Path("checkpoint.pt"), Path("never_killed.pt")


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


class ResumableSampler(DistributedSampler):
    """A DistributedSampler which can begin in the middle of an epoch."""

    skip = 0  # samples of this rank that were drawn before the checkpoint

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.skip, None)


def write_atomically(state: dict, path: Path, die_half_way: bool = False) -> None:
    """Replace `path` as a whole: a crash at any moment leaves the old or the new file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        if die_half_way:
            file.write(data[: len(data) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)  # cannot be caught: as the OOM killer does
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is
    os.replace(temporary, path)
    directory = os.open(path.resolve().parent, os.O_RDONLY)
    os.fsync(directory)  # and the new name, too
    os.close(directory)


def random_states(device: torch.device) -> dict[str, list[torch.Tensor]]:
    """Every rank's generator states, in rank order; ranks draw different dropout masks."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, states)
    return {kind: [rank_states[kind] for rank_states in gathered] for kind in states}


def main() -> None:
    kill, resume = "--kill" in sys.argv, "--resume" in sys.argv
    if resume:
        if not (CHECKPOINT.exists() and NEVER_KILLED.exists()):
            sys.exit("nothing to resume here: run it without a flag first, then with --kill")
        # every rank reads the file, onto the CPU: load_state_dict copies to the right device,
        # and generator states must be CPU tensors
        state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        if state["world_size"] != int(os.environ.get("WORLD_SIZE", "1")):
            sys.exit(f"{CHECKPOINT} was written by {state['world_size']} ranks: start as many")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()

    def report(line: str) -> None:
        if rank == 0:
            print(line, flush=True)  # before the kill takes the buffer with it

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40 * n, 16, generator=generator)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    sampler = ResumableSampler(data)
    # An iterator over a DataLoader draws one number from the generator. Without one of its own,
    # the extra iterator after a resume would shift the global one, and with it dropout.
    loader = DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1))
    model = DDP(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(100 + rank)
    step = 0

    if resume:
        # DDP cuts its buckets anew after its first backward, and the order in which an
        # all-reduce of three ranks or more adds depends on the place in the bucket. So spend
        # that backward here: all that it changes is loaded or zeroed below.
        model(x[:1].to(device)).backward()
        half_written = CHECKPOINT.with_suffix(".tmp")
        if half_written.exists():
            try:
                torch.load(half_written, weights_only=True)
            except (OSError, RuntimeError) as error:
                reason = str(error).partition(". ")[0]
                report(f"{half_written} is half-written: {type(error).__name__}: {reason}")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]
        torch.set_rng_state(state["random"]["cpu"][rank])
        if device.type != "cpu":
            accelerator_state = state["random"]["accelerator"][rank]
            torch.get_device_module(device).set_rng_state(accelerator_state, device)
        report(f"resumed after step {step} of {steps}")

    first_epoch, position = divmod(step, len(loader))
    orders = set()
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        sampler.skip = position * BATCH
        position = 0  # for the epochs after
        orders.add(tuple(sampler))
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % SAVE_EVERY == 0:
                state = {
                    "step": step,  # with len(loader): the epoch and the position in it
                    "world_size": n,
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "random": random_states(device),
                }
                if rank == 0:  # all ranks hold the same model: one writes
                    write_atomically(state, CHECKPOINT, die_half_way=kill and step == KILL_AT)
                report(f"step {step}: checkpoint written")

    assert len(orders) == EPOCHS - first_epoch  # each epoch has its own
    assert abs(scheduler.get_last_lr()[0]) < 1e-9  # half a cosine ends at zero
    parameters = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    if rank == 0:
        if not resume:
            torch.save(parameters, NEVER_KILLED)
        else:
            same = torch.equal(parameters, torch.load(NEVER_KILLED, weights_only=True))
            print(f"bit-identical to the run that was never killed: {same}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
