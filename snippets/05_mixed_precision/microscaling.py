"""Block formats by hand: MXFP8, MXFP6, MXFP4, MXINT8 and NVFP4, their bits and their errors.

An MX block is 32 elements and one scale, which is a power of two in 8 bits (E8M0). OCP's
specification rounds this scale down, so the largest element of a block may be beyond the end of
the format and is clamped. cuBLAS and torchao's MXFP8 training round the scale up. An NVFP4
block is 16 elements and a scale in E4M3, with one fp32 factor for the tensor. Each element is
rounded to the nearest number in a table of all numbers of its format.

Look at the column "clamped", and compare the two numbers of each pair: down / up.
"""

import math
from collections.abc import Callable
from functools import partial

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


def power_of_two(blocks: torch.Tensor, table: torch.Tensor, up: bool) -> torch.Tensor:
    """The scale of each block, [blocks, 32] -> [blocks, 1], by OCP's rule or rounded up."""
    amax = blocks.abs().amax(1, keepdim=True)
    if up:  # the largest element is at most the largest number of the format
        exponent = (amax / table[-1]).log2().ceil()
    else:  # OCP: the exponent of the largest element minus the largest exponent of the format
        exponent = amax.log2().floor() - table[-1].log2().floor()
    return 2.0 ** exponent.clamp(-127, 127)  # E8M0


def mx(x: torch.Tensor, element: str, up: bool = False) -> torch.Tensor:
    """x after a cast to blocks of 32 elements that share a power of two."""
    table, _ = ELEMENTS[element]
    blocks = x.view(-1, 32)
    scale = power_of_two(blocks, table, up)
    return (nearest(blocks / scale, table) * scale).view_as(x)


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """x after a cast to blocks of 16 with a scale in E4M3, and one fp32 factor for x."""
    table, _ = ELEMENTS["E2M1"]
    blocks = x.view(-1, 16)
    wanted = blocks.abs().amax(1, keepdim=True) / 6
    factor = wanted.max() / 448  # maps the largest scale to the largest number of E4M3
    scale = nearest(wanted / factor, ELEMENTS["E4M3"][0]) * factor
    return (nearest(blocks / scale.clamp(min=1e-30), table) * scale).view_as(x)


