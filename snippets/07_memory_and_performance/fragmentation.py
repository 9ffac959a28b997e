"""Out of memory although enough memory is free: fragmentation, and five ways to fix it.

The program traces training steps on texts of different lengths. Its tensors are on the meta
device, so a laptop can trace 4 GiB. It replays the trace through the large pool of the caching
allocator, with the rules of max_split_size_mb, and through expandable segments.

Look at the column "smallest memory that is enough": every row needs less than the first one.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 2**20
H, LAYERS, STEPS = 512, 4, 16


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Segments:
    """The large pool. Each segment is a list of pieces [bytes, free]."""

    def __init__(self, capacity: int, max_split: float = float("inf")) -> None:
        self.capacity, self.max_split, self.segments = capacity, max_split, []
        self.allocated = self.reserved = self.driver_calls = 0

    def malloc(self, size: int) -> list:
        free = [p for pieces in self.segments for p in pieces if p[1] and p[0] >= size]
        best = min(free, key=lambda piece: piece[0], default=None)
        if best and size < self.max_split <= best[0]:
            best = None  # a large block is not split for a small request
        if best and size >= self.max_split and best[0] >= size + 20 * MIB:
            best = None  # and not given to a much smaller request
        if best is None:
            new = 20 * MIB if size < 10 * MIB else round_up(size, 2 * MIB)
            if self.reserved + new > self.capacity:
                self.empty_cache()
            if self.reserved + new > self.capacity:
                raise MemoryError(new)
            self.reserved += new
            self.driver_calls += 1
            best = [new, True]
            self.segments.append([best])
        if size < self.max_split and best[0] - size > MIB:
            pieces = next(pieces for pieces in self.segments if any(p is best for p in pieces))
            at = next(i for i, piece in enumerate(pieces) if piece is best)
            pieces.insert(at + 1, [best[0] - size, True])
            best[0] = size
        best[1] = False
        self.allocated += best[0]
        return best

    def free(self, piece: list) -> None:
        self.allocated -= piece[0]
        piece[1] = True
        for pieces in self.segments:
            if any(p is piece for p in pieces):
                for at in range(len(pieces) - 2, -1, -1):  # merge free neighbours
                    if pieces[at][1] and pieces[at + 1][1]:
                        pieces[at][0] += pieces.pop(at + 1)[0]

    def empty_cache(self) -> None:
        for pieces in [p for p in self.segments if len(p) == 1 and p[0][1]]:
            self.reserved -= pieces[0][0]
            self.segments = [other for other in self.segments if other is not pieces]


class Expandable:
    """One range of addresses. A page of 20 MiB has memory only while a piece needs it."""

    PAGE = 20 * MIB

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken: list[tuple[int, int]] = []  # (start, end), sorted
        self.mapped: set[int] = set()  # pages that have memory
        self.allocated = self.driver_calls = 0

    @property
    def reserved(self) -> int:
        return len(self.mapped) * self.PAGE

    def pages(self, start: int, end: int) -> set[int]:
        return set(range(start // self.PAGE, -(-end // self.PAGE)))

    def malloc(self, size: int) -> tuple[int, int]:
        ends = [0, *(end for _, end in self.taken)]
        gaps = zip(ends, [start for start, _ in self.taken] + [2**60], strict=True)
        fits = [(end - start, start) for start, end in gaps if end - start >= size]
        ready = [gap for gap in fits if self.pages(gap[1], gap[1] + size) <= self.mapped]
        start = min(ready)[1] if ready else min(at for _, at in fits)  # best fit; lowest
        missing = self.pages(start, start + size) - self.mapped
        if self.reserved + len(missing) * self.PAGE > self.capacity:
            self.empty_cache()
            missing = self.pages(start, start + size) - self.mapped
        if self.reserved + len(missing) * self.PAGE > self.capacity:
            raise MemoryError(len(missing) * self.PAGE)
        self.mapped |= missing
        self.driver_calls += len(missing)
        self.taken = sorted([*self.taken, (start, start + size)])
        self.allocated += size
        return start, start + size

    def free(self, piece: tuple[int, int]) -> None:
        self.allocated -= piece[1] - piece[0]
        self.taken.remove(piece)

    def empty_cache(self) -> None:
        self.mapped = set().union(*(self.pages(*piece) for piece in self.taken))


class UnbatchedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [s, h]
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, 8, H // 8).permute(1, 2, 0, 3)
        weights = (q @ k.transpose(1, 2)).softmax(-1)  # [8, s, s]
        x = x + self.out((weights @ v).transpose(0, 1).reshape(len(x), H))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LargeTrace(TorchDispatchMode):
    """Records allocations above 1 MiB as (number, bytes); bytes are negative for a free."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.live: set[int] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, round_up(storage.nbytes(), 512)
                if key not in self.live and size > MIB:
                    self.live.add(key)
                    self.count += 1
                    number = self.count
                    self.events.append((number, size))
                    weakref.finalize(storage, self.freed, key, number, size).atexit = False
        return result

    def freed(self, key: int, number: int, size: int) -> None:
        self.live.remove(key)
        self.events.append((number, -size))


