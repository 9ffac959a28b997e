"""Folds BatchNorm into the layer before it, which leaves one layer fewer to quantize.

In evaluation, BatchNorm is a multiplication and an addition per channel. The fold is exact. It
makes the channels of the weight differ in size, so one scale for all channels is inaccurate
afterwards, and one scale per channel is not.
"""

import copy

import torch
from torch import nn


# --8<-- [start:fold]
def fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return one convolution that computes norm(convolution(x)) in evaluation."""
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()  # [out]
    bias = 0 if convolution.bias is None else convolution.bias
    folded = copy.deepcopy(convolution)  # with its stride, padding, dilation and groups
    folded.weight = nn.Parameter(convolution.weight * gain.view(-1, 1, 1, 1))
    folded.bias = nn.Parameter((bias - norm.running_mean) * gain + norm.bias)
    return folded


# --8<-- [end:fold]


def error(weight: torch.Tensor, per_channel: bool) -> float:
    """Relative error of the weight in symmetric int8, averaged over channels."""
    dims = (1, 2, 3) if per_channel else (0, 1, 2, 3)
    step = weight.abs().amax(dims, keepdim=True) / 127
    q = (weight / step).round()
    assert (q.abs().amax(dims) == 127).all()  # all fit into int8, and the range is used
    back = q * step
    return (
        ((back - weight).flatten(1).norm(dim=1) / weight.flatten(1).norm(dim=1)).mean().item()
    )


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    convolution = nn.Conv2d(16, 64, 3, padding=1).double()
    norm = nn.BatchNorm2d(64).double()
    norm.weight.copy_(torch.randn(64).mul(0.7).exp())  # as if they had been trained
    norm.bias.normal_()
    norm.running_mean.normal_()
    norm.running_var.copy_(torch.randn(64).mul(1.4).exp())
    norm.eval()

    x = torch.randn(4, 16, 12, 12, dtype=torch.float64)
    other = nn.Conv2d(16, 64, 3, stride=2, groups=4, bias=False).double()
    torch.testing.assert_close(fold(other, norm)(x), norm(other(x)), rtol=1e-12, atol=1e-12)
    folded = fold(convolution, norm)
    torch.testing.assert_close(folded(x), norm(convolution(x)), rtol=1e-12, atol=1e-12)
    print("folded equals unfolded to 12 digits in float64")

    library = torch.nn.utils.fusion.fuse_conv_bn_eval(convolution.eval(), norm)
    torch.testing.assert_close(folded.weight, library.weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(folded.bias, library.bias, rtol=1e-12, atol=1e-12)
    print("and equals torch.nn.utils.fusion.fuse_conv_bn_eval")

    print("int8 error per channel   one scale   a scale per channel")
    before, after = convolution.weight, folded.weight
    for name, weight in (("before", before), ("folded", after)):
        print(f"{name:22}   {error(weight, False):9.2%}   {error(weight, True):19.2%}")
    assert error(after, False) > 3 * error(before, False)
    torch.testing.assert_close(error(after, True), error(before, True))


if __name__ == "__main__":
    main()
