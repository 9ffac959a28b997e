"""fp8 casts of weights, activations and gradients: one scale per tensor, per row, per block.

A scale maps the largest magnitude of its group to the format's largest number, 448 in E4M3 and
57,344 in E5M2. What a cast then loses depends on how far the rest lies below that largest one.
"""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS, BLOCK = 512, 1024, 128


def cast(x: torch.Tensor, dtype: torch.dtype, groups: torch.Tensor | None) -> torch.Tensor:
    """`x` after a trip through fp8; `groups` [1 or more, ...] has the largest magnitudes."""
    scale = 1.0 if groups is None else torch.finfo(dtype).max / groups.clamp(min=1e-30)
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype).float() / scale  # saturate, never NaN


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
    """Four tensors [rows, columns] as they occur; three with a wide spread."""
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


def main() -> None:
    kinds = ("no scale", "tensor", "row", "1×128", "128×128")
    for dtype, name in ((E4M3, "E4M3"), (E5M2, "E5M2")):
        print(f"{name}: median relative error / share that becomes 0")
        print(f"{'':31}" + "".join(f"{kind:>15}" for kind in kinds))
        for title, x in tensors().items():
            cells = []
            for kind in kinds:
                back = cast(x, dtype, largest(x, kind))
                assert back.isfinite().all()
                if kind != "no scale":  # the largest of a group is the format's largest
                    top = x.abs() == largest(x, kind)
                    torch.testing.assert_close(back[top], x[top], rtol=1e-6, atol=0)
                error = ((back - x).abs() / x.abs()).median()
                zeros = (back == 0).float().mean()
                cells.append(f"{error:8.1%} / {zeros:4.0%}")
            print(f"{title:31}" + "".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
