"""Step 4: everything six times"""

STEP, HINT = 4, "gold"


def fast_step(x: torch.Tensor, codes: torch.Tensor):
    for _ in range(6):
        scores = torch.addmm(codes.square().sum(1), x, codes.t(), alpha=-2)
        least, nearest = scores.min(1)
        sums = torch.zeros_like(codes).index_add_(0, nearest, x)
        counts = torch.bincount(nearest, minlength=len(codes)).unsqueeze(1)
        new = torch.where(counts > 0, sums / counts, codes)
    return nearest, new, (least.sum() + x.square().sum()) / len(x)
