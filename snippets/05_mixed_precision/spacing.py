"""The step from one float to the next, read from neighbouring bit patterns, in five formats.

If you add 1 to the bits of a positive float, you get the next larger float. So the program can
measure the step with a subtraction. The step doubles at every power of two. Below the smallest
normal number it stays constant. The program compares the steps with a formula in every octave,
and it compares the drawn curves with the steps at random floats. Draws spacing.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

FORMATS = {  # name: dtype, its integer view, bits of exponent and mantissa
    "fp32": (torch.float32, torch.int32, 8, 23),
    "fp16": (torch.float16, torch.int16, 5, 10),
    "bf16": (torch.bfloat16, torch.int16, 8, 7),
    "E4M3": (torch.float8_e4m3fn, torch.uint8, 4, 3),
    "E5M2": (torch.float8_e5m2, torch.uint8, 5, 2),
}


def spacing(x: torch.Tensor, view: torch.dtype) -> torch.Tensor:
    """Return the distance from each element of `x` (positive) to the next float, in float64."""
    following = (x.view(view) + 1).view(x.dtype)
    return following.double() - x.double()


def sample(dtype: torch.dtype, view: torch.dtype, e: int, m: int) -> torch.Tensor:
    """Return the first float of each octave, subnormal ones too, and the largest float."""
    low, high = 2 - 2 ** (e - 1) - m, 2 ** (e - 1)  # exponents of 2
    octaves = 2.0 ** torch.arange(low, high, dtype=torch.float64)
    if dtype == torch.float8_e4m3fn:  # it has one octave more, because it has no infinity
        octaves = torch.cat([octaves, 2 * octaves[-1:]])
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    return torch.cat([octaves.to(dtype), largest])


def staircase(
    x: torch.Tensor, view: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:  # [2 * octaves] each
    """Return the corners of the curve, as logarithms to base 2: one level for each octave."""
    edges, levels = x.double().log2(), spacing(x[:-1], view).log2()
    return torch.stack([edges[:-1], edges[1:]], 1).flatten(), levels.repeat_interleave(2)


def draw() -> dict[str, torch.Tensor]:
    """Write spacing.svg; return the corners of each curve that the figure shows, [n, 2]."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "spacing", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    labels = {  # colour, and the place of the label
        "fp32": ("#52525b", (22, -9.5)),
        "fp16": ("#c2410c", (17.4, 3)),
        "bf16": ("#0b6e99", (24, 10.5)),
        "E4M3": ("#7c3aed", (-17, -7.5)),
        "E5M2": ("#15803d", (-24, -15)),
    }
    curves = {}
    for name, (dtype, view, e, m) in FORMATS.items():
        colour, at = labels[name]
        x, y = staircase(sample(dtype, view, e, m), view)
        (curve,) = axes.plot(x, y, color=colour, linewidth=2)
        curves[name] = torch.tensor(curve.get_xydata())
        axes.text(*at, name, color=colour, weight="bold")
        if e < 8:  # both ends are in the picture
            axes.plot(x[[0, -1]], y[[0, -1]], "o", color=colour, markersize=5)
    axes.plot([-45, 33], [-45, 33], color="#52525b", linewidth=0.8, linestyle=":")
    axes.text(3, 11, "step = value", color="#52525b", fontsize=10, rotation=32)
    axes.annotate(
        "subnormal:\nthe step stays",
        (-19, -23.7),
        (-41, -14),
        color="#c2410c",
        fontsize=11,
        arrowprops={"arrowstyle": "-", "color": "#c2410c"},
    )
    ticks = range(-40, 40, 10)
    axes.set_xticks(ticks, [f"2$^{{{t}}}$" for t in ticks])
    axes.set_yticks(ticks, [f"2$^{{{t}}}$" for t in ticks])
    axes.set(xlabel="value", ylabel="step to the next value", xlim=(-42, 33), ylim=(-50, 27))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("spacing.svg", transparent=True, metadata={"Date": None})
    return curves


def check_curve(corners: torch.Tensor, dtype: torch.dtype, view: torch.dtype) -> None:
    """Compare the drawn curve with the step at random floats of the format."""
    largest = int(torch.tensor([torch.finfo(dtype).max], dtype=dtype).view(view))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, largest, (2000,), generator=generator).to(view).view(dtype)
    place = torch.tensor([float(v) for v in x], dtype=torch.float64).log2()
    left, right = corners[0::2, 0], corners[1::2, 0]  # [octaves]
    inside = (left <= place[:, None]) & (place[:, None] < right)  # [2000, octaves]
    assert inside.sum(1).eq(1).all()
    levels = corners[0::2, 1][inside.double().argmax(1)]
    assert torch.equal(levels, spacing(x, view).log2())


def main() -> None:
    points = [2.0**-20, 2.0**-10, 1.0, 256.0, 2048.0]
    print("step above      2^-20     2^-10         1       256      2048")
    for name, (dtype, view, e, m) in FORMATS.items():
        cells = []
        for point in points:
            x = torch.tensor([point]).to(dtype)
            there = float(x) == point
            cells.append(f"2^{int(spacing(x, view).log2())}" if there else "–")
        print(f"{name:11}" + "".join(f"{cell:>10}" for cell in cells).rstrip())
        smallest = 1 - (2 ** (e - 1) - 1) - m  # 1 - bias - m
        for x in sample(dtype, view, e, m)[:-1].split(1):
            formula = 2.0 ** max(x.double().log2().item() - m, smallest)
            assert spacing(x, view).item() == formula, (name, x)
            middle = (1.5 * x.double()).to(dtype)
            if middle.double() < 2 * x.double():  # the smallest octave has only one float
                assert spacing(middle, view).item() == formula, (name, middle)
    print("equal to 2^max(floor(log2 x) - m, 1 - bias - m) in every octave")
    counts = {}
    for name, (dtype, view, _, _) in FORMATS.items():
        one = torch.ones(1, dtype=dtype).view(view)
        two = torch.tensor([2.0]).to(dtype).view(view)
        counts[name] = int(two) - int(one)
    print("values from 1 to 2: " + ", ".join(f"{k} {v:,}" for k, v in counts.items()))
    for name, corners in draw().items():
        check_curve(corners, *FORMATS[name][:2])


if __name__ == "__main__":
    main()
