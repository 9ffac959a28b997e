"""Step 3: the size without the kernel"""

STEP, HINT = 3, "size"


def im2col(x: torch.Tensor, kernel: int, stride: int, padding: int, dilation: int):
    n, c, h, w = x.shape
    ho, wo = ((size + 2 * padding) // stride for size in (h, w))
    return torch.zeros(n * ho * wo, kernel * kernel * c), ho, wo
