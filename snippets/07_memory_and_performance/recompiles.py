"""When does torch.compile compile again, and what happens after eight compilations?

Each compiled version has guards, which are the conditions under which it may be used. If a call
meets the guards of no version, torch compiles a new one. The backend here only counts. The last
part shows that the eight versions are still used, and that all other calls run eagerly.
"""

import logging

import torch
import torch._dynamo


class Count:
    """A backend that counts compilations and runs the graph as it is."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list):
        self.times += 1
        return graph.forward


def compilations(function, calls, **options) -> list[int]:
    """The number of compilations of `function` so far, after each call."""
    torch._dynamo.reset()
    backend = Count()
    compiled = torch.compile(function, backend=backend, **options)
    counts = []
    for call in calls:
        compiled(*call)
        counts.append(backend.times)
    return counts


def after_the_limit() -> tuple[list[int], list[str]]:
    """How often compiled code ran, for ten lengths and an old one; and the warnings."""
    torch._dynamo.reset()
    runs, uses = [], []
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: messages.append(entry.getMessage())
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(handler)

    def backend(graph: torch.fx.GraphModule, inputs: list):
        return lambda *args: runs.append(1) or graph.forward(*args)

    compiled = torch.compile(double, backend=backend, dynamic=False)
    for n in (*range(2, 12), 5):
        before = len(runs)
        torch.testing.assert_close(compiled(torch.ones(n)), torch.full((n,), 2.0))
        uses.append(len(runs) - before)
    logger.removeHandler(handler)
    return uses, messages


# --8<-- [start:cases]
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def scaled(x: torch.Tensor, rate: float) -> torch.Tensor:
    return x * rate


def main() -> None:
    torch.testing.assert_close(double(torch.arange(3)), torch.tensor([0, 2, 4]))
    lengths = [(torch.ones(n),) for n in (8, 9, 10, 11, 1)]
    print("lengths 8, 9, 10, 11, 1")
    print(f"  default:        compiled {compilations(double, lengths)}")
    print(f"  dynamic=True:   compiled {compilations(double, lengths, dynamic=True)}")
    print(f"  dynamic=False:  compiled {compilations(double, lengths, dynamic=False)}")
    x = torch.ones(8)
    kinds = [(x,), (x.double(),), (x.clone().requires_grad_(),), (torch.ones(2, 4),)]
    print(f"float, double, with grad, 2 dimensions: {compilations(double, kinds)}")
    rates = [0.1, 0.2, 0.3, 0.4]
    floats = compilations(scaled, [(x, r) for r in rates])
    as_tensors = [(x, torch.tensor(r)) for r in rates]
    tensors = compilations(scaled, as_tensors)
    assert [round(scaled(*call)[0].item(), 3) for call in as_tensors] == rates
    print(f"a rate that changes, as a float: {floats}, as a tensor: {tensors}")
    # --8<-- [end:cases]

    torch._dynamo.reset()
    compiled = torch.compile(double, backend="eager", dynamic=False, fullgraph=True)
    for n in range(2, 20):
        try:
            compiled(torch.ones(n))
        except Exception as error:
            first = str(error).splitlines()[0]
            print(f"dynamic=False, call {n - 1}: {type(error).__name__}: {first}")
            break
    else:
        raise AssertionError("compiled for 18 lengths, and no limit was hit")
    uses, messages = after_the_limit()
    print(f"ten lengths, then the fourth again: compiled code ran {uses}")
    print(f"  warnings: {[message.splitlines()[0] for message in messages]}")
    assert uses == [1] * 8 + [0] * 2 + [1]
    assert len(messages) == 1
    reasons: list[str] = []
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = True
    compiled = torch.compile(double, backend="eager")
    compiled(torch.ones(8))
    try:
        compiled(torch.ones(9))
    except Exception as error:
        reasons = [line.strip() for line in str(error).splitlines() if "tensor" in line]
        print(f"error_on_recompile: {type(error).__name__}")
        print(f"  {reasons[0]}")


if __name__ == "__main__":
    main()
