"""The steps of assignment 1: the rules of the allocator, one by one, on an emulated device."""

import functools
from types import ModuleType

from graders._compare import alone, borrow, finished
from graders.runner import Lesson

MIB = 2**20
HINTS = {
    "first_fit": "The first block that is large enough is not the one that wastes least: take "
    "the smallest that serves the request.",
    "tie": "Of two blocks of one size take the one at the lower address, so that the high "
    "addresses become free as a whole.",
    "pools": "A small request may not nibble at a large segment, nor a large one live in a "
    "small: compare block.small with size <= SMALL.",
    "streams": "This block belongs to another stream, whose kernels may still write to it. "
    "Look at block.stream.",
    "too_small": "The block is smaller than the request.",
    "always_split": "A rest of at most SMALL stays with its block in a large segment: cut off, "
    "it could serve no large request, and would never be used.",
    "never_split": "The rest of the block is lost as long as the block lives: make it a block "
    "of its own, and put it into `cached`.",
    "small_rest": "In a small segment a rest of MIN_BLOCK bytes or more becomes a block; only "
    "in a large one must it be over SMALL.",
    "links": "The chain of a segment is broken: when one comes or goes, the blocks on both "
    "sides must be told, by previous and by next.",
    "rest_stream": "The rest of a block belongs to the stream of the block.",
    "not_merged": "Two free neighbours are still two blocks: merge with the previous one and "
    "with the next one, whichever is free.",
    "stale": "A block that was merged into another is still in `cached`, and would be handed "
    "out as well. Remove it there.",
    "merged_used": 'Only a neighbour whose state is "free" may be merged.',
    "given_early": "Another stream still reads this block. free must take an event of each "
    "stream in block.users, and collect may give the block back only behind all of them.",
    "event_of_use": "The event lies before the last kernel that reads the block: take it in "
    "free, for only then is it known that nothing more will be launched.",
    "held_back": "A block that no other stream used is free at once: its own stream's later "
    "kernels come behind the earlier ones anyhow.",
    "own_event": "The block waits for its own stream. Only the other users count.",
    "kept_waiting": "All events have passed, and the block is not given back.",
    "skipped": "Two blocks could be given back, and only one is: a loop over a list that it "
    "shortens leaves out every second. Go over a copy.",
    "host_waits": "free and collect must not wait for the device: query says what has passed.",
    "no_retry": "The device is full of blocks that nobody uses. Give all whole cached segments "
    "back to the driver (go over a copy of the list), and ask again.",
    "waits_forgotten": "Blocks that wait for a stream could have been given back, too: wait "
    "for the device, collect, and only then look at the cache.",
    "parts_freed": "A segment can be given back only as a whole: block.size == block.segment.",
    "gives_up_early": "The cache was emptied though the driver had memory. Ask first.",
    "no_error": "Still full after the second time: raise MemoryError.",
    "report": "The numbers of the report: every byte of every segment is used, waiting or "
    "cached, and reserved is their sum.",
    "largest": "`largest` is the size of the largest cached block, for that is what the next "
    "request can have at most without the driver; 0 if nothing is cached.",
}  # fmt: skip
SOLVED = (
    "Allocator.best_fit Allocator.split Allocator.give_back Allocator.free "
    "Allocator.collect Allocator.grow Allocator.report"
)
OURS = finished("assignment1_allocator")


def begin(lesson: Lesson, keep: str, capacity: int = 64) -> tuple[ModuleType, object, object]:
    """The learner's module with all else finished, a device and an allocator."""
    keep = " ".join(f"Allocator.{name}" for name in keep.split())
    borrow(lesson.module, OURS, SOLVED, keep)
    device = OURS.Device(capacity * MIB)
    return lesson.module, device, lesson.module.Allocator(device)


# --- 1: best fit, and what is left --------------------------------------------------------


def chain(block) -> list[int] | str:
    """Sizes of the blocks of a segment in MiB; a word if the links do not agree."""
    while block.previous:
        block = block.previous
    sizes, address = [], block.address
    while block:
        if block.address != address or (block.next and block.next.previous is not block):
            return "broken"
        sizes.append(block.size / MIB)
        address, block = address + block.size, block.next
    return sizes


