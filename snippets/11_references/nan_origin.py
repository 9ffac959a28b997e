"""Finds the origin of a NaN: anomaly mode names the line of the forward pass that causes it.

The loss is finite, but the gradient is NaN. The derivative of sqrt at 0 is infinite, and the
mask multiplies it by 0. Hooks that check outputs find nothing, because every output is finite.
"""

import re
import statistics
import time
import warnings

import torch


# --8<-- [start:model]
def distances(points: torch.Tensor) -> torch.Tensor:
    """The mean distance of each pair of different points."""
    squared = (points[:, None] - points[None]).square().sum(-1)
    length = squared.sqrt()
    return length[~torch.eye(len(points), dtype=torch.bool)].mean()


def fixed(points: torch.Tensor) -> torch.Tensor:
    squared = (points[:, None] - points[None]).square().sum(-1)
    apart = squared > 0  # elsewhere, replace the 0 before the square root
    length = torch.where(apart, squared, 1.0).sqrt()
    return length[apart].mean()


# --8<-- [end:model]


def seconds(check: bool) -> float:
    """The median time of a forward and backward, with anomaly mode on or off."""
    points, times = torch.randn(64, 8, requires_grad=True), []
    for _ in range(15):
        start = time.perf_counter()
        with torch.autograd.set_detect_anomaly(check):
            fixed(points).backward()
            assert torch.is_anomaly_enabled() == check
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points = torch.randn(5, 3, requires_grad=True)
    loss = distances(points)
    loss.backward()
    missing = points.grad.isnan().sum()
    print(f"loss finite: {loss.isfinite().item()}, NaN in the gradient: {missing} of 15")
    assert loss.isfinite() and points.grad.isnan().all()

    # --8<-- [start:ask]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                distances(points).backward()
        except RuntimeError as error:
            print(f"RuntimeError: {error}")
    forward = next(
        str(w.message) for w in caught if "Traceback of forward call" in str(w.message)
    )
    print(f"  called at: {re.findall(r'^    (.*)', forward, re.MULTILINE)[-1].strip()}")
    # --8<-- [end:ask]
    assert "squared.sqrt()" in forward

    points.grad = None
    fixed(points).backward()
    torch.testing.assert_close(fixed(points), distances(points))
    (truth,) = torch.autograd.grad(torch.pdist(points).mean(), points)
    torch.testing.assert_close(points.grad, truth)
    print(f"fixed: NaN in the gradient: {points.grad.isnan().sum()}, the same loss")
    print(f"a step in anomaly mode: ≈{seconds(True) / seconds(False):.1f} times as long")


if __name__ == "__main__":
    main()
