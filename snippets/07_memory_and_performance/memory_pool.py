"""torch.cuda.MemPool gives long-lived tensors segments of their own. Needs a GPU.

A small tensor that outlives a large one prevents the driver from getting the large segment
back. If the small tensor is in a pool, only the segment of the pool stays. Then the program
checks the rules of a pool: who gets its free blocks, and which allocations do not go into it.
"""

import os
import sys

import torch

MIB = 2**20


def mib(size: int) -> torch.Tensor:
    return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")


def reserved() -> int:
    return torch.cuda.memory_reserved() // MIB


# --8<-- [start:pinned]
def pinned_by_one(pool: torch.cuda.MemPool | None) -> int:
    """MiB that stay reserved if 512 MiB are freed, and 2 MiB allocated afterwards are kept."""
    torch.cuda.empty_cache()
    before = reserved()
    large = mib(512)
    del large  # now a free block of 512 MiB is the whole segment
    if pool is None:
        kept = mib(2)  # the best fit is a part of this block
    else:
        with torch.cuda.use_mem_pool(pool):
            kept = mib(2)
    torch.cuda.empty_cache()
    stays = reserved() - before
    del kept
    return stays


# --8<-- [end:pinned]


# --8<-- [start:rules]
def lies_in(pool: torch.cuda.MemPool, tensor: torch.Tensor) -> bool:
    """Whether the tensor is in one of the segments of the pool."""
    return any(
        segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
        for segment in pool.snapshot()
    )


def rules() -> None:
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1  # the object itself
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = mib(8)
    assert pool.use_count() == 1
    assert lies_in(pool, inside)
    assert len(pool.snapshot()) == 1
    print("made in the with: in the pool, in a segment of its own")

    where = inside.data_ptr()
    del inside
    outside = mib(8)
    assert not lies_in(pool, outside)
    with torch.cuda.use_mem_pool(pool):
        again = mib(8)
    assert again.data_ptr() == where
    print("its free block: not for a tensor outside, and for the next one in the pool")

    weight = torch.ones(MIB, device="cuda", requires_grad=True)
    with torch.cuda.use_mem_pool(pool):
        product = weight * 2
        product.sum().backward()
    assert lies_in(pool, product)
    assert not lies_in(pool, weight.grad)  # allocated by a thread of the engine
    print("a backward in the with: the output is in the pool, the gradient is not")

    before, size = reserved(), sum(s["total_size"] for s in pool.snapshot()) // MIB
    del again, product, pool
    torch.cuda.empty_cache()
    assert reserved() <= before - size
    print("pool and tensors gone: its memory is the driver's again")


# --8<-- [end:rules]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this program needs a GPU: the pools are those of CUDA's caching allocator")
    if os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        sys.exit("unset PYTORCH_ALLOC_CONF: the sizes here are those of the defaults")
    alone, apart = pinned_by_one(None), pinned_by_one(torch.cuda.MemPool())
    print(f"512 MiB freed, 2 MiB kept: {alone} MiB stay reserved, with a pool {apart} MiB")
    assert (alone, apart) == (512, 20)  # the whole large segment, or one of 20 MiB
    rules()


if __name__ == "__main__":
    main()
