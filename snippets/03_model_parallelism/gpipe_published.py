"""GPipe's published speed-ups beside mK/(m+K-1): where the formula holds, and where it cannot.

The paper (Huang et al., 2019, arXiv 1811.06965) gives a Transformer's throughput on K
accelerators with M micro-batches, relative to K = 2 and M = 1. The formula knows the bubble and
nothing else. The second prediction lets a stage recompute its forward while it waits for
its gradient, as GPipe does: F = 1, recomputation 1, B = 2 make 4M + 3(K-1) units of time.
"""

PUBLISHED = {1: [1.0, 1.07, 1.3], 4: [1.7, 3.2, 4.8], 32: [1.8, 3.4, 6.3]}
PARTITIONS = [2, 4, 8]


def speed_up(m: int, k: int) -> float:
    """k ranks which are idle (k-1)/(m+k-1) of the time; 1 for two ranks and m = 1."""
    return m * k / (m + k - 1)


def recomputed_early(m: int, k: int) -> float:
    """The same when the first recomputation of a stage hides in its bubble."""
    units = 4 * m + 3 * (k - 1)  # m (F + R + B), and k-1 times F going up and B coming down
    return m * k / units / (2 / 7)


def main() -> None:
    print(" M   K  published  mK/(m+K-1)  error  early recomputation  error")
    for m, row in PUBLISHED.items():
        for k, published in zip(PARTITIONS, row, strict=True):
            print(f"{m:2}  {k:2}  {published:9.2f}", end="")
            for width, predicted in ((10, speed_up(m, k)), (19, recomputed_early(m, k))):
                error = predicted / published - 1
                print(f"  {predicted:{width}.2f}  {error:+5.0%}", end="")
            print()
    ratio = PUBLISHED[32][2] / PUBLISHED[4][2]
    print(f"K = 8, M = 32 over M = 4: published {ratio:.2f}, ", end="")
    print(f"formula {speed_up(32, 8) / speed_up(4, 8):.2f}")


if __name__ == "__main__":
    main()
