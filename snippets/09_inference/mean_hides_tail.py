"""The numbers that describe a request, and two servers with the same mean.

Both servers give a token every 30 ms on average. The first server does so evenly. The second
gives a token every 20 ms, but pauses for half a second once in fifty tokens, as a server does
during the prefill of a long prompt. Time is simulated, so the numbers are the same everywhere.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

OUTPUT, REQUESTS = 50, 2000


# --8<-- [start:metrics]
@dataclass
class Served:
    """One request: when it was sent, and when each of its tokens arrived; in seconds."""

    sent: float
    tokens: list[float]

    @property
    def ttft(self) -> float:
        """Time to first token: queue and prefill."""
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Times between tokens, as the user sees them."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Time per output token after the first: the mean of the gaps."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def latency(self) -> float:
        """End to end."""
        return self.tokens[-1] - self.sent


def percentile(values: list[float], p: float) -> float:
    """The smallest value that at least p percent of the values do not exceed."""
    ranked = sorted(values)
    return ranked[math.ceil(p * len(ranked) / 100) - 1]


def goodput(served: list[Served], seconds: float, met: Callable[[Served], bool]) -> float:
    """Requests per second that met every limit."""
    return sum(map(met, served)) / seconds


# --8<-- [end:metrics]


def serve(gap: Callable[[], float]) -> list[Served]:
    """One request a second, the first token after 0.2 s, the others `gap()` apart."""
    served = []
    for number in range(REQUESTS):
        clock = number + 0.2
        tokens = [clock]
        for _ in range(OUTPUT - 1):
            clock += gap()
            tokens.append(clock)
        served.append(Served(float(number), tokens))
    return served


def main() -> None:
    dice = random.Random(0)
    servers = {
        "even": serve(lambda: 0.030),
        "stalls": serve(lambda: 0.520 if dice.random() < 0.02 else 0.020),
    }
    print("                      even    stalls")
    rows: dict[str, list[float]] = {}
    for served in servers.values():
        gaps = [gap for request in served for gap in request.gaps]
        for name, value in (
            ("mean gap, ms", 1e3 * sum(gaps) / len(gaps)),
            ("p50 gap, ms", 1e3 * percentile(gaps, 50)),
            ("p95 gap, ms", 1e3 * percentile(gaps, 95)),
            ("p99 gap, ms", 1e3 * percentile(gaps, 99)),
            ("p99 TPOT, ms", 1e3 * percentile([r.tpot for r in served], 99)),
            ("mean latency, s", sum(r.latency for r in served) / REQUESTS),
        ):
            rows.setdefault(name, []).append(value)
        for request in served:  # latency = TTFT + (n − 1) · TPOT
            whole = request.ttft + (OUTPUT - 1) * request.tpot
            assert abs(request.latency - whole) < 1e-9
    for name, (even, stalls) in rows.items():
        print(f"{name:18} {even:7.1f}   {stalls:7.1f}")

    stalled = [max(r.gaps) > 0.1 for r in servers["stalls"]]
    share, formula = sum(stalled) / REQUESTS, 1 - 0.98 ** (OUTPUT - 1)
    print(f"requests that stalled at least once: {share:.0%}; 1 − 0.98^49 = {formula:.0%}")

    def kept(r: Served) -> bool:
        return r.ttft < 0.5 and max(r.gaps) < 0.1

    smooth = [goodput(served, REQUESTS, kept) for served in servers.values()]
    print(f"goodput, no gap above 100 ms: {smooth[0]:.2f} and {smooth[1]:.2f} requests/s")

    assert [percentile(list(range(1, 101)), p) for p in (7, 50, 99, 100)] == [7, 50, 99, 100]
    assert percentile([1, 2, 3], 50) == 2
    assert kept(Served(0, [0.4, 0.45])) and not kept(
        Served(0, [0.6, 0.65])
    )  # the first token is late
    assert abs(rows["mean gap, ms"][0] - rows["mean gap, ms"][1]) < 1
    assert rows["p95 gap, ms"][1] < rows["p95 gap, ms"][0] < rows["p99 gap, ms"][1] / 10
    assert abs(share - formula) < 0.03
    assert smooth[0] > 2 * smooth[1]


if __name__ == "__main__":
    main()
