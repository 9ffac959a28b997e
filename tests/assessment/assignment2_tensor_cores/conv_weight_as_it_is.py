"""Step 3: the weight is flattened as it is"""

STEP, HINT = 3, "weight_order"


def conv2d(x: torch.Tensor, weight: torch.Tensor, stride=1, padding=0, dilation=1):
    k = len(weight)
    rows, ho, wo = im2col(x, weight.shape[-1], stride, padding, dilation)
    out = mma(to_tf32(rows), to_tf32(weight.reshape(k, -1).T.contiguous()))
    return out.view(len(x), ho, wo, k).permute(0, 3, 1, 2)
