"""PT2E exports a graph, lets a quantizer annotate it, calibrates it and converts it.

The functions are in torchao.quantization.pt2e. `X86InductorQuantizer` knows which operators the
backend can run in 8 bits. The result is a graph with quantize and dequantize operators around
fp32 operators, and the backend fuses them into integer kernels. The program also computes the
same result by hand, with the scales of the graph.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

try:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )
except ImportError:
    sys.exit("this program needs torchao: pip install torchao==0.18.0")


def fake(x: torch.Tensor, scale, zero: int, low: int, high: int) -> torch.Tensor:
    return (((x * (1 / scale)).round() + zero).clamp(low, high) - zero) * scale


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    calibration, x = torch.randn(512, 64), torch.randn(512, 64)

    # --8<-- [start:flow]
    graph = torch.export.export(model, (calibration,)).module()
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)  # observers are inserted
    prepared(calibration)  # and see the ranges
    converted = convert_pt2e(prepared)
    # --8<-- [end:flow]

    print("the converted graph:")
    ranges = []
    for node in converted.graph.nodes:
        name = str(node.target).split(".")[-2] if node.op == "call_function" else ""
        if name == "quantize_per_tensor":
            ranges.append(node.args[1:5])
        if name:
            print(f"  {name}")
    print("of the inputs: " + "; ".join(f"scale {s:.4f}, zero point {z}, {a} to {b}"
                                        for s, z, a, b in ranges))  # fmt: skip

    # --8<-- [start:by_hand]
    def by_hand(x: torch.Tensor) -> torch.Tensor:
        for layer, (scale, zero, low, high) in zip((model[0], model[2]), ranges, strict=True):
            w_scale = layer.weight.abs().amax(1, keepdim=True) / 127.5
            weight = fake(layer.weight, w_scale, 0, -128, 127)
            x = F.linear(fake(x, scale, zero, low, high), weight, layer.bias)
            x = F.gelu(x) if layer is model[0] else x
        return x

    # --8<-- [end:by_hand]

    graph_calls: list[tuple] = []
    converted.register_forward_pre_hook(lambda _, args: graph_calls.append(args))
    theirs, ours, exact = converted(x), by_hand(x), model(x)
    between = ((theirs - ours).norm() / exact.norm()).item()
    error = ((theirs - exact).norm() / exact.norm()).item()
    # a row's largest weight is a tie, ±127.5 steps: x / scale for x · (1 / scale) rounds
    # some of them the other way, and would make a seventh of the error
    print(f"error against fp32 {error:.1%}, difference to ours by hand ≈{between:.2%}")
    assert between < 0.001 and error < 0.03 and len(graph_calls) == 1


if __name__ == "__main__":
    main()
