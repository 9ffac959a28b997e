"""Shows that a signal can overtake the data of a put, and four protocols that prevent this.

A network card has several channels. A channel delivers its puts in order, but it does not wait
for the other channels. The program models such a network on real memory that two processes
share. It delivers each message in every possible order, and after each store the receiver
looks at its memory. The table shows in how many orders the receiver reads old data. The same
orders are also counted in one process, and with formulas. The last lines show a check that
finds this error in other programs: each word carries the sequence number of its message.
"""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from math import comb
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

WORDS, SIGNAL = 4, 4  # four words of data, and the index of the signal
OLD, NEW = (101, 102, 103, 104), (201, 202, 203, 204)  # message 1, and message 2 after it
MASK = 2**32 - 1
Memory = MutableSequence[int]


def pack(values: tuple[int, ...], sequence: int) -> list[int]:
    """Words of 8 bytes: 4 bytes of data, and the sequence number of the message."""
    return [value << 32 | sequence for value in values]


# --8<-- [start:network]
class Network:
    """Three channels. A put is delivered later, and the channels do not wait for each other."""

    def __init__(self) -> None:
        self.queues = [deque() for _ in range(3)]
        self.epoch = 0  # the number of fences so far

    def put(self, channel: int, words: dict[int, int], signal: int = 0) -> None:
        """Queue a put. When it is delivered, it stores words, and then adds to the signal."""
        self.queues[channel].append((self.epoch, words, signal))

    def fence(self) -> None:
        """Deliver later puts only after all earlier puts, on all channels."""
        self.epoch += 1

    def ready(self) -> list[int]:
        """Return the channels whose oldest put may be delivered now."""
        first = {channel: queue[0][0] for channel, queue in enumerate(self.queues) if queue}
        return [channel for channel, epoch in first.items() if epoch == min(first.values())]

    def deliver(self, channel: int, memory: Memory) -> Iterator[None]:
        """Deliver the oldest put of a channel. Yield after each change of the memory."""
        _, words, signal = self.queues[channel].popleft()
        for address, word in words.items():
            memory[address] = word
            yield
        memory[SIGNAL] += signal
        yield


# --8<-- [end:network]
# --8<-- [start:protocols]
def send(network: Network, protocol: str) -> None:
    """Put message 2: two words on channel 0, and two words on channel 1."""
    sequence = 1 if protocol == "flags that do not change" else 2
    for address, word in enumerate(pack(NEW, sequence)):
        channel = 0 if protocol == "all on one channel" else address // 2
        last = address == WORDS - 1
        attached = protocol == "a signal with each put" or (
            protocol == "a signal with the last put" and last
        )
        network.put(channel, {address: word}, signal=int(attached))
    if protocol == "a fence before the signal":
        network.fence()
    if protocol in ("puts, then a signal", "a fence before the signal"):
        network.put(2, {}, signal=1)
    if protocol == "all on one channel":
        network.put(0, {}, signal=1)


def arrived(memory: Memory, protocol: str) -> bool:
    """The receiver's condition for reading."""
    if protocol.startswith("flags"):
        sequence = 1 if protocol == "flags that do not change" else 2
        return all(word & MASK == sequence for word in memory[:WORDS])
    return memory[SIGNAL] == (WORDS if protocol == "a signal with each put" else 1)


def check(words: list[int], sequence: int) -> None:
    """Raise an error if a word does not belong to the message with this sequence number."""
    late = [address for address, word in enumerate(words) if word & MASK != sequence]
    if late:
        raise RuntimeError(f"the signal has arrived, but words {late} have not")


# --8<-- [end:protocols]
EXPECTED = {  # the number of delivery orders, and in how many the receiver reads old data
    "puts, then a signal": (5 * comb(4, 2), 4 * comb(4, 2)),  # right if the signal is the last
    "all on one channel": (1, 0),
    "a fence before the signal": (comb(4, 2), 0),
    "a signal with the last put": (comb(4, 2), comb(3, 1)),  # wrong if channel 0 is the last
    "a signal with each put": (comb(4, 2), 0),
    "flags in the data": (comb(4, 2), 0),
    "flags that do not change": (comb(4, 2), comb(4, 2)),
}


