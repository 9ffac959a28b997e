"""Step 1: an infinite gradient"""

STEP, HINT = 1, "good_refused"


def samples() -> list[tuple[list[torch.Tensor], float]]:
    return [([torch.tensor([1.0, float("nan")])], 0.5)]
