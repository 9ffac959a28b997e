"""What eight formats make of a number: its bits, what is lost, and a sum that stalls.

Plain formats round to the nearest, ties to even, here with ordinary floats: without arguments
the program compares with torch's casts, bit by bit. MXFP4 and NVFP4 store E2M1 elements and a
scale for a block. The scale of MXFP4 follows the rule of OCP's specification, which rounds down
to a power of two. An element above 6 times the scale is clamped. In torchao, RCEIL chooses a
larger scale for each such block, and EVEN only for an element of at least 7 times the scale.

The page "Number formats" has the same numbers.
"""

import argparse
import math
import re
import sys
from decimal import ROUND_HALF_UP, Context
from typing import NamedTuple

import torch


class Format(NamedTuple):
    e: int
    m: int
    infinity: bool = True  # does the highest exponent mean infinity and NaN?
    largest: float = 0.0  # if not: what lies beyond becomes this

    @property
    def bias(self) -> int:
        return 2 ** (self.e - 1) - 1


E2M1, E4M3 = Format(2, 1, False, 6.0), Format(4, 3, False, 448.0)
FORMATS = {
    "fp32": Format(8, 23),
    "tf32": Format(8, 10),
    "bf16": Format(8, 7),
    "fp16": Format(5, 10),
    "e4m3": E4M3,
    "e5m2": Format(5, 2),
    "mxfp4": E2M1,
    "nvfp4": E2M1,
}
FACTOR = Format(8, 23, False, 2.0**128 - 2.0**104)  # fp32 that saturates
BLOCKS = {"mxfp4": 32, "nvfp4": 16}  # elements that share a scale
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?"


# --8<-- [start:plain]
def octave(x: float, f: Format) -> int:
    """The exponent at x: floor(log2 |x|), but no less than that of the smallest normal."""
    return max(math.frexp(x or 5e-324)[1] - 1, 1 - f.bias)


def rounded(x: float, f: Format) -> float:
    """The number of the format that is nearest to x, a tie to the even one."""
    if math.isnan(x) or (math.isinf(x) and f.infinity):
        return x
    largest = f.largest or (2 - 2.0**-f.m) * 2.0**f.bias
    if math.isfinite(x):
        step = 2.0 ** (octave(x, f) - f.m)
        y = round(abs(x) / step) * step  # Python's round sends ties to even
    else:
        y = math.inf
    if y > largest:
        y = math.inf if f.infinity else largest
    return math.copysign(y, x)


def encode(y: float, f: Format) -> int:
    """The bits of a number of the format."""
    sign = int(math.copysign(1, y) < 0) << (f.e + f.m)
    if math.isnan(y):
        return 2 ** (f.e + f.m) - (2 ** (f.m - 1) if f.infinity else 1)
    if math.isinf(y):
        return sign + ((2**f.e - 1) << f.m)
    exponent = octave(y, f)
    return sign + ((exponent + f.bias - 1) << f.m) + int(abs(y) / 2.0 ** (exponent - f.m))


def decode(pattern: int, f: Format) -> float:
    """The number that bits stand for; E2M1 has no NaN, and E4M3 one of each sign."""
    sign = -1.0 if pattern >> (f.e + f.m) else 1.0
    exponent, mantissa = pattern >> f.m & (2**f.e - 1), pattern & (2**f.m - 1)
    if exponent == 2**f.e - 1 and f.infinity:
        return math.nan if mantissa else sign * math.inf
    if f is E4M3 and exponent == 15 and mantissa == 7:
        return math.nan
    hidden = 2**f.m if exponent else 0
    return sign * (hidden + mantissa) * 2.0 ** (max(exponent, 1) - f.bias - f.m)


def neighbour(y: float, f: Format, by: int) -> float:
    """The next number of the format, above (by = 1) or below; NaN where there is none."""
    if not math.isfinite(y):
        return math.nan
    pattern = encode(abs(y), f)
    place = (-pattern if y < 0 else pattern) + by  # patterns count upwards from 0
    found = decode(abs(place), f) if abs(place) < 2 ** (f.e + f.m) else math.nan
    return -found if place < 0 else found


# --8<-- [end:plain]


