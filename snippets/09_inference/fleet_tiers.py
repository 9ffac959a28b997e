"""Where conversations wait for their next turn: GPU, host, disk or a shared pool.

The pauses of the trace are seconds, and those of users minutes or hours. As conversations that
are alive are starts times life, by Little, a cache a quarter as large stands for pauses four
times as long. Rates: half of PCIe 5's 63 GB/s to the host, a disk, and two networks.
"""

from fleet import CACHE, Fleet, Store, Tier, conserved, serve
from fleet_trace import Request, reusable, trace

# --8<-- [start:tiers]
ROOM = 0.9 * 80e9 - 16.06e9  # bytes beside the weights
HOST = Tier("host", 500_000, 32e9)  # 66 GB, at half of PCIe 5's rate
DISK = Tier("disk", 4_000_000, 6e9)  # 0.5 TB on one NVMe drive
POOL = Tier("pool", 8_000_000, 25e9, shared=True)  # 1 TB; half of the card's rate
SLOW = Tier("slow pool", 8_000_000, 1.25e9, shared=True)  # 10 Gbit/s Ethernet
# --8<-- [end:tiers]


def replayed(requests: tuple[Request, ...], room: float) -> float:
    """The share of prompts that one LRU cache holds if every answer takes no time."""
    store, found = Store(int(8 * room / CACHE)), 0
    for r in requests:
        key = "own", r.conversation
        found += min(store.get(key) or r.shared, r.prompt - 1)
        store.put(key, r.prompt + r.answer - 1)
    return found / sum(r.prompt for r in requests)


def main() -> None:
    requests = trace()
    ideal = reusable(requests) / sum(r.prompt for r in requests)
    print(f"nothing forgotten would be {ideal:.1%}; computing a token takes 30 µs")
    for tier in (HOST, DISK, POOL, SLOW):
        print(f"{tier.name:10} {1e6 * CACHE / tier.rate:5.1f} µs to load one")
    shares = (1.0, 0.4, 0.35, 0.25)
    alone = [replayed(requests, share * ROOM) for share in shares]
    print(
        "one LRU cache, no queue: "
        + ", ".join(
            f"{found:.1%} in {share:.0%}" for share, found in zip(shares, alone, strict=True)
        )
    )
    print("room        below it         cached   in time   p99 of TTFT   of TPOT")
    small = {"reserved": 0.75 * ROOM}
    rows = [
        ("100%", "nothing", Fleet()),
        ("40%", "nothing", Fleet(reserved=0.6 * ROOM)),
        ("35%", "nothing", Fleet(reserved=0.65 * ROOM)),
        ("25%", "nothing", Fleet(**small)),
        ("25%", "host", Fleet(**small, tiers=(HOST,))),
        ("25%", "disk", Fleet(**small, tiers=(DISK,))),
        ("25%", "pool", Fleet(**small, tiers=(POOL,))),
        ("25%", "slow pool", Fleet(**small, tiers=(SLOW,))),
        ("25%", "slow, if faster", Fleet(**small, tiers=(SLOW,), wait=False)),
        ("100%", "pool, in turn", Fleet(route="round robin", tiers=(POOL,))),
    ]
    kept, cached = {}, {}
    for room, below, fleet in rows:
        run = serve(fleet, requests)
        conserved(run)
        ttft, tpot = run.late(0.99)
        kept[room, below], cached[room, below] = run.kept(), run.cached()
        print(
            f"{room:11} {below:16} {run.cached():6.1%} {run.kept():8.1%} {ttft:11.2f} s "
            f"{1e3 * tpot:6.0f} ms"
        )
        assert run.cached() < ideal
    cliff = cached["40%", "nothing"] - cached["35%", "nothing"]
    assert cliff > 3 * (alone[1] - alone[2]), "the queue makes a cliff of LRU's slope"
    assert kept["25%", "nothing"] < 0.9 < kept["100%", "nothing"]
    assert min(kept["25%", below] for below in ("host", "disk", "pool")) > 0.9
    assert kept["25%", "slow pool"] > 0.9, "it loads three times as long as it computes"
    assert kept["25%", "slow, if faster"] == kept["25%", "nothing"], "it never is"
    assert kept["100%", "pool, in turn"] > 0.9, "any GPU will do"


if __name__ == "__main__":
    main()
