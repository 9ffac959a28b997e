"""Step 3: a loop over the codes"""

STEP, HINT = 3, "silver"


def fast_step(x: torch.Tensor, codes: torch.Tensor):
    scores = torch.addmm(codes.square().sum(1), x, codes.t(), alpha=-2)
    least, nearest = scores.min(1)
    new = codes.clone()
    for j in range(len(codes)):
        rows = x[nearest == j]
        if len(rows):
            new[j] = rows.mean(0)
    return nearest, new, (least.sum() + x.square().sum()) / len(x)
