"""How many GPUs follow the load: what a cold start takes, and what coming and going costs.

Every five seconds the fleet asks for as many GPUs as there are requests inside, divided by a
target. A new one is paid for from the order on, serves after its cold start, and knows no
prefix. One goes when no more were asked for during a while, and finishes what it has. The trace
follows the same law, with one wave that is played at half speed: eight minutes.
"""

from fleet import PARAMETERS, Fleet, conserved, serve
from fleet_trace import trace

# --8<-- [start:starts]
WEIGHTS = 2 * PARAMETERS  # bytes
STARTS = {  # bytes/s at which weights come, and seconds for all the rest: assumed
    "weights from the host, engine asleep": (32e9, 0.5),
    "from a disk, kernels and graphs kept": (6e9, 10),
    "from an object store, all anew": (1.25e9, 45),
}
# --8<-- [end:starts]


def main() -> None:
    requests = trace(240.0, 240.0)
    rows = {f"{n} GPUs all the time": Fleet(gpus=n) for n in (2, 3, 4)}
    for name, (rate, rest) in STARTS.items():
        rows[name] = Fleet(gpus=1, most=5, cold=WEIGHTS / rate + rest, target=25, hold=120)
    asleep = rows["weights from the host, engine asleep"]
    rows["asleep, and they go at once"] = Fleet(gpus=1, most=5, cold=asleep.cold, target=25)
    print(f"{'':42}cold   GPUs paid   in time   TTFT p99   cached")
    kept, paid = [], []
    for name, fleet in rows.items():
        run = serve(fleet, requests, 0.5)
        conserved(run)
        kept.append(run.kept())
        paid.append(run.paid / run.end)
        print(
            f"{name:39} {fleet.cold:5.1f} s {paid[-1]:8.1f} {kept[-1]:11.1%} "
            f"{run.late(0.99)[0]:8.2f} s {run.cached():8.1%}"
        )
        assert fleet.most or abs(paid[-1] - fleet.gpus) < 1e-9
    two, three, four, asleep, disk, store, hasty = kept
    assert two < 0.9 < three < four
    assert asleep > disk > store and store < 0.9, "who waits for a cold GPU is late"
    assert hasty < asleep, "whoever goes takes its prefixes along"
    assert paid[4] > paid[1], "on a wave as short as this, scaling saves nothing"


if __name__ == "__main__":
    main()
