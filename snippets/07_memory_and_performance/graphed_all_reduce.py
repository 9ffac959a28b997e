"""Capture a training step with its all-reduce in a CUDA graph, and check it on any device.

NCCL launches its kernels on a stream, so a CUDA graph records them like all other kernels. Each
replay then starts the all-reduce again, without a call of torch.distributed. Every rank must
therefore replay the same graphs in the same order. On a CPU, the program only runs the step
that it would capture. On NVIDIA GPUs, it also captures and replays the step. In both cases, the
weights must equal the weights of one process that trains on all rows.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

STEPS, WARM_UP, ROWS, WIDTH = 20, 3, 8, 64
RATE = 0.02


def all_batches(n: int) -> torch.Tensor:
    """The rows of all ranks, [steps, ranks, rows, width]. They are the same on every rank."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(STEPS, n, ROWS, WIDTH, generator=random, dtype=torch.float64)


def one_process(n: int) -> torch.Tensor:
    """The weights after training on the rows of all ranks, with autograd and no collective."""
    weights = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    for batch in all_batches(n):
        rows = batch.flatten(0, 1)
        loss = (rows @ weights - rows.sin().sum(1)).square().mean() / 2
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            weights -= RATE * gradient
    return weights.detach()


# --8<-- [start:step]
class Step:
    """A step that reads `x` and changes `weights`. The addresses of both never change."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.ones(ROWS, WIDTH, dtype=torch.float64, device=device)
        self.weights = torch.zeros(WIDTH, dtype=torch.float64, device=device)

    def __call__(self) -> None:
        error = self.x @ self.weights - self.x.sin().sum(1)  # [rows]
        gradient = self.x.T @ error / (ROWS * dist.get_world_size())
        dist.all_reduce(gradient)  # on a GPU, the graph contains the kernel of this call
        self.weights -= RATE * gradient


def capture_step(step: Step) -> Callable[[], None]:
    """Warm up on a side stream, and record one step without running it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # NCCL connects the ranks in the first all-reduce
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    step.weights.zero_()  # forget the warm-up, and keep the address
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# --8<-- [end:step]


def train(device: torch.device, graph: bool) -> tuple[torch.Tensor, float]:
    """Return the weights after all steps, on the CPU, and the seconds of each step."""
    step = Step(device)
    run = capture_step(step) if graph else step
    batches = all_batches(dist.get_world_size())[:, dist.get_rank()].to(device)
    dist.barrier()
    begin = time.perf_counter()
    for batch in batches:
        step.x.copy_(batch)
        run()
    weights = step.weights.cpu()  # the host waits only here
    return weights, (time.perf_counter() - begin) / STEPS


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


def main() -> int:
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    report = print if rank == 0 else lambda *_: None
    expected = one_process(n)
    assert expected.abs().min() > 1e-3  # every weight has moved
    warm = Step(device)
    warm()
    assert warm.weights.abs().min() > 1e-3  # a warm-up changes them, so it must be undone

    eager, eager_s = train(device, graph=False)
    torch.testing.assert_close(eager, expected, rtol=1e-9, atol=1e-9)
    report(f"eager:  after {STEPS} steps, {n} ranks have the weights of one process")
    if device.type != "cuda":
        dist.barrier()  # rank 0 has printed before a rank exits with an error
        if rank == 0:
            message = "to capture the step in a CUDA graph, this program needs NVIDIA GPUs"
            print(message, file=sys.stderr, flush=True)
        return 1
    replayed, graph_s = train(device, graph=True)
    torch.testing.assert_close(replayed, expected, rtol=1e-9, atol=1e-9)
    report(f"replay: after {STEPS} replays of one graph, the same weights")
    report(f"eager ≈{eager_s * 1e6:.0f} µs per step, replay ≈{graph_s * 1e6:.0f} µs")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
