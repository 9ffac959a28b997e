"""Prefill and decode together or apart, on the same GPUs and on others, under three promises.

Apart, a prompt's cache travels to the GPU that decodes, over both GPUs' cards, one after the
other. A first token counts when the decoding GPU has made a step. Goodput is the highest rate
of the trace of which nine in ten requests keep both promises.
"""

from fleet import A100, CACHE, FIRST, KEPT, Fleet, at_speed, first, goodput, step_below

# --8<-- [start:ways]
PROMISES = ((10.0, 0.200), (3.0, 0.050), (3.0, 0.020))  # seconds: TTFT, TPOT
GUESSES = {  # of the speed; prefixes kept or not
    False: {"together": (1.6, 0.94, 0.54), "apart": (1.3, 1.0, 0.9)},
    True: {"together": (3.0, 2.1, 1.1), "apart": (2.7, 2.0, 1.8)},
}
WAYS = {  # prefixes kept or not: GPUs for prompts alone, 0 if every GPU does both
    False: {"together": (0,), "apart": (5, 6)},
    True: {"together": (0,), "apart": (2, 3)},
}


def ways(keep: bool, way: str) -> dict[str, Fleet]:
    """The settings of one way, by name."""
    budgets = (512, 2048) if way == "together" else (2048,)
    return {
        f"{n} + {8 - n}" if n else f"{budget:,}": Fleet(prefills=n, budget=budget, keep=keep)
        for n in WAYS[keep][way]
        for budget in budgets
    }


# --8<-- [end:ways]


def highest(
    settings: dict[str, Fleet], guess: float, promise: tuple[float, float]
) -> tuple[float, str]:
    """The goodput of a GPU under the best of the settings, and its name.

    One that breaks the promise at the best rate so far is searched no further.
    """
    best = 0.0, ""
    for name, fleet in settings.items():
        if not best[1] or at_speed(fleet, step_below(guess)).kept(*promise) >= KEPT:
            best = max(best, (goodput(fleet, guess, *promise), name))
            guess = best[0] * FIRST / len(first())
    return best[0] / 8, best[1]


def main() -> None:
    print("eight GPUs, the same requests, no prefix kept:")
    work = []
    for way in ("together", "apart"):
        run = at_speed(list(ways(False, way).values())[-1], -4)
        work.append([sum(g.computed for g in run.gpus), sum(g.generated for g in run.gpus)])
        print(
            f"  {way:9} {work[-1][0] / 1e6:.2f} million tokens of prompts run, "
            f"{work[-1][1] / 1e6:.2f} of answers, {run.sent / run.end / 1e9:4.1f} GB/s sent"
        )
        sent = sum(job.request.prompt for job in run.jobs if job.decoded)
        assert run.sent == CACHE * sent and (run.sent > 0) == (way == "apart")
    assert work[0] == work[1], "not one token less"

    best = {}
    for keep, header in ((False, "no prefix kept"), (True, "prefixes kept")):
        print(
            f"{header + ', requests/s and GPU:':38}"
            + "".join(f"{f'{a:.0f} s, {1e3 * b:.0f} ms':>18}" for a, b in PROMISES)
        )
        for way in ("together", "apart"):
            best[keep, way] = [
                highest(ways(keep, way), guess, promise)
                for guess, promise in zip(GUESSES[keep][way], PROMISES, strict=True)
            ]
            cells = (f"{rate:.2f} ({name})" for rate, name in best[keep, way])
            print(f"  {way:36}" + "".join(f"{cell:>18}" for cell in cells))
        gains = [
            a / b
            for (a, _), (b, _) in zip(best[keep, "apart"], best[keep, "together"], strict=True)
        ]
        print(f"  {'ratio':36}" + "".join(f"{gain:18.2f}" for gain in gains))
        assert gains == sorted(gains) and gains[-1] > 1.3, "it pays where tokens must be fast"
        assert keep or gains[0] < 1 < gains[1], "and not where nothing is urgent"

    every = 8 * best[True, "together"][1][0]
    mixed = goodput(Fleet(prefills=2, budget=2048, decode_on=A100), 1.3, *PROMISES[1])
    price = (8 * mixed / every - 2) / 6
    print(
        f"2 H100 + 6 A100, 3 s and 50 ms: {mixed:.1f} requests/s; 8 H100 together {every:.1f}:"
    )
    print(f"each is cheaper if an A100 costs less than {price:.2f} of an H100")
    for rate, guess in ((25e9, 1.7), (12.5e9, 0.85)):
        slow = goodput(Fleet(prefills=3, budget=2048, link=rate), guess, *PROMISES[1]) / 8
        print(f"3 + 5 over {8 * rate / 1e9:.0f} Gbit/s: {slow:.2f} requests/s and GPU")
        assert slow < best[True, "together"][1][0], "half of the link, and together is better"


if __name__ == "__main__":
    main()
