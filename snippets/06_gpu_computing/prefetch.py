"""Copy the next batch to the GPU while the current batch is in use, by a stream and events.

With an accelerator, batches are copied from pinned memory in a second stream. An event makes
the kernels wait for their batch. The program times the loop and compares it with the formula
for stages that overlap. Without an accelerator the same loop runs and nothing is copied.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import torch


# --8<-- [start:prefetch]
def prefetch(batches: list[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield `batches` on `device`. Each batch is copied while the previous one is in use."""
    if device.type in ("cpu", "mps"):  # no link, or no streams of this API
        yield from (batch.to(device) for batch in batches)
        return
    copies = torch.Stream(device=device)
    compute = torch.accelerator.current_stream(device)

    def start(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        arrived = torch.Event(device=device)
        with copies:  # launches in this block go into the stream of copies
            moved = batch.pin_memory().to(device, non_blocking=True)
            arrived.record(copies)
        moved.record_stream(compute)  # its memory stays in use until `compute` is done
        return moved, arrived

    upcoming = start(batches[0])
    for following in [*batches[1:], None]:
        batch, arrived = upcoming
        if following is not None:
            upcoming = start(following)
        compute.wait_event(arrived)  # the stream waits, and the host goes on
        yield batch


# --8<-- [end:prefetch]


def milliseconds(run: Callable[[], object]) -> float:
    """Return the least time of five calls and of all their work, after two calls to warm up."""
    times = []
    for _ in range(7):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[2:])


def measure(device: torch.device, k: int = 8) -> None:
    """Print the time of `k` copies and `k` products: alone, in turns, and with copies ahead."""
    batches = [torch.randn(4096, 4096).pin_memory() for _ in range(k)]  # [b, h], 64 MiB
    weight = torch.randn(4096, 2048, device=device)

    def in_turns() -> Iterator[torch.Tensor]:
        for batch in batches:
            yield batch.to(device, non_blocking=True)

    def multiply(batches: Iterable[torch.Tensor]) -> None:
        for batch in batches:
            torch.mm(batch, weight)

    there = list(in_turns())
    copies = milliseconds(lambda: list(in_turns()))
    products = milliseconds(lambda: multiply(there))
    one_stream = milliseconds(lambda: multiply(in_turns()))
    ahead = milliseconds(lambda: multiply(prefetch(batches, device)))
    formula = (copies + products) / k + (k - 1) * max(copies, products) / k
    print(f"{k} batches of 64 MiB: copies alone ≈{copies:.1f} ms, products ≈{products:.1f} ms")
    print(f"in turns ≈{one_stream:.1f} ms, the sum is ≈{copies + products:.1f}")
    print(f"copied ahead ≈{ahead:.1f} ms, by the formula ≈{formula:.1f}")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(256, 512, generator=generator) for _ in range(6)]  # [b, h]
    weight = torch.randn(512, 512, generator=generator)

    there = weight.to(device)
    results = [(batch @ there).relu().sum() for batch in prefetch(batches, device)]
    expected = torch.stack(
        [(batch.double() @ weight.double()).relu().sum() for batch in batches]
    )
    actual = torch.stack(results).cpu().double()  # the host waits here, once
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
    print(f"{len(batches)} batches, equal to the float64 sums")
    if device.type not in ("cpu", "mps"):
        measure(device)


if __name__ == "__main__":
    main()
