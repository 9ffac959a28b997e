"""An output that is not rescaled when the maximum rises is wrong, but many tests pass.

The error depends on the position of the largest scores and on their size, so four inputs
judge the same bug differently. The last variant is the update as two papers print it, with an
inverse.
"""

import torch

TILE = 16


# --8<-- [start:online]
def online(z: torch.Tensor, v: torch.Tensor, shrink_out) -> torch.Tensor:
    m, total, out = torch.full((len(z),), -torch.inf), torch.zeros(len(z)), 0
    for j in range(0, z.shape[1], TILE):
        new = torch.maximum(m, z[:, j : j + TILE].max(-1).values)
        p, factor = (z[:, j : j + TILE] - new[:, None]).exp(), (m - new).exp()
        total = total * factor + p.sum(-1)
        out = shrink_out(out, factor[:, None]) + p @ v[j : j + TILE]
        m = new
    return out / total[:, None]


VARIANTS = {
    "right": lambda out, factor: out * factor,
    "forgotten": lambda out, factor: out,
    "inverted": lambda out, factor: out / factor,
}
# --8<-- [end:online]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    z, v = 2 * torch.randn(8, 128), torch.randn(128, 16)
    inputs = {
        "random scores": z,
        "largest first": z.sort(-1, descending=True).values,
        "largest last": z.sort(-1).values,
        "small scores (x 0.01)": 0.01 * z,
    }
    print("largest error            " + "".join(f"{name:>12}" for name in VARIANTS))
    worst = {}
    for name, scores in inputs.items():
        truth = scores.double().softmax(-1) @ v.double()
        errors = [
            (online(scores, v, way) - truth).abs().nan_to_num(torch.inf).max().item()
            for way in VARIANTS.values()
        ]
        worst[name] = dict(zip(VARIANTS, errors, strict=True))
        cells = ["NaN" if e == torch.inf else f"≈{e:.0e}" for e in errors]
        print(f"{name:25}" + "".join(f"{cell:>12}" for cell in cells))
    assert max(case["right"] for case in worst.values()) < 1e-5
    assert worst["random scores"]["forgotten"] > 0.1
    assert worst["largest first"]["forgotten"] < 1e-5  # the test that proves nothing
    assert worst["largest last"]["forgotten"] > 3 * worst["random scores"]["forgotten"]
    assert 1e-3 < worst["small scores (x 0.01)"]["forgotten"] < 0.01  # hidden by atol=0.01
    assert all(
        case["inverted"] == torch.inf for case in worst.values()
    )  # 0/0 in the first tile


if __name__ == "__main__":
    main()
