"""Assignment 1: a caching allocator for several streams, which survives a full device.

    python assessment/assignment1_allocator.py

Chapter 07 builds the allocator of PyTorch for one stream. This one has what training needs
beside that: every stream has its own free blocks, a block that another stream uses is held back
by events, a full device is asked again after the cache was given up, and a report says whether
memory is short or only in pieces. The rules are those of c10/cuda/CUDACachingAllocator.cpp.
The device is emulated: a stream is done when the program says so.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20
MIN_BLOCK, SMALL, SMALL_SEGMENT = 512, 1 * MIB, 2 * MIB
LARGE_SEGMENT, OWN_SEGMENT, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB


class Device:
    """A driver with `capacity` bytes, and streams whose work ends when `finish` is called."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.next_address = capacity, 0, 0
        self.launched: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()
        self.synchronized = 0

    def launch(self, stream: int) -> None:
        self.launched[stream] += 1

    def event(self, stream: int) -> tuple[int, int]:
        """An event behind all that was launched in `stream`."""
        return stream, self.launched[stream]

    def query(self, event: tuple[int, int]) -> bool:
        """Whether the stream has come past the event. The host does not wait."""
        return self.finished[event[0]] >= event[1]

    def finish(self, stream: int) -> None:
        self.finished[stream] = self.launched[stream]

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.synchronized += 1
        self.finished = self.launched.copy()

    def malloc(self, size: int) -> int | None:
        """The address of a new segment, or None if the device is full."""
        if self.used + size > self.capacity:
            return None
        self.used, address = self.used + size, self.next_address
        self.next_address += size
        return address

    def free(self, size: int) -> None:
        self.used -= size


@dataclass(eq=False)
class Block:
    """A piece of a segment: "free", "used", or "waiting" for streams that still use it."""

    address: int
    size: int
    segment: int  # bytes of its segment
    stream: int  # the one it was allocated in
    state: str = "free"
    users: set[int] = field(default_factory=set)  # other streams (record_stream)
    events: list[tuple[int, int]] = field(default_factory=list)
    previous: "Block | None" = None
    next: "Block | None" = None

    @property
    def small(self) -> bool:
        return self.segment == SMALL_SEGMENT


