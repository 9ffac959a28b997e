"""Computes by hand what quantize_dynamic of torch.ao.quantization computes.

quantize_dynamic replaces each linear layer by a layer with int8 weights that quantizes its
input at each call. It is deprecated but still works in torch 2.15. The warning announces its
removal in version 2.10, which has long been released.
"""

import sys
import warnings

import torch
from torch import nn

try:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
except ImportError:
    sys.exit("this torch has no torch.ao.quantization any more: see torchao")


# --8<-- [start:by_hand]
def by_hand(x: torch.Tensor, layer: nn.Linear, bits: int) -> torch.Tensor:
    """Dynamic quantization of one layer: weights per channel, the whole input by one scale."""
    weight_step = layer.weight.abs().amax(1, keepdim=True) / 127.5  # [out, 1]
    weight = (layer.weight / weight_step).round().clamp(-128, 127)
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    step = (high - low) / (2**bits - 1)
    zero = round(-low / step)
    q = ((x / step).round() + zero).clamp(0, 2**bits - 1)
    return ((q - zero) @ weight.T) * step * weight_step.T + layer.bias


# --8<-- [end:by_hand]


# --8<-- [start:library]
def library(layer: nn.Linear) -> tuple[nn.Module, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = quantize_dynamic(nn.Sequential(layer), {nn.Linear: per_channel_dynamic_qconfig})
    return model, caught


# --8<-- [end:library]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if torch.backends.quantized.engine == "none":
        sys.exit("this torch was built without a quantized engine for this processor")
    layer = nn.Linear(256, 128)
    x = torch.randn(32, 256) + 0.5
    model, caught = library(layer)
    print(type(model[0]).__module__ + "." + type(model[0]).__name__)
    print(f"weight: {model[0].weight().dtype}, {model[0].weight().qscheme()}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = quantize_dynamic(nn.Sequential(layer), {nn.Linear})  # no configuration
    assert default[0].weight().qscheme() == torch.per_tensor_affine  # one scale for the weight
    for warning in caught:
        if "deprecated" in str(warning.message):
            print(
                f"{warning.category.__name__}: {str(warning.message).splitlines()[0].strip()}"
            )
            break

    exact, theirs = layer(x), model(x)

    def error(y: torch.Tensor, reference: torch.Tensor) -> float:
        return ((y - reference).norm() / reference.norm()).item()

    hand = {bits: by_hand(x, layer, bits) for bits in (8, 7)}
    assert sum("deprecated" in str(warning.message) for warning in caught) > 0
    nearest = min(hand, key=lambda bits: error(theirs, hand[bits]))
    x86 = torch.backends.quantized.engine in {"x86", "fbgemm", "onednn"}
    assert nearest == 7 or not x86, nearest  # these engines obey reduce_range
    print(f"error against fp32: theirs ≈{error(theirs, exact):.2%}, by hand with 8 bits "
          f"≈{error(hand[8], exact):.2%}, with 7 ≈{error(hand[7], exact):.2%}")  # fmt: skip
    print(f"theirs equals ours with ≈{nearest} bits for the input; "
          f"relative difference ≈{error(theirs, hand[nearest]):.1e}")  # fmt: skip
    # an identity matrix as input returns the weights, and none of them is 128 steps
    weights = by_hand(torch.eye(256), layer, nearest) - layer.bias
    torch.testing.assert_close(weights.max(), model[0].weight().dequantize().max())
    positive = x.abs() + 1  # its range begins at 0 nevertheless
    assert error(model(positive), by_hand(positive, layer, nearest)) < 2e-3
    assert error(theirs, hand[nearest]) < 2e-3 < error(theirs, exact) < 3e-2


if __name__ == "__main__":
    main()
