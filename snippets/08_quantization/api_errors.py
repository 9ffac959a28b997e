"""Errors of integer weights and of the old quantization API, each with a fix."""

import importlib
import sys
import warnings

import torch
from torch import nn

try:
    from torch.ao import quantization as old
except ImportError:
    sys.exit("this torch has no torch.ao.quantization any more: see torchao")


# --8<-- [start:errors]
def integer_parameters() -> None:
    """Integers have no gradient, so they cannot be parameters with one."""
    nn.Parameter(torch.ones(2, 2, dtype=torch.int8))


def integer_parameters_fix() -> torch.Tensor:
    layer = nn.Module()
    layer.register_buffer("weight", torch.ones(2, 2, dtype=torch.int8))
    layer.frozen = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert list(layer.state_dict()) == ["frozen", "weight"]
    assert [name for name, _ in layer.named_parameters()] == ["frozen"]  # no buffer
    return layer.weight


def mixed() -> None:
    """An int8 weight is multiplied by a float input."""
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.int8)


def mixed_fix() -> torch.Tensor:
    return torch.ones(2, 2) @ (torch.ones(2, 2, dtype=torch.int8) * 0.5)  # times its scale


class Net(nn.Module):
    def __init__(self, stubs: bool) -> None:
        super().__init__()
        self.quant = old.QuantStub() if stubs else nn.Identity()
        self.linear = nn.Linear(8, 8)
        self.dequant = old.DeQuantStub() if stubs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequant(self.linear(self.quant(x)))


def no_stub(stubs: bool = False) -> torch.Tensor:
    """Eager static quantization: nothing turns the float input into a quantized tensor."""
    model = Net(stubs).eval()
    model.qconfig = old.get_default_qconfig(torch.backends.quantized.engine)
    x = torch.randn(4, 8)
    exact = model(x)
    old.prepare(model, inplace=True)
    model(x)  # observers see the ranges
    old.convert(model, inplace=True)
    assert 0 < (model(x) - exact).abs().max() < 0.1  # close to fp32, and not fp32
    return model(x)


def no_stub_fix() -> torch.Tensor:
    return no_stub(stubs=True)


def moved() -> None:
    """Quantization of exported graphs (PT2E) was here; it is in torchao now."""
    importlib.import_module("torch.ao.quantization.quantize_pt2e")


# --8<-- [end:errors]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if torch.backends.quantized.engine == "none":
        sys.exit("this torch was built without a quantized engine for this processor")
    for fail in (integer_parameters, mixed, no_stub, moved):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fail()
        except (RuntimeError, NotImplementedError, ImportError) as error:
            words = str(error).splitlines()[0].split(". ")[0][:150]
            print(f"{fail.__name__}: {type(error).__name__}: {words}")
        else:
            assert fail is moved, f"{fail.__name__} raised nothing"
            print(f"{fail.__name__}: the import works, as before torch 2.11")
    for fix in (integer_parameters_fix, mixed_fix, no_stub_fix):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fix()
        assert result.float().isfinite().all()
        assert fix is not mixed_fix or (result == 1).all()  # two products of 1 and 1 · 0.5
        print(f"{fix.__name__}: {str(result.dtype).removeprefix('torch.')}, finite")


if __name__ == "__main__":
    main()
