"""The error of a matrix product whose inputs are rounded to fp16, bf16 or tf32.

The inputs are rounded to m bits of mantissa. The product is computed in float64, so this is the
result of a tensor core with a perfect accumulator. The predicted relative error, 0.28·2^-m, has
two roundings and does not depend on the length K of the sums. Compare the columns with the
prediction in the last line. Draws input_rounding.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

LENGTHS = [2**k for k in range(4, 17, 2)]
MANTISSA = {"tf32": 10, "fp16": 10, "bf16": 7}
# The rounding error is uniform, so its mean square is step²/12. The mean of x² over the octave
# from 1 to 2 is 3/(2 ln 2) if log x is uniform. The two inputs double the squared error.
PREDICTED = math.sqrt(2 / 12 / (1.5 / math.log(2)))


def round_mantissa(x: torch.Tensor, m: int) -> torch.Tensor:
    """Round fp32 to `m` bits of mantissa, ties to even; m = 10 gives tf32."""
    drop = 23 - m
    bits = x.contiguous().view(torch.int32)
    bits = bits + (2 ** (drop - 1) - 1) + ((bits >> drop) & 1)
    return (bits & -(2**drop)).view(torch.float32)


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def draw(errors: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "input_rounding", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    rows = {
        "bf16": ("#0b6e99", 1.6, "bf16, 7 bits"),
        "tf32": ("#15803d", 1.6, "tf32 and fp16, 10 bits"),
        "fp32": ("#52525b", 4.0, "fp32 throughout"),
    }
    for name, (colour, above, words) in rows.items():
        axes.plot(LENGTHS, errors[name], "o-", color=colour, markersize=5)
        axes.text(LENGTHS[0], errors[name][0] * above, words, color=colour, va="bottom")
    for m in (7, 10):
        axes.axhline(PREDICTED * 2**-m, color="#c2410c", linestyle="--", linewidth=1.2)
    axes.text(
        LENGTHS[-1],
        PREDICTED * 2**-7 * 1.6,
        "0.28·2$^{-m}$",
        color="#c2410c",
        ha="right",
        va="bottom",
    )
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(3e-8, 2e-2),
        xlabel="length K of the sums",
        ylabel="relative error of the product",
    )
    axes.set_xticks(LENGTHS, [f"{k:,}" for k in LENGTHS])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("input_rounding.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(2**20, generator=generator)
    assert torch.equal(round_mantissa(probe, 7), probe.bfloat16().float())
    normal = probe[probe.abs() > 2**-14]  # where fp16 is not subnormal it rounds as tf32 does
    assert len(normal) > 0.99 * len(probe)
    assert torch.equal(round_mantissa(normal, 10), normal.half().float())
    print("rounding by hand: 7 bits equal torch's bf16; 10 bits equal fp16's normal numbers")

    errors: dict[str, list[float]] = {name: [] for name in (*MANTISSA, "fp32")}
    print("    K      tf32      fp16      bf16   fp32 throughout")
    for k in LENGTHS:
        a = torch.randn(32, k, generator=generator)  # [32, K]
        b = torch.randn(k, 32, generator=generator)  # [K, 32]
        exact = a.double() @ b.double()
        for name, cast in (
            ("tf32", lambda x: round_mantissa(x, 10)),
            ("fp16", torch.Tensor.half),
            ("bf16", torch.Tensor.bfloat16),
        ):
            errors[name].append(relative(cast(a).double() @ cast(b).double(), exact))
        errors["fp32"].append(relative(a @ b, exact))
        cells = "  ".join(f"≈{errors[name][-1]:.1e}" for name in errors)
        print(f"{k:6}  {cells}")
    assert errors["tf32"] != errors["fp16"]  # a few inputs are subnormal in fp16
    assert 5e-8 < errors["fp32"][-1] < 4e-6  # fp32 rounds the sums
    for name, m in MANTISSA.items():
        for error in errors[name][2:]:  # from K = 256 on there is enough to average over
            assert 0.85 < error / (PREDICTED * 2**-m) < 1.15, (name, error)
    print(
        f"predicted {PREDICTED:.2f}·2^-m: tf32 and fp16 {PREDICTED * 2**-10:.1e}, "
        f"bf16 {PREDICTED * 2**-7:.1e}; measured within 15% from K = 256 on"
    )
    draw(errors)


if __name__ == "__main__":
    main()
