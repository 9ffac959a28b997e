"""Prepare a training step for a CUDA graph, check it on any device, and capture it on a GPU.

A graph reads fixed addresses and runs no Python. Each batch is therefore copied into the same
tensor, and the learning rate is a tensor too. The rewritten step must give the same losses as
the ordinary one, which can be checked on a CPU. On an NVIDIA GPU, the program also captures,
replays and times the step.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

STEPS, WARM_UP, WIDTH = 12, 3, 256
HIGH, LOW = 1e-2, 1e-4  # the learning rate, before and after half of the steps


def model_and_batches(device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    x = torch.randn(STEPS, 16, WIDTH)  # [steps, b, h]
    return model.to(device), x.to(device), x[..., :8].sum(-1, keepdim=True).to(device)


def ordinary(device: torch.device) -> list[float]:
    """The ordinary step: new tensors in each step, and a Python number as learning rate."""
    model, xs, ys = model_and_batches(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=HIGH)
    losses = []
    for at in [0] * WARM_UP + list(range(STEPS)):
        if len(losses) == WARM_UP + STEPS // 2:
            optimizer.param_groups[0]["lr"] = LOW
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xs[at]), ys[at])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[WARM_UP:]


# --8<-- [start:static]
class StaticStep:
    """A step that reads `x`, `y` and `rate` from tensors whose addresses never change."""

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model, self.x, self.y = model, x.clone(), y.clone()
        on_gpu = x.device.type == "cuda"  # capturable: the step counters are on the GPU
        rate = torch.tensor(HIGH, device=x.device)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=on_gpu)

    @property
    def rate(self) -> torch.Tensor:  # loading a state replaces this tensor
        return self.optimizer.param_groups[0]["lr"]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (self.x, self.y, self.rate)]

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()  # to None, so backward does not add to old gradients
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# --8<-- [end:static]


# --8<-- [start:capture]
def captured(step: StaticStep) -> Callable[[], torch.Tensor]:
    """Warm up on a side stream, then record one step without running it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # for cuBLAS, autotuning and the optimizer's state
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss  # always the same tensor; it now contains the new loss

    return replay


# --8<-- [end:capture]


# --8<-- [start:train]
def train(device: torch.device, graph: bool) -> tuple[list[float], float]:
    """Losses of the steps after warming up, and seconds for each."""
    model, xs, ys = model_and_batches(device)
    static = StaticStep(model, xs[0], ys[0])
    step = captured(static) if graph else static
    if not graph:
        for _ in range(WARM_UP):
            static()
    addresses = static.addresses()
    losses = []
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for at, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if at == STEPS // 2:
            static.rate.fill_(LOW)
        static.x.copy_(x)
        static.y.copy_(y)
        losses.append(step().clone())
    values = torch.stack(losses).tolist()  # the host waits only here
    seconds = (time.perf_counter() - begin) / STEPS
    assert static.addresses() == addresses  # a graph always reads these addresses
    return values, seconds


# --8<-- [end:train]


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = ordinary(device)
    static, eager_seconds = train(device, graph=False)
    torch.testing.assert_close(static, reference, rtol=1e-4, atol=1e-5)
    print(f"ordinary step: losses {reference[0]:.3f} to {reference[-1]:.3f}")
    print(
        f"static step:   equal in {STEPS} steps, the learning rate lowered after {STEPS // 2}"
    )
    if device.type == "cpu":
        sys.exit("to capture it as a CUDA graph, this program needs an NVIDIA GPU")
    replayed, graph_seconds = train(device, graph=True)
    torch.testing.assert_close(replayed, reference, rtol=1e-4, atol=1e-5)
    print(f"replayed:      equal in {STEPS} steps")
    print(f"eager ≈{eager_seconds * 1e6:.0f} µs a step, replayed ≈{graph_seconds * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
