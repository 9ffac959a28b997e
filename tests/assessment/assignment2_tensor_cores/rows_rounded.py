"""Step 3: rounded too early"""

STEP, HINT = 3, "rows"


def im2col(x, kernel, stride, padding, dilation):
    n, c, h, w = x.shape
    cols = to_tf32(F.unfold(x, kernel, dilation, padding, stride))
    ho = (h + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    wo = (w + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return (
        cols.view(n, c, kernel**2, ho * wo).permute(0, 3, 2, 1).reshape(n * ho * wo, -1),
        ho,
        wo,
    )
