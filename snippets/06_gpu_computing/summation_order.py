"""The order of the additions decides the error of a sum: one by one, by threads, or pairwise.

The program adds random numbers from 0 to 1 in fp32 and compares each sum with the sum in
float64. The error is the root mean square over 16 draws. A chain of d additions has a relative
error of at most about d·u, where u = 2^-24. If rounding errors are independent, a loop has the
error sqrt(n/21)·u. Look at the last two columns: the loop stays far below its bound.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

U = 2.0**-24
THREADS = 4096


def one_by_one(x: np.ndarray) -> np.float32:
    """Sum of `x` in a chain of len(x) - 1 additions, as a loop adds."""
    return np.cumsum(x, dtype=np.float32)[-1]


def pairwise(x: np.ndarray) -> np.float32:
    """Sum of `x` by halving: a chain of log2(len(x)) additions for each element."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def as_kernel(x: np.ndarray) -> np.float32:
    """Each of 4096 threads adds every 4096th element; then a tree over the threads."""
    if len(x) <= THREADS:
        return pairwise(x)
    # [n] -> [n / threads, threads] -> [threads]
    return pairwise(np.cumsum(x.reshape(-1, THREADS), axis=0, dtype=np.float32)[-1])


ORDERS = {
    "one by one": (one_by_one, lambda n: n - 1, "#c2410c"),
    "4096 threads": (as_kernel, lambda n: max(n // THREADS - 1, 0) + 12, "#0b6e99"),
    "pairwise": (pairwise, lambda n: int(math.log2(n)), "#15803d"),
}


# --8<-- [start:expected]
def expected(n: int) -> float:
    """Relative error of n numbers added one by one, if rounding errors are independent."""
    # Let a step be the distance between two neighbouring floats. A rounding error is uniformly
    # distributed within half a step, so its square is step**2 / 12 on average. Let the final
    # sum S be just below a power of two, and let all numbers be about equal. In the last n / 2
    # additions, the step is S * U. In the n / 4 additions before them, it is half as large,
    # and so on. The squares add up to
    #   (n / 2) * (S * U)**2 / 12 * (1 + 1/8 + 1/64 + ...) = (n / 21) * (S * U)**2.
    # If S is elsewhere between two powers of two, the error is up to 19% larger.
    return math.sqrt(n / 21) * U


# --8<-- [end:expected]


def draw(sizes: list[int], errors: dict[str, list[float]]) -> None:
    """Write summation_order.svg: relative error against length, both axes logarithmic."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "world-size", "font.size": 12})
    figure, axes = plt.subplots(figsize=(7, 3.8))
    for name, (_, _, colour) in ORDERS.items():
        style = "o" if name == "one by one" else "o-"
        axes.loglog(sizes, errors[name], style, base=2, color=colour, markersize=4.5)
    chain = ORDERS["one by one"][1]
    axes.loglog(
        sizes, [chain(n) * U for n in sizes], "--", base=2, color="#c2410c", linewidth=1
    )
    axes.loglog(
        sizes, [expected(n) for n in sizes], ":", base=2, color="#52525b", linewidth=1.5
    )
    axes.set_yscale("log", base=10)
    axes.set_ylim(1e-9, 1)
    axes.set_xticks(sizes[1::2])
    for words, x, y in (  # in the left two thirds, which a phone shows
        ("at most, one by one", 2**6, 8e-4),
        ("one by one", 2**13, 2.2e-7),
        ("4096 threads", 2**11.5, 8e-9),
        ("pairwise", 2**7, 8e-9),
    ):
        axes.text(x, y, words, color=ORDERS[words.removeprefix("at most, ")][2])
    axes.text(2**8.4, 2.2e-6, "√(n/21) u", color="#52525b")
    axes.set_xlabel("numbers in the sum", loc="left")
    axes.set_ylabel("relative error")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("summation_order.svg", transparent=True, metadata={"Date": None})


def check_the_factor(generator: np.random.Generator) -> None:
    """Compare with sqrt(n/21)·u under the conditions of its derivation, in 1,000 sums."""
    n, squares = 4096, []
    for _ in range(1000):
        x = generator.uniform(0.9, 1.1, n)  # nearly equal numbers
        x = (x * (2.0**12 * 0.995 / x.sum())).astype(np.float32)  # just below a power of two
        squares.append((float(one_by_one(x)) / x.sum(dtype=np.float64) - 1) ** 2)
    assert 0.95 < math.sqrt(np.mean(squares)) / expected(n) < 1.02


def main() -> None:
    generator = np.random.default_rng(0)
    sizes = [2**k for k in range(6, 23, 2)]
    errors: dict[str, list[float]] = {name: [] for name in ORDERS}
    for n in sizes:
        squares = dict.fromkeys(ORDERS, 0.0)
        for _ in range(16):
            x = generator.random(n, dtype=np.float32)
            exact = x.sum(dtype=np.float64)
            for name, (add, depth, _) in ORDERS.items():
                error = abs(float(add(x)) / exact - 1)
                assert error <= depth(n) * U, (name, n)
                squares[name] += error**2 / 16
        for name in ORDERS:
            errors[name].append(math.sqrt(squares[name]))
    print("every sum within (length of its chain) · 2^-24")
    # one thread adds all three, and the 1 is lost in 2^24 + 1; the tree adds it to 0
    x = np.zeros(4 * THREADS, np.float32)
    x[[0, THREADS, 2 * THREADS]] = 2.0**24, 1, -(2.0**24)
    assert [add(x) for add, _, _ in ORDERS.values()] == [0, 0, 1]
    print(f"one by one, 2^22 numbers: predicted {expected(sizes[-1]):.1e}")
    print(f"\n2^22 numbers   {'chain':>8}  {'at most':>9}  {'found':>9}")
    for name, (_, depth, _) in ORDERS.items():
        chain = depth(sizes[-1])
        print(f"{name:13}  {chain:8,}  {chain * U:9.2e}   ≈{errors[name][-1]:.1e}")
    for n, loop, threads, halves in zip(sizes, *errors.values(), strict=True):
        assert 0.4 < loop / expected(n) < 2.5, n
        assert max(threads, halves) < 2 * U, n  # for every length
    ratios = np.array(errors["one by one"]) / [expected(n) for n in sizes]
    assert 0.8 < ratios.mean() < 1.25  # the mean over all sizes is closer than a single size
    check_the_factor(generator)
    draw(sizes, errors)


if __name__ == "__main__":
    main()
