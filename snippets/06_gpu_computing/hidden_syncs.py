"""Count the operators of a training loop whose result the host must see, and so must wait for.

On a GPU the host waits in each of them until the queue of its stream is empty. A dispatch mode
sees the same operators on a CPU, so you can find them without a GPU. The list has the common
ones and is not complete. Look at the two totals: both loops compute the same numbers.
"""

import collections
import contextlib
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# each returns a value to the host, or a tensor whose shape depends on the data
WAITS = {
    aten._local_scalar_dense.default: "item(), float(), bool(), print",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.equal.default: "equal",
    aten.bincount.default: "bincount",
}


# --8<-- [start:mode]
class CountWaits(TorchDispatchMode):
    """Counts the operators that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sized = (kwargs or {}).get("output_size") is not None  # the caller gives the length
        if func in WAITS and not sized:
            self.waits[WAITS[func]] += 1
        if func is aten.index.Tensor and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        ):
            self.waits["indexing by a mask"] += 1  # the number of rows depends on the mask
        return func(*args, **(kwargs or {}))


# --8<-- [end:mode]


def setup() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight [32, 10], inputs [steps, b, 32] and labels [steps, b]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 64, 32, generator=generator)
    y = torch.randint(10, (10, 64), generator=generator)
    return torch.zeros(32, 10, requires_grad=True), x, y


def step(weight: torch.Tensor, loss: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight -= 0.1 * gradient


# --8<-- [start:loops]
def chatty(weight, x, y) -> tuple[float, int]:
    """Return the sum of the losses and the number of wrong answers, and wait in each step."""
    total, wrong = 0.0, 0
    for inputs, labels in zip(x, y, strict=True):
        logits = inputs @ weight  # [b, 10]
        loss = torch.nn.functional.cross_entropy(logits, labels)
        if loss.isnan():  # waits
            break
        step(weight, loss)
        missed = labels[logits.argmax(1) != labels]  # waits for the number of rows
        total += loss.item()  # waits
        wrong += len(missed)
    return total, wrong


def quiet(weight, x, y) -> tuple[float, int]:
    """Return the same numbers, but add them up on the device and read them once."""
    total = torch.zeros((), device=x.device)
    wrong = torch.zeros((), dtype=torch.long, device=x.device)
    for inputs, labels in zip(x, y, strict=True):
        logits = inputs @ weight
        loss = torch.nn.functional.cross_entropy(logits, labels)
        step(weight, loss)
        total += loss.detach()
        wrong += (logits.argmax(1) != labels).sum()
    if math.isnan(losses := total.item()):  # waits
        raise RuntimeError("the loss is not a number")
    return losses, int(wrong)  # waits


# --8<-- [end:loops]


def main() -> None:
    x, counts = torch.tensor([1, 0, 2]), torch.tensor([1, 2, 1])
    waiting = [
        x.sum().item,
        x.nonzero,
        x.unique,
        lambda: x[x > 0],
        lambda: x.masked_select(x > 0),
        lambda: torch.equal(x, counts),
        x.bincount,
    ]
    for call in [*waiting, lambda: x.repeat_interleave(counts)]:
        with CountWaits() as counted:
            call()
        assert counted.waits.total() == 1
    with CountWaits() as counted:
        x.repeat_interleave(2)  # the host can compute the length
        x.repeat_interleave(counts, output_size=4)  # the caller gives the length
        x[counts]  # the result has one row for each integer of the index
    assert counted.waits.total() == 0

    results, waits = {}, {}
    for loop in (chatty, quiet):
        with CountWaits() as counted:
            results[loop] = loop(*setup())
        waits[loop] = sum(counted.waits.values())
        print(f"{loop.__name__}, 10 steps: the host waits {waits[loop]} times")
        for words, count in counted.waits.items():
            print(f"  {count:2} × {words}")
    assert waits == {chatty: 30, quiet: 2}
    assert results[chatty][1] == results[quiet][1]
    assert abs(results[chatty][0] - results[quiet][0]) < 1e-4
    weight, x, y = setup()
    x[3] = math.nan
    with contextlib.suppress(RuntimeError):
        quiet(weight, x, y)
        raise AssertionError("a loss that is not a number went by")
    print(f"both: sum of losses {results[quiet][0]:.3f}, {results[quiet][1]} of 640 wrong")


if __name__ == "__main__":
    main()
