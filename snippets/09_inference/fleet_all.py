"""Every policy on one trace: the goodput of a GPU, and the latency of the slowest 1%.

Each row changes one or two things of the baseline, and the two longest names change three. The
baseline has eight GPUs with continuous batching, pieces of 512 tokens, prefix caching, and a
router that estimates the time to the first token. Goodput is the highest rate at which nine in
ten requests have a TTFT of at most 1 s and a TPOT of at most 50 ms. It uses the first 80 s of
the trace. The percentiles are for these 80 s at the speed of the trace. Draws fleet_all.svg.
"""

from fleet import CACHE_BYTES, SEARCH_SECONDS, Fleet, goodput, run_at, search_trace, serve
from fleet_steps import ACCEPTANCE, DRAFT_COST, DRAFTS, HOST, HOST_PER_SEQUENCE
from fleet_tiers import CACHE_MEMORY, POOL
from fleet_tiers import HOST as HOST_MEMORY
from fleet_trace import PERIOD, STARTS, trace

RESERVED = 0.75 * CACHE_MEMORY  # so that a quarter of the cache memory is left
DRAFTING = {"drafts": DRAFTS, "acceptance": ACCEPTANCE, "draft_cost": DRAFT_COST}
TWO_GAINS = {"cache_bytes": CACHE_BYTES // 2, **DRAFTING}

# --8<-- [start:policies]
POLICIES: dict[str, tuple[Fleet, float]] = {  # and a guess of the highest speed
    "no prefix caching": (Fleet(prefix_caching=False), 0.69),
    "round robin": (Fleet(routing="round robin"), 0.92),
    "least loaded": (Fleet(routing="least loaded"), 1.11),
    "longest match": (Fleet(routing="longest match"), 0.22),
    "baseline": (Fleet(), 2.02),
    "round robin, pool": (Fleet(routing="round robin", tiers=(POOL,)), 2.1),
    "a quarter of the cache": (Fleet(reserved_bytes=RESERVED), 1.48),
    "a quarter, host tier": (Fleet(reserved_bytes=RESERVED, tiers=(HOST_MEMORY,)), 2.07),
    "3 prefill, 5 decode": (Fleet(prefill_gpus=3, token_budget=2048), 2.73),
    "8-bit cache": (Fleet(cache_bytes=CACHE_BYTES // 2), 2.31),
    "drafts": (Fleet(**DRAFTING), 2.52),
    "host before the GPU": (
        Fleet(host=HOST, host_per_sequence=HOST_PER_SEQUENCE, overlap=False),
        1.74,
    ),
    "guided, before the GPU": (
        Fleet(host=HOST, host_per_sequence=0.5e-3, overlap=False),
        0.43,
    ),
    "8 bits, drafts, 3 + 5": (
        Fleet(prefill_gpus=3, token_budget=2048, **TWO_GAINS),
        2.5,
    ),
    "8 bits, drafts, 5 + 3": (
        Fleet(prefill_gpus=5, token_budget=2048, **TWO_GAINS),
        4.3,
    ),
}
GROWTH = 2.2  # times as many requests per second
GROWTH_ROWS = {
    name: POLICIES[name][0]
    for name in ("baseline", "3 prefill, 5 decode", "8-bit cache", "drafts")
} | {"3 + 5, host tier": Fleet(prefill_gpus=3, token_budget=2048, tiers=(HOST_MEMORY,))}
# --8<-- [end:policies]


def draw(found: dict[str, tuple[float, float, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fleet", "font.size": 12}
    figure, axes = plt.subplots(1, 3, figsize=(7, 4.8), sharey=True, width_ratios=(5, 3, 3))
    names = list(found)[::-1]
    baseline = names.index("baseline")
    for column, axis in enumerate(axes):
        values = [found[name][column] for name in names]
        colours = ["#0b6e99" if n == baseline else "#7dafc4" for n in range(len(names))]
        if column:
            axis.scatter(values, range(len(names)), c=colours, s=36)
            axis.hlines(range(len(names)), 0 if column == 2 else 0.3, values, colors=colours)
        else:
            axis.barh(range(len(names)), values, color=colours, height=0.66)
            for n, value in enumerate(values):
                axis.text(value + 0.1, n, f"{value:.1f}", va="center", fontsize=11)
        axis.axvline(values[baseline], color="#52525b", linestyle=":", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_visible(False)
    axes[0].set(xlabel="goodput, requests/s per GPU", xlim=(0, 10.5))
    axes[0].set_yticks(range(len(names)), names)
    axes[1].set(xlabel="TTFT, p99, s", xscale="log", xlim=(0.3, 600))
    axes[1].set_xticks([1, 10, 100], ["1", "10", "100"])
    axes[2].set(xlabel="TPOT, p99, ms", xlim=(0, None))
    figure.tight_layout()
    figure.savefig("fleet_all.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("                           goodput      in     TTFT    TPOT  cached")
    print("policy                  per GPU, /s   time      p99     p99  tokens")
    found = {}
    for name, (fleet, guess) in POLICIES.items():
        result = run_at(fleet, 0)
        rate = goodput(fleet, guess) / fleet.gpus
        ttft, tpot = result.percentiles(0.99)
        found[name] = rate, ttft, 1e3 * tpot
        print(
            f"{name:25} {rate:9.2f} {result.in_time():6.1%} {ttft:6.2f} s {1e3 * tpot:4.0f} ms "
            f"{result.cached_share():6.1%}"
        )
    print(f"in time, with {GROWTH} times as many requests per second")
    print("                           faster trace   more conversations")
    in_time = {}
    for name, fleet in GROWTH_ROWS.items():
        faster = serve(fleet, search_trace(), GROWTH)
        more = serve(fleet, trace(SEARCH_SECONDS, PERIOD, GROWTH * STARTS), 1.0)
        in_time[name] = faster.in_time(), more.in_time()
        print(f"{name:23} {in_time[name][0]:15.1%} {in_time[name][1]:20.1%}")
    apart = "3 prefill, 5 decode"
    assert in_time["baseline"][0] < in_time[apart][0], "apart wins if the trace is faster"
    assert in_time["baseline"][1] > in_time[apart][1], "together wins with more conversations"
    best, baseline = {name: rate for name, (rate, *_) in found.items()}, found["baseline"][0]
    assert best["longest match"] < best["no prefix caching"], (
        "a hot spot is worse than no cache"
    )
    assert best["round robin"] < baseline / 1.3
    assert best["round robin, pool"] > 0.95 * baseline
    assert best["a quarter of the cache"] < baseline / 1.3 < best["a quarter, host tier"]
    for name in (apart, "8-bit cache", "drafts"):
        assert best[name] > 1.1 * baseline, name
    assert best["host before the GPU"] < baseline / 1.1
    assert best["8 bits, drafts, 3 + 5"] < 1.05 * best[apart], "prefill is the bottleneck"
    assert max(best, key=lambda name: best[name]) == "8 bits, drafts, 5 + 3"
    draw(found)


if __name__ == "__main__":
    main()