def rounded(size: int) -> int:
    return max(-(-size // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)


def segment_size(size: int) -> int:
    """What the driver is asked for when no free block serves `size` (rounded)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE


class Allocator:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.cached: list[Block] = []  # blocks whose state is "free"
        self.waiting: list[Block] = []
        self.used: list[Block] = []

    def malloc(self, size: int, stream: int = 0) -> Block:
        self.collect()
        size = rounded(size)
        block = self.best_fit(size, stream) or self.grow(size, stream)
        self.cached.remove(block)
        self.split(block, size)
        block.state = "used"
        self.used.append(block)
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        if stream != block.stream:
            block.users.add(stream)

    def best_fit(self, size: int, stream: int) -> Block | None:
        """The smallest cached block that serves `size` in `stream`; at equal size the lowest.

        A small request is served from small segments alone, a large one from the others.
        """
        # >>> solution 1: the smallest block of this pool and this stream that is large enough
        # hint: block.small says from which pool a block is
        fitting = [
            block
            for block in self.cached
            if block.size >= size and block.stream == stream and block.small == (size <= SMALL)
        ]
        return min(fitting, key=lambda block: (block.size, block.address), default=None)
        # <<< solution

    def split(self, block: Block, size: int) -> None:
        """Cut `block` to `size` if the rest is worth it; the rest is cached.

        In a small segment a rest of MIN_BLOCK or more is; in a large one it must be over SMALL.
        """
        # >>> solution 1: a new free block for the rest, linked between block and block.next
        rest = block.size - size
        if rest < MIN_BLOCK if block.small else rest <= SMALL:
            return
        new = Block(block.address + size, rest, block.segment, block.stream)
        new.previous, new.next = block, block.next
        if block.next:
            block.next.previous = new
        block.next, block.size = new, size
        self.cached.append(new)
        # <<< solution

    def give_back(self, block: Block) -> None:
        """Put a block that nobody uses into the cache, as one with its free neighbours."""
        block.state = "free"
        # >>> solution 2: merge with previous and next where they are free, keep `cached` true
        # hint: the one that goes must leave the list, and the links must close behind it
        if block.previous and block.previous.state == "free":
            block = block.previous
            self.cached.remove(block)
        for _ in range(2):
            if block.next and block.next.state == "free":
                gone = block.next
                if gone in self.cached:
                    self.cached.remove(gone)
                block.size += gone.size
                block.next = gone.next
                if gone.next:
                    gone.next.previous = block
        self.cached.append(block)
        # <<< solution

    def free(self, block: Block) -> None:
        """The tensor is gone. The host never waits here."""
        self.used.remove(block)
        # >>> solution 3: give it back; if other streams used it, only behind an event of each
        if not block.users:
            return self.give_back(block)
        block.events = [self.device.event(stream) for stream in sorted(block.users)]
        block.users = set()
        block.state = "waiting"
        self.waiting.append(block)
        # <<< solution

    def collect(self) -> None:
        """Give back the waiting blocks whose events have all passed."""
        # >>> solution 3: query, do not wait
        for block in list(self.waiting):
            if all(map(self.device.query, block.events)):
                self.waiting.remove(block)
                self.give_back(block)
        # <<< solution

    def grow(self, size: int, stream: int) -> Block:
        """A cached block that is a new segment for `size`.

        On a full device: wait for the waiting blocks, give cached segments that are whole back
        to the driver, ask once more; then MemoryError with the numbers of `report`.
        """
        wanted = segment_size(size)
        # >>> solution 4: ask, and if the device is full make room and ask once more
        address = self.device.malloc(wanted)
        if address is None:
            self.device.synchronize()
            self.collect()
            for block in [block for block in self.cached if block.size == block.segment]:
                self.cached.remove(block)
                self.device.free(block.segment)
            address = self.device.malloc(wanted)
        if address is None:
            raise MemoryError(f"{wanted} bytes wanted: {self.report()}")
        # <<< solution
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block

    def report(self) -> dict[str, int]:
        """Bytes: reserved, used, waiting, cached, and the largest cached block."""
        # >>> solution 5: five numbers; reserved is the sum of the next three
        used, waiting, cached = (
            sum(block.size for block in blocks)
            for blocks in (self.used, self.waiting, self.cached)
        )
        largest = max((block.size for block in self.cached), default=0)
        return {
            "reserved": used + waiting + cached, "used": used, "waiting": waiting,
            "cached": cached, "largest": largest,
        }  # fmt: skip
        # <<< solution


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


# --8<-- [start:main]
def main() -> None:
    device = Device(64 * MIB)
    allocator = Allocator(device)

    def say(what: str) -> None:
        numbers = allocator.report()
        print(f"{what:46}", *(f"{name} {n / MIB:g}" for name, n in numbers.items()))

    print("MiB of a device with 64:")
    batch = allocator.malloc(24 * MIB, stream=1)  # a batch, copied in a stream of its own
    say("a batch in the stream of copies")
    allocator.record_stream(batch, 0)
    device.launch(0)  # the step that reads it
    allocator.free(batch)
    say("freed while the step still reads it")
    again = allocator.malloc(24 * MIB, stream=1)
    assert again.address != batch.address
    say("the next batch goes elsewhere")
    device.finish(0)
    third = allocator.malloc(24 * MIB, stream=1)
    assert third.address == batch.address
    say("the step is done: the third takes the first's")
    allocator.free(again)
    pieces = [allocator.malloc(4 * MIB) for _ in range(5)]  # the cached 24 MiB are given up
    say("activations in the main stream")
    for block in pieces[::2]:
        allocator.free(block)
    say("every second one freed")
    try:
        allocator.malloc(22 * MIB)
    except MemoryError as error:
        print("MemoryError:", error)
        numbers = allocator.report()
        assert numbers["largest"] < numbers["cached"] == 12 * MIB
    else:
        raise AssertionError("22 MiB cannot be there")
    full = Allocator(Device(24 * MIB))
    batch = full.malloc(24 * MIB, stream=1)
    full.record_stream(batch, 0)
    full.device.launch(0)
    full.free(batch)
    full.malloc(24 * MIB)  # the step that reads the batch is waited for, not refused


# --8<-- [end:main]


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
