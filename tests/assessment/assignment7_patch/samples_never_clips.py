"""Step 1: no sample for this fault"""

STEP, HINT = 1, "never_clips"


def samples() -> list[tuple[list[torch.Tensor], float]]:
    def grid(*shape: int, by: float = 1.0) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        return torch.linspace(-by, by, count).reshape(shape)

    return [
        ([grid(4, 5), grid(7)], 500.0),
        ([grid(4, 5), grid(7)], 100.0),
        ([], 1e6),
        ([grid(0), grid(3)], 500.0),
        ([grid(4, 6).t(), grid(8)[::2]], 500.0),
        ([grid(5).half(), grid(6), grid(7).bfloat16()], 500.0),
        ([grid(64, by=400.0).half()], 1e6),
        ([torch.zeros(5)], 1e6),
    ]
