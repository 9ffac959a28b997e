"""Where the caches of waiting conversations are stored: GPU, host, disk or a shared pool.

The users of the trace answer after seconds, but real users often take minutes. By Little's law,
the number of open conversations is their rate times their lifetime. So a cache of a quarter of
the size stands for pauses that are about four times as long.

The bandwidths are half of the 63 GB/s of PCIe 5 (host), a fast SSD, and two networks.
"""

from fleet import CACHE_BYTES, Fleet, LRUCache, Tier, check_conservation, serve
from fleet_trace import Request, reusable, trace

# --8<-- [start:tiers]
CACHE_MEMORY = 0.9 * 80e9 - 16.06e9  # bytes of an H100 next to the weights
HOST = Tier("host", 500_000, 32e9)  # 66 GB per GPU; half of the bandwidth of PCIe 5
DISK = Tier("disk", 4_000_000, 6e9)  # 0.5 TB per GPU on an NVMe SSD
POOL = Tier("pool", 8_000_000, 25e9, shared=True)  # 1 TB; half of the network card
SLOW = Tier("slow pool", 8_000_000, 1.25e9, shared=True)  # 10 Gbit/s Ethernet
# --8<-- [end:tiers]


def replay(requests: tuple[Request, ...], memory: float) -> float:
    """The share of prompt tokens that one LRU cache finds if every answer takes no time.

    The cache has the `memory` of eight GPUs, in bytes per GPU.
    """
    store, found = LRUCache(int(8 * memory / CACHE_BYTES)), 0
    for r in requests:
        key = "conversation", r.conversation
        found += min(store.get(key) or r.shared, r.prompt - 1)
        store.put(key, r.prompt + r.answer - 1)
    return found / sum(r.prompt for r in requests)


def main() -> None:
    requests = trace()
    ideal = reusable(requests) / sum(r.prompt for r in requests)
    print(f"an unlimited cache would find {ideal:.1%}; computing one token takes 30 µs")
    for tier in (HOST, DISK, POOL, SLOW):
        print(f"{tier.name:10} {1e6 * CACHE_BYTES / tier.bandwidth:5.1f} µs to load one token")
    shares = (1.0, 0.4, 0.35, 0.25)
    alone = [replay(requests, share * CACHE_MEMORY) for share in shares]
    print(
        "one LRU cache without queues finds "
        + ", ".join(
            f"{found:.1%} in {share:.0%}" for share, found in zip(shares, alone, strict=True)
        )
    )
    print("GPU                        cached       in    TTFT    TPOT")
    print("cache  tier below it       tokens     time     p99     p99")
    small = {"reserved_bytes": 0.75 * CACHE_MEMORY}
    rows = [
        ("100%", "none", Fleet()),
        ("40%", "none", Fleet(reserved_bytes=0.6 * CACHE_MEMORY)),
        ("35%", "none", Fleet(reserved_bytes=0.65 * CACHE_MEMORY)),
        ("25%", "none", Fleet(**small)),
        ("25%", "host", Fleet(**small, tiers=(HOST,))),
        ("25%", "disk", Fleet(**small, tiers=(DISK,))),
        ("25%", "pool", Fleet(**small, tiers=(POOL,))),
        ("25%", "slow pool", Fleet(**small, tiers=(SLOW,))),
        ("25%", "slow pool, if faster", Fleet(**small, tiers=(SLOW,), always_load=False)),
        ("100%", "pool, round robin", Fleet(routing="round robin", tiers=(POOL,))),
    ]
    in_time, cached = {}, {}
    for size, below, fleet in rows:
        result = serve(fleet, requests)
        check_conservation(result)
        ttft, tpot = result.percentiles(0.99)
        in_time[size, below], cached[size, below] = result.in_time(), result.cached_share()
        print(
            f"{size:>5}  {below:20} {result.cached_share():5.1%} {result.in_time():8.1%} "
            f"{ttft:5.2f} s {1e3 * tpot:4.0f} ms"
        )
        assert result.cached_share() < ideal
    cliff = cached["40%", "none"] - cached["35%", "none"]
    assert cliff > 3 * (alone[1] - alone[2]), (
        "queues make the hit rate fall faster than LRU alone"
    )
    assert in_time["25%", "none"] < 0.9 < in_time["100%", "none"]
    assert min(in_time["25%", below] for below in ("host", "disk", "pool")) > 0.9
    assert in_time["25%", "slow pool"] > 0.9, (
        "although loading takes three times as long as computing"
    )
    assert in_time["25%", "slow pool, if faster"] == in_time["25%", "none"], (
        "loading is never faster"
    )
    assert in_time["100%", "pool, round robin"] > 0.9, "every GPU can load every conversation"


if __name__ == "__main__":
    main()
