"""Builds put, get, signal and barrier from shared memory, and collectives from them, on a CPU.

Each rank allocates the same layout, and maps the memory of all ranks. A put or a get is then
only a copy, and the other rank takes no part in it. The program compares an all-gather, a
one-shot and a two-shot all-reduce with torch.distributed. It compares the bytes that put and
get have counted with formulas. At the end it overwrites a buffer too early. A slow rank then
adds the wrong input of rank 0, and a version number in the memory detects this.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from unittest import mock

import torch
import torch.distributed as dist

ELEMENTS = 840 * 512  # float32, divisible by 1 to 8 ranks
COUNT, STEPS = 1000, 4  # elements and all-reduces of the last part
LOCK = threading.Lock()


def fence() -> None:
    """Order the memory accesses before and after this call. x86 keeps the order of stores."""
    for _ in range(2):
        with LOCK:  # taking a lock is an atomic operation that Arm processors do not reorder
            pass


def attach(name: str) -> SharedMemory:
    """Map the segment of another rank. That rank alone removes its name."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    segment = SharedMemory(name)
    resource_tracker.unregister(segment._name, "shared_memory")
    return segment


# --8<-- [start:memory]
class SymmetricMemory:
    """A float32 buffer on each rank, one signal per pair of ranks, and two version numbers."""

    def __init__(self, elements: int) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.sent, self.received = [0] * self.n, [0] * self.n  # signals to and from each rank
        self.bytes_got = self.bytes_put = self.rounds = 0
        header = 8 * (self.n + 2)
        own = SharedMemory(create=True, size=header + 4 * elements)  # filled with zeros
        names = [""] * self.n
        dist.all_gather_object(names, own.name)
        self.segments = [
            own if r == self.rank else attach(name) for r, name in enumerate(names)
        ]
        self.words = [segment.buf[:header].cast("q") for segment in self.segments]
        self.buffers = [
            torch.frombuffer(segment.buf, dtype=torch.float32, count=elements, offset=header)
            for segment in self.segments
        ]
        dist.barrier()
        own.unlink()  # only the name: the memory exists until the last process has ended

    def put(self, peer: int, offset: int, values: torch.Tensor) -> None:
        """Copy `values` into the buffer of `peer`, from element `offset` on."""
        self.buffers[peer][offset : offset + len(values)] = values
        self.bytes_put += values.nbytes * (peer != self.rank)

    def get(self, peer: int, offset: int, count: int) -> torch.Tensor:
        """Return a copy of `count` elements from the buffer of `peer`."""
        self.bytes_got += 4 * count * (peer != self.rank)
        return self.buffers[peer][offset : offset + count].clone()

    def signal(self, peer: int) -> None:
        """Tell `peer` that all earlier puts of this rank have arrived."""
        fence()
        self.sent[peer] += 1
        self.words[peer][self.rank] = self.sent[peer]  # no other rank writes this word

    def wait(self, peer: int) -> None:
        """Wait for the next signal from `peer`."""
        self.received[peer] += 1
        deadline = time.monotonic() + 60
        while self.words[self.rank][peer] < self.received[peer]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} got no signal from rank {peer}")
            time.sleep(0)  # let another process use the core
        fence()

    def wait_all(self) -> None:
        """Wait for the next signal from every rank."""
        self.rounds += 1
        for peer in range(self.n):
            self.wait(peer)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        for peer in range(self.n):
            self.signal(peer)
        self.wait_all()

    # --8<-- [end:memory]
    def close(self) -> None:
        self.buffers.clear()
        for words, segment in zip(self.words, self.segments, strict=True):
            words.release()
            segment.close()


# --8<-- [start:collectives]
def all_gather(memory: SymmetricMemory, shard: torch.Tensor) -> torch.Tensor:
    """Return the shards of all ranks. Each rank puts its shard into every buffer."""
    for peer in range(memory.n):
        memory.put(peer, memory.rank * len(shard), shard)
        memory.signal(peer)
    memory.wait_all()
    return memory.get(memory.rank, 0, memory.n * len(shard))


def add_parts(memory: SymmetricMemory, offset: int, count: int) -> torch.Tensor:
    """Get a part of the buffer of each rank, and add the parts in the order of the ranks."""
    total = memory.get(0, offset, count)
    for peer in range(1, memory.n):
        total += memory.get(peer, offset, count)
    return total


def one_shot(memory: SymmetricMemory, x: torch.Tensor) -> torch.Tensor:
    """All-reduce in one round: each rank reads the inputs of all ranks."""
    memory.put(memory.rank, 0, x)
    memory.barrier()  # all inputs are in place
    return add_parts(memory, 0, len(x))


def two_shot(memory: SymmetricMemory, x: torch.Tensor) -> torch.Tensor:
    """All-reduce in two rounds: each rank adds one chunk, and puts the sum into all buffers."""
    chunk = len(x) // memory.n
    memory.put(memory.rank, 0, x)
    memory.barrier()
    total = add_parts(memory, memory.rank * chunk, chunk)  # the reduce-scatter
    return all_gather(memory, total)


