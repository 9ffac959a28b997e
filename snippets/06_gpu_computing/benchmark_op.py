"""torch.utils.benchmark measures an operator, and a repeated measurement shows its noise.

The Timer warms up, chooses the number of loops, reports the median, uses one thread and waits
for a GPU. Look at the line of the statement that is measured twice: a difference between two
variants means something only if it is larger than the difference in this line.
"""

import math
import statistics
import timeit

import torch
from torch.utils.benchmark import Measurement, Timer

VARIANTS = ["(1 - x).clamp(min=0)", "(1 - x).clamp_(min=0)", "torch.relu(1 - x)"]


def measure(statement: str, x: torch.Tensor) -> Measurement:
    timer = Timer(statement, globals={"torch": torch, "x": x})
    return timer.blocked_autorange(min_run_time=0.05)


def main() -> None:
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    torch.manual_seed(0)
    for n in (1 << 8, 1 << 14):
        x = torch.randn(n, device=device)
        print(f"{x.numel():,} elements")
        for statement in VARIANTS:
            y = eval(statement)  # check the result before the time is measured
            torch.testing.assert_close(y, torch.where(x < 1, 1 - x, 0))
            # --8<-- [start:median]
            result = measure(statement, x)
            times = torch.tensor(result.times, dtype=torch.float64)
            low, typical, high = times.quantile(times.new_tensor([0.25, 0.5, 0.75])).tolist()
            assert math.isclose(typical, result.median)
            assert math.isclose(high - low, result.iqr, abs_tol=1e-12)
            # the measurement stores the statement that was timed
            print(f"  {result.task_spec.stmt:21} ≈{1e6 * typical:.1f} µs", end=", ")
            print(f"half of all from ≈{1e6 * low:.1f} to ≈{1e6 * high:.1f} µs")
            # --8<-- [end:median]
    first, second = (measure("x + 1", x) for _ in range(2))
    assert first.task_spec == second.task_spec and first.times != second.times
    print(f"{second.task_spec.stmt} twice: ≈{1e6 * first.median:.2f} µs", end=", ")
    print(f"then ≈{1e6 * second.median:.2f} µs")
    calls = torch.zeros_like(x)  # each call adds 1 to all elements
    counted = measure("x.add_(1)", calls)
    assert len(calls.unique()) == 1, "the statement does not use the whole tensor"
    runs = counted.number_per_run * len(counted.times)
    assert calls[0] > runs, "the Timer does not warm up"
    assert counted.mean * runs > 0.049, "the Timer stops too early"
    threads: list[int] = []
    torch.set_num_threads(2)  # the Timer changes this number while it measures
    statement = "threads.append(torch.get_num_threads())"
    Timer(statement, globals={"torch": torch, "threads": threads}).timeit(1)
    assert {*threads} == {first.task_spec.num_threads} and torch.get_num_threads() == 2
    print(f"threads, if not told: {threads[0]}")
    torch.set_num_threads(1)  # the Timer also uses one thread
    square = torch.randn(64, 64, device=device)
    call, *later = (timeit.timeit(lambda: torch.linalg.qr(square), number=1) for _ in range(20))
    later_call = statistics.median(later)
    assert call > later_call, "an earlier call has initialized the library"
    print(f"torch.linalg.qr: the first call ≈{1e6 * call:,.0f} µs", end=", ")
    print(f"a later one ≈{1e6 * later_call:,.0f} µs")


if __name__ == "__main__":
    main()
