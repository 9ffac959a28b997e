"""A rank dies, torchrun starts all ranks again, and training goes on from the last snapshot.

torchrun counts the lives in TORCHELASTIC_RESTART_COUNT. It restarts processes, nothing more:
what survives is what the program wrote down. Look for the steps that were computed twice.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, SNAPSHOT_EVERY, DIE_AT = 10, 4, 7
SNAPSHOT = Path("snapshot.pt")


def setup(life: int) -> torch.device:
    """Start the process group: one accelerator per local rank where possible, else CPU."""
    # The agent keeps one key-value store through all lives, and the addresses of the dead in
    # it: without a prefix, a rank that is early may call one of those ("Connection refused").
    # With several nodes, whose agents count lives apart, use --rdzv-backend=c10d and set
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun in place of this; the static
    # rendezvous of --master-addr ignores that variable.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"life {life}", dist.TCPStore(address, port, is_master=False))
    group = {
        "store": store,
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(device_id=device, **group)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **group)
    return device


def make_training(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, 12 rows: it depends on the step alone, in every life."""
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).to(device)
    return x, x.sum(1, keepdim=True)


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A rename is atomic: no life ever reads a half-written snapshot (see resume.py)."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    temporary = SNAPSHOT.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, SNAPSHOT)
    assert not temporary.exists()  # it was another file, until this moment


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps already done. All ranks need the optimizer's state."""
    if not SNAPSHOT.exists():
        return 0
    state = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main() -> None:
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=2 --max-restarts=2 elastic.py")
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if 12 % int(os.environ["WORLD_SIZE"]):  # of this life: another may have fewer nodes
        sys.exit("the batch of 12 rows must divide among the ranks")
    device = setup(life)
    rank, n = dist.get_rank(), dist.get_world_size()

    model, optimizer = make_training(device)
    first = load(model, optimizer)
    ddp = DDP(model)
    if rank == 0:
        print(f"life {life}: starts after step {first}", flush=True)

    for step in range(first + 1, STEPS + 1):
        if life == 0 and step == DIE_AT:
            dist.barrier()  # only so that the transcript is the same each time
            if rank == n - 1:
                os.kill(os.getpid(), signal.SIGKILL)  # in place of a failing machine
        x, y = (tensor.chunk(n)[rank] for tensor in batch(step, device))
        assert len(x) == 12 // n
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()
        if rank == 0:
            saved = step % SNAPSHOT_EVERY == 0
            if saved:
                save(step, model, optimizer)
            print(f"life {life}: step {step}" + (", saved" if saved else ""), flush=True)

    # the truth: one process, all steps, no accident
    alone, optimizer = make_training(device)
    for step in range(1, STEPS + 1):
        x, y = batch(step, device)
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    if rank == 0:
        restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        print(f"{life} of {restarts} restarts used; parameters equal to one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
