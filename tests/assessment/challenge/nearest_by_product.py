"""Step 1: the largest product"""

STEP, HINT = 1, "nearest"


def fast_step(x: torch.Tensor, codes: torch.Tensor):
    scores = -2 * (x @ codes.t())
    least, nearest = scores.min(1)
    sums = torch.zeros_like(codes).index_add_(0, nearest, x)
    counts = torch.bincount(nearest, minlength=len(codes)).unsqueeze(1)
    new = torch.where(counts > 0, sums / counts, codes)
    return nearest, new, (least.sum() + x.square().sum()) / len(x)
