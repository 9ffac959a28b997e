"""PyTorch's caching allocator in small: rounding, pools, segments, best fit, split, coalesce.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/
AllocatorConfig.h. The program replays the allocations and frees of three training steps, and
counts how often the allocator would have called the driver. It draws caching_allocator.svg.

Look at the column "driver": the second and the third step do not call it.
"""

import weakref
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KIB, MIB = 2**10, 2**20
MIN_BLOCK = 512  # every size is rounded up to a multiple of this
SMALL_SIZE = 1 * MIB  # up to here a request goes to the small pool
SMALL_BUFFER = 2 * MIB  # a segment of the small pool
LARGE_BUFFER = 20 * MIB  # a segment for requests below MIN_LARGE_ALLOC
MIN_LARGE_ALLOC = 10 * MIB  # a request of this size or more gets its own segment,
ROUND_LARGE = 2 * MIB  # whose size is rounded up to a multiple of this


@dataclass(eq=False)
class Block:
    """A part of a segment. `previous` and `next` are its neighbours in the segment."""

    address: int
    size: int
    segment: int  # address of the segment
    allocated: bool = False
    previous: "Block | None" = None
    next: "Block | None" = None


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def segment_size(size: int) -> int:
    """The bytes of a new segment for a rounded size that no free block can serve."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else round_up(size, ROUND_LARGE)


def merge(left: Block, right: Block) -> Block:
    left.size += right.size
    left.next = right.next
    if right.next:
        right.next.previous = left
    return left


class Allocator:
    """Serves requests from a device with `capacity` bytes. Addresses are never used again."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.next_address = capacity, 0
        self.segments: dict[int, int] = {}  # address: size
        self.free_blocks: dict[bool, list[Block]] = {True: [], False: []}  # True: small
        self.allocated = self.reserved = self.driver_calls = 0

    def malloc(self, size: int) -> Block:
        size = max(round_up(size, MIN_BLOCK), MIN_BLOCK)
        small = size <= SMALL_SIZE
        pool = self.free_blocks[small]
        fitting = [block for block in pool if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.address))  # best fit
            pool.remove(block)
        else:
            block = self.new_segment(segment_size(size))
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:  # otherwise the rest is wasted
            tail = Block(block.address + size, rest, block.segment, False, block, block.next)
            if block.next:
                block.next.previous = tail
            block.size, block.next = size, tail
            pool.append(tail)
        block.allocated = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Return the block to its pool, merged with free neighbours. No call of the driver."""
        self.allocated -= block.size
        block.allocated = False
        pool = self.free_blocks[self.segments[block.segment] == SMALL_BUFFER]
        if block.previous and not block.previous.allocated:
            pool.remove(block.previous)
            block = merge(block.previous, block)
        if block.next and not block.next.allocated:
            pool.remove(block.next)
            block = merge(block, block.next)
        pool.append(block)

    def new_segment(self, size: int) -> Block:
        """cudaMalloc. At the limit, return all segments that are completely free, and retry."""
        if self.reserved + size > self.capacity:
            self.empty_cache()
        if self.reserved + size > self.capacity:
            raise MemoryError(f"tried to allocate {size / MIB:.2f} MiB")
        address, self.next_address = self.next_address, self.next_address + size
        self.segments[address] = size
        self.reserved += size
        self.driver_calls += 1
        return Block(address, size, address)

    def empty_cache(self) -> None:
        """cudaFree for each segment that is a single free block."""
        for pool in self.free_blocks.values():
            for block in [b for b in pool if not b.previous and not b.next]:
                pool.remove(block)
                self.reserved -= self.segments.pop(block.segment)


def check_rules() -> None:
    """Checked by hand: segments of 10, 16 and 20 MiB, the last one split into 2, 12 and 6."""
    allocator = Allocator(46 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (10, 15, 2, 12)]
    assert allocator.reserved == 46 * MIB
    for block in blocks[:3]:
        allocator.free(block)
    best = allocator.malloc(9 * MIB)
    assert best is blocks[0] and best.size == 10 * MIB  # a rest of 1 MiB is not split off
    allocator.empty_cache()
    assert allocator.reserved == 30 * MIB  # the other two contain a block in use


class Trace(TorchDispatchMode):
    """Records what operators allocate (+) and free (-), as pairs (number, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.live: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.live and storage.nbytes():
                    self.live.add(key)
                    number, size = len(self.events), storage.nbytes()
                    self.events.append((number, size))
                    weakref.finalize(storage, self.freed, key, number, size).atexit = False
        return result

    def freed(self, key: int, number: int, size: int) -> None:
        self.live.remove(key)
        self.events.append((number, -size))


def steps_of_training() -> list[list[tuple[int, int]]]:
    """The events while a model is built, and then those of each of three training steps."""
    torch.manual_seed(0)
    parts = []
    with Trace() as trace:
        sizes = (600, 2400, 600, 2400, 600)
        model = nn.Sequential()
        for width, following in pairwise(sizes):
            model.extend([nn.Linear(width, following), nn.GELU()])
        adam = torch.optim.Adam(model.parameters(), foreach=False)
        for part in range(4):
            if part:
                model(torch.randn(700, 600)).square().mean().backward()
                adam.step()
                adam.zero_grad()
            parts.append(trace.events[sum(map(len, parts)) :])
    return parts


def draw(allocator: Allocator, blocks: list[Block]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "allocator", "font.size": 12}
    plt.rcParams |= {"legend.frameon": False}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    rows = {segment: row for row, segment in enumerate(allocator.segments)}
    for segment, size in allocator.segments.items():
        axes.barh(rows[segment], size / MIB, color="none", ec="#a1a1aa", hatch="//", lw=0)
        axes.barh(rows[segment], size / MIB, color="none", edgecolor="#52525b", linewidth=1)
    for block in blocks:
        left = (block.address - block.segment) / MIB
        colour = "#c2410c" if allocator.segments[block.segment] == SMALL_BUFFER else "#0b6e99"
        axes.barh(
            rows[block.segment],
            block.size / MIB,
            left=left,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
        )
    small = [
        row for segment, row in rows.items() if allocator.segments[segment] == SMALL_BUFFER
    ]
    axes.text(2.5, small[0], "a segment of the small pool, 2 MiB", va="center", color="#c2410c")
    allocated = Patch(color="#0b6e99", label="allocated: the blocks of tensors")
    unused = Patch(fc="none", ec="#a1a1aa", hatch="//", label="reserved but unallocated: free")
    figure.legend(handles=[allocated, unused], loc="upper center", ncols=2)
    axes.set(xlabel="MiB from the start of the segment", ylabel="segments, oldest first")
    axes.set_yticks(range(0, len(rows), 2))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig("caching_allocator.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    check_rules()
    allocator = Allocator(2**40)
    print("requested    rounded to   segment")
    for size in (1, 600 * KIB, 1 * MIB + 1, 9 * MIB, 10 * MIB + 1, 21 * MIB):
        rounded = round_up(size, MIN_BLOCK)
        print(f"{size:10,}  {rounded:11,}   {segment_size(rounded) // MIB} MiB")

    blocks: dict[int, Block] = {}
    print("\n           calls of the          MiB at the end        peak of")
    print("           allocator   driver    allocated   reserved  allocated")
    for name, events in zip(
        ("model", "step 1", "step 2", "step 3"), steps_of_training(), strict=True
    ):
        before, peak = allocator.driver_calls, 0
        for number, size in events:
            if size > 0:
                blocks[number] = allocator.malloc(size)
            else:
                allocator.free(blocks.pop(number))
            peak = max(peak, allocator.allocated)
        calls = allocator.driver_calls - before
        cells = [f"≈{len(events)}", f"≈{calls}" if calls else "0"]
        cells += [f"≈{n / MIB:.0f}" for n in (allocator.allocated, allocator.reserved, peak)]
        print(f"{name:9}" + "".join(f"{cell:>11}" for cell in cells))
        assert (calls == 0) == (name in ("step 2", "step 3")), (name, calls)
        unused = sum(block.size for pool in allocator.free_blocks.values() for block in pool)
        assert allocator.allocated + unused == allocator.reserved  # every byte is in a block
    draw(allocator, list(blocks.values()))
    allocator.empty_cache()
    print(f"empty_cache: ≈{allocator.reserved / MIB:.0f} MiB stay reserved")


if __name__ == "__main__":
    main()
