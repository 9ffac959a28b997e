"""What a run costs when machines fail: 6ΨD, MFU, a price, the best checkpoint interval.

The share of time that is kept (goodput) follows from the time to save, to restart, and between
failures; a simulation with random failures holds the formula to account. The price is yours:
python run_cost.py --price 2.5
"""

import argparse
import math
import random


# --8<-- [start:goodput]
def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Useful share of the time; all in hours. Failures come at random, `between` on average."""
    expected = (between + restart) * math.expm1((interval + save) / between)
    return interval / expected


def simulate(
    interval: float, save: float, restart: float, between: float, hours: float
) -> float:
    """The same with dice: work in intervals, lose what was not saved when a failure comes."""
    generator, clock, kept = random.Random(0), 0.0, 0.0
    failure = generator.expovariate(1 / between)
    while clock < hours:
        if clock + interval + save <= failure:
            clock, kept = clock + interval + save, kept + interval
        else:
            clock = failure + restart
            failure = clock + generator.expovariate(1 / between)
    return kept / clock


# --8<-- [end:goodput]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--price", type=float, default=2.0, help="of a GPU-hour, in your money")
    price = parser.parse_args().price
    if price <= 0:
        parser.error("the price must be more than 0")

    # 16,384 GPUs, 419 unexpected interruptions in 54 days, as the Llama 3 paper reports
    between = 54 * 24 / 419
    save, restart = 1 / 60, 10 / 60
    print(
        f"a failure every {between:.2f} h; saving {60 * save:.0f} min, restart "
        f"{60 * restart:.0f} min (assumed)"
    )
    best = math.sqrt(2 * save * between)
    print(f"best interval sqrt(2 · save · between) = {60 * best:.0f} min")
    for minutes in (5, round(60 * best), 60, 120):
        arguments = (minutes / 60, save, restart, between)
        formula, dice = goodput(*arguments), simulate(*arguments, hours=200_000)
        assert abs(formula - dice) < 0.005, "the formula does not describe the simulation"
        print(f"  every {minutes:3} min: useful {formula:.1%} by formula, {dice:.1%} by dice")

    parameters, tokens, gpus, peak = 70e9, 1.5e12, 1024, 989e12
    flops = 6 * parameters * tokens
    print(f"70B parameters, 1.5T tokens: 6ΨD = {flops:.2e} FLOPs, on {gpus} × 989 TFLOP/s:")
    for mfu, useful in ((0.40, 1.0), (0.40, 0.90), (0.30, 0.90), (0.20, 0.90)):
        hours = flops / (peak * mfu * useful) / 3600
        print(
            f"  MFU {mfu:.0%}, useful {useful:.0%}: {hours:,.0f} GPU-hours, "
            f"{hours / gpus / 24:.0f} days, {price * hours / 1e6:.2f} M at {price:.2f} an hour"
        )


if __name__ == "__main__":
    main()
