"""Six number formats from their bits: their limits, every bit pattern, and the number 0.1.

A float has a sign, an exponent of e bits with a bias, and a mantissa of m bits. The limits
follow from e and m alone. The program compares them with torch.finfo, and it compares every
pattern of the four short formats with the value that torch gives it. tf32 has no dtype in
torch. It is an fp32 without the last 13 bits of its mantissa, and here these bits are rounded
to nearest. Draws formats.svg.
"""

from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

TENTH = torch.tensor(0.1)


@dataclass
class Format:
    name: str
    e: int
    m: int
    dtype: torch.dtype | None  # None: torch has no such dtype
    view: torch.dtype = torch.int16
    infinity: bool = True  # does the highest exponent mean infinity and NaN?

    @property
    def bias(self) -> int:
        return 2 ** (self.e - 1) - 1

    def decode(self, pattern: int) -> float:
        """Return the value of a bit pattern, by the definition."""
        sign = -1.0 if pattern >> (self.e + self.m) else 1.0
        exponent = pattern >> self.m & (2**self.e - 1)
        mantissa = pattern & (2**self.m - 1)
        if exponent == 2**self.e - 1:
            if self.infinity:
                return float("nan") if mantissa else sign * float("inf")
            if mantissa == 2**self.m - 1:
                return float("nan")
        if exponent == 0:  # subnormal: no leading 1, and the exponent of E = 1
            return sign * mantissa * 2.0 ** (1 - self.bias - self.m)
        return sign * (2**self.m + mantissa) * 2.0 ** (exponent - self.bias - self.m)

    def limits(self) -> tuple[float, float, float, float]:
        """Return the largest, smallest normal and smallest subnormal number, and epsilon."""
        if self.infinity:
            largest = (2 - 2.0**-self.m) * 2.0**self.bias
        else:  # the highest E is used, too, and only all ones is NaN
            largest = (2 - 2.0 ** (1 - self.m)) * 2.0 ** (self.bias + 1)
        normal = 2.0 ** (1 - self.bias)
        return largest, normal, normal * 2.0**-self.m, 2.0**-self.m


FORMATS = [
    Format("fp32", 8, 23, torch.float32, torch.int32),
    Format("tf32", 8, 10, None),
    Format("fp16", 5, 10, torch.float16),
    Format("bf16", 8, 7, torch.bfloat16),
    Format("fp8 E4M3", 4, 3, torch.float8_e4m3fn, torch.uint8, infinity=False),
    Format("fp8 E5M2", 5, 2, torch.float8_e5m2, torch.uint8),
]


def pattern_of(value: torch.Tensor, format: Format) -> int:
    """Return the bits of `value` in `format`, as an unsigned integer."""
    if format.dtype is None:  # tf32: round the fp32 bits to nearest even, drop 13 of them
        bits = int(value.view(torch.int32))
        return (bits + 0xFFF + (bits >> 13 & 1)) >> 13
    width = 1 + format.e + format.m
    return int(value.to(format.dtype).view(format.view)) & (2**width - 1)


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "formats", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 5.2))
    for row, format in enumerate(FORMATS):
        width, top = 1 + format.e + format.m, -2.0 * row
        pattern = pattern_of(TENTH, format)
        for i, bit in enumerate(f"{pattern:0{width}b}"):
            colour = "#c2410c" if i == 0 else "#0b6e99" if i <= format.e else "#15803d"
            box = plt.Rectangle((i, top), 0.92, 1, facecolor=colour, alpha=0.85)
            axes.add_patch(box)
            axes.text(i + 0.46, top + 0.46, bit, color="white", ha="center", va="center")
        words = f"{format.name}: 1 + {format.e} + {format.m}"
        axes.text(0, top + 1.12, words, va="bottom")
        axes.text(32, top + 1.12, f"{format.decode(pattern):.9g}", va="bottom", ha="right")
    for x, word, colour in [(16, "sign", 0), (19.4, "exponent", 1), (25.2, "mantissa", 2)]:
        colours = ["#c2410c", "#0b6e99", "#15803d"]
        axes.text(x, -9.6, word, color=colours[colour], weight="bold")
    axes.set(xlim=(-0.3, 32.3), ylim=(-10.3, 2))
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig("formats.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    tf32 = FORMATS[1]  # from 1 to 2 it has the same numbers as fp16
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11])  # halfway between two numbers
    for x in torch.cat([1 + torch.rand(256, generator=torch.Generator().manual_seed(0)), ties]):
        assert tf32.decode(pattern_of(x, tf32)) == x.half().item()
    print("format    bits    bias  largest     min normal  min subnormal  step above 1  0.1 is")
    for format in FORMATS:
        largest, normal, subnormal, step = format.limits()
        if format.dtype:
            info = torch.finfo(format.dtype)
            assert (info.max, info.smallest_normal, info.eps) == (largest, normal, step)
            one = torch.ones((), dtype=format.view).view(format.dtype)
            assert float(one) == subnormal  # the pattern 00…01
        top = 2 ** (format.e + format.m) - 1 - (2**format.m if format.infinity else 1)
        assert format.decode(top) == largest  # one below infinity, or one below NaN
        power = [
            f"2^{torch.tensor(x).double().log2().int()}" for x in (normal, subnormal, step)
        ]
        print(
            f"{format.name:9} {1 + format.e + format.m:4}  {format.bias:6}  {largest:<10.5g}"
            f"  {power[0]:10}  {power[1]:13}  {power[2]:12}"
            f"  {format.decode(pattern_of(TENTH, format)):.9g}"
        )
    print("largest = (2 - 2^-m)·2^bias, min normal = 2^(1-bias), step = 2^-m; E4M3: 1.75·2^8")

    decoded = 0
    for format in FORMATS[2:]:  # the 16-bit and 8-bit formats: all of their patterns
        count = 2 ** (1 + format.e + format.m)
        patterns = torch.arange(count, dtype=torch.int32).to(format.view)
        ours = torch.tensor([format.decode(p) for p in range(count)], dtype=torch.float64)
        assert torch.equal(
            ours.nan_to_num(7e77, 8e88, -8e88),
            patterns.view(format.dtype).double().nan_to_num(7e77, 8e88, -8e88),
        )
        decoded += count
    print(f"{decoded:,} patterns of fp16, bf16, E4M3 and E5M2 decoded as torch decodes them")

    wide = torch.tensor([57344.0, 61439.0, 61440.0])
    print(f"cast to E5M2: {wide.tolist()} become {wide.to(torch.float8_e5m2).tolist()}")
    over = torch.tensor([448.0, 464.0, 465.0, float("inf")])
    cast = over.to(torch.float8_e4m3fn).float()
    # above 464, torch up to 2.12 gives NaN and later releases give 448, without an error
    assert cast[:2].eq(448).all() and (cast[2:].isnan() | cast[2:].eq(448)).all()
    print(
        f"cast to E4M3: {over[:2].tolist()} become {cast[:2].tolist()}, more becomes NaN or 448"
    )
    safe = torch.cat((over, -over)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(safe.float(), torch.tensor([448.0, -448.0]).repeat_interleave(4))
    print(f"clamped to ±448 first: {over.tolist()} become {safe[:4].tolist()}")
    draw()


if __name__ == "__main__":
    main()
