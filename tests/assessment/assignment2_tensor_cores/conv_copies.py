"""Step 3: the result is copied to contiguous"""

STEP, HINT = 3, "format"


def conv2d(x: torch.Tensor, weight: torch.Tensor, stride=1, padding=0, dilation=1):
    k = len(weight)
    rows, ho, wo = im2col(x, weight.shape[-1], stride, padding, dilation)
    flat = weight.permute(0, 2, 3, 1).reshape(k, -1)
    out = mma(to_tf32(rows), to_tf32(flat.T.contiguous()))
    return out.view(len(x), ho, wo, k).permute(0, 3, 1, 2).contiguous()
