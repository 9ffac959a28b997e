"""A source is overwritten before its copy: the bug of non_blocking, and a ring that fixes it.

A thread takes the role of the GPU's copy engine. It takes copies from a queue and performs them
in order, some time later. From pageable memory the driver first copies the bytes into its own
buffer, so the caller may overwrite the source. From pinned memory the engine reads the source
itself, and later.
"""

import queue
import threading
import time

import torch


# --8<-- [start:engine]
class CopyEngine:
    """Performs copies in order, in a thread of its own. Each takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.queue: queue.Queue = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work, done = self.queue.get()
            work()
            done.set()

    def copy(self, target: torch.Tensor, source: torch.Tensor, pinned: bool) -> threading.Event:
        """Copy `source` to `target` some time later. The event is set after the copy."""
        if not pinned:
            source = source.clone()  # into the driver's buffer, while the caller waits
        done = threading.Event()

        def work() -> None:
            time.sleep(self.seconds)
            target.copy_(source)

        self.queue.put((work, done))
        return done


# --8<-- [end:engine]


# --8<-- [start:loops]
def one_buffer(engine: CopyEngine, there: torch.Tensor, pinned: bool) -> None:
    """Fill a buffer with batch i, send it, and at once fill it with the next batch."""
    buffer = torch.empty(there.shape[1])
    for i, target in enumerate(there):
        buffer.fill_(i)
        done = engine.copy(target, buffer, pinned)
    done.wait()


def ring(engine: CopyEngine, there: torch.Tensor, buffers: int, wait: bool = True) -> int:
    """The fix: several buffers. Each is filled again only after its copy has ended."""
    ring = torch.empty(buffers, there.shape[1])
    events: list[threading.Event | None] = [None] * buffers
    waits = 0
    for i, target in enumerate(there):
        slot = i % buffers
        if events[slot] is not None and wait:
            waits += not events[slot].is_set()
            events[slot].wait()  # the copy of batch i - buffers
        ring[slot].fill_(i)
        events[slot] = engine.copy(target, ring[slot], pinned=True)
    for event in events:
        event.wait()
    return waits


# --8<-- [end:loops]


def main() -> None:
    engine = CopyEngine(seconds=0.04)
    there = torch.full((6, 1024), -1.0)  # six batches on the "device"

    one_buffer(engine, there, pinned=False)
    print("pageable, one buffer: batches", there[:, 0].int().tolist())
    one_buffer(engine, there, pinned=True)
    print("pinned, one buffer:   batches", there[:, 0].int().tolist())
    waits = ring(engine, there.fill_(-1), buffers=2)
    print("pinned, ring of two:  batches", there[:, 0].int().tolist())
    print(f"  the host waited for {waits} of 6 copies before it filled a buffer again")
    assert torch.equal(there[:, 0], torch.arange(6.0))

    ring(engine, there.fill_(-1), buffers=2, wait=False)
    assert not torch.equal(there[:, 0], torch.arange(6.0))  # the ring needs the wait
    if not torch.accelerator.is_available():
        for attempt in (lambda: there.pin_memory(), lambda: torch.empty(4, pin_memory=True)):
            try:
                attempt()
            except RuntimeError:
                continue
            raise AssertionError("pinned without an accelerator")
        print("no accelerator here: .pin_memory() and pin_memory=True raise a RuntimeError")
        return
    device = torch.accelerator.current_accelerator()
    source = torch.ones(2**26)  # 256 MiB
    for words, host in (("pageable", source), ("pinned", source.pin_memory())):
        host.to(device)
        start, stop = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        called = time.perf_counter()
        host.to(device, non_blocking=True)
        returned = time.perf_counter()
        stop.record()
        stop.synchronize()
        rate = source.nbytes / start.elapsed_time(stop) / 1e6
        print(f"{words}: ≈{rate:.1f} GB/s, the call took ≈{1e3 * (returned - called):.2f} ms")


if __name__ == "__main__":
    main()
