"""Microscaling by hand: MXFP8, MXFP6, MXFP4, MXINT8 and NVFP4, their bits and their error.

An MX block is 32 elements and one scale, a power of two in 8 bits (E8M0); NVFP4 has 16 elements
and a scale in E4M3, with one fp32 factor for the tensor. Elements are found by rounding to the
nearest number that the format has, from a table of all of them.
"""

import torch

ROWS, COLUMNS = 256, 1024


def numbers(exponent_bits: int, mantissa_bits: int, limit: float) -> torch.Tensor:
    """All non-negative numbers of a small float, in order, subnormals included, up to limit."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            hidden = 1 if exponent else 0  # subnormals have no hidden bit
            values.append((hidden + fraction) * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor([v for v in values if v <= limit])


ELEMENTS = {  # name: the numbers, bits of an element
    "E4M3": (numbers(4, 3, 448), 8),
    "E5M2": (numbers(5, 2, 57344), 8),
    "E2M3": (numbers(2, 3, 7.5), 6),
    "E3M2": (numbers(3, 2, 28), 6),
    "E2M1": (numbers(2, 1, 6), 4),
    "INT8": (torch.arange(128) / 64, 8),  # 2's complement with 6 fraction bits, to 1.984
}


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Round |x| to the nearest of the table, ties to the even code; beyond its end, the end."""
    between = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(x.abs(), between)  # a tie goes down
    tie = (index < len(between)) & (between[index.clamp(max=len(between) - 1)] == x.abs())
    index = index + (tie & (index % 2 == 1)).long()  # unless the lower code is odd
    return table[index] * x.sign()


def mx(x: torch.Tensor, element: str, block: int = 32) -> torch.Tensor:
    """Blocks that share a power of two: floor(log2 amax) - the element's largest exponent."""
    table, _ = ELEMENTS[element]
    blocks = x.view(-1, block)
    top = torch.log2(table[-1]).floor()
    scale = 2 ** (blocks.abs().amax(1, keepdim=True).log2().floor() - top).clamp(-127, 127)
    return (nearest(blocks / scale, table) * scale).view_as(x)


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 with a scale in E4M3; an fp32 factor maps the largest scale to 448."""
    table, _ = ELEMENTS["E2M1"]
    blocks = x.view(-1, 16)
    wanted = blocks.abs().amax(1, keepdim=True) / 6
    factor = wanted.max() / 448
    scale = nearest(wanted / factor, ELEMENTS["E4M3"][0]) * factor
    return (nearest(blocks / scale.clamp(min=1e-30), table) * scale).view_as(x)


def main() -> None:
    codes = torch.arange(127, dtype=torch.uint8)  # the tables are torch's, without inf and NaN
    assert ELEMENTS["E4M3"][0].equal(codes.view(torch.float8_e4m3fn).float())
    assert ELEMENTS["E5M2"][0].equal(codes[:124].view(torch.float8_e5m2).float())
    assert [len(ELEMENTS[name][0]) for name in ("E2M3", "E3M2", "E2M1")] == [32, 32, 8]
    x = torch.arange(-448 * 2**10, 448 * 2**10 + 1) / 2**10  # all numbers of E4M3, all ties
    assert nearest(x, ELEMENTS["E4M3"][0]).equal(x.to(torch.float8_e4m3fn).float())
    low = torch.full((32,), 1.75 * 2.0**-126)  # wants 2^-128, and E8M0 ends at 2^-127
    assert mx(low, "E2M1").eq(2.0**-125).all()
    print("E2M1 has", [f"{v:g}" for v in ELEMENTS["E2M1"][0].tolist()])
    torch.manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS)
    outliers = normal.clone()
    outliers[:, ::256] *= 100
    print("error: |x' - x| / |x|, in the 2-norm, of normal numbers; of all but 4 outlier")
    print("channels × 100; of rows from 1e-3 to 1e3 (root mean square over rows)")
    print("format          block  scale  bits per element    normal  outliers      rows")
    rows = {
        "bf16": (lambda x: x.bfloat16().float(), 0, 16, "none"),
        "MXFP8 E4M3": (lambda x: mx(x, "E4M3"), 32, 8, "E8M0"),
        "MXFP8 E5M2": (lambda x: mx(x, "E5M2"), 32, 8, "E8M0"),
        "MXINT8": (lambda x: mx(x, "INT8"), 32, 8, "E8M0"),
        "MXFP6 E2M3": (lambda x: mx(x, "E2M3"), 32, 6, "E8M0"),
        "MXFP6 E3M2": (lambda x: mx(x, "E3M2"), 32, 6, "E8M0"),
        "MXFP4 E2M1": (lambda x: mx(x, "E2M1"), 32, 4, "E8M0"),
        "NVFP4 E2M1": (nvfp4, 16, 4, "E4M3"),
    }
    ordinary = torch.ones(COLUMNS, dtype=torch.bool)
    ordinary[::256] = False
    spread = normal * torch.logspace(-3, 3, ROWS)[:, None]
    for name, (trip, block, bits, scale) in rows.items():
        total = bits + (8 / block if block else 0)
        errors = [(trip(normal) - normal).norm() / normal.norm()]
        off = (trip(outliers) - outliers)[:, ordinary]
        errors.append(off.norm() / outliers[:, ordinary].norm())
        errors.append(
            ((trip(spread) - spread).norm(dim=1) / spread.norm(dim=1)).square().mean().sqrt()
        )
        cells = "".join(f"{error:10.2%}" for error in errors)
        print(f"{name:14}  {block or '–':>5}  {scale:5}  {total:16.2f}{cells}")


if __name__ == "__main__":
    main()
