"""Why DDP replaced DataParallel: threads share one interpreter lock, and processes do not.

`nn.DataParallel` is one process with one thread per device. In every step it scatters the
batch, copies the model to all devices, and runs the replicas in threads. It gathers the outputs
on device 0, which computes the loss. It also sums all gradients there, because device 0 has the
only optimizer. The copy of the model comes before forward, so nothing hides it. `data_parallel`
below does these steps and counts the bytes that are sent between devices.

The program then compares threads with processes. Its forward consists of many small operations,
so nearly all of its time is Python code, which needs the interpreter lock. Two threads
therefore take turns. Two processes do not wait for each other. Each time is the fastest of a
few rounds, because other work on the machine can only make a round slower.
"""

import copy
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

N = 2  # devices, or processes
ROUNDS = 5


class Recurrent(nn.Module):
    """A model of many small operations: nearly all of its time is Python and dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, time, 16] -> [b, 10]
        state = x.new_zeros(len(x), 16)
        for x_t in x.unbind(dim=1):
            state = torch.tanh(self.cell(torch.cat([x_t, state], dim=1)))[:, :16]
        return self.head(torch.cat([state, state], dim=1))


def parallel_apply(replicas: list[nn.Module], shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run every replica on its shard, each in its own thread."""
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(shards)
    together = threading.Barrier(len(shards), timeout=300)  # all threads start together

    def work(i: int) -> None:
        together.wait()
        outputs[i] = replicas[i](shards[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


def data_parallel(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, Counter]:
    """Run forward and backward like nn.DataParallel. Return the loss and the bytes moved."""
    moved = Counter()
    shards = inputs.chunk(N)  # scatter
    moved["inputs"] = sum(shard.nbytes for shard in shards[1:])
    # replicate, again in every step: the optimizer has changed the parameters
    replicas = [model, *(copy.deepcopy(model) for _ in shards[1:])]
    moved["parameters"] = sum(
        p.nbytes for replica in replicas[1:] for p in replica.parameters()
    )
    outputs = parallel_apply(replicas, shards)
    moved["outputs and their gradients"] = sum(2 * output.nbytes for output in outputs[1:])
    loss = nn.functional.cross_entropy(torch.cat(outputs), targets)  # gather, on device 0
    loss.backward()
    for replica in replicas[1:]:
        for parameter, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            parameter.grad += theirs.grad  # reduce, to device 0
            moved["gradients"] += theirs.grad.nbytes
    return loss, moved


def process(shard: torch.Tensor, barrier, results) -> None:
    """Run forward as one process of DDP does: the same work with its own interpreter."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Recurrent()
    for _ in range(ROUNDS):
        barrier.wait()  # until `main` starts the clock
        output = model(shard)
        barrier.wait()  # until both processes have finished
        results.put((len(shard), output.sum().item()))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())  # Ψ


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Recurrent()
    inputs, targets = torch.randn(16, 1000, 16), torch.randint(10, (16,))
    context = multiprocessing.get_context("fork")  # before there are any threads
    barrier, results = context.Barrier(N + 1), context.SimpleQueue()
    workers = [
        context.Process(target=process, args=(shard, barrier, results), daemon=True)
        for shard in inputs.chunk(N)
    ]
    for worker in workers:
        worker.start()

    nn.functional.cross_entropy(model(inputs), targets).backward()
    whole_batch = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    _, moved = data_parallel(model, inputs, targets)
    for parameter, expected in zip(model.parameters(), whole_batch, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
    print("DataParallel by hand: the gradients equal those of the whole batch")
    for what, size in moved.items():
        print(f"  {size:>7,} bytes of {what}")
    # All ranks of DDP together send the same number of bytes. But each rank sends an equal
    # part, and sends it during backward. (With NCCL, the GPUs of DataParallel pass copies and
    # gradients on to each other. The copies still come before forward.)
    assert moved["parameters"] + moved["gradients"] == 2 * (N - 1) * 4 * count(model)
    print("parameters and gradients that a device sends and receives, in units of 4Ψ bytes:")
    for n in (2, 8):
        through_one = 2 * (n - 1)  # out of device 0 and into it
        through_each = 2 * through_one / n  # out of each rank and into it
        print(
            f"  N = {n}: {through_one} on device 0 of DataParallel, "
            f"{through_each:.1f} on each rank of DDP"
        )

    rows: list[int] = []  # samples in each forward; the hook is copied with the model
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    replicas, shards = [model, copy.deepcopy(model)], inputs.chunk(N)

    alone, threads, processes = [], [], []
    for _ in range(ROUNDS):  # they take turns, so that a slow second affects all of them
        alone.append(seconds(lambda: model(shards[0])))
        threads.append(seconds(lambda: parallel_apply(replicas, shards)))
        barrier.wait()
        processes.append(seconds(barrier.wait))
        outputs = sorted(results.get() for _ in workers)
        expected = sorted((len(shard), model(shard).sum().item()) for shard in shards)
        torch.testing.assert_close(outputs, expected)  # the processes did the same work
    for worker in workers:
        worker.join()

    assert rows == [len(inputs) // N] * ROUNDS * (1 + N + N)  # alone, threads, comparison
    one, two, both = min(alone), min(threads), min(processes)
    print("forward of one shard, then of two shards at once:")
    print(f"  one shard   ≈{one * 1e3:.0f} ms")
    print(f"  2 threads   ≈{two * 1e3:.0f} ms, ≈{two / one:.1f} times as long")
    print(f"  2 processes ≈{both * 1e3:.0f} ms, ≈{both / one:.1f} times as long")


if __name__ == "__main__":
    main()
