"""An all-reduce of int8 tensors overflows without an error.

The gradients of four ranks have a known average. Compare the sum in int8 and the sum in int32
with this average. The last two numbers are the same on every rank.
"""

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=4 int8_sum_overflows.py")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    average = torch.tensor([0.6, -0.2, 1.0, 0.9])
    shift = 0.1 * (2 * rank - n + 1) / n  # the shifts of all ranks add up to 0
    gradient = average + torch.tensor([shift, -shift, 0, 0])
    # --8<-- [start:wraps]
    scale = 1.0 / 127  # the same on all ranks
    q = (gradient / scale).round().to(torch.int8)
    wrapped = q.clone()
    dist.all_reduce(wrapped)  # a sum of int8 is an int8
    # --8<-- [end:wraps]
    # --8<-- [start:fix]
    wide = q.to(torch.int32)
    dist.all_reduce(wide)  # right, but the same number of bytes as fp32
    # --8<-- [end:fix]
    assert wide.nbytes == gradient.nbytes
    if rank == 0:
        print(f"average          {[round(x, 2) for x in average.tolist()]}")
        print(f"int8, summed     {[round(x, 2) for x in (wrapped * scale / n).tolist()]}")
        print(f"int32, summed    {[round(x, 2) for x in (wide * scale / n).tolist()]}")
        torch.testing.assert_close(wide * scale / n, average, atol=0.005, rtol=0)
        assert torch.equal(wrapped.int(), (wide + 128) % 256 - 128)  # only the last 8 bits
        if n > 1:
            assert not torch.allclose(wrapped * scale / n, average, atol=0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
