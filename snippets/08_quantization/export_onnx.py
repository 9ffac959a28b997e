"""Export a statically quantized model to ONNX with Q/DQ nodes, and run it in ONNX Runtime.

A pair of `QuantizeLinear` and `DequantizeLinear` nodes marks a tensor that may have 8 bits.
ONNX Runtime converts weights with such pairs to int8 constants. TensorRT reads the same nodes.
Compare the sizes of the files, and look at the operators of the optimized models.
"""

import collections
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

try:
    import onnx
    import onnxruntime
    import onnxscript  # noqa: F401  torch.onnx.export needs it
except ImportError:
    sys.exit("this program needs three packages: pip install onnx onnxscript onnxruntime")


# --8<-- [start:QDQLinear]
class QDQLinear(nn.Module):
    """A linear layer whose input and weight are rounded to int8 by operators of ONNX."""

    def __init__(self, linear: nn.Linear, largest_input: float, low=-128) -> None:
        super().__init__()
        self.linear, self.x_scale, self.low = linear, largest_input / 127, low
        self.register_buffer("w_scale", linear.weight.detach().abs().amax(1) / 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, self.x_scale, 0, self.low, 127)
        zero = torch.zeros_like(self.w_scale, dtype=torch.int32)
        w = torch.fake_quantize_per_channel_affine(
            self.linear.weight, self.w_scale, zero, 0, self.low, 127
        )
        return F.linear(x, w, self.linear.bias)


# --8<-- [end:QDQLinear]


def operators(path: str) -> str:
    nodes = collections.Counter(node.op_type for node in onnx.load(path).graph.node)
    return ", ".join(f"{count} {name}" for name, count in sorted(nodes.items()))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    x = torch.randn(128, 64)
    hidden = model[:2](x)

    def quantize(low: int) -> nn.Sequential:
        return nn.Sequential(QDQLinear(model[0], x.abs().max().item(), low), nn.GELU(),
                             QDQLinear(model[2], hidden.abs().max().item(), low))  # fmt: skip

    quantized = quantize(-128)
    single = nn.Linear(64, 64, bias=False)  # diagonal, with weights of different sizes
    single.weight = nn.Parameter(torch.diag(torch.logspace(-3, 0, 64)))
    bare = QDQLinear(single, x.abs().max().item())
    off = (bare(x) / single.weight.diag() - x).abs().max()
    assert off < 0.501 * x.abs().max() / 127  # half a step of the input; the weights are exact
    # --8<-- [start:export]
    models = {"model.onnx": model, "model_int8.onnx": quantized, "no_bias.onnx": bare}
    for path, module in models.items():
        program = torch.onnx.export(
            module, (x,), dynamo=True, verbose=False, opset_version=20,
            input_names=["x"], output_names=["y"],
        )  # fmt: skip
        program.save(path)
    # --8<-- [end:export]

    # --8<-- [start:run]
    for path, to in (("model_int8.onnx", "optimized.onnx"), ("no_bias.onnx", "fused.onnx")):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # no warning that the file suits this machine only
        # without VNNI, int8 products saturate at 16 bits unless this option is set
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.optimized_model_filepath = to  # write the optimized model to a file
        session = onnxruntime.InferenceSession(path, options)
        (y,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), models[path](x).detach())
    # --8<-- [end:run]
    print("ONNX Runtime equals PyTorch")
    error = ((quantized(x) - model(x)).norm() / model(x).norm()).item()
    print(f"int8 against fp32: {error:.1%}")
    assert error < 0.03
    for path in ("model.onnx", "model_int8.onnx", "optimized.onnx"):
        print(f"{path:16} ≈{os.path.getsize(path) / 1024:.0f} KiB  {operators(path)}")
    print(f"one layer without a bias: {operators('fused.onnx')}")
    assert "QGemm" in operators("fused.onnx") and "QGemm" not in operators("optimized.onnx")
    assert os.path.getsize("optimized.onnx") < 0.4 * os.path.getsize("model.onnx")

    # --8<-- [start:refused]
    try:
        torch.onnx.export(quantize(-127), (x,), dynamo=True, verbose=False)
        sys.exit("this export was expected to fail")
    except torch.onnx.OnnxExporterError as error:
        cause = next(line for line in str(error).splitlines() if "quant_min" in line)
        print(cause.split(": ", 1)[-1])
    # --8<-- [end:refused]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
