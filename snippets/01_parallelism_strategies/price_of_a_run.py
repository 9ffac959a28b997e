"""Computes the price of a run from five numbers, and compares it with three published runs.

Training on D tokens needs 6ΨD FLOPs, or 8ΨD FLOPs if every layer is recomputed. If each of n
GPUs computes X FLOPs per second, the run takes FLOPs / (n·X) seconds. X is the peak times the
utilization. Days and GPU-hours follow from the seconds. Dollars follow from a price per
GPU-hour, which you pass as an argument.
"""

import argparse
from dataclasses import dataclass


@dataclass
class Run:
    parameters: float
    tokens: float
    gpus: int
    achieved: float  # FLOP/s per GPU, which is MFU times peak
    recomputed: bool = False  # whether `achieved` also counts the second forward pass

    def flops(self) -> float:
        return (8 if self.recomputed else 6) * self.parameters * self.tokens

    def gpu_hours(self) -> float:
        return self.flops() / self.achieved / 3600

    def days(self) -> float:
        return self.gpu_hours() / self.gpus / 24


def published_runs() -> None:
    print("8TP/(nX), Narayanan et al. (2021), equation (4):")
    gpt3 = Run(175e9, 300e9, gpus=1024, achieved=140e12, recomputed=True)
    print(f"  GPT-3 on 1,024 A100: {gpt3.days():.1f} days; the paper says 34")
    trillion = Run(1008e9, 450e9, gpus=3072, achieved=163e12, recomputed=True)
    print(f"  1T on 3,072 A100: {trillion.days():.1f} days; the paper says 84")
    assert round(gpt3.days()) == 34 and round(trillion.days()) == 84

    print("the same as MFU, with the second forward no longer counted as work:")
    for name, run in {"GPT-3": gpt3, "1T": trillion}.items():
        useful = run.achieved * 6 / 8
        hfu, mfu = run.achieved / 312e12, useful / 312e12
        print(f"  {name}: {100 * hfu:.0f}% of 312 TFLOP/s counted so, MFU {100 * mfu:.0f}%")

    print("Llama 3 405B, 15.6T tokens, 16,384 H100 at 400 TFLOP/s (its Table 4):")
    llama = Run(405e9, 15.6e12, gpus=16384, achieved=400e12)
    print(f"  6ΨD = {llama.flops():.2e} FLOPs; the paper says 3.8e+25")
    reported = 30.84e6  # GPU-hours, from the model card of Llama 3.1
    print(
        f"  {llama.gpu_hours() / 1e6:.1f}M GPU-hours; the model card says {reported / 1e6:.2f}M"
    )
    layers, hidden, sequence = 126, 16384, 8192
    # a causal mask needs half of the scores
    attention = 12 * layers * hidden * sequence / 2 / (6 * llama.parameters)
    print(f"  causal attention at s = 8,192 adds {100 * attention:.1f}% to 6ΨD")
    corrected = llama.gpu_hours() * (1 + attention) / 0.9
    print(f"  with it, and 90% effective training time: {corrected / 1e6:.1f}M GPU-hours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float)
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of one GPU")
    parser.add_argument("--mfu", type=float, default=0.4)
    parser.add_argument("--price", type=float, help="dollars per GPU-hour")
    options = parser.parse_args()
    if options.parameters is None or options.tokens is None:
        published_runs()
        return
    run = Run(options.parameters, options.tokens, options.gpus, options.mfu * options.peak)
    print(f"{run.flops():.2e} FLOPs, {run.gpu_hours():,.0f} GPU-hours, {run.days():.1f} days")
    if options.price is not None:
        print(f"{run.gpu_hours() * options.price:,.0f} dollars at {options.price:.2f} an hour")


if __name__ == "__main__":
    main()
