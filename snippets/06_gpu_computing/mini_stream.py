"""Streams and events from scratch: a queue and a thread, and what goes wrong without waiting.

A stream is a queue that a device works off in order; to launch is to append to it. An event is
a mark in the queue: another stream, or the host, can wait until it is reached. The kernels here
sleep, so that two CPU cores show what a GPU does.
"""

import queue
import threading
import time
from collections.abc import Callable


# --8<-- [start:stream]
class Event:
    """A mark in a stream: reached or not, and when."""

    def __init__(self) -> None:
        self.reached, self.at = threading.Event(), 0.0

    def record(self, stream: "Stream") -> None:
        def mark() -> None:
            self.at = time.perf_counter()
            self.reached.set()

        stream.launch(mark)

    def synchronize(self) -> None:
        """The host waits here."""
        self.reached.wait()

    def elapsed(self, later: "Event") -> float:
        """Milliseconds from this mark to the later one, on the device's clock."""
        return 1000 * (later.at - self.at)


class Stream:
    """Work in order: `launch` returns at once, a worker does what was launched."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.work.get()()

    def launch(self, kernel: Callable[[], None]) -> None:
        self.work.put(kernel)

    def wait_event(self, event: Event) -> None:
        """This stream waits; the host goes on."""
        self.launch(event.reached.wait)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


# --8<-- [end:stream]


def sleep(milliseconds: float) -> Callable[[], None]:
    return lambda: time.sleep(milliseconds / 1000)


def wrong_clock(stream: Stream) -> None:
    """Time three kernels by the host's clock, with and without waiting, and by events."""
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
    """One stream fills x after a while, another doubles it; return what was read."""
    x, result = [0.0], []
    producer, consumer, filled = Stream(), Stream(), Event()
    launched, went_on = threading.Event(), []

    def fill() -> None:
        went_on.append(launched.wait(60))  # False: the host itself waited for the event
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

    streams, done = [Stream() for _ in range(3)], []
    first, last = Event(), Event()
    first.record(streams[0])
    at_once = threading.Barrier(3)  # lets nobody pass before all three are there
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
