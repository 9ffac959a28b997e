"""TorchScript, as in old `.pt` files: script, trace, freeze, save, and what it cannot do.

A script contains both branches of an `if`. A trace contains only the branch that its example
took, and only a warning says so. The parameters of a frozen module are constants, and a saved
module can be loaded without its class.
"""

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=FutureWarning)  # from torch 2.14 on


# --8<-- [start:gate]
class Gate(nn.Module):
    """Applies one of two layers, depending on the sign of the sum of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.up(x)
        return self.down(x)


# --8<-- [end:gate]


class KeywordArguments(nn.Module):
    def forward(self, x, **options):
        return x


class TryBlock(nn.Module):
    def forward(self, x):
        try:
            return x.view(3)
        except RuntimeError:
            return x


class MatchStatement(nn.Module):
    def forward(self, x):
        match x.dim():
            case 1:
                return x
            case _:
                return -x


def operators(module: torch.jit.ScriptModule, kind: str) -> int:
    """How many nodes of a kind its graph has, those inside branches included."""
    return sum(node.kind() == kind for node in module.graph.findAllNodes(kind))


def main() -> None:
    torch.manual_seed(0)
    gate = Gate().eval()
    positive, negative = torch.ones(2, 4), -torch.ones(2, 4)
    assert not torch.equal(gate.up(negative), gate.down(negative))

    # --8<-- [start:ways]
    scripted = torch.jit.script(gate)  # compiles the source
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(gate, positive)  # runs it once and records the operators
    frozen = torch.jit.freeze(scripted)
    # --8<-- [end:ways]

    print("                 if  parameters  equal on the example  on its negative")
    for name, module in (("script", scripted), ("trace", traced), ("freeze", frozen)):
        on_example = torch.equal(module(positive), gate(positive))
        on_negative = torch.equal(module(negative), gate(negative))
        assert on_example and on_negative == (name != "trace")
        count = len(list(module.parameters()))
        branches = operators(module, "prim::If")
        assert (branches, count) == {"script": (1, 4), "trace": (0, 4), "freeze": (1, 0)}[name]
        print(f"{name:8} {branches:10}  {count:10}  {on_example!s:>20}  {on_negative!s:>15}")
    said = [str(w.message) for w in caught if w.category is torch.jit.TracerWarning]
    assert said  # several times: the trace is checked by running the same example again
    print(f"TracerWarning: {said[0].split('. ')[0]}.")
    assert torch.equal(traced(negative), gate.up(negative))  # the other layer: no error

    frozen.save("gate.pt")
    loaded = torch.jit.load("gate.pt")
    assert torch.equal(loaded(negative), gate(negative)) and not isinstance(loaded, Gate)
    print(f"loaded without its class: a {type(loaded).__name__}, equal")

    print("script refuses")
    for module in (KeywordArguments(), TryBlock(), MatchStatement()):
        try:
            torch.jit.script(module)
        except Exception as error:
            text = str(error).split(":\n")[0].split(" or ")[0].strip()
            print(f"  {type(module).__name__:16} {type(error).__name__}: {text}")
        else:
            raise AssertionError(f"{type(module).__name__} compiles")


if __name__ == "__main__":
    main()
