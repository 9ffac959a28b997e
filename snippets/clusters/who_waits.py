"""Shows why profiles seem to blame the network if one of 1,024 ranks is slow.

In every step, 1,024 ranks compute and then start an all-reduce, which takes 2% of a step. One
GPU runs at 80% of its clock. The profile of every other rank shows a slow all-reduce. The slow
rank is the rank that spends the least time in the all-reduce.
"""

import statistics

import torch

RANKS, STEPS, TRANSFER, NOISE, SLOW, SLOW_RANK = 1024, 500, 0.02, 0.01, 1.25, 700


# --8<-- [start:profile]
def in_collective(slow: float) -> torch.Tensor:
    """Fraction of each rank's time that its profiler counts as all-reduce."""
    compute = 1 + NOISE * torch.randn(STEPS, RANKS)
    compute[:, SLOW_RANK] *= slow
    arrives_last = compute.max(dim=1, keepdim=True).values
    waits = arrives_last - compute + TRANSFER  # the kernel runs from the rank's arrival
    return waits.sum(dim=0) / (arrives_last + TRANSFER).sum()


# --8<-- [end:profile]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    healthy, one_slow = in_collective(1.0), in_collective(SLOW)
    late = NOISE * statistics.NormalDist().inv_cdf(0.5 ** (1 / RANKS))  # median of the slowest
    assert abs(healthy.mean() - (late + TRANSFER) / (1 + late + TRANSFER)) < 0.003
    print(f"all ranks healthy: rank 0 spends ≈{healthy[0]:.0%} of its time in all-reduce")
    others = (SLOW - 1 + TRANSFER) / (SLOW + TRANSFER)
    slow_rank = TRANSFER / (SLOW + TRANSFER)
    print(f"one rank at 80%: rank 0 ≈{one_slow[0]:.1%}, predicted {others:.1%}")
    print(f"    the slow rank itself ≈{one_slow[SLOW_RANK]:.1%}, predicted {slow_rank:.1%}")
    assert abs(one_slow[0] - others) < 0.002
    assert abs(one_slow[SLOW_RANK] - slow_rank) < 0.002
    least = one_slow.argmin().item()
    assert least == SLOW_RANK
    second = one_slow.sort().values[1].item()
    ratio = second / one_slow[least].item()
    print(f"rank {least} waits least; the next one waits ≈{ratio:.0f} times as long")


if __name__ == "__main__":
    main()