def step(y: float, f: Format) -> float:
    """Return the distance from y to the next number of the format that is farther from 0."""
    return 2.0 ** (octave(y, f) - f.m) if math.isfinite(y) else math.nan


def limits(f: Format) -> tuple[float, float, float]:
    """Return the largest number, the smallest normal number, and the step from 1 upwards."""
    return f.largest or (2 - 2.0**-f.m) * 2.0**f.bias, 2.0 ** (1 - f.bias), 2.0**-f.m


# --8<-- [start:blocks]
def scales(values: list[float], name: str) -> tuple[list[float], float]:
    """The scale of each block, and the factor of them all (NVFP4's; 1 in MXFP4)."""
    size = BLOCKS[name]
    tops = [max(abs(v) for v in values[i : i + size]) for i in range(0, len(values), size)]
    if name == "mxfp4":  # OCP's rule: 2^(floor(log2 top) - 2), and 2 is the exponent of 6
        return [2.0 ** min(max(math.frexp(t)[1] - 3, -127), 127) for t in tops], 1.0
    factor = rounded(max(tops) / 6 / 448, FACTOR)  # the largest scale becomes 448
    return [rounded(t / 6 / factor, E4M3) if factor else 0.0 for t in tops], factor


def block_stored(values: list[float], name: str) -> list[float]:
    """What each value becomes: an element of E2M1, times the scale of its block."""
    if not all(map(math.isfinite, values)):
        return [math.nan for _ in values]
    each, factor = scales(values, name)
    units = [each[i // BLOCKS[name]] * factor for i in range(len(values))]
    pairs = zip(values, units, strict=True)
    return [rounded(v / unit, E2M1) * unit if unit else 0.0 for v, unit in pairs]


# --8<-- [end:blocks]


def repeated(y: float, f: Format, times: int) -> tuple[float, int]:
    """The sum of `times` y, one after the other, and the terms after which it stood still."""
    total = 0.0
    for i in range(times):
        following = rounded(total + y, f)
        if following == total:
            return total, i
        total = following
    return total, times


def written(x: float, figures: int = 9) -> str:
    """So many digits at most, and a power of ten where the point is far away."""
    if not x or not math.isfinite(x):
        return f"{x:g}"
    x = float(Context(prec=figures, rounding=ROUND_HALF_UP).create_decimal(x))
    if 1e-4 <= abs(x) < 1e9:
        return f"{x:.15g}"
    mantissa, _, exponent = f"{x:.12e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def length(values: list[float]) -> float:
    """The 2-norm, added in order: sum() is more precise from Python 3.12 on."""
    total = 0.0
    for v in values:
        total += v * v
    return math.sqrt(total)


def lost(x: float, y: float) -> str:
    if x == y or math.isnan(x):
        return "0%"
    if not math.isfinite(y) or not math.isfinite(x):
        return "all"
    return f"{written(100 * abs((y - x) / x), 3)}%"


def parts(pattern: int, f: Format) -> tuple[str, str]:
    """Bits with gaps between sign, exponent and mantissa, and what they say."""
    text = f"{pattern:0{1 + f.e + f.m}b}"
    bits = f"{text[0]} {text[1 : 1 + f.e]} {text[1 + f.e :]}"
    y, mantissa = decode(pattern, f), pattern & (2**f.m - 1)
    if not y or not math.isfinite(y):
        return bits, written(y)
    exponent = octave(y, f)
    one = "1 + " if abs(y) >= 2.0 ** (1 - f.bias) else ""
    return bits, f"{'-' if y < 0 else ''}({one}{mantissa}/{2**f.m})·2^{exponent}"


def value_of(text: str, name: str, scale: int) -> float:
    """A number as typed; 0x… are bits of the format."""
    if not text.startswith("0x"):
        return float(text)
    f = FORMATS[name]
    return decode(int(text, 16) % 2 ** (1 + f.e + f.m), f) / 2.0**scale


def stored(x: float, rest: list[float], name: str, scale: int) -> tuple[float, float, float]:
    """Of a number that shares its block with `rest`: the element, its unit, their product."""
    f = FORMATS[name]
    if name not in BLOCKS:
        y = rounded(x * 2.0**scale, f)
        return y, 2.0**-scale, y / 2.0**scale
    if not math.isfinite(x):
        return math.nan, math.nan, math.nan
    each, factor = scales([x, *rest], name)
    unit = each[0] * factor
    y = rounded(x / unit, f) if unit else 0.0
    return y, unit, y * unit


def facts(text: str, name: str, scale: int, times: int, rest: list[float]) -> dict:
    """What is said about one number, whose block `rest` completes."""
    f, x = FORMATS[name], value_of(text, name, scale)
    y, unit, _ = stored(x, rest, name, scale)
    bits, says = parts(encode(y, f), f) if name not in BLOCKS or y == y else ("none", "nan")
    beside = [neighbour(y, f, by) * unit for by in (-1, 1)]
    below, above = ("none" if math.isnan(v) else written(v) for v in beside)
    others = {}
    for other, g in FORMATS.items():
        element, _, each = stored(x, rest, other, scale)
        if other in BLOCKS:  # products are summed in fp32
            g, divisor = FORMATS["fp32"], 1.0
            element = rounded(each, g)
        else:
            divisor = 2.0**scale
        total, terms = repeated(element, g, times)
        stops = f"after {terms} terms" if 0 < terms < times else "no"
        others[other] = [written(each), lost(x, each), written(total / divisor), stops]
        if other == name:
            spacing = step(total, g) / divisor
    largest, smallest, above_one = map(written, limits(f))
    block = "none"
    scaled = f"2^{scale}"
    if name in BLOCKS and math.isfinite(x):
        values = [x, *rest]
        kept = block_stored(values, name)
        gone = sum(bool(v) and not w for v, w in zip(values, kept, strict=True))
        off, norm = length([w - v for v, w in zip(values, kept, strict=True)]), length(values)
        error = written(100 * off / norm, 3) if norm else "0"
        block = f"{len(values)} values, {gone} become 0, error of all {error}%"
        each, factor = scales(values, name)
        scaled = written(each[0]) + (f" × {written(factor)}" if name == "nvfp4" else "")
    return {
        "number": written(x),
        "stored": others[name][0],
        "lost": others[name][1],
        "bits": bits,
        "says": says,
        "below": below,
        "above": above,
        "largest": largest,
        "smallest": smallest,
        "above one": above_one,
        "scale": scaled,
        "block": block,
        "sum": others[name][2],
        "exact": written(x * times),
        "still": others[name][3],
        "spacing": "none" if math.isnan(spacing) else written(spacing),
        "others": others,
    }


def check() -> int:
    """Compare with torch's casts, and the blocks with a search over all 15 elements."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
             "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # fmt: skip
    views = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=random).int()
    near = torch.randn(8000, generator=random) * 2.0 ** torch.randint(
        -24, 17, (8000,), generator=random
    )
    halves = torch.arange(2**16, dtype=torch.int32)[::7] << 16  # bf16's numbers
    ties = torch.cat([halves + 0x8000, (halves >> 16) - 2**15 << 13])  # and what lies between
    x = torch.cat([near, *(each.view(torch.float32) for each in (bits, halves, ties.int()))])
    cases = 0
    for name, dtype in types.items():
        f, view = FORMATS[name], views[dtype.itemsize]
        info = torch.finfo(dtype)
        expected = info.max, info.smallest_normal, info.eps
        assert limits(f) == expected, name
        casts = x.to(dtype)
        width = 2 ** (1 + f.e + f.m)
        rows = zip(x.tolist(), casts.double().tolist(), casts.view(view).tolist(), strict=True)
        for number, theirs, pattern in rows:
            y = rounded(number, f)
            cases += 1
            if math.isnan(theirs):  # older versions of torch give NaN beyond 464
                assert math.isnan(y) or (f is E4M3 and abs(number) > 464), (name, number)
                continue
            assert y == theirs and encode(y, f) == pattern % width, (name, number)
            assert decode(pattern % width, f) == y
            above = neighbour(y, f, 1)
            assert math.isnan(above) or (above > y and neighbour(above, f, -1) in (y, math.nan))
            assert y < 0 or not math.isfinite(above) or above - y == step(y, f)
    precise = torch.randn(4000, generator=random, dtype=torch.float64)
    assert [rounded(v, FORMATS["fp32"]) for v in precise.tolist()] == precise.float().tolist()
    for number, pattern in zip(near.tolist(), near.view(torch.int32).tolist(), strict=True):
        kept = pattern % 2**32 + 0xFFF + (pattern >> 13 & 1) >> 13  # tf32, from the bits
        assert encode(rounded(number, FORMATS["tf32"]), FORMATS["tf32"]) == kept
    for name in ("bf16", "fp16"):
        total = torch.zeros((), dtype=types[name])
        for _ in range(1000):
            total += torch.tensor(0.1, dtype=types[name])
        term = rounded(0.1, FORMATS[name])
        assert repeated(term, FORMATS[name], 1000)[0] == total
        end, terms = repeated(term, FORMATS[name], 4096)  # a sum stops at half a step
        steps = [step(total, FORMATS[name]) for total in (end / 2, end)]
        assert terms < 4096 and steps[0] / 2 < term <= steps[1] / 2

    elements = [decode(p, E2M1) for p in range(16)]
    for _ in range(60):
        values = (
            torch.randn(32, generator=random)
            * 2.0 ** torch.randint(-6, 7, (32,), generator=random)
        ).tolist()
        for name, size in BLOCKS.items():
            each, factor = scales(values, name)
            kind = torch.float8_e8m0fnu if name == "mxfp4" else torch.float8_e4m3fn
            assert torch.tensor(each).to(kind).float().tolist() == each  # the type has them
            kept = block_stored(values, name)
            for i, (v, w) in enumerate(zip(values, kept, strict=True)):
                unit = each[i // size] * factor
                cases += 1
                near_by = min(elements, key=lambda t: abs(t - v / unit))
                assert abs(w / unit - v / unit) <= abs(near_by - v / unit) + 1e-12
            top = max(map(abs, values))
            assert 3 <= top / max(each) / factor < 8  # the largest value uses the elements
    for top, scale in ((3.9, 0.5), (5.0, 1.0), (7.9, 1.0), (8.0, 2.0)):  # OCP's rule
        assert scales([0.1, -top], "mxfp4") == ([scale], 1.0)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", default="0.1", help="such as -1.5e-3, or bits: 0x3dcd")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--scale", type=int, default=0, help="stored is the number × 2^scale")
    parser.add_argument("--times", type=int, default=1024, help="terms of the sum, to 4096")
    parser.add_argument("--block", default="", help="the rest of its block, up to 31 numbers")
    args = parser.parse_args()
    rest = args.block.split()
    if not re.fullmatch(rf"{NUMBER}|0x[0-9a-f]{{1,8}}|[+-]?inf|nan", args.number):
        sys.exit("--number: a number such as -1.5e-3, inf, nan, or bits as 0x3dcd")
    if len(rest) > 31 or not all(re.fullmatch(NUMBER, each) for each in rest):
        sys.exit("--block: up to 31 numbers with blanks between them")
    if not (1 <= args.times <= 4096 and -24 <= args.scale <= 24):
        sys.exit("1 to 4096 terms, and a scale from 2^-24 to 2^24")
    scale = 0 if args.format in BLOCKS else args.scale
    said = facts(args.number, args.format, scale, args.times, [float(v) for v in rest])
    print(f"{said['number']} in {args.format} is {said['stored']}, lost: {said['lost']}")
    print(f"bits {said['bits']}: {said['says']}, scale {said['scale']}")
    print(
        f"largest number {said['largest']}, smallest normal number {said['smallest']}", end=""
    )
    print(f", step above 1: {said['above one']}{' (elements)' * (args.format in BLOCKS)}")
    print(f"below {said['below']}, above {said['above']}; block: {said['block']}")
    print(
        f"{args.times} of them: {said['sum']}, exactly {said['exact']}, stalls: {said['still']}"
    )
    print(f"step to the next number at the end of the sum: {said['spacing']}")
    print("format           stored       lost             sum  stalls")
    for name, (value, share, total, stops) in said["others"].items():
        print(f"{name:6} {value:>16} {share:>10} {total:>15}  {stops}")
    if len(sys.argv) == 1:
        print(f"{check():,} roundings as torch's, or as a search over all elements")


if __name__ == "__main__":
    main()
