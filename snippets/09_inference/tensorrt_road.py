"""A check of an ONNX file against TensorRT's table of operators finds problems without a GPU.

The program exports a model, compares the operators of the file with the table, and builds an
engine if there is a GPU. The check finds an operator that the parser does not support and a
zero point that is not 0. On a GPU, the program also tries a shape outside of the profile. The
table is docs/operators.md of onnx-tensorrt at 10.1-GA, for opsets 9 to 20.

Needs: pip install onnx onnxscript onnxruntime; for the engine an NVIDIA GPU and tensorrt
"""

import importlib.util
import sys
import tempfile
import warnings

import torch
from onnx_decode import Decoder
from torch import nn

TAKEN = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast
CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum
DeformConv DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike
Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization GRU HardSigmoid HardSwish
Hardmax Identity If ImageScaler InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu
Less LessOrEqual Log LogSoftmax Loop LRN LSTM LpNormalization LpPool MatMul Max MaxPool Mean
MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or Pad
ParametricSoftplus Pow PRelu QuantizeLinear RandomNormal RandomNormalLike RandomUniform
RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence
RNN RoiAlign Round ScaledTanh Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid
Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan
Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""
LEAST, BEST, MOST = (1, 1), (2, 16), (64, 64)  # shapes of ids [b, s] of the profile


class Rounded(nn.Module):
    """Quantize and dequantize the input, then multiply it by a weight."""

    def __init__(self, zero: int) -> None:
        super().__init__()
        self.zero, self.linear = zero, nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.fake_quantize_per_tensor_affine(x, 0.1, self.zero, -128, 127))


# --8<-- [start:table]
def refused(model) -> list[str]:
    """Return what the table excludes in an ONNX graph; `model` is a model of onnx_ir."""
    from onnx_ir.convenience import get_const_tensor

    found = {node.op_type for node in model.graph} - set(TAKEN.split())
    for node in model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            given = node.inputs[2] if len(node.inputs) > 2 else None  # left out, it is 0
            zero = get_const_tensor(given) if given is not None else None
            if given is not None and (zero is None or zero.numpy().any()):
                found.add(f"{node.op_type} with a zero point that is not 0")
    return sorted(found)


# --8<-- [end:table]


# --8<-- [start:engine]
def build(path: str) -> bytes:
    """Parse an ONNX file and time kernels for it on this GPU. Large models need minutes."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)  # no flag: a batch is an axis like any other
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(path):
        sys.exit("\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    profile = builder.create_optimization_profile()
    profile.set_shape(network.get_input(0).name, LEAST, BEST, MOST)
    config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))


def run(plan: bytes, ids: torch.Tensor) -> torch.Tensor:
    """Execute a plan: it gets the addresses of torch tensors and the current stream."""
    import tensorrt as trt

    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    source, target = (engine.get_tensor_name(i) for i in range(2))
    if not context.set_input_shape(source, tuple(ids.shape)):
        raise ValueError(f"{tuple(ids.shape)} is outside of the profile")
    logits = torch.empty(tuple(context.get_tensor_shape(target)), device=ids.device)
    context.set_tensor_address(source, ids.data_ptr())
    context.set_tensor_address(target, logits.data_ptr())
    context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return logits


# --8<-- [end:engine]


@torch.no_grad()
def main() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"this program needs the package {package}")
    import onnxruntime

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, ids = Decoder().eval(), torch.randint(37, BEST)
    eager = model(ids)
    with tempfile.TemporaryDirectory() as folder:
        # --8<-- [start:export]
        batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=64)
        exported = torch.export.export(model, (ids,), dynamic_shapes=({0: batch, 1: length},))
        for opset in (20, 23):
            program = torch.onnx.export(
                exported, dynamo=True, verbose=False, opset_version=opset
            )
            program.save(f"{folder}/{opset}.onnx")
            # --8<-- [end:export]
            session = onnxruntime.InferenceSession(f"{folder}/{opset}.onnx")
            model.head.weight.neg_()  # the file has its own weights
            (logits,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
            model.head.weight.neg_()
            torch.testing.assert_close(torch.from_numpy(logits), eager, rtol=1e-4, atol=1e-4)
            missing = refused(program.model)
            print(f"opset {opset}: equal to eager mode in ONNX Runtime; not in the table: "
                  f"{', '.join(missing) or 'nothing'}")  # fmt: skip
            assert missing == ([] if opset == 20 else ["Attention"])
        for zero in (0, 3):
            rounded = (Rounded(zero), (torch.randn(4, 8),))
            program = torch.onnx.export(*rounded, dynamo=True, verbose=False, opset_version=20)
            missing = refused(program.model)
            quantizers = {"QuantizeLinear", "DequantizeLinear"}
            assert quantizers <= {node.op_type for node in program.model.graph}
            print(f"zero point {zero}: {'; '.join(missing) or 'accepted'}")
            assert len(missing) == (2 if zero else 0)

        if not torch.cuda.is_available():
            print("engine: not built, because this machine has no NVIDIA GPU")
            return
        if importlib.util.find_spec("tensorrt") is None:
            sys.exit("an engine needs: pip install tensorrt")
        plan = build(f"{folder}/20.onnx")
        for shape in (LEAST, BEST, (3, 64)):
            ids = torch.randint(37, shape)
            ours = run(plan, ids.cuda()).cpu()
            torch.testing.assert_close(ours, model(ids), rtol=1e-3, atol=1e-3)
        print(f"engine: ≈{len(plan) / 1024:.0f} KiB, equal to eager mode in three shapes")
        try:
            run(plan, torch.zeros(65, 1, dtype=torch.long).cuda())
        except ValueError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("65 sequences were accepted")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
