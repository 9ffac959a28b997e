"""Step 3: the order of unfold"""

STEP, HINT = 3, "order"


def im2col(x: torch.Tensor, kernel: int, stride: int, padding: int, dilation: int):
    ho, wo = (
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for size in x.shape[2:]
    )
    rows = F.unfold(x, kernel, dilation, padding, stride).transpose(1, 2)
    return rows.reshape(-1, rows.shape[-1]), ho, wo
