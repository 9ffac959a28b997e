"""When a rank dies, torchrun starts all ranks again, and they continue from the last snapshot.

torchrun counts its restarts in TORCHELASTIC_RESTART_COUNT. It starts new processes and does
nothing else: what survives is what the program has written to a file. The program calls each
start of all ranks an attempt. Look for the steps that are computed twice, and for the number of
processes that are from before the failure.
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


def setup(attempt: int) -> torch.device:
    """Start the process group: one accelerator per local rank where possible, else CPU."""
    # torchrun's agent keeps one key-value store for all attempts. The addresses of the dead
    # ranks are still in it, so a new rank may connect to one of them ("Connection refused").
    # A prefix gives each attempt keys of its own. On several nodes the agents count restarts
    # separately: there, use --rdzv-backend=c10d and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # for torchrun instead. The static rendezvous of --master-addr ignores that variable.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    store = dist.PrefixStore(f"attempt {attempt}", store)
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
    """The global batch of a step, 12 rows. It depends on nothing but the step."""
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).to(device)
    return x, x.sum(1, keepdim=True)


def save(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, processes: list[int]
) -> None:
    """Write the snapshot next to the old one and rename it, so that it is always whole."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["processes"] = processes  # only to see later that none of them has survived
    temporary = SNAPSHOT.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, SNAPSHOT)
    assert not temporary.exists()  # until now it was a file of its own


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[int]]:
    """Load the snapshot; return the steps that are done, and the processes that did them."""
    if not SNAPSHOT.exists():
        return 0, []
    state = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["processes"]


def main() -> None:
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=2 --max-restarts=2 elastic.py")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if 12 % int(os.environ["WORLD_SIZE"]):  # of this attempt: the next may have fewer nodes
        sys.exit("the batch of 12 rows must divide among the ranks")
    device = setup(attempt)
    rank, n = dist.get_rank(), dist.get_world_size()
    processes: list = [None] * n
    dist.all_gather_object(processes, os.getpid())

    model, optimizer = make_training(device)
    done, saved_by = load(model, optimizer)
    ddp = DDP(model)
    if rank == 0:
        print(f"attempt {attempt}: starts after step {done}", flush=True)
        if saved_by:
            survivors = set(saved_by) & set(processes)
            print(f"attempt {attempt}: {len(survivors)} of {n} processes are from before")
            assert not survivors

    # --8<-- [start:train]
    for step in range(done + 1, STEPS + 1):
        if attempt == 0 and step == DIE_AT:
            dist.barrier()  # only to make every transcript the same
            if rank == n - 1:
                os.kill(os.getpid(), signal.SIGKILL)  # plays a failing machine
        x, y = (tensor.chunk(n)[rank] for tensor in batch(step, device))
        assert len(x) == 12 // n
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()
        if rank == 0:
            saved = step % SNAPSHOT_EVERY == 0
            if saved:
                save(step, model, optimizer, processes)
            text = f"attempt {attempt}: step {step}"
            print(text + (", snapshot saved" if saved else ""), flush=True)
    # --8<-- [end:train]

    # the reference: one process does all steps, and nothing fails
    alone, optimizer = make_training(device)
    for step in range(1, STEPS + 1):
        x, y = batch(step, device)
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    if rank == 0:
        restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        repeated = DIE_AT - 1 - done if attempt else 0
        assert repeated < SNAPSHOT_EVERY
        print(f"{attempt} of {restarts} restarts used, {repeated} steps computed twice")
        print("parameters equal to one process that never failed")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
