"""[torch.empty(2)] * n: a list that holds one tensor n times, and a gather that loses ranks.

all_gather fills the tensors of the list one after the other. If they are all the same tensor,
the last one written remains, n times. Nothing is raised. A list comprehension makes n tensors.
"""

import os
import sys

import torch
import torch.distributed as dist


def gather(x: torch.Tensor, fix: bool) -> list[torch.Tensor]:
    n = dist.get_world_size()
    outputs = [torch.empty_like(x) for _ in range(n)] if fix else [torch.empty_like(x)] * n
    dist.all_gather(outputs, x)
    return outputs


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("aliased_outputs.py needs 2 ranks or more, started by torchrun")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    for fix in (False, True):
        x = torch.tensor([rank])
        values = [int(output.item()) for output in gather(x, fix)]
        assert (values == list(range(n))) == fix and x.item() == rank  # what was sent stays
        if rank == 0:
            print(f"{'[… for _ in range(n)]' if fix else '[…] * n':22} gathered {values}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
