"""A load generator that waits for each answer hides the queue that it should measure.

The server needs 10 ms per request and stops once, for two seconds. A closed-loop client sends
its next request when the answer has arrived, so it sends nothing during the stall. An
open-loop client sends on a schedule that does not depend on the answers. Time is simulated.
"""

SERVICE, RATE, SECONDS = 0.010, 50, 20
STALL = (5.0, 7.0)  # no request starts in this time


# --8<-- [start:loops]
def served_at(start: float) -> float:
    """When a request that could begin at `start` is done."""
    if STALL[0] <= start < STALL[1]:
        start = STALL[1]
    return start + SERVICE


def closed_loop() -> list[float]:
    """One client, one request at a time: send when the request before is answered."""
    latencies, clock = [], 0.0
    while clock < SECONDS:
        done = served_at(clock)
        latencies.append(done - clock)
        clock = max(done, clock + 1 / RATE)  # it tries to send RATE per second
    return latencies


def open_loop() -> list[float]:
    """Requests leave on schedule, and their times count from the schedule."""
    latencies, free = [], 0.0
    for number in range(SECONDS * RATE):
        sent = number / RATE
        free = served_at(max(sent, free))
        latencies.append(free - sent)
    return latencies


def corrected(latencies: list[float]) -> list[float]:
    """Add the requests that the closed loop should have sent while it waited."""
    filled = []
    for latency in latencies:
        while latency > 0:
            filled.append(latency)
            latency -= 1 / RATE
    return filled


# --8<-- [end:loops]


def report(name: str, latencies: list[float]) -> float:
    ranked = sorted(latencies)
    p50, p99 = ranked[len(ranked) // 2], ranked[int(0.99 * len(ranked))]
    slow = sum(latency > 0.1 for latency in ranked) / len(ranked)
    print(
        f"{name:22} {len(ranked):5} requests   p50 {1e3 * p50:3.0f} ms   "
        f"p99 {1e3 * p99:5.0f} ms   over 100 ms: {slow:5.1%}   max {ranked[-1]:.2f} s"
    )
    return p99


def main() -> None:
    closed = report("closed loop", closed_loop())
    opened = report("open loop", open_loop())
    filled = report("closed loop, corrected", corrected(closed_loop()))
    # by hand: the queue lasts as long as the stall, and then until it has drained
    rho = RATE * SERVICE
    lasts = (STALL[1] - STALL[0]) / (1 - rho)
    over = lasts - (0.1 - SERVICE) / (1 - rho)  # at its end, waits are below 100 ms again
    print(f"by hand: a queue for {lasts:.1f} s, {over / SECONDS:.1%} over 100 ms")
    seen = sum(latency > 0.1 for latency in open_loop()) / (SECONDS * RATE)
    assert abs(seen - over / SECONDS) < 0.005, "users see the stall, and the queue after it"
    assert closed < 0.02, "the closed loop sees one slow request, below its 99th percentile"
    assert opened > 1.5, "requests during the stall did not wait"
    assert 0.8 < filled / opened < 1.2


if __name__ == "__main__":
    main()
