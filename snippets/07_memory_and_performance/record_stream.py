"""A block is reused while another stream still reads it; record_stream prevents this.

The tensor x is written in one stream and read in another. Python drops x before the read, and
then creates y. On a GPU the program uses PyTorch's allocator, and a kernel that only waits
delays the reader. Without a GPU it simulates streams that run as late as they may.

Look at the first row: the reader sees sevens, which are the values of y.
"""

from collections import defaultdict, deque
from collections.abc import Callable

import torch

WAYS = ("nothing", "x.record_stream(side)", "main.wait_stream(side)")


# --8<-- [start:toy]
class Stream:
    """Runs its work in order, and only when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.launched = self.done = 0

    def launch(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.launched += 1

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queue.popleft()()

    def wait_stream(self, other: "Stream") -> None:
        until = other.launched
        self.launch(lambda: other.run(until))


class Allocator:
    """Blocks of one size. The stream that allocated a block can reuse it once it is freed."""

    def __init__(self) -> None:
        self.free_blocks: dict[Stream, list[torch.Tensor]] = defaultdict(list)
        self.readers: dict[int, list[Stream]] = defaultdict(list)
        self.pending: list[tuple[torch.Tensor, Stream, list[tuple[Stream, int]]]] = []

    def malloc(self, stream: Stream) -> torch.Tensor:
        for item in list(self.pending):  # have all readers passed their events?
            block, owner, events = item
            if all(reader.done >= place for reader, place in events):
                self.pending.remove(item)
                self.free_blocks[owner].append(block)
        blocks = self.free_blocks[stream]
        return blocks.pop() if blocks else torch.zeros(4)

    def record_stream(self, block: torch.Tensor, reader: Stream) -> None:
        self.readers[block.data_ptr()].append(reader)

    def free(self, block: torch.Tensor, owner: Stream) -> None:
        readers = self.readers.pop(block.data_ptr(), [])
        if readers:  # an event in each: all work launched so far
            events = [(reader, reader.launched) for reader in readers]
            self.pending.append((block, owner, events))
        else:
            self.free_blocks[owner].append(block)


# --8<-- [end:toy]


def check_toy() -> None:
    """A block with two readers. Each has two pieces of work, and one gets a third later."""
    owner, first, second, memory = Stream(), Stream(), Stream(), Allocator()
    block = memory.malloc(owner)
    for reader in (first, second) * 2:
        reader.launch(lambda: None)
        memory.record_stream(block, reader)
    memory.free(block, owner)
    first.run(2), second.run(1)
    assert memory.malloc(owner) is not block  # one reader has not finished
    owner.wait_stream(second)
    second.launch(lambda: None)
    owner.run(1)
    assert second.done == 2 and memory.malloc(owner) is block


# --8<-- [start:scene]
def on_toy(way: str, side_late: bool = True) -> tuple[bool, bool, list[float]]:
    main, side, memory = Stream(), Stream(), Allocator()
    x = memory.malloc(main)
    main.launch(lambda: x.fill_(1))
    side.wait_stream(main)
    read: list[torch.Tensor] = []
    side.launch(lambda: read.append(x.clone()))
    if way == "x.record_stream(side)":
        memory.record_stream(x, side)
    elif way == "main.wait_stream(side)":
        main.wait_stream(side)
    memory.free(x, main)  # Python drops x
    y = memory.malloc(main)
    main.launch(lambda: y.fill_(7))
    assert not read  # the host has waited for no stream
    for stream in (main, side) if side_late else (side, main):
        stream.run(stream.launched)  # one stream runs early, the other late
    z = memory.malloc(main)
    return y is x, z is x, read[0].tolist()


def on_gpu(way: str) -> tuple[bool, bool, list[float]]:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.full((2**20,), 1.0, device="cuda")
    where = x.data_ptr()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        read = torch.empty_like(x)
        torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second or so
        read.copy_(x)
    if way == "x.record_stream(side)":
        x.record_stream(side)
    elif way == "main.wait_stream(side)":
        main.wait_stream(side)
    del x
    y = torch.full((2**20,), 7.0, device="cuda")
    torch.cuda.synchronize()
    z = torch.empty(2**20, device="cuda")
    return y.data_ptr() == where, z.data_ptr() == where, read[:4].tolist()


# --8<-- [end:scene]


def main() -> None:
    check_toy()
    assert on_toy(WAYS[0], side_late=False)[2] == [1] * 4  # side waits until x is written
    run = on_gpu if torch.cuda.is_available() else on_toy
    run(WAYS[0])  # a first run loads the kernels
    print(f"{'before x is dropped':24}{'x lay':16}side has read")
    results = []
    for way in WAYS:
        in_y, in_z, read = run(way)
        results.append((in_y, in_z, [int(value) for value in read]))
        place = "where y lies" if in_y else "where z lies" if in_z else "elsewhere"
        print(f"{way:24}{place:16}{results[-1][2]}")
    wrong, right = [7] * 4, [1] * 4
    assert results == [(True, False, wrong), (False, True, right), (True, False, right)]
    print("y is made while side has not read yet, z when it has")


if __name__ == "__main__":
    main()
