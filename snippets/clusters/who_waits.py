"""A profile that blames the network: one slow rank, seen from all the others.

1,024 ranks compute and meet in an all-reduce that takes 2% of a step. One GPU runs at 80% of
its clock. Every other rank's profile shows a slow collective; the rank that waits least is it.
"""

import statistics

import torch

RANKS, STEPS, TRANSFER, NOISE, SLOW, GUILTY = 1024, 500, 0.02, 0.01, 1.25, 700


# --8<-- [start:profile]
def in_collective(slow: float) -> torch.Tensor:
    """Share of each rank's time that its profiler counts as all-reduce."""
    compute = 1 + NOISE * torch.randn(STEPS, RANKS)
    compute[:, GUILTY] *= slow
    arrives_last = compute.max(dim=1, keepdim=True).values
    waits = arrives_last - compute + TRANSFER  # the kernel runs from arrival to the end
    return waits.sum(dim=0) / (arrives_last + TRANSFER).sum()


# --8<-- [end:profile]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    healthy, sick = in_collective(1.0), in_collective(SLOW)
    late = NOISE * statistics.NormalDist().inv_cdf(0.5 ** (1 / RANKS))  # the last one
    assert abs(healthy.mean() - (late + TRANSFER) / (1 + late + TRANSFER)) < 0.003
    print(f"all ranks healthy: rank 0 spends ≈{healthy[0]:.0%} of its time in all-reduce")
    others = (SLOW - 1 + TRANSFER) / (SLOW + TRANSFER)
    guilty = TRANSFER / (SLOW + TRANSFER)
    print(f"one at 80%: rank 0 ≈{sick[0]:.1%}, predicted {others:.1%}")
    print(f"            the slow rank ≈{sick[GUILTY]:.1%}, predicted {guilty:.1%}")
    assert abs(sick[0] - others) < 0.002 and abs(sick[GUILTY] - guilty) < 0.002
    least = sick.argmin().item()
    assert least == GUILTY
    second = sick.sort().values[1].item()
    ratio = second / sick[least].item()
    print(f"rank {least} waits least; the next one waits ≈{ratio:.0f} times as long")


if __name__ == "__main__":
    main()
