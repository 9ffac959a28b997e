"""Compare torchao's quantize_ with the formulas of this chapter.

The weight becomes a tensor subclass that stores integers and scales. Look at the shapes in the
output, and at the errors. The program asserts that the integers are those of the formulas.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

try:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
except ImportError:
    sys.exit("this program needs torchao: pip install torchao==0.18.0")

K, N = 512, 256


def new() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N, bias=False))


# --8<-- [start:formulas]
def int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, one scale per row. torchao divides by 127.5, half of the 255 steps."""
    scale = x.abs().amax(1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127), scale


def int4(w: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, one scale per group, integers from -8 to 7."""
    w = w.unflatten(1, (-1, group))
    scale = w.abs().amax(-1, keepdim=True) / 7.5
    return (w / scale).round().clamp(-8, 7).flatten(1), scale.squeeze(-1)


# --8<-- [end:formulas]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    weight = new()[0].weight
    x = torch.randn(32, K)
    exact = F.linear(x, weight)

    # --8<-- [start:quantize_]
    by_channel, dynamic, by_group, fp8 = new(), new(), new(), new()
    quantize_(by_channel, Int8WeightOnlyConfig())
    quantize_(dynamic, Int8DynamicActivationInt8WeightConfig())
    quantize_(by_group, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    quantize_(fp8, Float8WeightOnlyConfig())
    # --8<-- [end:quantize_]

    def check(w: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, top: float) -> None:
        """The scales are equal. Integers differ only where the quotient is a tie."""
        torch.testing.assert_close(w.scale, scale)
        steps = (weight.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)).flatten(1)
        assert steps.abs().max() > top - 1e-3  # the largest of a row or group is one
        assert (q.min(), q.max()) == (w.qdata.min(), w.qdata.max())  # one more below zero
        differs = w.qdata != q
        assert ((steps[differs] % 1 - 0.5).abs() < 1e-3).all()
        assert (w.qdata - q).abs().max() <= 1 and differs.float().mean() < 0.03

    def report(name: str, model: nn.Module, ours: torch.Tensor) -> None:
        w = model[0].weight
        parts = {key: getattr(w, key, None) for key in w.tensor_data_names}
        kept = ", ".join(
            f"{k} {str(t.dtype)[6:]} {tuple(t.shape)}"
            for k, t in parts.items()
            if t is not None
        )
        error = ((model(x) - exact).norm() / exact.norm()).item()
        print(f"{name}: {type(w).__name__}\n  {kept}\n  error of the output {error:.2%}")
        assert (model(x) - ours).norm() < 0.5 * (model(x) - exact).norm()

    q, scale = int8(weight)
    check(by_channel[0].weight, q, scale, 127.5)
    report("Int8WeightOnlyConfig", by_channel, F.linear(x, q * scale))
    xq, x_scale = int8(x)  # each token has its own scale, which is computed when it arrives
    report("Int8DynamicActivationInt8WeightConfig", dynamic, F.linear(xq * x_scale, q * scale))
    q, scale = int4(weight, 32)
    check(by_group[0].weight, q, scale, 7.5)
    ours = (q.unflatten(1, (-1, 32)) * scale.unsqueeze(-1)).flatten(1)
    report("IntxWeightOnlyConfig, int4, groups of 32", by_group, F.linear(x, ours))
    scale = weight.abs().amax(1, keepdim=True) / 448
    torch.testing.assert_close(fp8[0].weight.scale, scale)
    e4m3 = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    report("Float8WeightOnlyConfig", fp8, F.linear(x, e4m3))
    print("the same integers as by the formulas, but for ties")

    try:
        quantize_(new().bfloat16(), Int4WeightOnlyConfig(group_size=32))
    except ImportError as error:
        print(f"Int4WeightOnlyConfig on a CPU: ImportError: {error}")


if __name__ == "__main__":
    main()
