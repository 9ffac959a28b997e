"""The steps of assignment 1. They test the rules of the allocator on an emulated device."""

from types import ModuleType
from typing import Any

from graders.dsl import Lab, Wrong, require, require_equal

MIB = 2**20
LAB = Lab()


def part(number: int, title: str, proves: str, own: str, **settings):
    """Return a decorator for a step that grades `__init__` and these methods of `Allocator`."""
    own = " ".join(f"Allocator.{name}" for name in ("__init__", *own.split()))
    return LAB.alone(number, title, proves, "Allocator", own=own, **settings)


def begin(submission: ModuleType, reference: ModuleType, capacity: int = 64) -> tuple[Any, Any]:
    """Return a device with this capacity in MiB, and the learner's allocator for it."""
    device = reference.Device(capacity * MIB)
    return device, submission.Allocator(device)


def mib(blocks: list) -> list[float]:
    """Return the sizes of blocks in MiB, sorted."""
    return sorted(block.size / MIB for block in blocks)


# --- 1: best fit, and the rest of a block -------------------------------------------------


def chain(block) -> list[float] | str:
    """Return the sizes in MiB of the blocks of a segment, in the order of their addresses.

    Returns "broken" if the addresses or the links between the blocks are not consistent.
    """
    while block.previous:
        block = block.previous
    sizes, address = [], block.address
    while block:
        if block.address != address or (block.next and block.next.previous is not block):
            return "broken"
        sizes.append(block.size / MIB)
        address, block = address + block.size, block.next
    return sizes


@part(1, "best fit and split", "the block that PyTorch chooses, and the rest that it stores",
      "best_fit split", crashes={r"min\(\)": "none_fits"})  # fmt: skip
