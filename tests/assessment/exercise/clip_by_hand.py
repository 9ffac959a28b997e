"""Step 13: a number for each parameter"""

STEP, HINT = 13, "clip"


def clip(parameters: list[nn.Parameter]) -> None:
    norm = sum(parameter.grad.norm().item() ** 2 for parameter in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, CLIP / norm))
