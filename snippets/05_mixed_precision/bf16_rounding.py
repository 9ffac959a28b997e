"""Round to nearest, ties to even: fp32 to bf16 by integer arithmetic, equal to torch's cast.

bf16 is the upper half of an fp32. Adding a little less than half a step before cutting rounds
to nearest; one more, where the last kept bit is 1, sends the ties to the even neighbour.
"""

import torch


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Cast fp32 to bf16 by its bits; infinities and NaN come out as they went in."""
    bits = x.view(torch.int32)
    last = (bits >> 16) & 1  # the lowest bit that stays
    rounded = (bits + 0x7FFF + last) >> 16
    rounded = torch.where(x.isnan(), 0x7FC0, rounded)  # or the sum could carry into the sign
    return rounded.to(torch.int16).view(torch.bfloat16)


def truncate(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def half_up(x: torch.Tensor) -> torch.Tensor:
    """To nearest, ties always away from zero: the rounding of school."""
    return ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def main() -> None:
    step = 2.0**-7  # of bf16 between 1 and 2
    print("x, in steps above 1   last bit below   becomes")
    for k in range(4):
        x = torch.tensor([1 + (k + 0.5) * step])
        ours = round_to_bf16(x)
        assert torch.equal(ours, x.bfloat16())
        print(f"{k + 0.5:19}   {k % 2:14}   {(ours.item() - 1) / step:.0f}")

    # every upper half there is, with each kind of lower half: nothing, below, tie, above
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    some = torch.randint(0, 2**32, (2**21,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([(upper[:, None] | lower).flatten(), some])
    x = bits.to(torch.int32).view(torch.float32)  # wraps to the same 32 bits
    ours, theirs = round_to_bf16(x), x.bfloat16()
    number = ~x.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[number].view(torch.int16), theirs[number].view(torch.int16))
    print(f"{len(x):,} fp32 patterns: as torch casts them, bit for bit")
    past = torch.tensor([torch.finfo(torch.float32).max])
    print(f"the largest fp32 becomes {round_to_bf16(past).item()}")

    print("mean error in steps          truncated   half up   half to even")
    ties = 1 + (torch.arange(128) + 0.5) * step
    anything = 1 + torch.rand(2**20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(half_up(-ties), -half_up(ties))
    low = anything.bfloat16()  # has nothing to round
    assert all(f(low.float()).equal(low) for f in (truncate, half_up, round_to_bf16))
    for name, x in (("on ties", ties), ("on any x", anything)):
        errors = [
            ((f(x).double() - x.double()) / step).mean().item() + 0.0
            for f in (truncate, half_up, round_to_bf16)
        ]
        print(f"{name:26}   {errors[0]:9.2f}   {errors[1]:7.2f}   {abs(errors[2]):12.2f}")


if __name__ == "__main__":
    main()
