"""environment variable RANK expected, but not set: no launcher has started this program.

init_process_group without arguments reads four variables in this order: RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. Each command of the transcript sets one more of them. torchrun sets
all four. srun and mpirun set variables with other names, which you have to translate.
"""

import sys

import torch
import torch.distributed as dist


def main() -> int:
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()  # on every rank
    if dist.get_rank() == 0:
        print(f"world size {dist.get_world_size()}, sum of ones {one.item():.0f}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
