"""What bounds a training step? Five bounds from counts and rates, and the measured time.

Start the program with torchrun and 2 ranks, because one rank has nothing to communicate.
Dispatch modes count the FLOPs, bytes and calls of a step. The program measures the cost of a
call, the memory bandwidth, the FLOP/s and the rate of an all-reduce on this machine. For each
of five steps with a known fault, the largest bound must name the fault.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


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


# --8<-- [start:count]
class Count(TorchDispatchMode):
    """Counts operators, and the bytes that they read and write."""

    calls = moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view and "c10d" not in str(func):
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
            self.moved += sum(t.nbytes for t in tensors)
        return result


def bounds(step: Callable, batch: Callable, sent: int, rates: dict) -> dict[str, float]:
    """Lower bounds of the time of a step in s. `sent`: the bytes that it all-reduces."""
    begin = time.perf_counter()
    inputs = batch()
    wait = time.perf_counter() - begin
    with Count() as count, FlopCounterMode(display=False) as flops:
        step(inputs)
    return {
        "input": wait,
        "host": count.calls * rates["call"],
        "memory": count.moved / rates["bytes"],
        "compute": flops.get_total_flops() / rates["flops"],
        "communication": sent / rates["all-reduce"],
    }


# --8<-- [end:count]


def timed(work: Callable[[], object], rounds: int = 5) -> float:
    """The shortest time in s of several rounds. All ranks start together, after a warm-up."""
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def works(device: torch.device) -> dict[str, tuple[Callable, int]]:
    """For each rate: the work that measures it, and its number of calls, bytes or FLOPs."""
    little, large = torch.ones(8, device=device), torch.ones(2**22, device=device)
    square, message = torch.ones(768, 768, device=device), torch.ones(2**21, device=device)
    return {
        "call": (lambda: [little.add_(1.0) for _ in range(1000)], 1000),
        "bytes": (lambda: large + 1.0, 2 * large.nbytes),
        "flops": (lambda: square @ square, 2 * 768**3),
        "all-reduce": (lambda: dist.all_reduce(message), message.nbytes),
    }


def calibrate(device: torch.device) -> dict[str, float]:
    """This machine's seconds per call, bytes/s, FLOP/s and all-reduced bytes/s."""
    rates = {name: amount / timed(work) for name, (work, amount) in works(device).items()}
    return rates | {"call": 1 / rates["call"]}


class Sent(TorchDispatchMode):
    """Counts the bytes of the tensors that are passed to collectives."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in str(func):
            self.total += sum(t.nbytes for t in tree_leaves(args) if torch.is_tensor(t))
        return func(*args, **(kwargs or {}))


def check_amounts(device: torch.device) -> None:
    """The work that measures the rates must be counted in the same way as the steps."""
    ones, done = dict.fromkeys(["call", "bytes", "flops", "all-reduce"], 1), works(device)
    for rate, kind in {"call": "host", "bytes": "memory", "flops": "compute"}.items():
        work, amount = done[rate]
        counted = bounds(lambda _, work=work: work(), lambda: None, 0, ones)
        assert counted[kind] == amount, (rate, counted[kind], amount)
    step, batch, amount = made_steps(device)["communication"]
    for work, sent in (done["all-reduce"], (lambda: step(batch()), amount)):
        with Sent() as mode:
            work()
        assert mode.total == sent, (mode.total, sent)


# --8<-- [start:steps]
def made_steps(device: torch.device) -> dict[str, tuple[Callable, Callable, int]]:
    """For each bound, a step that has it: the step, its input, and the bytes all-reduced."""
    large, square = torch.ones(2**22, device=device), torch.ones(768, 768, device=device)
    weights = [torch.zeros(8, device=device) for _ in range(500)]
    gradient = torch.ones(2**22, device=device)
    row = torch.ones(32, 32, device=device)

    def slow_input() -> torch.Tensor:
        time.sleep(0.1)
        return row

    def many_small(x: torch.Tensor) -> None:  # an optimizer, one tensor at a time
        for weight in weights:
            weight.mul_(0.9).add_(0.1).sub_(0.01)

    def elementwise(x: torch.Tensor) -> torch.Tensor:  # an unfused activation
        return (large * 0.5 + 1.0).relu() * large

    def product(x: torch.Tensor) -> torch.Tensor:
        return square @ square @ square

    return {
        "input": (lambda x: x @ x, slow_input, 0),
        "host": (many_small, lambda: row, 0),
        "memory": (elementwise, lambda: row, 0),
        "compute": (product, lambda: row, 0),
        "communication": (lambda x: dist.all_reduce(gradient), lambda: row, gradient.nbytes),
    }


# --8<-- [end:steps]


def main() -> None:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit("start with torchrun and 2 ranks: torchrun --nproc-per-node=2 diagnose.py")
    device = init_distributed()
    if device.type == "cpu":
        torch.set_num_threads(1)
    report = print if dist.get_rank() == 0 else lambda *_: None
    check_amounts(device)
    rates = calibrate(device)
    report(
        f"a call ≈{1e6 * rates['call']:.1f} µs, memory ≈{rates['bytes'] / 1e9:.1f} GB/s, "
        f"products ≈{rates['flops'] / 1e9:.0f} GFLOP/s, "
        f"all-reduce ≈{rates['all-reduce'] / 1e9:.2f} GB/s"
    )
    report(
        "bounds in ms:   input   host   memory   compute   communication   measured: verdict"
    )
    for name, (step, batch, sent) in made_steps(device).items():
        lower = bounds(step, batch, sent, rates)
        measured = timed(lambda step=step, batch=batch: step(batch()))
        verdict = max(lower, key=lower.get)
        cells = [
            f"≈{1e3 * seconds:.1f}".rjust(len(kind) + 1) for kind, seconds in lower.items()
        ]
        report(f"{name:13}  {'  '.join(cells)}   ≈{1e3 * measured:.1f} ms: {verdict}")
        if dist.get_rank() == 0:
            assert verdict == name, f"the fault is {name}, the largest bound is {verdict}"
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
