"""Step 1: the tensors of a default argument"""

STEP, HINT = 1, "shared"


def samples() -> list:
    kept = globals().setdefault("KEPT", [torch.ones(4), torch.ones(3)])
    return [([kept[0]], 0.5), ([kept[1]], 9.0)]