def orders(protocol: str, begin: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield each order in which the network can deliver the message, as channel numbers."""
    network = Network()
    send(network, protocol)
    for channel in begin:
        deque(network.deliver(channel, [0] * (WORDS + 1)), maxlen=0)
    channels = network.ready()
    if not channels:
        yield begin
    for channel in channels:
        yield from orders(protocol, (*begin, channel))


def play(protocol: str, order: tuple[int, ...], memory: Memory, look: Callable) -> list[int]:
    """Deliver message 2 in this order. Return the words that the receiver reads first."""
    for address, word in enumerate([*pack(OLD, 1), 0]):  # message 1, and no signal
        memory[address] = word
    network = Network()
    send(network, protocol)
    read = look(protocol)  # a put returns before its delivery: nothing has changed yet
    for channel in order:
        for _ in network.deliver(channel, memory):
            read = read or look(protocol)
    assert read, "the receiver never stops waiting"
    return read


def receiver(segment: SharedMemory, requests: Connection) -> None:
    """The second process: look at the memory, and return the words if they have arrived."""
    with segment.buf[: 8 * (WORDS + 1)].cast("q") as memory, contextlib.suppress(EOFError):
        while protocol := requests.recv():
            words = memory[:WORDS].tolist() if arrived(memory, protocol) else None
            requests.send((words, os.getpid()))
    segment.close()


def values(words: list[int]) -> tuple[int, ...]:
    return tuple(word >> 32 for word in words)


def count(memory: Memory, look: Callable) -> None:
    """Play all orders of all protocols, in two processes and in the model."""
    print(f"{'wrong reads':28}two processes   model   orders")
    for protocol, expected in EXPECTED.items():
        local = [0] * (WORDS + 1)
        seen = {
            "real": (memory, look),
            "model": (local, lambda p, m=local: m[:WORDS] if arrived(m, p) else None),
        }
        wrong = dict.fromkeys(seen, 0)
        for order in (every := list(orders(protocol))):
            for name, (target, poll) in seen.items():
                wrong[name] += values(play(protocol, order, target, poll)) != NEW
            sequence = 1 if protocol == "flags that do not change" else 2
            assert list(memory[:WORDS]) == local[:WORDS] == pack(NEW, sequence)  # all arrive
        assert (len(set(every)), wrong["real"]) == expected
        assert wrong["real"] == wrong["model"]
        print(f"  {protocol:26}{wrong['real']:13}{wrong['model']:8}{len(every):9}")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    segment = SharedMemory(create=True, size=8 * (WORDS + 1))
    requests, other_end = context.Pipe()
    process = context.Process(target=receiver, args=(segment, other_end), daemon=True)

    def look(protocol: str) -> list[int] | None:
        requests.send(protocol)
        words, process_id = requests.recv()
        assert process_id == process.pid != os.getpid()
        return words

    try:
        process.start()
        other_end.close()  # so that both processes notice when the other one ends
        with segment.buf[: 8 * (WORDS + 1)].cast("q") as memory:
            first = play("puts, then a signal", (2, 0, 0, 1, 1), memory, look)
            print(f"signal first: sent {NEW}, read {values(first)}")
            count(memory, look)

            reports = {False: [], True: []}  # for wrong and right reads
            for order in orders("puts, then a signal"):
                words = play("puts, then a signal", order, memory, look)
                try:
                    check(words, sequence=2)
                    report = None
                except RuntimeError as error:
                    report = str(error)
                reports[values(words) == NEW].append(report)
            found = {right: sum(map(bool, lines)) for right, lines in reports.items()}
            sizes = {right: len(lines) for right, lines in reports.items()}
            assert found == {False: 24, True: 0} and sizes == {False: 24, True: 6}
            print(
                f"the check reports {found[False]} of {sizes[False]} wrong reads, "
                f"and {found[True]} of {sizes[True]} right reads"
            )
            print(f"  {reports[False][0]}")
    finally:
        if process.is_alive():
            requests.send(None)
            process.join()
        segment.close()
        segment.unlink()


if __name__ == "__main__":
    main()
