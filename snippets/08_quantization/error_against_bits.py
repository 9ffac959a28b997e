"""Rounding adds noise of variance step²/12, so each bit reduces the noise by 6.02 dB.

The program measures this on uniform and on normal numbers, with a grid from the smallest to the
largest number. Compare the measured columns with step²/12 and, below 3 bits, with the corrected
column. Draws error_against_bits.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

BITS = range(1, 13)


# --8<-- [start:error]
def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Round x to 2^bits values from its minimum to its maximum. Return the step as well."""
    low, high = x.min(), x.max()
    step = (high - low) / (2**bits - 1)
    return ((x - low) / step).round() * step + low, step.item()


def in_decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise)


def predicted_for_normal(step: float, low: float) -> float:
    """step²/12 with its correction for a normal density of variance 1, on low + n · step."""
    phase = 2 * math.pi * (low / step)  # where 0 lies between two points
    terms = (
        (-1) ** k / k**2 * math.cos(k * phase) * math.exp(-2 * (math.pi * k / step) ** 2)
        for k in range(1, 50)
    )
    return step**2 / 12 + step**2 / math.pi**2 * sum(terms)


# --8<-- [end:error]


def draw(curves: dict[str, list[float]], predicted: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "error_against_bits"}
    plt.rcParams |= {"font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    for (name, values), colour in zip(curves.items(), ("#0b6e99", "#c2410c"), strict=True):
        axes.plot(BITS, predicted[name], "--", color=colour, linewidth=1.3)
        axes.plot(BITS, values, "o", color=colour, markersize=6)
    axes.text(7.7, 51, "uniform", color="#0b6e99", ha="right")
    axes.text(8.4, 36, "normal", color="#c2410c", ha="left")
    axes.text(1, 68, "dots: measured\ndashes: step²/12", color="#52525b", va="top")
    axes.set(xlabel="bits", ylabel="signal to noise (dB)", xticks=list(BITS))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("error_against_bits.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    samples = {
        "uniform": torch.rand(2**18, generator=generator, dtype=torch.float64) * 2 - 1,
        "normal": torch.randn(2**18, generator=generator, dtype=torch.float64),
    }
    curves: dict[str, list[float]] = {name: [] for name in samples}
    predicted: dict[str, list[float]] = {name: [] for name in samples}
    print("        uniform                       normal")
    print(
        "bits  step²/12   measured     dB   step²/12  corrected   measured     dB  correlation"
    )
    for bits in BITS:
        cells = []
        for name, x in samples.items():
            back, step = quantize(x, bits)
            error = back - x
            noise, signal = error.square().mean().item(), x.var().item()
            curves[name].append(in_decibels(signal, noise))
            predicted[name].append(in_decibels(signal, step**2 / 12))
            plain = f"{step**2 / 12:.3e}"
            if name == "uniform" or bits >= 3:
                assert math.isclose(noise, step**2 / 12, rel_tol=0.015), (name, bits)
            if name == "normal":
                corrected = predicted_for_normal(step, x.min().item())
                assert math.isclose(noise, corrected, rel_tol=0.015), (bits, noise, corrected)
                plain += f"  {corrected:.3e}"
            cells.append(f"{plain}  {noise:.3e}  {curves[name][-1]:5.1f}")
        # the error is a function of the value; on a fine grid it is uncorrelated with it
        correlation = round(torch.corrcoef(torch.stack([x, error]))[0, 1].item(), 2) + 0.0
        print(f"{bits:4} {'  '.join(cells)}  {correlation:11.2f}")
        assert (abs(correlation) < 0.01) == (bits >= 3)
    for name, curve in curves.items():
        slope = (curve[11] - curve[7]) / 4
        print(f"{name}: {slope:.2f} dB per bit from 8 to 12 bits; 20·log10(2) = 6.02")
        assert abs(slope - 6.02) < 0.05
    assert predicted["normal"][0] > curves["normal"][0] + 2  # one bit loses more
    draw(curves, predicted)


if __name__ == "__main__":
    main()
