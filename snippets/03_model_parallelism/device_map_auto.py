"""device_map="auto" under torchrun: every process spreads a whole model over all GPUs.

A device map says which GPU holds which layer of one model of one process. "auto" asks
accelerate for a map over all GPUs that the process sees. Under torchrun each process sees all
of them, so each process makes the same map: no GPU belongs to one rank, and accelerate refuses
to train. The GPUs are invented here, and the maps come from accelerate's own functions.

    (no flag)   "auto" on every rank; accelerate raises ValueError
    --fix       {"": local_rank}: one whole model on the GPU of each rank, trained by DDP
"""

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 8, 64


# --8<-- [start:maps]
def automatic(model: nn.Module, gpus: int) -> dict[str, int]:
    """The map of device_map="auto" for a process that sees `gpus` GPUs of 1 GB."""
    memory = get_balanced_memory(model, dict.fromkeys(range(gpus), 10**9))
    return dict(infer_auto_device_map(model, memory))


def own_gpu(local_rank: int) -> dict[str, int]:
    """The whole model, whose name is the empty string, on the GPU of this rank."""
    return {"": local_rank}


# --8<-- [end:maps]


def bytes_on(model: nn.Module, device_map: dict[str, int], gpus: int) -> torch.Tensor:
    """How many bytes of parameters this process puts on each GPU."""
    count = torch.zeros(gpus, dtype=torch.int64)
    for name, parameter in model.named_parameters():
        (gpu,) = {
            gpu for part, gpu in device_map.items() if not part or name.startswith(f"{part}.")
        }
        count[gpu] += parameter.nbytes
    return count


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def train_step(model: nn.Module, rank: int, n: int) -> torch.Tensor:
    """The gradient of the first weight after DDP has averaged it over the ranks."""
    prepared = Accelerator(cpu=True).prepare(model)
    assert type(prepared) is DistributedDataParallel
    assert prepared.module.hf_device_map == {"": int(os.environ["LOCAL_RANK"])}
    batch = torch.randn(4 * n, WIDTH, generator=torch.Generator().manual_seed(1))
    prepared(batch[4 * rank : 4 * rank + 4]).square().mean().backward()
    reference = build()  # the same step in one process, on the whole batch and without DDP
    reference(batch).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)
    return model[0].weight.grad


def main() -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    dist.init_process_group("gloo")  # on the CPU, because the GPUs are invented
    rank, n = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    model = build()
    size = sum(parameter.nbytes for parameter in model.parameters())
    device_map = own_gpu(local_rank) if "--fix" in sys.argv else automatic(model, n)
    mine = bytes_on(model, device_map, n)
    table = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(table, mine)
    model.hf_device_map = device_map  # from_pretrained stores the map under this name
    try:
        train_step(model, rank, n)
        said = "trains, and the gradient equals that of one process on the whole batch"
    except ValueError as error:
        said = f"ValueError: {error}"
    if rank == 0:
        for number, row in enumerate(table):
            print(f"rank {number}: KiB of weights on GPU 0, 1, …: {(row / 1024).tolist()}")
        print(said)
    whole = torch.eye(n, dtype=torch.int64) * size
    if "--fix" in sys.argv:
        assert torch.equal(torch.stack(table), whole), (
            "each rank uses its own GPU, and no other"
        )
        assert said.startswith("trains"), said
    else:
        assert all(row.sum() == size for row in table), "every process loads a whole model"
        assert all(row.gt(0).all() for row in table), "and spreads it over all GPUs"
        assert "any distributed mode" in said, said
    dist.destroy_process_group()
    return int("--fix" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
