"""Step 1: all differences at once"""

STEP, HINT = 1, "memory"


def fast_step(x: torch.Tensor, codes: torch.Tensor):
    scores = (x[:, None] - codes).square().sum(-1)
    least, nearest = scores.min(1)
    sums = torch.zeros_like(codes).index_add_(0, nearest, x)
    counts = torch.bincount(nearest, minlength=len(codes)).unsqueeze(1)
    new = torch.where(counts > 0, sums / counts, codes)
    return nearest, new, least.mean()
