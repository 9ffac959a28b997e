"""PyTorch's caching allocator in forty lines: what `reserved` is, and why it exceeds
`allocated`.

Sizes are rounded to 512 bytes; requests up to 1 MiB share segments of 2 MiB, up to 10 MiB
those of 20 MiB, larger ones get a segment of their own, rounded to 2 MiB. The smallest free
block that is large enough is taken and split; neighbours that are free become one block again.
Nothing goes back to the driver. The rules are derived in 07, "Memory and performance", and are
those of c10/cuda/CUDACachingAllocator.cpp. Here they run on sizes alone, without a GPU.
"""

from bisect import bisect_left, insort

MIB = 2**20


# --8<-- [start:Allocator]
class Allocator:
    def __init__(self) -> None:
        self.free_blocks: tuple[list, list] = ([], [])  # (size, block) of each pool, sorted
        self.blocks: dict[int, list] = {}  # block: [size, before, after, is free, pool]
        self.reserved = self.allocated = self.peak_allocated = self.made = 0

    def _new(self, size: int, before: int | None, after: int | None, pool: int) -> int:
        self.made += 1
        self.blocks[self.made] = [size, before, after, True, pool]
        return self.made

    def malloc(self, size: float) -> int:
        size = max(512, -(-int(size) // 512) * 512)
        pool = 0 if size <= MIB else 1
        free = self.free_blocks[pool]
        fits = bisect_left(free, (size, -1))
        if fits < len(free):
            block = free.pop(fits)[1]
        else:
            own = -(-size // (2 * MIB)) * 2 * MIB
            segment = own if size >= 10 * MIB else (20 if pool else 2) * MIB
            self.reserved += segment
            block = self._new(segment, None, None, pool)
        entry = self.blocks[block]
        rest = entry[0] - size
        if rest > (MIB if pool else 511):
            other = self._new(rest, block, entry[2], pool)
            if entry[2] is not None:
                self.blocks[entry[2]][1] = other
            entry[0], entry[2] = size, other
            insort(free, (rest, other))
        entry[3] = False
        self.allocated += entry[0]
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: int) -> None:
        entry = self.blocks[block]
        self.allocated -= entry[0]
        free = self.free_blocks[entry[4]]
        entry[3] = True
        for side in (1, 2):
            other = entry[side]
            if other is None or not self.blocks[other][3]:
                continue
            neighbour = self.blocks.pop(other)
            free.pop(bisect_left(free, (neighbour[0], other)))
            entry[0] += neighbour[0]
            entry[side] = neighbour[side]
            if neighbour[side] is not None:
                self.blocks[neighbour[side]][3 - side] = block
        insort(free, (entry[0], block))


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
