"""Why DDP replaced DataParallel: threads share one interpreter, processes do not.

`nn.DataParallel` is one process with one thread per device. Every step scatters the batch,
copies the model to all devices, runs the replicas in threads, gathers the outputs on device 0,
where the loss is taken, and adds up all gradients there, where the only optimizer lives. The
copy comes before forward, so nothing hides it. `data_parallel` below does these steps and
counts the bytes that cross between devices.

A forward that spends its time in Python, as one of many small operations does, needs the global
interpreter lock: two threads take turns. Two processes do not know of each other. Each time is
the fastest of a few, since whatever else the machine does only adds.
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
    """Many small operations: nearly all of its time is Python and dispatch."""

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
    """Run every replica on its shard, each in a thread of its own."""
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(shards)
    together = threading.Barrier(len(shards), timeout=300)  # else they would take turns

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
    """One forward and backward as nn.DataParallel does it; also the bytes it moves."""
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


def process(shard: torch.Tensor, barrier) -> None:
    """What one process of DDP does in forward: the same work, alone with its interpreter."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Recurrent()
    for _ in range(ROUNDS):
        barrier.wait()  # until `main` says go
        model(shard)
        barrier.wait()  # until both have finished


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
    barrier = context.Barrier(N + 1)
    workers = [context.Process(target=process, args=(s, barrier)) for s in inputs.chunk(N)]
    for worker in workers:
        worker.start()

    nn.functional.cross_entropy(model(inputs), targets).backward()
    whole_batch = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    _, moved = data_parallel(model, inputs, targets)
    for parameter, truth in zip(model.parameters(), whole_batch, strict=True):
        torch.testing.assert_close(parameter.grad, truth)
    print("DataParallel by hand: its gradients are those of the whole batch")
    for what, size in moved.items():
        print(f"  {size:>7,} bytes of {what}")
    # DDP sends as much in all, but evenly, and while backward computes. (Between GPUs with
    # NCCL, DataParallel passes copies and gradients on; its copies still precede forward.)
    assert moved["parameters"] + moved["gradients"] == 2 * (N - 1) * 4 * count(model)
    print("parameters and gradients in units of 4Ψ bytes, copied from one device, or by DDP:")
    for n in (2, 8):
        through_one = 2 * (n - 1)  # out of device 0 and into it
        through_each = 2 * through_one / n  # out of each rank and into it
        print(
            f"  N = {n}: {through_one} through device 0, {through_each:.1f} through each rank"
        )

    rows: list[int] = []  # of each forward; the hook is copied with the model
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    replicas, shards = [model, copy.deepcopy(model)], inputs.chunk(N)

    alone, threads, processes = [], [], []
    for _ in range(ROUNDS):  # in turns, so that a slow second hits all of them
        alone.append(seconds(lambda: model(shards[0])))
        threads.append(seconds(lambda: parallel_apply(replicas, shards)))
        barrier.wait()
        processes.append(seconds(barrier.wait))
    for worker in workers:
        worker.join()

    assert rows == [len(inputs) // N] * ROUNDS * (1 + N)  # one shard alone, then all
    one, two, both = min(alone), min(threads), min(processes)
    print("forward of one shard, then of two shards at once:")
    print(f"  one shard   ≈{one * 1e3:.0f} ms")
    print(f"  2 threads   ≈{two * 1e3:.0f} ms, ≈{two / one:.1f} times as long")
    print(f"  2 processes ≈{both * 1e3:.0f} ms, ≈{both / one:.1f} times as long")


if __name__ == "__main__":
    main()