def fit(submission, reference, lesson):
    _, allocator = begin(submission, reference)

    def chosen(size: float, *blocks: tuple[float, bool, int]) -> float | None:
        """Return the index of the chosen block, or None if best_fit chooses no block.

        Each block is (MiB, is_small, stream).
        """
        allocator.cached = [
            submission.Block(
                i * 64 * MIB, int(n * MIB), 2 * MIB if is_small else 20 * MIB, stream
            )
            for i, (n, is_small, stream) in enumerate(blocks)
        ]
        order = list(allocator.cached)
        allocator.cached.reverse()
        try:
            block = allocator.best_fit(int(size * MIB), 0)
        except StopIteration:
            raise Wrong("best_fit calls next(), which found no block", "none_fits") from None
        is_known = block is None or any(block is each for each in order)
        require(is_known, f"best_fit returned {type(block).__name__} {block}", "no_block")
        unchanged = sorted(map(id, allocator.cached)) == sorted(map(id, order))
        require(unchanged, "best_fit changed which blocks are in `cached`", "removes")
        return None if block is None else [each is block for each in order].index(True)

    def check(size: float, where: str, wanted: int | None, hint: str, *blocks) -> None:
        """Raise `Wrong` unless best_fit chooses the block with the index `wanted`."""
        found = chosen(size, *blocks)
        names = [f"block {i} of {n:g} MiB" for i, (n, *_) in enumerate(blocks)]
        found, wanted = ("None" if i is None else names[i] for i in (found, wanted))
        hint = "nothing_found" if found == "None" else hint
        what = f"for {size:g} MiB, best_fit returned {found}, but it must return {wanted}"
        require(found == wanted, f"{what}; {where}", hint)

    free = "the only free block has"
    check(3, f"{free} 4 MiB", 0, "nothing_found", (4, False, 0))
    check(3, f"{free} 2 MiB", None, "too_small", (2, False, 0))
    what = f"{free} 4 MiB and belongs to a different stream"
    check(3, what, None, "streams", (4, False, 1))
    check(1, f"{free} 1.5 MiB and is in a large segment", None, "pools", (1.5, False, 0))
    check(1.1, f"{free} 2 MiB and is in a small segment", None, "pools", (2, True, 0))
    exact = chosen(4, (4, False, 0))
    require(
        exact == 0, "for 4 MiB, best_fit did not return a block of exactly 4 MiB", "exact_fit"
    )
    check(9, "both blocks fit", 0, "tie", *[(12, False, 0)] * 2)
    sizes = (16, 4, 2, 4, 8)
    where = "the free blocks have 16, 4, 2, 4 and 8 MiB"
    check(3, where, 1, "first_fit", *((size, False, 0) for size in sizes))

    def cut(size: int, whole: int, segment: int) -> tuple[Any, list]:
        """Cut a block in front of a used block of 1 MiB.

        Returns the two blocks, and the list `cached`.
        """
        allocator.cached = []
        block = submission.Block(0, whole, segment, 7)
        block.next = submission.Block(whole, MIB, segment, 7, "used", previous=block)
        end = block.next
        allocator.split(block, size)
        return (block, end), allocator.cached

    (block, end), rest = cut(4 * MIB, 19 * MIB, 20 * MIB)
    is_cached = any(each is block for each in rest)
    require(not is_cached, "the block that malloc returns is in `cached`", "block_cached")
    what = "after 4 MiB were cut from 19 MiB: MiB of the blocks in `cached`"
    require(len(rest) == 1, f"{what}: {mib(rest)}; it should be [15.0]", "never_split")
    require_equal("after 4 MiB were cut from 19 MiB: MiB of the block", block.size / MIB, 4.0,
          "cut_size")  # fmt: skip
    (new,) = rest
    where = [new.address / MIB, new.size / MIB]
    what = "the rest of 19 MiB, of which 4 were cut off: its address and its size in MiB"
    require_equal(what, where, [4.0, 15.0], "rest_address")
    chains = [chain(block), chain(new), chain(end)]
    what = "MiB of the blocks that previous and next connect, seen from each of the three"
    require_equal(what, chains, [[4.0, 15.0, 1.0]] * 3, "links")
    require_equal("the stream of a block of stream 7, and of its rest",
          [block.stream, new.stream],
          [7, 7], "rest_stream")  # fmt: skip
    require_equal(
        "MiB of the segment that the rest stores", new.segment // MIB, 20, "rest_segment"
    )
    is_separate = new.users is not block.users and new.state == "free"
    what = "the rest shares `users` with the block, or its state is not free"
    require(is_separate, what, "rest_users")
    small = [each.size for each in cut(MIB - 512, MIB, 2 * MIB)[1]]
    what = "a small segment, 1 MiB - 512 bytes cut from 1 MiB: bytes of the blocks in `cached`"
    require_equal(what, small, [512], "small_rest")
    exact = [each.size for each in cut(MIB, MIB, 2 * MIB)[1]]
    what = "a small segment, 1 MiB cut from 1 MiB: bytes of the blocks in `cached`"
    require_equal(what, exact, [], "empty_rest")
    useless = mib(cut(18 * MIB, 19 * MIB, 20 * MIB)[1])
    what = "a large segment, 18 MiB cut from 19 MiB: MiB of the blocks in `cached`"
    require_equal(what, useless, [], "always_split")


# --- 2: neighbours ------------------------------------------------------------------------

# orders in which four blocks are freed, and the sizes in MiB in the cache after each of them
ORDERS = {
    "from left to right": ((0, 1, 2, 3), [[5], [10], [15], [20]]),
    "from right to left": ((3, 2, 1, 0), [[5], [10], [15], [20]]),
    "the ends first": ((0, 3, 1, 2), [[5], [5, 5], [5, 10], [20]]),
    "the middle first": ((1, 2, 0, 3), [[5], [10], [15], [20]]),
}


@part(2, "free neighbours are one block", "in any order, the segment is whole again",
      "give_back", crashes={r"list\.remove": "links"})  # fmt: skip
