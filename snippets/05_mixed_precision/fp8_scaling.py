"""What a cast to fp8 loses with one scale per tensor, per row or per block, for four tensors.

A scale maps the largest magnitude of its group to the format's largest number, which is 448 in
E4M3 and 57,344 in E5M2. The loss depends on how far the other values are below the largest one.
In each cell, the second number is the fraction of values that become 0.
"""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS, BLOCK = 512, 1024, 128


def cast(x: torch.Tensor, dtype: torch.dtype, groups: torch.Tensor | None) -> torch.Tensor:
    """x after a cast to fp8 and back; `groups` contains the largest magnitude of each group."""
    scale = 1.0 if groups is None else torch.finfo(dtype).max / groups.clamp(min=1e-30)
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(
        dtype
    ).float() / scale  # clamp: no infinity, no NaN


def largest(x: torch.Tensor, kind: str) -> torch.Tensor | None:
    """The largest magnitude of each group, shaped to broadcast against [rows, columns]."""
    if kind == "no scale":
        return None
    if kind == "tensor":
        return x.abs().amax()
    if kind == "row":
        return x.abs().amax(1, keepdim=True)
    rows = 1 if kind == "1×128" else BLOCK
    blocks = x.view(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    return amax.expand_as(blocks).reshape_as(x)


def tensors() -> dict[str, torch.Tensor]:
    """Four tensors [rows, columns]; in three of them the magnitudes differ widely."""
    torch.manual_seed(0)
    noise = torch.randn(ROWS, COLUMNS)
    outliers = noise.clone()
    outliers[:, ::256] *= 2000  # a few channels of an activation
    return {
        "weight, 0.02 × normal": 0.02 * noise,
        "activation, 4 channels × 2000": outliers,
        "rows from 1e-3 to 1e3": noise * torch.logspace(-3, 3, ROWS)[:, None],
        "gradient, 1e-6 × log-normal": 1e-6 * noise * torch.exp(3 * torch.randn(ROWS, COLUMNS)),
    }


def check() -> None:
    """Compare the cast with a search for the nearest number in a table of the format."""
    torch.manual_seed(1)
    x = torch.randn(4, 64) * torch.logspace(-1, 1, 4)[:, None]
    for dtype, codes in ((E4M3, 127), (E5M2, 124)):  # without infinity and NaN
        table = torch.arange(codes, dtype=torch.uint8).view(dtype).float()
        table = torch.cat([-table, table])
        for kind in ("no scale", "tensor", "row"):
            top = largest(x, kind)
            step = 1 if top is None else top / table.max()
            nearest = table[(x / step).unsqueeze(-1).sub(table).abs().argmin(-1)] * step
            torch.testing.assert_close(cast(x, dtype, top), nearest, rtol=1e-5, atol=1e-30)
    x = torch.randn(256, 384)
    for kind, rows, columns in (("row", 1, 384), ("1×128", 1, 128), ("128×128", 128, 128)):
        tops = largest(x, kind).expand_as(x)
        for i in range(0, 256, rows):
            for j in range(0, 384, columns):
                group = slice(i, i + rows), slice(j, j + columns)
                assert tops[group].eq(x[group].abs().max()).all(), kind


def main() -> None:
    torch.set_num_threads(1)
    check()
    kinds = ("no scale", "tensor", "row", "1×128", "128×128")
    weight, activation, rows, gradient = tensors()
    errors: dict[tuple[str, ...], float] = {}
    zeros: dict[tuple[str, ...], float] = {}
    for dtype, name in ((E4M3, "E4M3"), (E5M2, "E5M2")):
        print(f"{name}: median relative error / fraction that becomes 0, one scale for each")
        print(f"{'':31}" + "".join(f"{kind:>15}" for kind in kinds))
        for title, x in tensors().items():
            cells = []
            for kind in kinds:
                back = cast(x, dtype, largest(x, kind))
                assert back.isfinite().all()
                if kind != "no scale":  # the largest of a group is the format's largest
                    top = x.abs() == largest(x, kind)
                    torch.testing.assert_close(back[top], x[top], rtol=1e-6, atol=0)
                key = name, title, kind
                errors[key] = ((back - x).abs() / x.abs()).median().item()
                zeros[key] = (back == 0).float().mean().item()
                cells.append(f"{errors[key]:8.1%} / {zeros[key]:4.0%}")
            print(f"{title:31}" + "".join(f"{cell:>15}" for cell in cells))
    x = tensors()[activation]
    integers = (x / (x.abs().max() / 127)).round()
    lost = (integers == 0).float().mean().item()
    print(f"int8 with one scale for the tensor: {lost:.1%} of the activation becomes 0")

    for title in (weight, activation):  # one scale is enough for these two, but not in int8
        assert errors["E4M3", title, "tensor"] < 0.03 and zeros["E4M3", title, "tensor"] < 0.02
    assert lost > 0.98
    assert zeros["E4M3", rows, "tensor"] > 0.15 and zeros["E4M3", rows, "row"] < 0.01
    small, row, square = (zeros["E4M3", gradient, kind] for kind in ("1×128", "row", "128×128"))
    assert 2 * small < row < square / 1.5  # 128 × 128 is the largest group of the three
    for title in (weight, activation, rows, gradient):
        assert zeros["E5M2", title, "tensor"] < 0.005 < 0.04 < errors["E5M2", title, "tensor"]
    assert zeros["E5M2", gradient, "no scale"] > 0.5  # even E5M2 needs a scale here
    assert 1.8 < errors["E5M2", weight, "row"] / errors["E4M3", weight, "row"] < 2.2


if __name__ == "__main__":
    main()
