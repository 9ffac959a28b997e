"""What changes a step: drafts, 8-bit caches, the host's time, graphs and guided decoding.

First one step alone, by batch and context: what a round of speculation gains there. Then the
first 80 s of the trace, at its own speed, with one thing changed at a time.
"""

from dataclasses import replace

from fleet import B200, CACHE, H100, Fleet, Gpu, at_speed

DRAFTS, ACCEPTED, SHARE = 3, 0.7, 0.1  # accepted with 70%; one costs a tenth of a step
HOST, EACH = 3e-3, 50e-6  # seconds of Python: for a step, and for each answer in it
LAUNCH = 32 * 3.441e-3 / 16  # as cuda_graph_decode.py measured on an H200, for 32 layers
EIGHTS = (1, 2, 4, *range(8, 257, 8))


# --8<-- [start:speedup]
def speedup(fleet: Fleet, batch: int, context: int) -> float:
    """Tokens a second with drafts over those without, of `batch` answers at one context."""
    plain, drafted = (Gpu(each, H100, []) for each in (Fleet(), fleet))
    looked_back = batch * (context + 1)
    return (
        drafted.gain
        * plain.seconds(batch, 0, looked_back, 0)
        / drafted.seconds(batch, 0, looked_back, 0)
    )


# --8<-- [end:speedup]


def main() -> None:
    drafting = Fleet(drafts=DRAFTS, accepted=ACCEPTED, draft_cost=SHARE)
    batches, table = (1, 16, 64, 256), {}
    print(
        f"speculation, {DRAFTS} drafts, {ACCEPTED:.0%} accepted: times as many tokens a second"
    )
    print("context   batch of " + "".join(f"{batch:8}" for batch in batches))
    for context in (0, 500, 6000):
        table[context] = [speedup(drafting, batch, context) for batch in batches]
        print(f"{context:7,}            " + "".join(f"{gain:8.2f}" for gain in table[context]))
    tokens = (1 - ACCEPTED ** (DRAFTS + 1)) / (1 - ACCEPTED)  # the formula of the next token
    assert abs(tokens / (1 + DRAFTS * SHARE) / table[0][0] - 1) < 0.02
    assert table[0] == sorted(table[0], reverse=True) and table[0][-1] < 1 < table[6000][-1]

    sync = {"host": HOST, "host_each": EACH, "overlap": False}
    rows = {
        "the base": Fleet(),
        "8-bit cache": Fleet(cache=CACHE // 2),
        "drafts": drafting,
        "drafts, 30% accepted": Fleet(drafts=DRAFTS, accepted=0.3, draft_cost=SHARE),
        "host first, then GPU": Fleet(**sync),
        "the same, overlapped": Fleet(host=HOST, host_each=EACH),
        "kernels one by one": Fleet(host=HOST, host_each=EACH, launch=LAUNCH),
        "graphs of 1, 2, 4, 8, 16, …": Fleet(
            host=HOST, host_each=EACH, launch=LAUNCH, captured=EIGHTS, reserved=1e9
        ),
        "graphs of powers of two": Fleet(
            host=HOST,
            host_each=EACH,
            launch=LAUNCH,
            captured=tuple(2**n for n in range(9)),
            reserved=1e9,
        ),
        "guided, 0.5 ms an answer, overlapped": Fleet(host=HOST, host_each=0.5e-3),
        "guided, 0.5 ms an answer, host first": Fleet(
            host=HOST, host_each=0.5e-3, overlap=False
        ),
    }
    print("the trace, on H100:                  TPOT p50    p99   in time    on B200: TPOT p50")
    middle, fast = {}, {}
    for name, fleet in rows.items():
        run, faster = at_speed(fleet, 0), at_speed(replace(fleet, hardware=B200), 0)
        (_, middle[name]), (_, tpot), (_, fast[name]) = (
            run.late(0.5),
            run.late(0.99),
            faster.late(0.5),
        )
        print(
            f"{name:36} {1e3 * middle[name]:5.1f} ms {1e3 * tpot:6.1f} {run.kept():9.1%} "
            f"{1e3 * fast[name]:20.1f} ms"
        )
    base = middle["the base"]
    assert middle["8-bit cache"] < base and middle["drafts"] < base
    assert middle["the same, overlapped"] < 1.02 * base < middle["host first, then GPU"]
    assert middle["kernels one by one"] < 1.02 * base, "an H100 is slow enough to hide them"
    assert fast["kernels one by one"] > 1.5 * fast["graphs of 1, 2, 4, 8, 16, …"]
    assert middle["graphs of powers of two"] >= middle["graphs of 1, 2, 4, 8, 16, …"]


if __name__ == "__main__":
    main()