def training(lengths: list[int], keep: bool = True) -> Iterator[list[tuple[int, int]]]:
    """The events of each step. Those of the first step include the building of the model."""
    with LargeTrace() as trace:
        with torch.device("meta"):
            model = nn.Sequential(*(UnbatchedLayer() for _ in range(LAYERS)))
        adam, kept = torch.optim.Adam(model.parameters(), foreach=False), []
        for length in lengths:
            output = model(torch.empty(length, H, device="meta"))
            output.square().mean().backward()
            if keep:  # 2 to 3 MiB for a metric at the end of the epoch
                kept.append(output.detach())
            del output
            adam.step()
            adam.zero_grad()
            yield trace.events
            trace.events = []


def replay(allocator: Segments | Expandable, steps: list) -> tuple[int, int]:
    """Return the peaks of allocated and of reserved bytes, or raise MemoryError."""
    live: dict[int, object] = {}
    peaks = 0, 0
    for number, size in (event for step in steps for event in step):
        if size > 0:
            live[number] = allocator.malloc(size)
            peaks = max(peaks[0], allocator.allocated), max(peaks[1], allocator.reserved)
        else:
            allocator.free(live.pop(number))
    return peaks


def smallest(make: Callable, steps: list) -> int:
    """The smallest capacity in bytes, a multiple of 10 MiB, with which all steps run."""
    low, high = 60, 140  # fails, runs
    while high - low > 1:
        middle = (low + high) // 2
        try:
            replay(make(middle * 10 * MIB), steps)
            high = middle
        except MemoryError:
            low = middle
    assert 60 < low < high < 140  # the answer is inside the range of the search
    return high * 10 * MIB


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1000, 1600, (STEPS,), generator=generator).tolist()
    mixed = list(training(lengths))
    ordered = list(training(sorted(lengths, reverse=True)))
    padded = list(training([max(lengths)] * STEPS))
    print(f"{STEPS} steps, lengths {min(lengths)} to {max(lengths)}; MiB")
    print("                           peak of     reserved, without   smallest memory")
    print("                           allocated   a limit             that is enough")
    needs, wasted, largest = {}, {}, {}
    for name, make, steps in (
        ("as it is", Segments, mixed),
        ("nothing kept of a step", Segments, list(training(lengths, keep=False))),
        ("max_split_size_mb:32", lambda capacity: Segments(capacity, 32 * MIB), mixed),
        ("expandable_segments:True", Expandable, mixed),
        ("longest first", Segments, ordered),
        ("padded to the longest", Segments, padded),
    ):
        allocated, reserved = replay(make(2**50), steps)
        needs[name] = smallest(make, steps)
        wasted[name] = needs[name] - allocated
        largest[name] = max(accumulate(size for step in steps for _, size in step))
        assert largest[name] <= allocated <= min(1.04 * largest[name], needs[name], reserved)
        cells = (f"≈{size / MIB:.0f}" for size in (allocated, reserved, needs[name]))
        print(
            f"{name:27}"
            + "".join(f"{cell:<12}" + "    " * (i > 0) for i, cell in enumerate(cells))
        )
    # The settings of the allocator do not change the steps. Padding makes every step longest.
    assert largest["max_split_size_mb:32"] == largest["expandable_segments:True"]
    assert largest["max_split_size_mb:32"] == largest["as it is"] > largest["longest first"]
    assert largest["padded to the longest"] == max(largest.values())
    assert max(list(needs.values())[1:]) < needs["as it is"]  # each of the five helps
    assert wasted["nothing kept of a step"] < wasted["as it is"] / 2  # kept tensors waste most
    plain, unsplit = Segments(needs["as it is"]), Segments(needs["as it is"], 32 * MIB)
    replay(plain, mixed), replay(unsplit, mixed)
    assert plain.driver_calls < unsplit.driver_calls
    print(f"\nsegments from the driver within ≈{needs['as it is'] // MIB} MiB:", end=" ")
    print(f"≈{plain.driver_calls}, with max_split_size_mb:32 ≈{unsplit.driver_calls}")
    allocator = Segments((needs["as it is"] + needs["expandable_segments:True"]) // 2)
    try:
        replay(allocator, mixed)
        raise AssertionError("less than the smallest memory was enough")
    except MemoryError as oom:
        free = allocator.capacity - allocator.reserved
        unused = allocator.reserved - allocator.allocated
        print("\nas it is, in between:")
        print(f"CUDA out of memory. Tried to allocate ≈{oom.args[0] / MIB:.2f} MiB.")
        print(f"GPU 0 has a total capacity of ≈{allocator.capacity / MIB:.2f} MiB", end=" ")
        print(f"of which ≈{free / MIB:.2f} MiB is free.")
        print(
            f"Of the allocated memory ≈{allocator.allocated / MIB:.2f} MiB is allocated",
            end=" ",
        )
        print(
            f"by PyTorch, and ≈{unused / MIB:.2f} MiB is reserved by PyTorch but unallocated."
        )
        assert unused > 2 * oom.args[0]


if __name__ == "__main__":
    main()
