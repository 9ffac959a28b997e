"""The steps of assignment 1: the rules of the allocator, one by one, on an emulated device."""

from types import ModuleType

from graders.tools import Lab, Passes, at_most, check

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
LAB = Lab(HINTS)


def part(number: int, title: str, proves: str, own: str, **settings):
    """A step that grades these methods of Allocator."""
    own = " ".join(f"Allocator.{name}" for name in ("__init__", *own.split()))
    return LAB.alone(number, title, proves, "Allocator", own=own, **settings)


def begin(theirs: ModuleType, ours: ModuleType, capacity: int = 64) -> tuple[object, object]:
    """A device, and an allocator for it."""
    device = ours.Device(capacity * MIB)
    return device, theirs.Allocator(device)


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


@part(1, "best fit and split", "the block PyTorch takes, and the rest it keeps",
      "best_fit split")  # fmt: skip
def fit(theirs, ours, lesson):
    _, allocator = begin(theirs, ours)

    def chosen(size: float, *blocks: tuple[float, bool, int]) -> int | None:
        """The index of the block taken from (MiB, small, stream); None for none."""
        allocator.cached = [
            theirs.Block(i * 64 * MIB, int(n * MIB), 2 * MIB if small else 20 * MIB, stream)
            for i, (n, small, stream) in enumerate(blocks)
        ]
        order = list(allocator.cached)
        allocator.cached.reverse()
        block = allocator.best_fit(int(size * MIB), 0)
        return None if block is None else order.index(block)

    check("for 3 MiB if 2 MiB are free", chosen(3, (2, False, 0)), None, "too_small")
    other = chosen(3, (4, False, 1))
    check("for 3 MiB if another stream has 4 MiB free", other, None, "streams")
    large, small = chosen(1, (1.5, False, 0)), chosen(1.1, (2, True, 0))
    check("for 1 MiB if a large segment has 1.5 free", large, None, "pools")
    check("for 1.1 MiB if a small one has 2 free", small, None, "pools")
    twins = chosen(9, *[(12, False, 0)] * 2)
    check("for 9 MiB, which of two blocks of 12 MiB", [twins], [0], "tie")
    best = chosen(3, *((size, False, 0) for size in (16, 4, 2, 4, 8)))
    check("for 3 MiB, which of the blocks of 16, 4, 2, 4, 8 MiB", [best], [1], "first_fit")

    def cut(size: int, segment: int) -> tuple[list, list]:
        """The chain from both ends, and the blocks that are cached."""
        allocator.cached = []
        block = theirs.Block(0, segment, segment, 7, state="used")
        end = theirs.Block(segment, MIB, segment, 7, "used", previous=block)
        block.next = end
        allocator.split(block, size)
        return [chain(block), chain(end)], allocator.cached

    chains, rest = cut(4 * MIB, 20 * MIB)
    sizes = [block.size / MIB for block in rest]
    check("cached after 4 MiB were cut from 20", sizes, [16.0], "never_split")
    small = [block.size for block in cut(2 * MIB - 512, 2 * MIB)[1]]
    check("bytes cached if a small segment has 512 left", small, [512], "small_rest")
    check("the chain then, from both ends", chains, [[4.0, 16.0, 1.0]] * 2, "links")
    check("the stream of the rest", [block.stream for block in rest], [7], "rest_stream")
    useless = [block.size / MIB for block in cut(39 * MIB // 2, 20 * MIB)[1]]
    check("cached after 19.5 of 20 MiB", useless, [], "always_split")


# --- 2: neighbours ------------------------------------------------------------------------

WAYS = {  # the order in which four blocks are freed, and the sizes in the cache after each
    "left to right": ((0, 1, 2, 3), [[5], [10], [15], [20]]),
    "right to left": ((3, 2, 1, 0), [[5], [10], [15], [20]]),
    "ends first": ((0, 3, 1, 2), [[5], [5, 5], [5, 10], [20]]),
    "middle first": ((1, 2, 0, 3), [[5], [10], [15], [20]]),
}
NO_MORE = Passes(
    "at most 5 more with each",
    lambda states: all(sum(sizes) <= 5 * n for n, sizes in enumerate(states, 1)),
)


@part(2, "free neighbours are one block", "in any order, the segment is whole again",
      "give_back", crashes={r"list\.remove": "links"})  # fmt: skip
def merge(theirs, ours, lesson):
    found, chains = {}, {}
    for way, (order, _) in WAYS.items():
        _, allocator = begin(theirs, ours)
        blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
        found[way] = []
        for i in order:
            allocator.free(blocks[i])
            found[way].append(sorted(block.size // MIB for block in allocator.cached))
        chains[way] = chain(allocator.cached[0])
    for way, states in found.items():
        check(f"bytes in the cache, freed {way}", sum(states[-1]), at_most(20), "stale")
    for way, states in found.items():
        check(f"cached MiB, four of 5 freed {way}", states, NO_MORE, "merged_used")
    for way, (_, wanted) in WAYS.items():
        check(f"cached MiB, four of 5 freed {way}", found[way], wanted, "not_merged")
    for way, sizes in chains.items():
        check(f"the chain, freed {way}", sizes, [20.0], "links")


# --- 3: streams ---------------------------------------------------------------------------


@part(3, "other streams", "held back as long as someone reads, and not a moment longer",
      "free collect")  # fmt: skip
def streams(theirs, ours, lesson):
    def new() -> tuple:
        device, allocator = begin(theirs, ours)
        block = allocator.malloc(4 * MIB, stream=1)
        device.launch(1)
        return device, allocator, block

    def free_again(allocator, block) -> bool:
        allocator.collect()
        return block.state == "free"

    device, allocator, block = new()
    allocator.free(block)
    at_once = block.state == "free"
    check("free at once, if its own stream alone used it", at_once, True, "held_back")

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
    check("free while two streams read it, then one", seen, [False, False], "given_early")
    device.finish(3)
    check("free when both are done", free_again(allocator, block), True, "kept_waiting")

    device, allocator, block = new()
    both = [block, allocator.malloc(4 * MIB, stream=1)]
    device.launch(2)
    for block in both:
        allocator.record_stream(block, 2)
        allocator.free(block)
    device.finish(1), device.finish(2)
    allocator.collect()
    left = len(allocator.waiting)
    check("blocks that still wait when the reader of two is done", left, 0, "skipped")

    device, allocator, block = new()
    allocator.record_stream(block, 2)
    device.launch(2)
    device.finish(2)
    device.launch(2)  # a second kernel reads it after the first was done
    allocator.free(block)
    early = free_again(allocator, block)
    check("free before its last reader is done", early, False, "event_of_use")
    check("times the host waited", waits + device.synchronized, 0, "host_waits")
    device.finish(2)
    then = free_again(allocator, block)
    check("free then, though its own stream still works", then, True, "own_event")


# --- 4: a full device ---------------------------------------------------------------------


@part(4, "a full device", "the cache is given up before the request is", "grow")
def full(theirs, ours, lesson):
    device, allocator = begin(theirs, ours)
    kept = [allocator.malloc(size * MIB) for size in (12, 12, 4)]
    for block in kept[:2]:
        allocator.free(block)  # 24 cached in two segments; 20 reserved for the third
    allocator.malloc(18 * MIB)
    used = device.used // MIB
    check("MiB reserved if the driver has 20 left", used, 62, "gives_up_early")

    def tried(allocator, size: int) -> str:
        try:
            return str(allocator.malloc(size * MIB).size // MIB)
        except MemoryError:
            return "MemoryError"
        except (TypeError, ValueError, AttributeError) as error:
            return type(error).__name__

    found = tried(allocator, 26)
    check("malloc of 26 MiB, with two segments of 12 cached", found, "26", "no_retry")
    check("MiB reserved then", device.used // MIB, 64, "parts_freed")
    found = tried(allocator, 40)
    check("malloc of 40 MiB, with 16 cached", found, "MemoryError", "no_error")

    device, allocator = begin(theirs, ours)
    block = allocator.malloc(40 * MIB, stream=1)
    allocator.record_stream(block, 2)
    device.launch(2)
    allocator.free(block)
    found = tried(allocator, 60)
    check("malloc of 60 MiB, with 40 waiting for a stream", found, "60", "waits_forgotten")


# --- 5: the report ------------------------------------------------------------------------


@part(5, "a report", "short of memory or only in pieces: the numbers say which", "report",
      crashes={r"max\(\)": "largest"})  # fmt: skip
def report(theirs, ours, lesson):
    device, allocator = begin(theirs, ours)
    check("a new allocator", sum(allocator.report().values()), 0, "report")
    blocks = [allocator.malloc(n * MIB, stream=1) for n in (4, 4, 4, 4, 4, 12, 30)]
    allocator.record_stream(blocks[0], 2)
    device.launch(2)
    for i in (0, 1, 3, 5):
        allocator.free(blocks[i])
    found = allocator.report()
    true = {"used": 38, "waiting": 4, "cached": 20, "reserved": 62, "largest": 12}
    for name, wanted in true.items():
        hint = "largest" if name == "largest" else "report"
        check(f"MiB {name}", found.get(name, 0) // MIB, wanted, hint)
