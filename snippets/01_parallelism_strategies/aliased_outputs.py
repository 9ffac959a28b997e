"""[torch.empty(2)] * n is a list that contains one tensor n times, so a gather loses values.

all_gather fills the tensors of the list one after the other. If they are all the same tensor,
the value of the last rank remains, n times. No error is raised. A list comprehension creates n
tensors. A test in which all ranks have equal values cannot detect the mistake.
"""

import os
import sys
from unittest import mock

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
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as spy:
            values = [int(output.item()) for output in gather(x, fix)]
        places = {output.data_ptr() for output in spy.call_args.args[0]}
        assert len(places) == (n if fix else 1)  # the list itself causes the loss
        assert values == (list(range(n)) if fix else [n - 1] * n)
        assert x.item() == rank  # the input is unchanged
        equal = gather(torch.tensor([7]), fix)  # all ranks have the same value
        assert [int(output.item()) for output in equal] == [7] * n  # no difference: hidden
        if rank == 0:
            print(f"{'[… for _ in range(n)]' if fix else '[…] * n':22} gathered {values}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
