"""Step 2: a loop over the rows"""

STEP, HINT = 2, "bronze"


def fast_step(x: torch.Tensor, codes: torch.Tensor):
    scores = torch.addmm(codes.square().sum(1), x, codes.t(), alpha=-2)
    least, nearest = scores.min(1)
    new = codes.clone()
    for j in range(len(codes)):
        rows = x[nearest == j]
        if len(rows):
            new[j] = rows.mean(0)
    for i in range(len(x)):
        least = least + scores[i, nearest[i]] * 0
    return nearest, new, (least.sum() + x.square().sum()) / len(x)
