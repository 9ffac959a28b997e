"""Shows where the straight-through estimator is right and where it is wrong, on one weight.

round() has slope 0 nearly everywhere. Its average over a uniform offset of one step is the
identity, whose slope is 1, so the estimator is the exact gradient of this average. A single
weight does not settle between two integers. It oscillates, and the fraction of its time at the
upper integer equals the target.
"""

import itertools

import torch


# --8<-- [start:through]
def round_through(x: torch.Tensor) -> torch.Tensor:
    """Forward round(x), backward the gradient of x: an autograd.Function in one line."""
    return x + (x.round() - x).detach()


# --8<-- [end:through]


# --8<-- [start:weight]
def descend(rounding, target: float, steps: int = 3000, lr: float = 0.01) -> list[float]:
    """Minimize (rounding(w) - target)² / 2 by gradient descent; return rounding(w) per step."""
    w = torch.tensor(0.6, requires_grad=True)
    path = []
    for _ in range(steps):
        value = rounding(w)
        (gradient,) = torch.autograd.grad((value - target).square() / 2, w)
        with torch.no_grad():
            w -= lr * gradient
        path.append(value.item())
    return path


# --8<-- [end:weight]


def main() -> None:
    torch.set_num_threads(1)
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    (plain,) = torch.autograd.grad(x.round().sum(), x)
    (through,) = torch.autograd.grad(round_through(x).sum(), x)
    slopes = [slope.unique().tolist() for slope in (plain, through)]
    print(f"slope of round: {slopes[0]}, straight through: {slopes[1]}")
    assert not plain.any() and (through == 1).all() and round_through(x).equal(x.round())

    # the library's fake quantization does the same; where it clamps, the gradient is 0
    x = torch.linspace(-3, 3, 100, requires_grad=True)
    fake = torch.fake_quantize_per_tensor_affine(x, 0.25, 0, -7, 7)
    (library,) = torch.autograd.grad(fake.sum(), x)
    assert torch.equal(library, ((x / 0.25).round().abs() <= 7).float())
    assert torch.equal(fake, (x / 0.25).round().clamp(-7, 7) * 0.25)
    print("slope of torch.fake_quantize_per_tensor_affine: 1 inside the range, 0 outside")

    # the average over all offsets r in [-1/2, 1/2): of 10,000 evenly spread ones
    offsets = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000 - 0.5
    points = torch.tensor([0.2, 0.49, 0.8, 1.37], dtype=torch.float64)
    smooth = (points[:, None] + offsets).round().mean(1)
    torch.testing.assert_close(smooth, points, rtol=0, atol=1e-4)
    print(f"round(x + r) averaged over r, at {points.tolist()}: "
          f"{[round(v, 3) for v in smooth.tolist()]}")  # fmt: skip

    # with a loss l(q) = (q - 0.3)²/2 the same average, differentiated: l(1) - l(0) in [0, 1)
    x = torch.tensor([0.2, 0.8], dtype=torch.float64, requires_grad=True)
    loss = (round_through(x[:, None] + offsets) - 0.3).square() / 2
    (through,) = torch.autograd.grad(loss.mean(1).sum(), x)  # the average of l'(round(x + r))
    x = x.detach()
    between = (1 - x) * 0.3**2 / 2 + x * 0.7**2 / 2  # a straight line from l(0) to l(1)
    torch.testing.assert_close(loss.detach().mean(1), between, rtol=0, atol=1e-4)
    rounded = (x[:, None] + offsets).round()
    shifted = (x[:, None] + 0.01 + offsets).round()
    slope = ((shifted - 0.3).square() / 2 - (rounded - 0.3).square() / 2).mean(1) / 0.01
    exact, passed_on = ([round(v, 3) for v in t.tolist()] for t in (slope, through))
    print(f"slope of the averaged loss at {x.tolist()}: {exact}, the estimator's: {passed_on}")
    torch.testing.assert_close(slope, torch.full_like(slope, 0.2), rtol=0, atol=2e-3)
    torch.testing.assert_close(through, x - 0.3, rtol=0, atol=1e-3)

    print(
        "one weight, target 0.3, integers only; the better of them is 0, with a loss of 0.045"
    )
    functions = (torch.round, round_through)
    stuck, moved = (descend(function, 0.3, steps=1000) for function in functions)
    print(f"  round: stays at {stuck[-1]:.0f}, because its gradient is 0")
    assert set(stuck) == {1.0} and set(moved) == {0.0, 1.0}  # only the gradient is different
    for lr in (0.1, 0.01):
        path = descend(round_through, 0.3, lr=lr)[-1000:]
        switches = sum(a != b for a, b in itertools.pairwise(path))
        share = sum(path) / len(path)
        loss = sum((value - 0.3) ** 2 / 2 for value in path) / len(path)
        print(f"  straight through, lr {lr}: {switches} switches in 1,000 steps, "
              f"at 1 in {share:.1%}, mean loss {loss:.3f}")  # fmt: skip
        assert abs(share - 0.3) < 0.01 and switches > 20
        assert abs(loss - 0.3 * 0.7 / 2) < 0.005 and loss > 0.045


if __name__ == "__main__":
    main()
