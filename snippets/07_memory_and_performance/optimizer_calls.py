"""AdamW tensor by tensor, for lists of tensors, and in one kernel: calls and time of a step.

The arithmetic per parameter is the same in all three cases. The number of operator calls
differs, and so does the number of times that each value is read from memory.
"""

import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TENSORS, LENGTH = 200, 1000


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


# --8<-- [start:run]
def run(device: torch.device, **options: bool) -> tuple[int, float, torch.Tensor]:
    """Calls of a step, its time in s (shortest of five), and the parameters after seven."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for _ in range(TENSORS):
        values = torch.randn(LENGTH, generator=generator).to(device)
        values.grad = torch.randn(LENGTH, generator=generator).to(device)
        parameters.append(values)
    optimizer = torch.optim.AdamW(parameters, lr=0.01, **options)
    start = torch.cat(parameters)
    optimizer.step()  # creates the state of the optimizer
    with Calls() as calls:
        optimizer.step()
    times = []
    for _ in range(5):
        if device.type != "cpu":
            torch.accelerator.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    least, end = min(times), torch.cat(parameters)
    assert least <= sum(times) / 5
    # if the gradient is constant, each step of Adam is as large as the learning rate
    moved = (end - start * (1 - 0.01 * 0.01) ** 7).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 7 * 0.01), rtol=0.05, atol=0)
    return calls.count, least, end.cpu()


# --8<-- [end:run]


class Reads(TorchDispatchMode):
    """Counts how often Python reads the value of a tensor, as `.item()` does."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counter_reads(tensors: int, **options: bool) -> int:
    """How often a step of AdamW reads the step counters of `tensors` tensors."""
    parameters = [torch.ones(2) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW(parameters, **options)
    optimizer.step()  # creates the counters
    with Reads() as reads:
        optimizer.step()
    return reads.count


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    print(f"AdamW over {TENSORS} tensors of {LENGTH}")
    results = {}
    for name, options in (
        ("for each tensor", {"foreach": False}),
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
    ):
        calls, seconds, parameters = results[name] = run(device, **options)
        torch.testing.assert_close(parameters, results["for each tensor"][2])
        many = "call" if calls == 1 else "calls"
        print(f"{name:16} {calls:5} {many} a step, ≈{1e3 * seconds:.2f} ms")
    print("parameters equal after the same number of steps")
    assert results["fused"][1] < results["for each tensor"][1]
    # foreach reads the counter of each tensor twice, and makes a few calls besides
    assert counter_reads(3, foreach=True) == 2 * 3 and counter_reads(3, fused=True) == 0
    assert results["foreach"][0] - counter_reads(TENSORS, foreach=True) < 20


if __name__ == "__main__":
    main()