def merge(submission, reference, lesson):
    for name, (order, wanted) in ORDERS.items():
        _, allocator = begin(submission, reference)
        blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
        for count, (i, sizes) in enumerate(zip(order, wanted, strict=True), 1):
            allocator.free(blocks[i])
            cached = allocator.cached
            found = mib(cached)
            what = f"{count} of four blocks of 5 MiB were freed, {name}: MiB of the blocks in "
            what += f"`cached`: {found}; it should be {[float(size) for size in sizes]}"
            has_duplicate = len(set(map(id, cached))) < len(cached)
            twice = f"{what}. One block is in the list twice"
            require(not has_duplicate, twice, "listed_twice")
            if sum(found) > 5 * count:
                is_broken = "broken" in map(chain, cached)
                hint = "links" if is_broken else "merged_used"
                require(False, what, hint if len(cached) <= len(sizes) else "stale")
            require(sum(found) == 5 * count, what, "lost")
            require(found == sizes, what, "not_merged")
        what = f"all four blocks were freed, {name}: MiB of the blocks that previous and next "
        what += "connect"
        require_equal(what, chain(cached[0]), [20.0], "links")

    device, allocator = begin(submission, reference)
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    for block in (blocks[1], blocks[3]):
        allocator.record_stream(block, 1)
    device.launch(1)
    for i in (1, 3, 2):
        allocator.free(blocks[i])
    found = mib(allocator.cached)
    what = "of four blocks of 5 MiB, one was freed between two that wait for a stream"
    require_equal(f"{what}: MiB of the blocks in `cached`", found, [5.0], "merged_used")

    _, allocator = begin(submission, reference)
    for block in [allocator.malloc(12 * MIB) for _ in range(3)]:
        allocator.free(block)
    found = mib(allocator.cached)
    what = "three neighbouring segments of 12 MiB are free: MiB of the blocks in `cached`"
    require_equal(what, found, [12.0] * 3, "across")


# --- 3: streams ---------------------------------------------------------------------------


@part(3, "other streams", "a block is free as soon as no other stream uses it, and not earlier",
      "free collect")  # fmt: skip
def streams(submission, reference, lesson):
    def new_block() -> tuple:
        device, allocator = begin(submission, reference)
        block = allocator.malloc(4 * MIB, stream=1)
        device.launch(1)
        return device, allocator, block

    def is_free(device, allocator, block) -> bool:
        """Return whether the block is free after a call of collect()."""
        allocator.collect()
        count = device.synchronized
        require(count == 0, f"times that free and collect waited for the device: {count}",
            "host_waits")  # fmt: skip
        return block.state == "free"

    device, allocator, block = new_block()
    allocator.free(block)
    what = "no other stream used the block, but it was not free at once"
    require(block.state == "free", what, "held_back")

    for first, last in ((2, 3), (3, 2)):
        device, allocator, block = new_block()
        for stream in (2, 3):
            allocator.record_stream(block, stream)
            device.launch(stream)
        allocator.free(block)
        too_early = is_free(device, allocator, block)
        what = "the block is free, but streams 2 and 3 still read it"
        require(not too_early, what, "given_early")
        waiting = [each for each in allocator.waiting if each is block]
        require(waiting, "the block must wait, but it is not in self.waiting", "not_listed")
        device.finish(first)
        too_early = is_free(device, allocator, block)
        what = f"the block is free, but stream {last} still reads it"
        require(not too_early, what, "given_early")
        device.finish(last)
        if not is_free(device, allocator, block):
            device.finish(1)
            what = "streams 2 and 3 have finished, but the block is not free"
            if is_free(device, allocator, block):
                require(False, f"{what} until its own stream 1 has finished, too", "own_event")
            require(False, what, "kept_waiting")
        require(not allocator.waiting, "the block is free and still in self.waiting",
            "still_waiting")  # fmt: skip
    again = allocator.malloc(4 * MIB, stream=1)
    for stream in (2, 3):
        device.launch(stream)
    allocator.free(again)
    waits = again is block and again.state != "free"
    what = "streams 2 and 3 used only an earlier tensor of this block, but it waits for them"
    require(not waits, what, "users_kept")

    device, allocator, block = new_block()
    blocks = [block, *(allocator.malloc(4 * MIB, stream=1) for _ in range(2))]
    for block, stream in zip(blocks, (3, 2, 2), strict=True):
        device.launch(stream)
        allocator.record_stream(block, stream)
        allocator.free(block)
    device.finish(2)
    is_free(device, allocator, block)
    count = len(allocator.waiting)
    what = "stream 2, which read two of three blocks, has finished: blocks that still wait"
    require_equal(what, count, 1, "stops" if count == 3 else "skipped")

    device, allocator, block = new_block()
    allocator.record_stream(block, 2)
    device.launch(2)
    device.finish(2)
    device.launch(2)  # a second kernel reads it after the first was done
    allocator.free(block)
    too_early = is_free(device, allocator, block)
    what = "the first of two kernels in stream 2 has finished, and the block is already free"
    require(not too_early, what, "event_of_use")


# --- 4: a full device ---------------------------------------------------------------------


