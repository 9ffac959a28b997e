"""PyTorch's caching allocator in sixty lines: what `reserved` is, and why it exceeds
`allocated`.

Sizes are rounded up to 512 bytes; requests up to 1 MiB share segments of 2 MiB, those below 10
MiB share segments of 20 MiB, larger ones get a segment of their own, rounded up to 2 MiB. The
smallest free block that is large enough is taken and split; neighbours that are free become one
block again. Nothing goes back to the driver. The rules are derived in 07, "The caching
allocator", and are those of c10/cuda/CUDACachingAllocator.cpp. Here they run on sizes alone,
without a GPU.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cache

MIB = 2**20


# --8<-- [start:Allocator]
@dataclass(slots=True, eq=False)
class Block:
    size: int
    number: int  # of two of one size, the older is taken
    pool: int
    before: "Block | None" = None  # neighbours in the segment
    after: "Block | None" = None
    is_free: bool = False


@cache
def rounded(size: float) -> int:
    return max(512, -(-int(size) // 512) * 512)


class Allocator:
    def __init__(self) -> None:
        self.free_blocks: tuple[list, list] = ([], [])  # (size, number, block), sorted
        self.reserved = self.allocated = self.peak_allocated = self.made = 0

    def malloc(self, size: float) -> Block:
        size = rounded(size)
        pool = 0 if size <= MIB else 1
        free = self.free_blocks[pool]
        fits = bisect_left(free, (size,))
        if fits < len(free):
            block = free.pop(fits)[2]
        else:
            own = -(-size // (2 * MIB)) * 2 * MIB
            segment = own if size >= 10 * MIB else (20 if pool else 2) * MIB
            self.reserved += segment
            self.made += 1
            block = Block(segment, self.made, pool)
        rest = block.size - size
        if rest > (MIB if pool else 511):
            self.made += 1
            other = Block(rest, self.made, pool, block, block.after, True)
            if other.after:
                other.after.before = other
            block.size, block.after = size, other
            insort(free, (rest, self.made, other))
        block.is_free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        free = self.free_blocks[block.pool]
        block.is_free = True
        before, after = block.before, block.after
        if before and before.is_free:
            del free[bisect_left(free, (before.size, before.number))]
            block.size += before.size
            block.before = before.before
            if block.before:
                block.before.after = block
        if after and after.is_free:
            del free[bisect_left(free, (after.size, after.number))]
            block.size += after.size
            block.after = after.after
            if block.after:
                block.after.before = block
        insort(free, (block.size, block.number, block))


# --8<-- [end:Allocator]


def main() -> None:
    pool = Allocator()
    small = [pool.malloc(3 * MIB) for _ in range(6)]
    print(
        f"six of 3 MiB: allocated {pool.allocated // MIB}, reserved {pool.reserved // MIB} MiB"
    )
    assert (pool.allocated, pool.reserved) == (18 * MIB, 20 * MIB)
    for block in small[::2]:
        pool.free(block)
    pool.malloc(8 * MIB)  # nine MiB are free, in pieces of three
    print(f"three freed, then 8 MiB: allocated {pool.allocated // MIB}, ", end="")
    print(f"reserved {pool.reserved // MIB} MiB")
    assert (pool.allocated, pool.reserved) == (17 * MIB, 40 * MIB)
    pool.free(small[3])  # between two that are free: now they are one
    pool.malloc(8 * MIB)
    pool.malloc(8 * MIB)
    print(
        f"one between two of them freed, then 8 MiB twice: reserved {pool.reserved // MIB} MiB"
    )
    assert (pool.allocated, pool.reserved) == (31 * MIB, 40 * MIB)  # a rest of 1 MiB stays

    # sizes are rounded up, and small requests share 2 MiB
    pool = Allocator()
    for size in (1, 513, 1000 * 1000, MIB):
        pool.malloc(size)
    assert pool.allocated == 512 + 1024 + 1954 * 512 + MIB and pool.reserved == 2 * MIB
    pool.malloc(MIB)  # the rest of the first segment is too small
    assert pool.reserved == 4 * MIB
    for size, block, segment in (
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # a rest below 1 MiB is not split off
    ):
        pool = Allocator()
        pool.malloc(size)
        assert (pool.allocated, pool.reserved) == (block, segment)

    # a training step in two lines: what the first step keeps for good lies in the holes of its
    # activations, and so the second step finds fewer of its size
    pool = Allocator()
    activations = [pool.malloc(134 * MIB) for _ in range(8)]
    for block in activations:
        pool.free(block)
    for _ in range(4):
        pool.malloc(16 * MIB)  # the optimizer's state comes after the first backward
    for _ in range(8):
        pool.malloc(134 * MIB)
    needed = 8 * 134 + 4 * 16
    print(f"eight activations and a late optimizer: {needed} MiB needed, ", end="")
    print(f"{pool.reserved // MIB} reserved")
    assert pool.reserved > needed * MIB and pool.allocated == needed * MIB


if __name__ == "__main__":
    main()
