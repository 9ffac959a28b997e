"""Step 1: no sample for this fault"""

STEP, HINT = 1, "strides"


def samples() -> list[tuple[list[torch.Tensor], float]]:
    def grid(*shape: int, by: float = 1.0) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        return torch.linspace(-by, by, count).reshape(shape)

    return [
        ([grid(4, 5), grid(7)], 0.5),
        ([grid(4, 5), grid(7)], 100.0),
        ([], 1.0),
        ([grid(0), grid(3)], 0.5),
        ([grid(5).half(), grid(6), grid(7).bfloat16()], 0.5),
        ([grid(64, by=400.0).half()], 1.0),
        ([torch.zeros(5)], 1.0),
    ]
