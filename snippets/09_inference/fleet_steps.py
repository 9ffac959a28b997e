"""How drafts, an 8-bit cache, host time, CUDA graphs and guided decoding change the steps.

The upper table shows how much one step of speculative decoding gains, by batch size and context
length. The lower table simulates the first 80 s of the trace at its own speed. Each row changes
one setting of the baseline. Compare the median TPOT of a row with that of the baseline.
"""

from dataclasses import replace

from fleet import B200, CACHE_BYTES, H100, Fleet, Gpu, run_at

DRAFTS, ACCEPTANCE = 3, 0.7  # drafts per step, and the probability that a draft is accepted
DRAFT_COST = 0.1  # of the time of a step of the model
HOST, HOST_PER_SEQUENCE = 3e-3, 50e-6  # seconds of Python code; assumed
LAUNCH = 32 * 3.441e-3 / 16  # 32 layers; cuda_graph_decode.py measured 16 on an H200
MULTIPLES_OF_8 = (1, 2, 4, *range(8, 257, 8))
POWERS_OF_2 = tuple(2**n for n in range(9))


# --8<-- [start:speedup]
def speedup(fleet: Fleet, batch: int, context: int) -> float:
    """Tokens per second with drafts divided by tokens per second without drafts.

    All `batch` answers have the same context length.
    """
    plain, drafting = Gpu(Fleet(), H100, []), Gpu(fleet, H100, [])
    tokens = batch * (context + 1)  # that the step reads from the cache
    plain_step = plain.step_seconds(batch, 0, tokens, 0)
    drafting_step = drafting.step_seconds(batch, 0, tokens, 0)
    return drafting.tokens_per_step * plain_step / drafting_step


# --8<-- [end:speedup]


def main() -> None:
    drafting = Fleet(drafts=DRAFTS, acceptance=ACCEPTANCE, draft_cost=DRAFT_COST)
    batches, table = (1, 16, 64, 256), {}
    print(f"speedup of one step with {DRAFTS} drafts, of which {ACCEPTANCE:.0%} are accepted")
    print("context   batch of " + "".join(f"{batch:8}" for batch in batches))
    for context in (0, 500, 6000):
        table[context] = [speedup(drafting, batch, context) for batch in batches]
        print(f"{context:7,}            " + "".join(f"{gain:8.2f}" for gain in table[context]))
    tokens = (1 - ACCEPTANCE ** (DRAFTS + 1)) / (1 - ACCEPTANCE)  # per step, closed form
    assert abs(tokens / (1 + DRAFTS * DRAFT_COST) / table[0][0] - 1) < 0.02
    assert table[0] == sorted(table[0], reverse=True) and table[0][-1] < 1 < table[6000][-1]

    host = {"host": HOST, "host_per_sequence": HOST_PER_SEQUENCE}
    launches, guided = {**host, "launch": LAUNCH}, {"host": HOST, "host_per_sequence": 0.5e-3}
    rows = {
        "baseline": Fleet(),
        "8-bit cache": Fleet(cache_bytes=CACHE_BYTES // 2),
        "drafts": drafting,
        "drafts, 30% accepted": Fleet(drafts=DRAFTS, acceptance=0.3, draft_cost=DRAFT_COST),
        "host before the GPU": Fleet(**host, overlap=False),
        "host overlaps the GPU": Fleet(**host),
        "kernels launched one by one": Fleet(**launches),
        "graphs for 1, 2, 4, 8, 16, 24, …": Fleet(
            **launches, graph_sizes=MULTIPLES_OF_8, reserved_bytes=1e9
        ),
        "graphs for powers of two": Fleet(
            **launches, graph_sizes=POWERS_OF_2, reserved_bytes=1e9
        ),
        "guided decoding, overlapped": Fleet(**guided),
        "guided decoding, before the GPU": Fleet(**guided, overlap=False),
    }
    print("the trace                         H100: TPOT p50      p99  in time   B200: TPOT p50")
    medians, b200_medians = {}, {}
    for name, fleet in rows.items():
        result, b200 = run_at(fleet, 0), run_at(replace(fleet, hardware=B200), 0)
        medians[name], b200_medians[name] = (r.percentiles(0.5)[1] for r in (result, b200))
        _, slowest = result.percentiles(0.99)
        print(
            f"{name:32} {1e3 * medians[name]:12.1f} ms {1e3 * slowest:5.1f} ms"
            f" {result.in_time():8.1%} {1e3 * b200_medians[name]:13.1f} ms"
        )
    baseline = medians["baseline"]
    assert medians["8-bit cache"] < baseline and medians["drafts"] < baseline
    assert medians["drafts, 30% accepted"] > baseline
    overlapped, before = medians["host overlaps the GPU"], medians["host before the GPU"]
    assert overlapped < 1.02 * baseline < before
    one_by_one, graphs = "kernels launched one by one", "graphs for 1, 2, 4, 8, 16, 24, …"
    assert medians[one_by_one] < 1.02 * baseline, "the steps of an H100 hide the launches"
    assert b200_medians[one_by_one] > 1.5 * b200_medians[graphs], "the steps of a B200 do not"
    assert medians["graphs for powers of two"] >= medians[graphs], "more rows are padding"


if __name__ == "__main__":
    main()
