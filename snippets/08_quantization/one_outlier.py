"""Failure: one large weight makes the int8 weights of a whole matrix useless.

With one scale for the tensor, the steps become so large that nearly all other weights are
rounded to zero, and no error is raised. There are two fixes: one scale per channel limits the
damage to a row, and a clip sacrifices the large weight.
"""

import torch


# --8<-- [start:quantize]
def quantize(w: torch.Tensor, largest_value: torch.Tensor) -> torch.Tensor:
    """Round to int8 within ±largest_value, and return floats."""
    step = largest_value / 127
    return (w / step).round().clamp(-127, 127) * step


# --8<-- [end:quantize]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(256, 256, generator=generator) * 0.02
    x = torch.randn(64, 256, generator=generator)
    print("                                    one scale   scale per row   one scale, clipped")
    for name, outlier in (("as it is", None), ("one weight of 10", 10.0)):
        if outlier is not None:
            w[7, 7] = outlier
        schemes = (
            w.abs().max(),
            w.abs().amax(1, keepdim=True),
            w.abs().flatten().kthvalue(int(0.9999 * w.numel())).values,
        )
        backs = [quantize(w, largest) for largest in schemes]
        zeros = [(back == 0).float().mean().item() for back in backs]
        exact, rest = x @ w.T, torch.arange(256) != 7
        errors = [
            ((x @ b.T - exact)[:, rest].norm() / exact[:, rest].norm()).item() for b in backs
        ]
        print(f"{name:16} weights at zero  {zeros[0]:11.1%} {zeros[1]:15.1%} {zeros[2]:20.1%}")
        print(f"{'':16} error of others  {errors[0]:11.1%} {errors[1]:15.1%} {errors[2]:20.1%}")
    assert zeros[0] > 0.9 and errors[0] > 0.9 and max(errors[1:]) < 0.02
    lost = (backs[1] == 0).float().mean(1) > 0.9  # with a scale per row, only row 7 is lost
    assert lost.nonzero().tolist() == [[7]]
    ends = torch.stack(quantize(w, torch.tensor(0.01)).aminmax())  # a clip has two sides
    torch.testing.assert_close(ends, torch.tensor([-0.01, 0.01]))


if __name__ == "__main__":
    main()