@part(4, "a full device", "malloc fails only after it has released the cache", "grow")
def full(submission, reference, lesson):
    device, allocator = begin(submission, reference)
    blocks = [allocator.malloc(size * MIB) for size in (12, 12, 4)]
    require_equal("MiB reserved for 12, 12 and 4 MiB", device.used // MIB, 44, "asked_size")
    for block in blocks[:2]:
        allocator.free(block)  # 24 MiB are cached in two segments, and the third has 20 MiB
    allocator.malloc(18 * MIB)
    used = device.used // MIB
    require_equal("MiB reserved after a request that fits", used, 62, "gives_up_early")
    waits = device.synchronized
    require_equal(
        "times that grow waited although the driver had memory", waits, 0, "gives_up_early"
    )
    message = ""

    def try_malloc(size: int) -> str:
        """Return the size of the new block as a text, or "MemoryError"."""
        nonlocal message
        try:
            return f"{allocator.malloc(size * MIB).size // MIB} MiB"
        except MemoryError as error:
            message = str(error)
            return "MemoryError"

    found = try_malloc(26)
    fact = "malloc of 26 MiB, with two segments of 12 MiB in the cache"
    require_equal(fact, found, "26 MiB", "no_retry")
    whole = [block for block in allocator.cached if block.size == block.segment]
    fact = "MiB of the whole segments in `cached` after this malloc"
    require_equal(fact, mib(whole), [], "still_cached")
    fact = "MiB reserved after this malloc"
    require_equal(fact, device.used // MIB, 64, "parts_freed")
    try:
        found = try_malloc(40)
    except RuntimeError as error:
        found = type(error).__name__
    fact = "malloc of 40 MiB, with 16 MiB in the cache"
    require_equal(fact, found, "MemoryError", "no_error")
    numbers = allocator.report()
    text = message.replace(",", "").replace("_", "")
    for name in ("used", "cached"):
        has_number = any(f"{numbers[name] / unit:g}" in text for unit in (MIB, 2**10))
        has_number = has_number or str(numbers[name]) in text
        what = f"the text of the MemoryError, {message!r}, does not say how much is {name}"
        require(has_number, what, "no_numbers")

    device, allocator = begin(submission, reference)
    blocks = [allocator.malloc(size * MIB) for size in (4, 4, 4, 4, 4)]
    for block in (blocks[0], blocks[4]):
        allocator.free(block)  # the first and the last block of a segment
    try_malloc(60)
    require_equal(
        "MiB reserved, with a segment of 20 in use", device.used // MIB, 20, "parts_freed"
    )

    device, allocator = begin(submission, reference)
    block = allocator.malloc(40 * MIB, stream=1)
    allocator.record_stream(block, 2)
    device.launch(2)
    allocator.free(block)
    found = try_malloc(60)
    what = "malloc of 60 MiB, with 40 MiB that wait for a stream"
    require_equal(what, found, "60 MiB", "waits_forgotten")


# --- 5: the report ------------------------------------------------------------------------

NAMES = ("used", "waiting", "cached", "reserved", "largest")


@part(5, "a report", "the numbers show whether memory is missing or only fragmented", "report",
      crashes={r"max\(\)": "largest"})  # fmt: skip
def report(submission, reference, lesson):
    device, allocator = begin(submission, reference)

    def numbers() -> dict[str, int]:
        found = allocator.report()
        what = f"report returned {type(found).__name__} {found}"
        require(isinstance(found, dict) and set(found) == set(NAMES), what, "keys")
        return found

    for name, found in numbers().items():
        require_equal(
            f"{name} of a new allocator", found, 0, "largest" if name == NAMES[-1] else "report"
        )
    blocks = [allocator.malloc(n * MIB, stream=1) for n in (4, 4, 4, 4, 4, 12, 30)]
    allocator.record_stream(blocks[0], 2)
    device.launch(2)
    for i in (0, 1, 3, 5):
        allocator.free(blocks[i])
    found = numbers()
    true = dict(zip(NAMES, (38, 4, 20, 62, 12), strict=True))
    for name, wanted in true.items():
        hint = "largest" if name == "largest" else "report"
        what = f"{name}: {found[name]:,} bytes; it should be {wanted * MIB:,} bytes"
        require(found[name] == wanted * MIB, what, "unit" if found[name] == wanted else hint)
