"""A softmax that does not subtract the maximum is NaN for scores above 88 or below -103."""

import torch


# --8<-- [start:both]
def without(z: torch.Tensor) -> torch.Tensor:
    e = z.exp()
    return e / e.sum(-1, keepdim=True)


def with_maximum(z: torch.Tensor) -> torch.Tensor:
    e = (z - z.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True)


# --8<-- [end:both]


def main() -> None:
    print("largest score   fp32, without          fp32, with")
    for top in (1.0, 80.0, 88.0, 89.0, 1e4, -90.0, -110.0):
        z = torch.tensor([[top, top - 1, top - 2]])
        truth = z.double().softmax(-1)
        cells = []
        for way in (without, with_maximum):
            p = way(z)[0]
            bad = p.isnan().any()
            cells.append("NaN" if bad else " ".join(f"{x:.3f}" for x in p.tolist()))
        torch.testing.assert_close(with_maximum(z).double(), truth, rtol=1e-3, atol=1e-6)
        print(f"{top:13g}   {cells[0]:20}   {cells[1]}")
    apart = torch.tensor([[-60.0, 0.0, 60.0], [900.0, 700.0, 1000.0], [-400.0, -399.0, -500.0]])
    torch.testing.assert_close(with_maximum(apart), apart.softmax(-1))  # each row its maximum
    assert without(torch.tensor([[89.0, 88.0]])).isnan().any()
    assert without(torch.tensor([[-110.0, -111.0]])).isnan().all()
    sixteen = without(torch.tensor([[12.0, 11.0]], dtype=torch.float16))
    print(f"fp16, scores 12 and 11: {sixteen.tolist()[0]}")
    assert sixteen.isnan().any()


if __name__ == "__main__":
    main()