def probe_fit(lesson: Lesson) -> None:
    module, _, allocator = begin(lesson, "best_fit split")

    def chosen(size: float, *blocks: tuple[float, bool, int]) -> int | None:
        """The index of the block taken from (MiB, small, stream); None for none."""
        allocator.cached = [
            module.Block(i * 64 * MIB, int(n * MIB), 2 * MIB if small else 20 * MIB, stream)
            for i, (n, small, stream) in enumerate(blocks)
        ]
        order = list(allocator.cached)
        allocator.cached.reverse()
        block = allocator.best_fit(int(size * MIB), 0)
        return None if block is None else order.index(block)

    big = [(16, False, 0), (4, False, 0), (2, False, 0), (4, False, 0), (8, False, 0)]
    lesson.fact("for 3 MiB, which of the blocks of 16, 4, 2, 4, 8 MiB", [chosen(3, *big)])
    lesson.fact("for 9 MiB, which of two blocks of 12 MiB", [chosen(9, *[(12, False, 0)] * 2)])
    lesson.fact("for 1 MiB if a large segment has 1.5 free", chosen(1, (1.5, False, 0)))
    lesson.fact("for 1.1 MiB if a small one has 2 free", chosen(1.1, (2, True, 0)))
    lesson.fact("for 3 MiB if another stream has 4 MiB free", chosen(3, (4, False, 1)))
    lesson.fact("for 3 MiB if 2 MiB are free", chosen(3, (2, False, 0)))

    def cut(size: int, segment: int) -> tuple[list, object]:
        allocator.cached = []
        block = module.Block(0, segment, segment, 7, state="used")
        end = module.Block(segment, MIB, segment, 7, "used", previous=block)
        block.next = end
        allocator.split(block, size)
        return chain(block), chain(end), [(b.size, b.stream) for b in allocator.cached]

    first, last, cached = cut(4 * MIB, 20 * MIB)
    lesson.fact("cached after 4 MiB were cut from 20", [size / MIB for size, _ in cached])
    lesson.fact("the chain then, from both ends", [first, last])
    lesson.fact("the stream of the rest", [stream for _, stream in cached])
    rest = cut(39 * MIB // 2, 20 * MIB)[2]
    lesson.fact("cached after 19.5 of 20 MiB", [size / MIB for size, _ in rest])
    small = cut(2 * MIB - 512, 2 * MIB)[2]
    lesson.fact("bytes cached if a small segment has 512 left", [size for size, _ in small])


# --- 2: neighbours ------------------------------------------------------------------------


def probe_merge(lesson: Lesson) -> None:
    for name, order in {
        "left to right": (0, 1, 2, 3),
        "right to left": (3, 2, 1, 0),
        "ends first": (0, 3, 1, 2),
        "middle first": (1, 2, 0, 3),
    }.items():
        _, _, allocator = begin(lesson, "give_back")
        blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
        states = []
        for i in order:
            allocator.free(blocks[i])
            states.append(sorted(block.size // MIB for block in allocator.cached))
        lesson.fact(f"bytes in the cache, freed {name}", sum(states[-1]))
        lesson.fact(f"cached MiB, four of 5 freed {name}", states)
        lesson.fact(f"the chain, freed {name}", chain(allocator.cached[0]))


WAYS = {
    "left to right": [[5], [10], [15], [20]],
    "right to left": [[5], [10], [15], [20]],
    "ends first": [[5], [5, 5], [5, 10], [20]],
    "middle first": [[5], [10], [15], [20]],
}

# --- 3: streams ---------------------------------------------------------------------------


def probe_streams(lesson: Lesson) -> None:
    def new() -> tuple:
        _, device, allocator = begin(lesson, "free collect")
        block = allocator.malloc(4 * MIB, stream=1)
        device.launch(1)
        return device, allocator, block

    def free_again(allocator, block) -> bool:
        allocator.collect()
        return block.state == "free"

    device, allocator, block = new()
    allocator.free(block)
    lesson.fact("free at once, if its own stream alone used it", block.state == "free")

    device, allocator, block = new()
    for stream in (2, 3):
        allocator.record_stream(block, stream)
    for stream in (2, 3):
        device.launch(stream)
    allocator.free(block)
    seen = [free_again(allocator, block)]
    device.finish(2)
    seen.append(free_again(allocator, block))
    waits = device.synchronized
    device.finish(3)
    lesson.fact("free while two streams read it, then one", seen)
    lesson.fact("free when both are done", free_again(allocator, block))

    device, allocator, block = new()
    both = [block, allocator.malloc(4 * MIB, stream=1)]
    device.launch(2)
    for block in both:
        allocator.record_stream(block, 2)
        allocator.free(block)
    device.finish(1), device.finish(2)
    allocator.collect()
    lesson.fact("blocks that still wait when the reader of two is done", len(allocator.waiting))

    device, allocator, block = new()
    allocator.record_stream(block, 2)
    device.launch(2)
    device.finish(2)
    device.launch(2)  # a second kernel reads it after the first was done
    allocator.free(block)
    lesson.fact("free before its last reader is done", free_again(allocator, block))
    lesson.fact("times the host waited", waits + device.synchronized)
    device.finish(2)
    lesson.fact("free then, though its own stream still works", free_again(allocator, block))


# --- 4: a full device ---------------------------------------------------------------------


def probe_full(lesson: Lesson) -> None:
    _, device, allocator = begin(lesson, "grow")
    kept = [allocator.malloc(size * MIB) for size in (12, 12, 4)]
    for block in kept[:2]:
        allocator.free(block)  # 24 cached in two segments; 20 reserved for the third
    allocator.malloc(18 * MIB)
    lesson.fact("MiB reserved if the driver has 20 left", device.used // MIB)

    def tried(allocator, size: int) -> str:
        try:
            return str(allocator.malloc(size * MIB).size // MIB)
        except MemoryError:
            return "MemoryError"
        except (TypeError, ValueError, AttributeError) as error:
            return type(error).__name__

    lesson.fact("malloc of 26 MiB, with two segments of 12 cached", tried(allocator, 26))
    lesson.fact("MiB reserved then", device.used // MIB)
    lesson.fact("malloc of 40 MiB, with 16 cached", tried(allocator, 40))

    _, device, allocator = begin(lesson, "grow")
    block = allocator.malloc(40 * MIB, stream=1)
    allocator.record_stream(block, 2)
    device.launch(2)
    allocator.free(block)
    lesson.fact("malloc of 60 MiB, with 40 waiting for a stream", tried(allocator, 60))


# --- 5: the report ------------------------------------------------------------------------


def probe_report(lesson: Lesson) -> None:
    _, device, allocator = begin(lesson, "report")
    lesson.fact("a new allocator", sum(allocator.report().values()))
    blocks = [allocator.malloc(n * MIB, stream=1) for n in (4, 4, 4, 4, 4, 12, 30)]
    allocator.record_stream(blocks[0], 2)
    device.launch(2)
    for i in (0, 1, 3, 5):
        allocator.free(blocks[i])
    found = allocator.report()
    for name in ("reserved", "used", "waiting", "cached", "largest"):
        lesson.fact(f"MiB {name}", found.get(name, 0) // MIB)


step = functools.partial(alone, HINTS)
STEPS = [
    step(
        1, "best fit and split", "the block PyTorch takes, and the rest it keeps",
        probe_fit, "Allocator",
        ("for 3 MiB if 2 MiB are free", None, "too_small"),
        ("for 3 MiB if another stream has 4 MiB free", None, "streams"),
        ("for 1 MiB if a large segment has 1.5 free", None, "pools"),
        ("for 1.1 MiB if a small one has 2 free", None, "pools"),
        ("for 9 MiB, which of two blocks of 12 MiB", [0], "tie"),
        ("for 3 MiB, which of the blocks of 16, 4, 2, 4, 8 MiB", [1], "first_fit"),
        ("cached after 4 MiB were cut from 20", [16.0], "never_split"),
        ("bytes cached if a small segment has 512 left", [512], "small_rest"),
        ("the chain then, from both ends", [[4.0, 16.0, 1.0]] * 2, "links"),
        ("the stream of the rest", [7], "rest_stream"),
        ("cached after 19.5 of 20 MiB", [], "always_split"),
    ),
    step(
        2, "free neighbours are one block", "in any order, the segment is whole again",
        probe_merge, "Allocator",
        *((f"bytes in the cache, freed {way}", lambda n: n is not None and n <= 20, "stale")
          for way in WAYS),
        *((f"cached MiB, four of 5 freed {way}",
           lambda found: found is not None and all(sum(s) <= 5 * (i + 1) for i, s in
                                                   enumerate(found)), "merged_used")
          for way in WAYS),
        *((f"cached MiB, four of 5 freed {way}", states, "not_merged")
          for way, states in WAYS.items()),
        *((f"the chain, freed {way}", [20.0], "links") for way in WAYS),
        crashes=((r"list\.remove", HINTS["links"]),),
    ),
    step(
        3, "other streams", "held back as long as someone reads, and not a moment longer",
        probe_streams, "Allocator",
        ("free at once, if its own stream alone used it", True, "held_back"),
        ("free while two streams read it, then one", [False, False], "given_early"),
        ("free when both are done", True, "kept_waiting"),
        ("blocks that still wait when the reader of two is done", 0, "skipped"),
        ("free before its last reader is done", False, "event_of_use"),
        ("times the host waited", 0, "host_waits"),
        ("free then, though its own stream still works", True, "own_event"),
    ),
    step(
        4, "a full device", "the cache is given up before the request is",
        probe_full, "Allocator",
        ("MiB reserved if the driver has 20 left", 62, "gives_up_early"),
        ("malloc of 26 MiB, with two segments of 12 cached", "26", "no_retry"),
        ("MiB reserved then", 64, "parts_freed"),
        ("malloc of 40 MiB, with 16 cached", "MemoryError", "no_error"),
        ("malloc of 60 MiB, with 40 waiting for a stream", "60", "waits_forgotten"),
    ),
    step(
        5, "a report", "short of memory or only in pieces: the numbers say which",
        probe_report, "Allocator",
        ("a new allocator", 0, "report"),
        ("MiB used", 38, "report"),
        ("MiB waiting", 4, "report"),
        ("MiB cached", 20, "report"),
        ("MiB reserved", 62, "report"),
        ("MiB largest", 12, "largest"),
        crashes=((r"max\(\)", HINTS["largest"]),),
    ),
]  # fmt: skip
