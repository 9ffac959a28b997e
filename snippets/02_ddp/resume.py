"""A run that is killed while it writes a checkpoint is resumed to bit-identical parameters.

A checkpoint contains the model, the optimizer, the scheduler, the random state of every rank,
and the number of steps, which gives the place in the data. One thing that the next step depends
on is in no checkpoint: how DDP divides the gradients into buckets.

Run the program three times, as the transcript does: without a flag (it trains to the end), with
--kill (it dies while it writes the checkpoint of step 12), and with --resume. The resumed run
is then repeated with one part left out each time. Look for `bit-identical` in the output, and
for the size of the difference that each missing part makes.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
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
PARTS = ("model", "optimizer", "scheduler", "random state", "place in the data", "buckets")


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


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in the middle of an epoch."""

    skip = 0  # the number of samples of this rank that were trained on before the checkpoint

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.skip, None)


def write_atomically(state: dict, path: Path, die_half_way: bool = False) -> None:
    """Replace `path` as a whole: after a crash it is either the old or the new file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        if die_half_way:
            file.write(data[: len(data) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)  # the out-of-memory killer sends this, too
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the new name is
    os.replace(temporary, path)
    directory = os.open(path.resolve().parent, os.O_RDONLY)
    os.fsync(directory)  # the new name is on the disk as well
    os.close(directory)


def random_states(device: torch.device) -> dict[str, list[torch.Tensor]]:
    """The generator states of all ranks, in rank order. Their dropout masks differ."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, states)
    return {kind: [rank_states[kind] for rank_states in gathered] for kind in states}


class Training:
    """A model, its optimizer, scheduler and data, and what a checkpoint stores of them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, n = device, dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40 * n, 16, generator=generator)
        data = TensorDataset(x, x.sin().sum(1, keepdim=True))
        self.sampler = ResumableSampler(data)
        # An iterator over a DataLoader draws one number from the generator. Without a generator
        # of its own, the extra iterator after a resume would shift the global random state,
        # and with it the dropout masks.
        self.loader = DataLoader(data, BATCH, sampler=self.sampler, generator=torch.Generator())

        torch.manual_seed(1)
        layers = nn.Linear(16, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1)
        self.ddp = DDP(nn.Sequential(*layers).to(device))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.steps = EPOCHS * len(self.loader)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.steps)
        torch.manual_seed(100 + self.rank)
        self.step = self.position = 0  # position: in the epoch, in batches

    def state(self) -> dict:
        """All that a checkpoint stores. Every rank must call this: it gathers."""
        return {
            "step": self.step,  # with len(loader): the epoch and the position in it
            "world_size": dist.get_world_size(),
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random state": random_states(self.device),
        }

    def restore(self, state: dict, without: str = "") -> None:
        """Continue the run that saved `state`, but do not restore the part `without`."""
        if without != "buckets":
            # DDP divides the gradients into buckets again after its first backward, and with
            # three ranks or more the place in a bucket decides the order of the additions. So
            # run that backward now: all that it changes is loaded or set to zero below.
            self.ddp(torch.zeros(1, 16, device=self.device)).backward()
        if without != "model":
            self.ddp.module.load_state_dict(state["model"])
        if without != "optimizer":
            self.optimizer.load_state_dict(state["optimizer"])
        if without != "scheduler":
            self.scheduler.load_state_dict(state["scheduler"])
        if without != "random state":
            torch.set_rng_state(state["random state"]["cpu"][self.rank])
            if self.device.type != "cpu":
                accelerator_state = state["random state"]["accelerator"][self.rank]
                torch.get_device_module(self.device).set_rng_state(
                    accelerator_state, self.device
                )
        self.step = state["step"]
        if without != "place in the data":
            self.position = self.step % len(self.loader)

    def run(self, after_step: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Train to the end; return the parameters as one vector."""
        orders = set()
        first_epoch = self.step // len(self.loader)
        for epoch in range(first_epoch, EPOCHS):
            self.sampler.set_epoch(epoch)
            self.sampler.skip = self.position * BATCH
            self.position = 0  # the later epochs begin at their first batch
            orders.add(tuple(self.sampler))
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                outputs = self.ddp(inputs.to(self.device))
                F.mse_loss(outputs, targets.to(self.device)).backward()
                self.optimizer.step()
                self.scheduler.step()
                self.step += 1
                after_step()
        assert len(orders) == EPOCHS - first_epoch  # each epoch has an order of its own
        return torch.cat([p.detach().flatten().cpu() for p in self.ddp.parameters()])


def main() -> None:
    kill, resume = "--kill" in sys.argv, "--resume" in sys.argv
    if resume:
        if not (CHECKPOINT.exists() and NEVER_KILLED.exists()):
            sys.exit("nothing to resume: run this program without a flag, then with --kill")
        # Every rank reads the file onto the CPU: load_state_dict copies to the right device,
        # and generator states must be CPU tensors.
        state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        if state["world_size"] != int(os.environ.get("WORLD_SIZE", "1")):
            sys.exit(f"{CHECKPOINT} needs the {state['world_size']} ranks that wrote it")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    def report(line: str) -> None:
        if rank == 0:
            print(line, flush=True)  # now, because a killed process loses its buffer

    training = Training(device)
    if resume:
        half_written = CHECKPOINT.with_suffix(".tmp")
        if half_written.exists():
            try:
                torch.load(half_written, weights_only=True)
            except (OSError, RuntimeError) as error:
                reason = str(error).partition(". ")[0]
                report(f"{half_written} is half-written: {type(error).__name__}: {reason}")
        training.restore(deepcopy(state))  # the optimizer takes over tensors of what it loads
        report(f"resumed after step {training.step} of {training.steps}")

    def save_at_intervals() -> None:
        if training.step % SAVE_EVERY == 0:
            saved = training.state()
            if rank == 0:  # the model is the same on all ranks, so one rank writes
                write_atomically(saved, CHECKPOINT, kill and training.step == KILL_AT)
            report(f"step {training.step}: checkpoint written")

    first = training.step
    parameters = training.run(save_at_intervals)
    assert training.step == training.steps and first == (KILL_AT - SAVE_EVERY) * resume
    assert abs(training.scheduler.get_last_lr()[0]) < 1e-9  # half a cosine ends at zero
    if not resume:
        if rank == 0:
            torch.save(parameters, NEVER_KILLED)
        return

    never_killed = torch.load(NEVER_KILLED, weights_only=True)
    same = torch.equal(parameters, never_killed)
    report(f"bit-identical to the run that was never killed: {same}")
    report("resumed again, and one part is not restored:")
    for part in PARTS:
        training = Training(device)
        training.restore(deepcopy(state), without=part)
        weight, saved_weight = training.ddp.module[0].weight.cpu(), state["model"]["0.weight"]
        random, saved_random = torch.get_rng_state(), state["random state"]["cpu"][rank]
        restored = {
            "model": torch.equal(weight, saved_weight),
            "optimizer": bool(training.optimizer.state),
            "scheduler": training.scheduler.last_epoch == training.step,
            "random state": torch.equal(random, saved_random),
            "place in the data": training.position > 0,
            "buckets": training.ddp.module[0].weight.grad is not None,  # of the extra backward
        }
        assert restored == {name: name != part for name in PARTS}  # only one part is missing
        difference = (training.run() - never_killed).abs().max().item()
        size = f"≈{difference:.0e}" if difference else "none"
        report(f"  {part:18} largest difference of a parameter: {size}")
        # two ranks add only two numbers, in whichever order: the buckets cannot matter
        assert (difference > 0) == (part != "buckets" or n > 2)
    assert same


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
