"""Prefill and decode on the same GPUs or on different GPUs, under three pairs of limits.

With prefill and decode apart, the cache of a prompt is sent to the GPU that decodes. During the
transfer, the network cards of both GPUs are busy. A first token counts when the decoding GPU
has finished a step. Goodput is the highest rate at which nine in ten requests keep both limits.

Compare the rows "together" and "apart" from left to right: the limits get tighter.
"""

from fleet import (
    A100,
    CACHE_BYTES,
    REQUIRED_SHARE,
    SEARCH_SECONDS,
    Fleet,
    exponent_below,
    goodput,
    run_at,
    search_trace,
)

# --8<-- [start:ways]
LIMITS = ((10.0, 0.200), (3.0, 0.050), (3.0, 0.020))  # TTFT and TPOT in seconds
PREFILL_GPUS = {  # with prefix caching or without it; 0 means that every GPU does both
    False: {"together": (0,), "apart": (5, 6)},
    True: {"together": (0,), "apart": (2, 3)},
}
GUESSES = {  # speeds at which the search starts, for the three pairs of limits
    False: {"together": (1.6, 0.94, 0.54), "apart": (1.3, 1.0, 0.9)},
    True: {"together": (3.0, 2.1, 1.1), "apart": (2.7, 2.0, 1.8)},
}


def settings(caching: bool, way: str) -> dict[str, Fleet]:
    """The fleets that are tried: budgets for "together", numbers of GPUs for "apart"."""
    budgets = (512, 2048) if way == "together" else (2048,)
    return {
        f"{n} + {8 - n}" if n else f"{budget:,}": Fleet(
            prefill_gpus=n, token_budget=budget, prefix_caching=caching
        )
        for n in PREFILL_GPUS[caching][way]
        for budget in budgets
    }


# --8<-- [end:ways]


def highest(
    fleets: dict[str, Fleet], guess: float, limits: tuple[float, float]
) -> tuple[float, str]:
    """The highest goodput per GPU, and the name of its fleet.

    A fleet that breaks the limits at the best rate so far is not searched further.
    """
    best = 0.0, ""
    for name, fleet in fleets.items():
        start = run_at(fleet, exponent_below(guess))
        if not best[1] or start.in_time(*limits) >= REQUIRED_SHARE:
            best = max(best, (goodput(fleet, guess, *limits), name))
            guess = best[0] * SEARCH_SECONDS / len(search_trace())
    return best[0] / 8, best[1]


def main() -> None:
    print("the work of eight GPUs for the same requests, without prefix caching:")
    work = []
    for way in ("together", "apart"):
        result = run_at(list(settings(False, way).values())[-1], -4)
        prompts = sum(g.computed_tokens for g in result.gpus)
        answers = sum(g.generated_tokens for g in result.gpus)
        work.append((prompts, answers))
        print(
            f"  {way:9} {prompts / 1e6:.2f} million prompt tokens, {answers / 1e6:.2f} million"
            f" answer tokens, {result.transferred_bytes / result.end / 1e9:.1f} GB/s sent"
        )
        sent = sum(job.request.prompt for job in result.jobs if job.transferred)
        assert result.transferred_bytes == CACHE_BYTES * sent
        assert (sent > 0) == (way == "apart")
    assert work[0] == work[1]

    best = {}
    for caching, header in ((False, "without prefix caching"), (True, "with prefix caching")):
        print(f"goodput in requests/s per GPU, {header}")
        print(
            "  limits for TTFT and TPOT"
            + "".join(f"{f'{a:.0f} s, {1e3 * b:.0f} ms':>18}" for a, b in LIMITS)
        )
        for way in ("together", "apart"):
            best[caching, way] = [
                highest(settings(caching, way), guess, limits)
                for guess, limits in zip(GUESSES[caching][way], LIMITS, strict=True)
            ]
            cells = (f"{rate:.2f} ({name})" for rate, name in best[caching, way])
            print(f"  {way:24}" + "".join(f"{cell:>18}" for cell in cells))
        together, apart = best[caching, "together"], best[caching, "apart"]
        ratios = [a / b for (a, _), (b, _) in zip(apart, together, strict=True)]
        print(f"  {'apart / together':24}" + "".join(f"{ratio:18.2f}" for ratio in ratios))
        assert ratios == sorted(ratios) and ratios[-1] > 1.3, "apart wins with tight limits"
        assert ratios[0] < 1 < ratios[1], "together wins with loose limits"

    together = 8 * best[True, "together"][1][0]
    mixed_fleet = Fleet(prefill_gpus=2, token_budget=2048, decode_hardware=A100)
    mixed = goodput(mixed_fleet, 1.3, *LIMITS[1])
    price = (8 * mixed / together - 2) / 6
    print("limits of 3 s and 50 ms, with prefix caching:")
    print(
        f"  2 H100 prefill, 6 A100 decode: {mixed:.1f} requests/s; "
        f"8 H100 together: {together:.1f}"
    )
    print(f"  so the A100 is cheaper per request below {price:.2f} of the price of an H100")
    for link, guess in ((25e9, 1.7), (12.5e9, 0.85)):
        fleet = Fleet(prefill_gpus=3, token_budget=2048, link=link)
        slow = goodput(fleet, guess, *LIMITS[1]) / 8
        print(
            f"  3 + 5 with links of {8 * link / 1e9:.0f} Gbit/s: {slow:.2f} requests/s per GPU"
        )
        assert slow < together / 8, "a link of half the bandwidth is too slow"


if __name__ == "__main__":
    main()
