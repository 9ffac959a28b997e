"""How many other requests does one prompt of 200,000 tokens delay?

The long prompt arrives at a peak of the load, and its computation alone takes one GPU almost
half a minute. The program serves the trace without and with this prompt, and counts the late
requests. It compares two routers and three ways to cut prompts into pieces. Look at the columns
"late without" and "with it", and at the price: the TTFT of the long prompt itself.
"""

from dataclasses import replace

from fleet import H100, TPOT_LIMIT, TTFT_LIMIT, Fleet, Gpu, check_conservation, latencies, serve
from fleet_trace import Request, trace

# --8<-- [start:ways]
LONG = Request(-1, 30.0, 10**6, 3, 4096, prompt=200_000, answer=300)
ROWS = {
    "first come, 512 tokens per step": {},
    "taking turns, 512 tokens per step": {"interleave": True},
    "taking turns, steps below 45 ms": {"interleave": True, "max_step": 0.045},
}
# --8<-- [end:ways]


def main() -> None:
    requests = [r for r in trace() if r.arrival < 120]
    with_long = [
        replace(r, number=n)
        for n, r in enumerate(sorted([*requests, LONG], key=lambda r: r.arrival))
    ]
    gpu = Gpu(Fleet(), H100, [])
    products = gpu.token_cost * LONG.prompt
    attention = gpu.pair_cost * LONG.prompt**2 / 2
    longest = max(r.prompt for r in requests)
    other = gpu.token_cost * longest + gpu.pair_cost * longest**2 / 2
    print(f"the long prompt alone: {products:.1f} s of matrix products", end="")
    print(f", {attention:.1f} s of attention")
    print(f"the longest other prompt has {longest:,} tokens: {other:.1f} s together")
    for behind in (0, 50_000, 200_000):
        step = gpu.step_seconds(0, 512, behind, 512 * behind)
        print(f"a piece of 512 tokens after {behind:7,} tokens: {1e3 * step:4.0f} ms")
    assert attention > products, "the three constants of the plan leave attention out"

    print("                                              late      late  TTFT of the")
    print("router    prompts on a GPU                 without   with it  long prompt")
    delayed = {}
    for routing in ("sticky", "estimate"):
        for name, settings in ROWS.items():
            fleet, late = Fleet(routing=routing, **settings), []
            for chosen in (requests, with_long):
                result = serve(fleet, chosen)
                check_conservation(result)
                short = [job for job in result.jobs if job.request.prompt < LONG.prompt]
                late.append(
                    sum(a > TTFT_LIMIT or b > TPOT_LIMIT for a, b in map(latencies, short))
                )
            (long,) = (job for job in result.jobs if job.request.prompt == LONG.prompt)
            ttft, _ = latencies(long)
            delayed[routing, name] = late[1] - late[0]
            print(f"{routing:9} {name:34} {late[0]:5} {late[1]:9} {ttft:10.0f} s")
    first_come, turns, bounded = (delayed["sticky", name] for name in ROWS)
    assert bounded < first_come / 4 and bounded < turns < first_come
    assert delayed["estimate", "first come, 512 tokens per step"] < first_come / 20


if __name__ == "__main__":
    main()
