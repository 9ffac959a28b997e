"""Step 3: viewed in another order"""

STEP, HINT = 3, "format"


def conv2d(x, weight, stride=1, padding=0, dilation=1):
    k, _, r, _ = weight.shape
    rows, ho, wo = im2col(x, r, stride, padding, dilation)
    out = mma(to_tf32(rows), to_tf32(weight.permute(2, 3, 1, 0).reshape(-1, k)))
    return out.view(len(x), k, ho, wo)
