"""Graph breaks: where torch.compile leaves the graph, why, and the same function without them.

The backend is a function that counts what it gets and runs it as it is: no code is generated,
and what dynamo does can be seen alone.
"""

import torch
import torch._dynamo


# --8<-- [start:functions]
def chatty(x: torch.Tensor) -> torch.Tensor:
    x = x.sin() * 2
    if x.sum() > 0:  # which way? only data can tell
        x = x + 1
    print("", end="")
    return x.cos() * 3


def quiet(x: torch.Tensor) -> torch.Tensor:
    x = x.sin() * 2
    x = torch.where(x.sum() > 0, x + 1, x)  # both ways, chosen on the device
    return x.cos() * 3


# --8<-- [end:functions]


class Counting:
    """A backend that runs its graphs eagerly, and remembers how many operators each has."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list):
        self.graphs.append(
            sum(n.op in ("call_function", "call_method") for n in graph.graph.nodes)
        )
        return graph.forward


def main() -> None:
    torch.set_num_threads(1)
    x = torch.tensor([0.5] * 4 + [-0.5] * 3)  # its sum has a sign, its elements have both
    for function in (chatty, quiet):
        torch._dynamo.reset()
        explained = torch._dynamo.explain(function)(x)
        print(
            f"{function.__name__}: {explained.graph_count} graphs, "
            f"{explained.graph_break_count} breaks"
        )
        for reason in explained.break_reasons:
            line = reason.user_stack[-1]
            print(f"  line {line.lineno}: {line.line.strip()}")
        torch._dynamo.reset()
        backend = Counting()
        compiled = torch.compile(function, backend=backend)
        torch.testing.assert_close(compiled(x), chatty(x))
        torch.testing.assert_close(compiled(-x), chatty(-x))
        print(f"  operators in the graphs, for both signs of x: {backend.graphs}")

    torch._dynamo.reset()
    try:
        torch.compile(chatty, backend="eager", fullgraph=True)(x)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()]
        print(f"fullgraph=True: {type(error).__name__}: {lines[0]}")
        for line in lines:
            if line.startswith("Explanation:") or "`torch.cond`" in line:
                print(f"  {line}")


if __name__ == "__main__":
    main()
