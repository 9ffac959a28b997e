"""The fewer numbers share a scale, the smaller is the error, but the scales need memory.

The weight resembles a trained one: its rows differ in size, and a few input columns are larger.
The prediction uses step/√12 for all numbers that share a scale. Compare the rows from one scale
per tensor to one scale per 32 numbers.
"""

import math

import torch

ROWS, COLUMNS = 256, 1024


# --8<-- [start:granularity]
def quantize_groups(w: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize symmetrically with one scale per `size` neighbours. Return w and the steps.

    With size = w.numel() there is one scale per tensor. With the length of a row, there is one
    scale per channel.
    """
    largest = 2 ** (bits - 1) - 1
    groups = w.reshape(-1, size)
    step = groups.abs().amax(1, keepdim=True) / largest  # [groups, 1]
    step = step.bfloat16().float()  # scales are stored in 16 bits
    return ((groups / step).round() * step).view_as(w), step


# --8<-- [end:granularity]


def make_weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(ROWS, COLUMNS, generator=generator)
    w *= torch.randn(ROWS, 1, generator=generator).mul(0.5).exp()  # rows differ in size
    w[:, ::128] *= 4  # and some inputs have larger weights in every row
    return w


def main() -> None:
    torch.set_num_threads(1)
    w = make_weight()
    print("                      4 bits: error                8 bits: error")
    print("one scale per   predicted  measured  bits/weight   predicted  measured")
    errors = {}
    for name, size in {
        "tensor": w.numel(),
        "channel": COLUMNS,
        "group of 128": 128,
        "group of 32": 32,
    }.items():
        cells = []
        for bits in (4, 8):
            back, step = quantize_groups(w, bits, size)
            measured = ((back - w).norm() / w.norm()).item()
            predicted = (step.square().mean() / 12 / w.square().mean()).sqrt().item()
            cells.append(f"{predicted:9.2%} {measured:9.2%}")
            errors[name, bits] = measured
            # a step larger than the numbers loses no more than the numbers: not so at 8 bits
            assert measured < 1.02 * predicted
            assert bits == 4 or math.isclose(predicted, measured, rel_tol=0.02), (
                name,
                measured,
            )
        stored = 4 + 16 * step.numel() / w.numel()  # a scale in 16 bits
        print(f"{name:13} {cells[0]}  {stored:11.3f}   {cells[1]}")
    order = [errors[name, 4] for name in ("tensor", "channel", "group of 128", "group of 32")]
    assert order == sorted(order, reverse=True) and order[0] > 3 * order[-1]

    back, step = quantize_groups(w, 8, COLUMNS)
    torchs = torch.fake_quantize_per_channel_affine(
        w, step[:, 0], torch.zeros(ROWS, dtype=torch.int32), 0, -127, 127
    )
    assert ((torchs - back).abs() > step / 2).float().mean() < 1e-4
    print("per channel: equal to torch.fake_quantize_per_channel_affine")


if __name__ == "__main__":
    main()
