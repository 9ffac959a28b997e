"""Graph breaks: where torch.compile ends a graph, why, and a function without graph breaks.

The backend only counts the operators of each graph and runs it eagerly. It generates no code,
so the output shows what Dynamo does.
"""

import torch
import torch._dynamo


# --8<-- [start:functions]
def with_breaks(x: torch.Tensor) -> torch.Tensor:
    x = x.sin() * 2
    if x.sum() > 0:  # depends on the values in x
        x = x + 1
    print("", end="")
    return x.cos() * 3


def without_breaks(x: torch.Tensor) -> torch.Tensor:
    x = x.sin() * 2
    x = torch.where(x.sum() > 0, x + 1, x)  # the device computes both and chooses
    return x.cos() * 3


# --8<-- [end:functions]


class Counting:
    """A backend that runs its graphs eagerly and stores their numbers of operators."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list):
        self.graphs.append(
            sum(n.op in ("call_function", "call_method") for n in graph.graph.nodes)
        )
        return graph.forward


def main() -> None:
    torch.set_num_threads(1)
    x = torch.tensor([0.5] * 4 + [-0.5] * 3)  # elements of both signs
    for function in (with_breaks, without_breaks):
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
        torch.testing.assert_close(compiled(x), with_breaks(x))
        torch.testing.assert_close(compiled(-x), with_breaks(-x))
        print(f"  operators in the graphs, for both signs of x: {backend.graphs}")

    torch._dynamo.reset()
    try:
        torch.compile(with_breaks, backend="eager", fullgraph=True)(x)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()]
        print(f"fullgraph=True: {type(error).__name__}: {lines[0]}")
        for line in lines:
            if line.startswith("Explanation:") or "`torch.cond`" in line:
                print(f"  {line}")


if __name__ == "__main__":
    main()