def check() -> None:
    """Compare the tables, the rounding and both rules with torch's own types."""
    codes = torch.arange(127, dtype=torch.uint8)  # the tables are torch's, without inf and NaN
    assert ELEMENTS["E4M3"][0].equal(codes.view(torch.float8_e4m3fn).float())
    assert ELEMENTS["E5M2"][0].equal(codes[:124].view(torch.float8_e5m2).float())
    assert [len(ELEMENTS[name][0]) for name in ("E2M3", "E3M2", "E2M1")] == [32, 32, 8]
    x = torch.arange(-448 * 2**10, 448 * 2**10 + 1) / 2**10  # all numbers of E4M3, all ties
    assert nearest(x, ELEMENTS["E4M3"][0]).equal(x.to(torch.float8_e4m3fn).float())
    low = torch.full((32,), 1.75 * 2.0**-126)  # wants 2^-128, and E8M0 ends at 2^-127
    assert mx(low, "E2M1").eq(2.0**-125).all()
    block = torch.tensor([7.0, *[0.1] * 31])  # 7 = 1.75 · 4 is 6 at OCP's scale 1, 8 at 2
    assert [mx(block, "E2M1", up)[0].item() for up in (False, True)] == [6.0, 8.0]
    block = torch.tensor([6.0, *[0.1] * 31])  # the largest number itself needs no larger scale
    assert mx(block, "E2M1", up=True).equal(mx(block, "E2M1")) and mx(block, "E2M1")[0] == 6
    blocks = torch.randn(64, 32)
    for up in (False, True):
        scale = power_of_two(blocks, ELEMENTS["E4M3"][0], up)
        assert scale.to(torch.float8_e8m0fnu).float().equal(scale)
        x8 = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert (x8.float() * scale).equal(mx(blocks, "E4M3", up))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check()
    print("E2M1 has", [f"{v:g}" for v in ELEMENTS["E2M1"][0].tolist()])
    normal = torch.randn(ROWS, COLUMNS)
    outliers = normal.clone()
    outliers[:, ::256] *= 100
    ordinary = torch.ones(COLUMNS, dtype=torch.bool)
    ordinary[::256] = False
    spread = normal * torch.logspace(-3, 3, ROWS)[:, None]

    def errors(cast: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        """The errors for normal numbers, next to outliers, and for rows of different size."""
        off, rows = (cast(outliers) - outliers)[:, ordinary], cast(spread) - spread
        rows = rows.norm(dim=1) / spread.norm(dim=1)
        return [
            ((cast(normal) - normal).norm() / normal.norm()).item(),
            (off.norm() / outliers[:, ordinary].norm()).item(),
            rows.square().mean().sqrt().item(),
        ]

    print("error: |x' - x| / |x|, in the 2-norm. normal: normal numbers; outliers: all but 4")
    print("channels that are 100 times as large; rows: rows from 1e-3 to 1e3, root mean square")
    print("clamped: blocks of normal numbers whose largest element is beyond the format's end")
    print("scale rounded down (OCP) / rounded up")
    print("format       bits    clamped           normal         outliers             rows")
    found = {}
    for name, (element, up_matters) in {
        "bf16": ("", False),
        "MXFP8 E4M3": ("E4M3", True),
        "MXFP8 E5M2": ("E5M2", True),
        "MXINT8": ("INT8", True),
        "MXFP6 E2M3": ("E2M3", True),
        "MXFP6 E3M2": ("E3M2", True),
        "MXFP4 E2M1": ("E2M1", True),
        "NVFP4 E2M1": ("E2M1", False),
    }.items():
        if up_matters:
            table, bits = ELEMENTS[element]
            pairs = [errors(partial(mx, element=element, up=up)) for up in (False, True)]
            blocks = normal.view(-1, 32)
            largest = [
                blocks.abs().amax(1, keepdim=True) / power_of_two(blocks, table, up)
                for up in (False, True)
            ]
            clamped = [(top > table[-1]).float().mean().item() for top in largest]
            bits, clamps = bits + 8 / 32, f"{clamped[0]:5.1%} / {clamped[1]:2.0%}"
            cells = [f"{down:.2%} / {up:.2%}" for down, up in zip(*pairs, strict=True)]
            found[element] = (clamped, *zip(*pairs, strict=True))
        else:
            one = errors(nvfp4 if element else lambda x: x.bfloat16().float())
            bits, clamps = (4 + 8 / 16 if element else 16), "–"
            cells = [f"{error:.2%}" for error in one]
            found[name] = one
        print(f"{name:11}{bits:6.2f}{clamps:>11}" + "".join(f"{cell:>17}" for cell in cells))

    assert all(clamped[1] == 0 for clamped, *_ in (found[name] for name in ELEMENTS))
    assert 0.15 < found["E4M3"][0][0] < 0.2 and 0.25 < found["E2M1"][0][0] < 0.35
    for element, mantissa in (("E4M3", 3), ("E5M2", 2)):  # √(ln 2 / 18) · 2^-m, one factor
        assert 1 < found[element][1][1] / (math.sqrt(math.log(2) / 18) * 2**-mantissa) < 1.12
    # OCP's rule hides that E4M3 is more accurate than E2M3 for normal numbers, too
    assert found["E2M3"][1][0] < found["E4M3"][1][0]
    assert found["E4M3"][1][1] < 0.95 * min(found["E2M3"][1])
    assert min(found["INT8"][2]) > 4 * max(found["E4M3"][2])  # outliers need more exponents
    assert found["NVFP4 E2M1"][0] < 0.9 * min(found["E2M1"][1])
    assert found["NVFP4 E2M1"][2] > 2 * max(found["E2M1"][3])  # one factor for all rows


if __name__ == "__main__":
    main()
