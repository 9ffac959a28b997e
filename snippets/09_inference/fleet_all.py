"""Every policy on one trace: goodput of a GPU, and what the slowest hundredth waits.

Each row changes one thing of the base: eight GPUs with continuous batching, chunks of 512, kept
prefixes, and a router that estimates the time to a first token. Goodput is the highest rate of
the trace's first 80 s of which nine in ten requests keep 1 s and 50 ms. The percentiles are
those of these 80 s at the trace's own speed. Draws fleet_all.svg.
"""

from fleet import CACHE, FIRST, Fleet, Run, at_speed, first, goodput, serve
from fleet_steps import ACCEPTED, DRAFTS, EACH, HOST, SHARE
from fleet_tiers import HOST as HOST_MEMORY
from fleet_tiers import POOL, ROOM
from fleet_trace import PERIOD, STARTS, trace

SMALL = 0.75 * ROOM  # bytes taken from the caches' room
DRAFTING = {"drafts": DRAFTS, "accepted": ACCEPTED, "draft_cost": SHARE}

# --8<-- [start:policies]
POLICIES: dict[str, tuple[Fleet, float]] = {  # and a guess at the speed it bears
    "no prefix kept": (Fleet(keep=False), 0.69),
    "in turn": (Fleet(route="round robin"), 0.92),
    "least loaded": (Fleet(route="least loaded"), 1.11),
    "longest match": (Fleet(route="longest match"), 0.22),
    "the base": (Fleet(), 2.02),
    "in turn, pool": (Fleet(route="round robin", tiers=(POOL,)), 2.1),
    "a quarter of the room": (Fleet(reserved=SMALL), 1.48),
    "a quarter, and host": (Fleet(reserved=SMALL, tiers=(HOST_MEMORY,)), 2.07),
    "3 prefill, 5 decode": (Fleet(prefills=3, budget=2048), 2.73),
    "8-bit caches": (Fleet(cache=CACHE // 2), 2.31),
    "drafts": (Fleet(**DRAFTING), 2.52),
    "host first, then GPU": (Fleet(host=HOST, host_each=EACH, overlap=False), 1.74),
    "guided, host first": (Fleet(host=HOST, host_each=0.5e-3, overlap=False), 0.43),
    "8 bits, drafts, 3 + 5": (
        Fleet(cache=CACHE // 2, prefills=3, budget=2048, **DRAFTING),
        2.5,
    ),
    "8 bits, drafts, 5 + 3": (
        Fleet(cache=CACHE // 2, prefills=5, budget=2048, **DRAFTING),
        4.3,
    ),
}
TIMES = 2.2  # as many requests a second: the trace so much faster, or so many conversations
GROWN = {
    name: POLICIES[name][0]
    for name in ("the base", "3 prefill, 5 decode", "8-bit caches", "drafts")
} | {"3 + 5, and host": Fleet(prefills=3, budget=2048, tiers=(HOST_MEMORY,))}
# --8<-- [end:policies]


def draw(found: dict[str, tuple[float, float, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fleet", "font.size": 12}
    figure, axes = plt.subplots(1, 3, figsize=(7, 4.8), sharey=True, width_ratios=(5, 3, 3))
    names = list(found)[::-1]
    base = names.index("the base")
    for column, axis in enumerate(axes):
        values = [found[name][column] for name in names]
        colours = ["#0b6e99" if n == base else "#7dafc4" for n in range(len(names))]
        if column:
            axis.scatter(values, range(len(names)), c=colours, s=36)
            axis.hlines(range(len(names)), 0 if column == 2 else 0.3, values, colors=colours)
        else:
            axis.barh(range(len(names)), values, color=colours, height=0.66)
            for n, value in enumerate(values):
                axis.text(value + 0.1, n, f"{value:.1f}", va="center", fontsize=11)
        axis.axvline(values[base], color="#52525b", linestyle=":", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_visible(False)
    axes[0].set(xlabel="goodput, requests/s and GPU", xlim=(0, 10.5))
    axes[0].set_yticks(range(len(names)), names)
    axes[1].set(xlabel="TTFT, p99, s", xscale="log", xlim=(0.3, 600))
    axes[1].set_xticks([1, 10, 100], ["1", "10", "100"])
    axes[2].set(xlabel="TPOT, p99, ms", xlim=(0, None))
    figure.tight_layout()
    figure.savefig("fleet_all.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("                        goodput/GPU   in time   TTFT p99   TPOT p99   cached")
    found = {}
    for name, (fleet, guess) in POLICIES.items():
        run: Run = at_speed(fleet, 0)
        rate = goodput(fleet, guess) / fleet.gpus
        found[name] = (
            rate,
            *(scale * x for scale, x in zip((1, 1e3), run.late(0.99), strict=True)),
        )
        _, ttft, tpot = found[name]
        print(
            f"{name:23} {rate:12.2f} {run.kept():9.1%} {ttft:8.2f} s {tpot:7.0f} ms "
            f"{run.cached():8.1%}"
        )
    print(f"{TIMES} times as many requests, in time:   faster   more conversations")
    kept = {}
    for name, fleet in GROWN.items():
        ways = (
            (first(), TIMES),
            (trace(FIRST, PERIOD, TIMES * STARTS), 1.0),
        )
        runs = [serve(fleet, requests, speed) for requests, speed in ways]
        kept[name] = [run.kept() for run in runs]
        print(f"{name:38}" + "".join(f"{share:8.1%}" for share in kept[name]))
    assert kept["the base"][0] < kept["3 prefill, 5 decode"][0], "apart, at more speed"
    assert kept["the base"][1] > kept["3 prefill, 5 decode"][1], "together, with more users"
    best, base = {name: rate for name, (rate, *_) in found.items()}, found["the base"][0]
    assert best["longest match"] < best["no prefix kept"], "a hot spot is worse than no cache"
    assert best["in turn"] < base / 1.3 and best["in turn, pool"] > 0.95 * base
    assert best["a quarter of the room"] < base / 1.3 < best["a quarter, and host"]
    for name in ("3 prefill, 5 decode", "8-bit caches", "drafts"):
        assert best[name] > 1.1 * base, f"{name} serves more"
    assert best["host first, then GPU"] < base / 1.1
    assert best["8 bits, drafts, 3 + 5"] < 1.05 * best["3 prefill, 5 decode"], (
        "prefill is short"
    )
    assert max(best, key=lambda name: best[name]) == "8 bits, drafts, 5 + 3"
    draw(found)


if __name__ == "__main__":
    main()