# --8<-- [end:collectives]
def reference(name: str, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The exact result of a collective: a loop over the inputs of the ranks."""
    inputs = [torch.empty_like(x, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(inputs, x.to(device))
    inputs = [part.cpu() for part in inputs]
    return torch.cat(inputs) if name == "all-gather" else functools.reduce(torch.add, inputs)


def with_late_puts(
    memory: SymmetricMemory, algorithm: Callable, x: torch.Tensor
) -> torch.Tensor:
    """Run an algorithm while each rank waits before its puts, the last rank for the longest.

    A rank that signals before its put then makes the result of rank 0 wrong.
    """

    def put(*arguments: object) -> None:
        time.sleep(0.03 * memory.rank)
        SymmetricMemory.put(memory, *arguments)

    begin = time.monotonic()
    with mock.patch.object(memory, "put", put):
        result = algorithm(memory, x)
    assert time.monotonic() - begin >= 0.03 * memory.rank  # the puts were really late
    return result


def reuse(memory: SymmetricMemory, rule: str) -> tuple[int, int]:
    """All-reduce four times in one buffer or in two, while the last rank reads late.

    Return how many sums of this rank are wrong, and how many the version numbers report.
    """
    rank, slow, wrong, reported = memory.rank, memory.n - 1, 0, 0
    for step in range(STEPS):
        # --8<-- [start:reuse]
        half = step % 2 if rule == "two buffers" else 0
        x = torch.full((COUNT,), float((step + 1) if rank == 0 else 10**rank))
        memory.words[rank][memory.n + half] = step  # the new version, before the new data
        fence()
        memory.put(rank, half * COUNT, x)
        if rank == 0 and step > 0 and rule != "second barrier":
            memory.signal(slow)  # the next input of rank 0 is written
        memory.barrier()
        if rank == slow and step < STEPS - 2:  # in step STEPS - 2, it waits inside get
            memory.wait(0)  # the slow rank reads only now
        total = add_parts(memory, half * COUNT, COUNT)
        fence()
        late = memory.words[0][memory.n + half] != step  # rank 0 may have changed its data
        # --8<-- [end:reuse]
        reported += late
        if rank == slow and rule == "two buffers" and step < STEPS - 1:
            assert memory.words[0][memory.n + 1 - half] == step + 1  # rank 0 was ahead
        others = sum(10**r for r in range(1, memory.n))
        if rank == slow and not (total == step + 1 + others).all():
            assert late and (total == step + 2 + others).all()  # the next input of rank 0
            wrong += 1
        if rule == "second barrier":
            if rank == 0 and step < STEPS - 1:
                memory.signal(slow)  # rank 0 can do nothing more before the slow rank reads
            memory.barrier()
    memory.barrier()
    return wrong, reported


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def run(memory: SymmetricMemory, device: torch.device) -> None:
    rank, n = memory.rank, memory.n
    torch.manual_seed(rank)  # a different input on each rank
    x = torch.randn(ELEMENTS)
    size, lines = x.nbytes, []
    expected = {  # bytes that a rank reads from others and writes to others, and rounds
        "all-gather": (0, (n - 1) * size // n, 1),
        "one-shot all-reduce": ((n - 1) * size, 0, 1),
        "two-shot all-reduce": ((n - 1) * size // n, (n - 1) * size // n, 2),
    }
    inputs = {name: x[: ELEMENTS // n] if name == "all-gather" else x for name in expected}
    for name, algorithm in zip(expected, (all_gather, one_shot, two_shot), strict=True):
        memory.bytes_got = memory.bytes_put = memory.rounds = 0
        result = algorithm(memory, inputs[name])
        counts = memory.bytes_got, memory.bytes_put, memory.rounds
        memory.barrier()  # before the next algorithm overwrites the buffers
        late = with_late_puts(memory, algorithm, -inputs[name])
        memory.barrier()
        assert counts == expected[name], (name, counts)
        assert torch.equal(result, reference(name, inputs[name], device))  # bit by bit
        assert torch.equal(late, -result), f"{name}: a signal came before its put"
        got, put, rounds = counts
        sizes = f"reads {got // 1024:5} KiB, writes {put // 1024:4} KiB"
        lines.append(f"  {name:19}  {sizes}, rounds: {rounds}")
    library = x.to(device)
    dist.all_reduce(library)
    torch.testing.assert_close(result, library.cpu())
    if device.type == "cpu" and n > 2:  # gloo adds in a different order
        assert not torch.equal(result, library)
    assert not any(os.path.exists(f"/dev/shm/{s.name}") for s in memory.segments)
    if rank == 0:
        print(f"{n} ranks, S = {size // 1024} KiB: equal to a loop over all inputs")
        print("\n".join(lines))

    def put(peer: int, offset: int, values: torch.Tensor) -> None:  # first the new version
        assert rank > 0 or memory.words[0][n + offset // COUNT] == values[0] - 1
        SymmetricMemory.put(memory, peer, offset, values)

    def get(peer: int, offset: int, count: int) -> torch.Tensor:
        step = memory.words[rank][n + offset // COUNT]
        if peer == 0 and rank == n - 1 and step == STEPS - 2:
            memory.wait(0)  # rank 0 writes its next input after this read has begun
        return SymmetricMemory.get(memory, peer, offset, count)

    for rule in ("no protection", "second barrier", "two buffers") if n > 1 else ():
        counts = [None] * n
        with mock.patch.multiple(memory, put=put, get=get):
            dist.all_gather_object(counts, reuse(memory, rule))
        wrong, reported = counts[n - 1]  # of the slow rank
        assert wrong == reported == (STEPS - 1 if rule == "no protection" else 0)
        if rule != "no protection":
            assert not any(sum(counts, ()))  # no rank saw a version that is too new
        if rank == 0:
            print(
                f"  {rule:14}  rank {n - 1} reads late: {wrong} of {STEPS} sums are wrong, "
                f"{reported} reported"
            )


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not 1 <= world <= 8 or world != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        sys.exit("this program needs 1 to 8 ranks on one machine, because they share memory")
    device = init_distributed()
    memory = SymmetricMemory(ELEMENTS)
    try:
        run(memory, device)
    finally:
        memory.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
