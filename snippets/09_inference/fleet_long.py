"""One prompt of 200,000 tokens among thousands of short ones: who waits for it?

It comes at the crest of the first wave, in the middle of the trace. By its arithmetic alone it
keeps one GPU for half a minute. The rest is who stands behind it, and how long its pieces make
each step.
"""

from dataclasses import replace

from fleet import H100, TPOT, TTFT, Fleet, Gpu, conserved, serve, waits
from fleet_trace import Request, trace

# --8<-- [start:ways]
LONG = Request(-1, 30.0, 10**6, 3, 4096, 200_000, 300)
ROWS = {
    "first come, 512 tokens a step": {},
    "taking turns, 512 tokens a step": {"fair": True},
    "taking turns, steps of 45 ms at most": {"fair": True, "longest_step": 0.045},
}
# --8<-- [end:ways]


def main() -> None:
    requests = [r for r in trace() if r.arrival < 120]
    with_it = [
        replace(r, number=n)
        for n, r in enumerate(sorted([*requests, LONG], key=lambda r: r.arrival))
    ]
    gpu = Gpu(Fleet(), H100, [])
    products = gpu.token * LONG.prompt
    attention = gpu.pair * LONG.prompt**2 / 2
    print(f"alone: {products:.1f} s of products, {attention:.1f} s of attention")
    print("a piece of 512 tokens: ", end="")
    for behind in (0, 50_000, 200_000):
        step = gpu.seconds(0, 512, behind, 512 * behind)
        print(f"{1e3 * step:.0f} ms behind {behind:,}", end=", " if behind < 200_000 else "\n")
    assert attention > products, "which the plan of a step leaves out"

    print("route     on each GPU                            late without   with it   its TTFT")
    more = {}
    for route in ("sticky", "estimate"):
        for name, fields in ROWS.items():
            fleet = Fleet(route=route, **fields)
            late = []
            for chosen in (requests, with_it):
                run = serve(fleet, chosen)
                conserved(run)
                jobs = [job for job in run.jobs if job.request.prompt < LONG.prompt]
                late.append(sum(a > TTFT or b > TPOT for a, b in map(waits, jobs)))
            (long,) = (job for job in run.jobs if job.request.prompt == LONG.prompt)
            ttft, _ = waits(long)
            more[route, name] = late[1] - late[0]
            print(f"{route:9} {name:38} {late[0]:8} {late[1]:12} {ttft:8.0f} s")
    first, turns, bounded = (more["sticky", name] for name in ROWS)
    assert bounded < first / 4 and turns > bounded
    assert more["estimate", "first come, 512 tokens a step"] < first / 20


if __name__ == "__main__":
    main()
