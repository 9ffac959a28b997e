"""Round fp32 to bf16 with integer arithmetic, and get the same bits as torch's cast.

bf16 is the upper half of an fp32. If you add a little less than half a step and then cut off
the lower half, you round to nearest. If you also add 1 where the last remaining bit is 1, every
tie goes to the even neighbour. Look at the mean errors at the end: on ties, only this rule has
no bias.
"""

import torch


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Cast fp32 to bf16 with integers. Infinity stays infinity, and NaN stays NaN."""
    bits = x.view(torch.int32)
    last = (bits >> 16) & 1  # the lowest bit that remains
    rounded = (bits + 0x7FFF + last) >> 16
    rounded = torch.where(x.isnan(), 0x7FC0, rounded)  # otherwise a carry could reach the sign
    return rounded.to(torch.int16).view(torch.bfloat16)


def truncate(x: torch.Tensor) -> torch.Tensor:
    """Cut off the lower half, which rounds towards zero."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def half_up(x: torch.Tensor) -> torch.Tensor:
    """Round to nearest, and round every tie away from zero, as taught in school."""
    return ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def main() -> None:
    step = 2.0**-7  # of bf16 between 1 and 2
    print("x, in steps above 1   last bit below   becomes")
    for k in range(4):
        x = torch.tensor([1 + (k + 0.5) * step])
        ours = round_to_bf16(x)
        assert torch.equal(ours, x.bfloat16())
        print(f"{k + 0.5:19}   {k % 2:14}   {(ours.item() - 1) / step:.0f}")

    # all upper halves, with each kind of lower half: zero, below a tie, a tie, above a tie
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    some = torch.randint(0, 2**32, (2**19,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([(upper[:, None] | lower).flatten(), some])
    x = bits.to(torch.int32).view(torch.float32)  # the same 32 bits
    ours, theirs = round_to_bf16(x), x.bfloat16()
    number = ~x.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[number].view(torch.int16), theirs[number].view(torch.int16))
    print(f"{len(x):,} fp32 patterns: the same bits as torch's cast")
    past = torch.tensor([torch.finfo(torch.float32).max])
    print(f"the largest fp32 becomes {round_to_bf16(past).item()}")

    print("mean error in steps          truncated   half up   half to even")
    ties = 1 + (torch.arange(128) + 0.5) * step
    anything = 1 + torch.rand(2**20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(half_up(-ties), -half_up(ties))
    low = anything.bfloat16()  # bf16 numbers need no rounding
    assert all(f(low.float()).equal(low) for f in (truncate, half_up, round_to_bf16))
    biases = {}
    for name, x in (("on ties", ties), ("on any x", anything)):
        errors = [
            ((f(x).double() - x.double()) / step).mean().item() + 0.0
            for f in (truncate, half_up, round_to_bf16)
        ]
        biases[name] = [round(error, 2) for error in errors]
        print(f"{name:26}   {errors[0]:9.2f}   {errors[1]:7.2f}   {abs(errors[2]):12.2f}")
    assert biases == {"on ties": [-0.5, 0.5, 0], "on any x": [-0.5, 0, 0]}


if __name__ == "__main__":
    main()
