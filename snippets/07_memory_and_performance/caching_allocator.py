"""PyTorch's caching allocator in small: rounding, pools, segments, best fit, split, coalesce.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/
AllocatorConfig.h. The program replays through it what three training steps allocate and free,
and counts how often the driver would have been asked. Draws caching_allocator.svg.
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
MIN_LARGE_ALLOC = 10 * MIB  # from here on a request gets a segment of its own,
ROUND_LARGE = 2 * MIB  # rounded up to a multiple of this


@dataclass(eq=False)
class Block:
    """A piece of a segment; `previous` and `next` are its neighbours in the same segment."""

    address: int
    size: int
    segment: int  # address of the segment
    allocated: bool = False
    previous: "Block | None" = None
    next: "Block | None" = None


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def segment_size(size: int) -> int:
    """What is asked of the driver for a rounded size that no free block can serve."""
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
    """The device's memory is `capacity` bytes; addresses only ever grow, as in a fresh one."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.next_address = capacity, 0
        self.segments: dict[int, int] = {}  # address -> size
        self.free_blocks: dict[bool, list[Block]] = {True: [], False: []}  # by small or not
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
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:  # else the rest is wasted
            tail = Block(block.address + size, rest, block.segment, False, block, block.next)
            if block.next:
                block.next.previous = tail
            block.size, block.next = size, tail
            pool.append(tail)
        block.allocated = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Back to the pool, merged with free neighbours. The driver hears nothing of it."""
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
        """cudaMalloc; at the limit give back every segment that is wholly free, and retry."""
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
        """cudaFree for each segment that is one free block; a split one cannot go."""
        for pool in self.free_blocks.values():
            for block in [b for b in pool if not b.previous and not b.next]:
                pool.remove(block)
                self.reserved -= self.segments.pop(block.segment)


def check_rules() -> None:
    """By hand: segments of 10, 16 and 20 MiB, the last cut into 2, 12 and 6."""
    allocator = Allocator(46 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (10, 15, 2, 12)]
    assert allocator.reserved == 46 * MIB
    for block in blocks[:3]:
        allocator.free(block)
    best = allocator.malloc(9 * MIB)
    assert best is blocks[0] and best.size == 10 * MIB  # a rest of 1 MiB is not cut off
    allocator.empty_cache()
    assert allocator.reserved == 30 * MIB  # of the other two something is in use


class Trace(TorchDispatchMode):
    """What the operators under it allocate (+) and free (-): (number, bytes)."""

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
                    weakref.finalize(storage, self.die, key, number, size).atexit = False
        return result

    def die(self, key: int, number: int, size: int) -> None:
        self.live.remove(key)
        self.events.append((number, -size))


def steps_of_training() -> list[list[tuple[int, int]]]:
    """Allocations of building a model, then of each of three steps."""
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

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "allocator", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    rows = {segment: row for row, segment in enumerate(allocator.segments)}
    for segment, size in allocator.segments.items():
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
    axes.set(xlabel="MiB from the start of the segment", ylabel="segment, in order of birth")
    axes.set_yticks(range(0, len(rows), 2))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
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
        asked = allocator.driver_calls - before
        cells = [f"≈{len(events)}", f"≈{asked}" if asked else "0"]
        cells += [f"≈{n / MIB:.0f}" for n in (allocator.allocated, allocator.reserved, peak)]
        print(f"{name:9}" + "".join(f"{cell:>11}" for cell in cells))
        assert name in ("model", "step 1", "step 2") or asked == 0
        unused = sum(block.size for pool in allocator.free_blocks.values() for block in pool)
        assert allocator.allocated + unused == allocator.reserved  # no byte got lost
    draw(allocator, list(blocks.values()))
    allocator.empty_cache()
    print(f"empty_cache: ≈{allocator.reserved / MIB:.0f} MiB stay reserved")


if __name__ == "__main__":
    main()
