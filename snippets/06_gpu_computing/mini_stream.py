"""Streams and events built from a queue and a thread, and three bugs of programs without waits.

A stream is a queue whose work runs in order. A launch appends to the queue. An event is a mark
in the queue, and another stream or the host can wait until it is reached. The kernels sleep, so
two CPU cores show what a GPU does. Look at the wrong values: the host reads too early, a second
stream reads too early, and an allocator reuses memory that a second stream has yet to read.
"""

import queue
import threading
import time
from collections.abc import Callable


# --8<-- [start:stream]
class Event:
    """A mark in a stream. It is reached when the stream comes to it."""

    def __init__(self) -> None:
        self.reached, self.at = threading.Event(), 0.0

    def record(self, stream: "Stream") -> None:
        def mark() -> None:
            self.at = time.perf_counter()
            self.reached.set()

        stream.launch(mark)

    def synchronize(self) -> None:
        """Make the host wait until the event is reached."""
        self.reached.wait()

    def elapsed(self, later: "Event") -> float:
        """Return the milliseconds from this event to a later one."""
        return 1000 * (later.at - self.at)


class Stream:
    """A queue of work. `launch` returns immediately, and a worker runs the work in order."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.work.get()()

    def launch(self, kernel: Callable[[], None]) -> None:
        self.work.put(kernel)

    def wait_event(self, event: Event) -> None:
        """Make this stream wait for the event. The host goes on."""
        self.launch(event.reached.wait)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


# --8<-- [end:stream]


# --8<-- [start:allocator]
class Allocator:
    """A cache of blocks that one stream allocates. A block is a list with one number."""

    def __init__(self) -> None:
        self.cache: list[list[float]] = []
        self.pending: list[tuple[list[float], list[Event]]] = []

    def allocate(self) -> list[float]:
        for entry in list(self.pending):
            if all(event.reached.is_set() for event in entry[1]):
                self.pending.remove(entry)
                self.cache.append(entry[0])
        return self.cache.pop() if self.cache else [0.0]

    def free(self, block: list[float], recorded: tuple[Stream, ...] = ()) -> None:
        """Free the block. Work that streams in `recorded` have in their queues may use it."""
        events = [Event() for _ in recorded]
        for stream, event in zip(recorded, events, strict=True):
            event.record(stream)
        self.pending.append((block, events))  # without events it is free immediately


# --8<-- [end:allocator]


def sleep(milliseconds: float) -> Callable[[], None]:
    return lambda: time.sleep(milliseconds / 1000)


def wrong_clock(stream: Stream) -> None:
    """Print the time of three kernels by the host's clock, waiting or not, and by events."""
    start, stop = Event(), Event()
    host = time.perf_counter()
    start.record(stream)
    for _ in range(3):
        stream.launch(sleep(40))
    stop.record(stream)
    returned = 1000 * (time.perf_counter() - host)
    stop.synchronize()
    waited = 1000 * (time.perf_counter() - host)
    print("three kernels of 40 ms")
    print(f"  host's clock, no wait      ≈{returned:.2f} ms")
    print(f"  host's clock, synchronized ≈{waited:.0f} ms")
    print(f"  between two events         ≈{start.elapsed(stop):.0f} ms")
    assert returned < 60 < 115 < start.elapsed(stop) <= waited + 1


def race(wait: bool) -> float:
    """Let one stream fill x after a while and another stream double it. Return the result."""
    x, result = [0.0], []
    producer, consumer, filled = Stream(), Stream(), Event()
    launched, went_on = threading.Event(), []

    def fill() -> None:
        went_on.append(launched.wait(60))  # False if the host itself waits for the event
        time.sleep(0.06)
        x[0] = 21.0

    producer.launch(fill)
    filled.record(producer)
    if wait:
        consumer.wait_event(filled)
    consumer.launch(lambda: result.append(2 * x[0]))
    launched.set()
    consumer.synchronize()
    producer.synchronize()
    assert went_on == [True]
    return result[0]


def reuse(recorded: bool) -> tuple[float, bool]:
    """Free a block that a second stream has yet to read. Return what it reads."""
    allocator, compute, side = Allocator(), Stream(), Stream()
    filled, refilled, result = Event(), Event(), []
    x = allocator.allocate()
    compute.launch(lambda: x.__setitem__(0, 42.0))
    filled.record(compute)
    side.wait_event(filled)  # the side stream does wait for the value
    side.launch(refilled.synchronize)  # a long kernel: it ends after y has been written
    side.launch(lambda: result.append(x[0]))
    allocator.free(x, (side,) if recorded else ())  # Python drops the tensor
    y = allocator.allocate()
    compute.launch(lambda: y.__setitem__(0, 7.0))
    refilled.record(compute)
    side.synchronize()
    return result[0], y is x


def main() -> None:
    wrong_clock(Stream())

    x = [0.0]
    stream = Stream()
    stream.launch(sleep(60))
    stream.launch(lambda: x.__setitem__(0, 42.0))
    early = x[0]
    stream.synchronize()
    print(f"host reads without waiting: {early:.0f}, after synchronize: {x[0]:.0f}")
    assert (early, x[0]) == (0.0, 42.0)

    print(f"consumer in another stream, no event: {race(False):.0f}")
    print(f"consumer waits for the event:         {race(True):.0f}")
    assert (race(False), race(True)) == (0.0, 42.0)

    print(f"block freed while a second stream reads it: {reuse(False)[0]:.0f}")
    print(f"the same after record_stream:               {reuse(True)[0]:.0f}")
    assert (reuse(False), reuse(True)) == ((7.0, True), (42.0, False))
    allocator, stream = Allocator(), Stream()
    block = allocator.allocate()
    allocator.free(block, (stream,))
    stream.synchronize()
    assert allocator.allocate() is block  # reused as soon as the recorded stream has passed
    other, gate = Stream(), Event()
    other.wait_event(gate)
    allocator.free(block, (stream, other))
    stream.synchronize()
    assert allocator.allocate() is not block  # `other` still waits for the gate
    gate.record(stream)
    other.synchronize()
    assert allocator.allocate() is block

    streams, done = [Stream() for _ in range(3)], []
    first, last = Event(), Event()
    first.record(streams[0])
    at_once = threading.Barrier(3)  # no kernel passes before all three streams run one
    for each, milliseconds in zip(streams, (60, 70, 80), strict=True):
        each.launch(lambda: at_once.wait(timeout=300))
        each.launch(sleep(milliseconds))
        each.launch(lambda: done.append(True))
    last.record(streams[2])  # the longest
    for each in streams:
        each.synchronize()
    assert len(done) == 3
    print(f"kernels of 60, 70 and 80 ms in three streams: ≈{first.elapsed(last):.0f} ms")


if __name__ == "__main__":
    main()
