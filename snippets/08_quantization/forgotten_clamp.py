"""Failure: a cast to int8 without a clamp flips the signs of the largest weights.

The largest weight of a row should become 127 steps. In bf16 the quotient is 127.5, which is
rounded to 128, and the cast turns 128 into -128 on this CPU.
"""

import torch


# --8<-- [start:fix]
def round_to_int8(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide in fp32 by the scale that will be stored, round to the nearest, and clamp."""
    return (w.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)


# --8<-- [end:fix]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    w = torch.randn(512, 1024).bfloat16()  # as checkpoints are
    # --8<-- [start:wraps]
    scale = w.abs().amax(1, keepdim=True) / 127  # rounded to bf16, up or down
    steps = (w / scale).round()  # bf16 has steps of ½ here
    q = steps.to(torch.int8)  # no clamp: the result for 128 is not defined
    # --8<-- [end:wraps]
    flipped = (q.float() * w < 0).sum()
    error = ((q * scale.float() - w).norm() / w.float().norm()).item()
    print(f"largest quotient: {steps.abs().max():.0f}; weights whose sign has flipped: "
          f"{flipped} in {len(w)} rows")  # fmt: skip
    print(f"relative error without clamp {error:.1%}", end=", ")
    q = round_to_int8(w, scale)
    fixed = ((q * scale.float() - w).norm() / w.float().norm()).item()
    print(f"divided in fp32 and clamped {fixed:.1%}")
    assert flipped > 0 and error > 4 * fixed
    assert (q.float() * w >= 0).all()
    steps_off = (q * scale.float() - w.float()).abs() / scale.float()
    assert (steps_off <= 0.5 + 1e-4).all()  # half a step at most
    # weights beyond the range of the scale saturate on both sides, and keep their signs
    beyond = round_to_int8(2 * w, scale)
    assert (beyond.float() * w >= 0).all() and beyond.aminmax() == (-127, 127)


if __name__ == "__main__":
    main()
