"""The step from one float to the next, read from neighbouring bit patterns, in six formats.

Adding 1 to the bits of a positive float gives the next one, so the spacing is a subtraction.
It doubles with every octave; below the smallest normal it stays what it was. Draws spacing.svg.
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
    """The distance from each element of `x` (positive) to the next larger float, in float64."""
    following = (x.view(view) + 1).view(x.dtype)
    return following.double() - x.double()


def sample(dtype: torch.dtype, view: torch.dtype, e: int, m: int) -> torch.Tensor:
    """One float in each octave, subnormal ones included, and the last below the largest."""
    low, high = 2 - 2 ** (e - 1) - m, 2 ** (e - 1)  # exponents of 2
    octaves = 2.0 ** torch.arange(low, high, dtype=torch.float64)
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    return torch.cat([octaves.to(dtype), (largest.view(view) - 1).view(dtype)])


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "spacing", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    rows = {  # colour, label, where the label stands
        "fp32": ("#52525b", "fp32", (22, -9.5)),
        "fp16": ("#c2410c", "fp16", (16.6, 5)),
        "bf16": ("#0b6e99", "bf16", (24, 10.5)),
        "E4M3": ("#7c3aed", "E4M3", (-17, -7.5)),
        "E5M2": ("#15803d", "E5M2", (-24, -15)),
    }
    for name, (dtype, view, e, m) in FORMATS.items():
        colour, words, at = rows[name]
        x = sample(dtype, view, e, m)
        axes.step(
            x.double().log2(), spacing(x, view).log2(), where="post", color=colour, linewidth=2
        )
        axes.text(*at, words, color=colour, weight="bold")
        if e < 8:  # the ends are in the picture
            axes.plot(*ends(x, view), "o", color=colour, markersize=5)
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


def ends(x: torch.Tensor, view: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    both = x[[0, -1]]
    return both.double().log2(), spacing(both, view).log2()


def main() -> None:
    points = [2.0**-20, 2.0**-10, 1.0, 256.0, 2048.0]
    print("step above      2^-20     2^-10         1       256      2048")
    for name, (dtype, view, e, m) in FORMATS.items():
        cells = []
        for point in points:
            x = torch.tensor([point]).to(dtype)
            if float(x) != point:
                cells.append("–")
                continue
            step = spacing(x, view)
            smallest = 1 - (2 ** (e - 1) - 1) - m  # 1 - bias - m
            formula = 2.0 ** max(x.double().log2().item() - m, smallest)
            assert step.item() == formula, (name, point)
            assert spacing((x.double() + step).to(dtype), view) == step  # and the next one's
            cells.append(f"2^{int(step.log2())}")
        print(f"{name:11}" + "".join(f"{cell:>10}" for cell in cells).rstrip())
    print("equal to 2^max(floor(log2 x) - m, 1 - bias - m) everywhere")
    counts = {}
    for name, (dtype, view, _, _) in FORMATS.items():
        one = torch.ones(1, dtype=dtype).view(view)
        two = torch.tensor([2.0]).to(dtype).view(view)
        counts[name] = int(two) - int(one)
    print("values from 1 to 2: " + ", ".join(f"{k} {v:,}" for k, v in counts.items()))
    draw()


if __name__ == "__main__":
    main()
