"""If one rank runs one forward more, its all-gather waits for the other ranks until a timeout.

(no flag)   rank 0 has one more batch than rank 1
--fix       the ranks first agree on the smallest number of batches
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

H, PATIENCE = 48, timedelta(seconds=3)  # the default of gloo is 30 minutes


def evaluate(model: nn.Module, batches: int) -> float:
    """Return the mean of the outputs over all batches and ranks."""
    total = torch.zeros(())
    with torch.no_grad():  # no gradients, but every forward still gathers parameters
        for batch in range(batches):
            total += model(torch.full((4, H), 1.0 + batch)).mean() / batches
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> int:
    if "RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=2 uneven_forwards.py")
    dist.init_process_group("gloo")  # on every machine, because it shows a message of gloo
    group = dist.new_group(timeout=PATIENCE)  # only for the parameters
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 1))
    with torch.no_grad():  # the two batches that every rank has, without sharding
        expected = torch.stack([model(torch.full((4, H), v)).mean() for v in (1.0, 2.0)]).mean()
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    batches = torch.tensor(3 - rank % 2)
    if "--fix" in sys.argv:
        dist.all_reduce(batches, op=dist.ReduceOp.MIN)
    try:
        mean = evaluate(model, int(batches))
    except RuntimeError as error:
        if rank == 0:  # rank 1 waits in the last all-reduce until rank 0 has gone
            print(f"rank 0: RuntimeError: {str(error).split('] ')[-1]}", flush=True)
        return 1
    assert abs(mean - expected.item()) < 1e-6
    if rank == 0:
        print(f"{int(batches)} batches on every rank, mean {mean:.4f}")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status == 0:
        dist.destroy_process_group()
    os._exit(status)  # after a failure the group is of no use, and DTensor's caches hold it
