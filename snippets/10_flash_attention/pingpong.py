"""This simulation shows how two warpgroups take turns at the tensor cores: pingpong.

Each tile needs a product, the exponentials and a second product, in this order. The tensor
cores and the exponential units serve one warpgroup at a time. The durations are those of an
H100 for heads of width 128, computed from its datasheet. Look at the share of time in which
the tensor cores are busy. The schedule is that of FlashAttention-3 (arXiv 2407.08608, section
3.1). Draws pingpong.svg.
"""

from itertools import pairwise

TILES, TILE, D = 8, (64, 128), 128  # tiles of keys; queries of a warpgroup, keys of a tile
TENSOR = 989e12 / 132  # FLOP/s of the tensor cores of one multiprocessor
EXP = 16 * 1.83e9  # exponentials per second of one multiprocessor

PRODUCT = 2 * TILE[0] * TILE[1] * D / TENSOR
SOFTMAX = TILE[0] * TILE[1] / EXP


# --8<-- [start:simulate]
def simulate(groups: int, overlap: bool) -> tuple[float, list]:
    """Return the end of the last tile and every operation as (group, unit, start, duration).

    With overlap, the two units work independently, and the group that is ready first is served
    first. Without overlap, only one unit works at a time.
    """
    free = {"tensor": 0.0, "exp": 0.0}
    ready = [0.0] * groups
    bars = []
    # the second product of a tile and the first product of the next tile follow each other
    chains = [
        [("tensor", PRODUCT)] + TILES * [("exp", SOFTMAX), ("tensor", 2 * PRODUCT)]
    ] * groups
    chains = [[*chain[:-1], ("tensor", PRODUCT)] for chain in chains]
    position = [0] * groups
    while any(position[g] < len(chains[g]) for g in range(groups)):
        waiting = [g for g in range(groups) if position[g] < len(chains[g])]
        starts = {
            g: max(ready[g], free[chains[g][position[g]][0]] if overlap else max(free.values()))
            for g in waiting
        }
        g = min(waiting, key=lambda g: (starts[g], ready[g]))
        unit, duration = chains[g][position[g]]
        bars.append((g, unit, starts[g], duration))
        free[unit] = ready[g] = starts[g] + duration
        position[g] += 1
    return max(ready), bars


# --8<-- [end:simulate]


def check(bars: list[tuple]) -> None:
    """Check that a unit serves one group at a time, and that a group does one thing at a time.

    The operations of a group must also come in the order of the algorithm: a product, then
    the exponentials of a tile and two products, and so on, with one product at the end.
    """
    for key in (1, 0):  # by unit, by group
        for name in {bar[key] for bar in bars}:
            of_one = sorted((bar for bar in bars if bar[key] == name), key=lambda bar: bar[2])
            for (_, _, start, duration), (_, _, then, _) in pairwise(of_one):
                assert start + duration <= then + 1e-15, f"{name} does two things at a time"
            if key == 0:
                order = [unit for _, unit, _, _ in of_one]
                assert order == ["tensor"] + ["exp", "tensor"] * TILES
                total = sum(d for _, unit, _, d in of_one if unit == "tensor")
                assert abs(total - TILES * 2 * PRODUCT) < 1e-12, "a product is missing"


def draw(plans: list[tuple[str, float, list]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "pingpong", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3))
    colours = {"tensor": "#0b6e99", "exp": "#c2410c"}
    y, ticks = 0, []
    for name, _, bars in plans:
        for group in (0, 1):
            for g, unit, start, duration in bars:
                if g == group:
                    axes.barh(
                        y, duration * 1e6, left=start * 1e6, height=0.7, color=colours[unit]
                    )
            ticks.append((y, f"{name}, group {group + 1}"))
            y -= 1
        y -= 0.5
    axes.set_yticks([t for t, _ in ticks], [label for _, label in ticks])
    longest = max(end for _, end, _ in plans) * 1e6
    axes.text(0, 0.9, "tensor cores", color=colours["tensor"])
    axes.text(longest * 0.3, 0.9, "exponentials", color=colours["exp"])
    axes.set(xlabel="µs on one multiprocessor", ylim=(y + 0.6, 1.7))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.tight_layout()
    figure.savefig("pingpong.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print(f"a tile of {TILE[0]} x {TILE[1]}: two products {2e9 * PRODUCT:.0f} ns, "
          f"exponentials {1e9 * SOFTMAX:.0f} ns")  # fmt: skip
    fp8 = SOFTMAX / PRODUCT  # in fp8 products take half as long
    print(
        f"exponentials / products: {SOFTMAX / (2 * PRODUCT):.2f} in 16 bits, {fp8:.2f} in fp8"
    )
    busy = 2 * TILES * 2 * PRODUCT
    plans = []
    for name, overlap in (("one at a time", False), ("pingpong", True)):
        end, bars = simulate(2, overlap)
        check(bars)
        plans.append((name, end, bars))
        print(f"{name:14} {1e6 * end:.2f} µs, tensor cores busy {busy / end:.0%}")
    serial, pingpong = (busy / end for _, end, _ in plans)
    assert abs(serial - 1 / (1 + SOFTMAX / (2 * PRODUCT))) < 1e-9
    assert abs(pingpong - 1) < 1e-9, "another group always has a product to compute"
    alone, _ = simulate(1, True)  # one group cannot hide its own exponentials
    assert abs(busy / 2 / alone - serial) < 1e-9
    draw(plans)


if __name__ == "__main__":
    main()
