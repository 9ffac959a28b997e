"""An autoscaler follows the load: what a cold start and a lost cache cost.

Every five seconds the autoscaler divides the number of active requests by a target, and orders
that many GPUs. A new GPU is paid for from the order on. It serves after its cold start, and its
cache is empty. The autoscaler releases a GPU if the demand was lower during a whole delay.
This GPU first finishes its requests. The trace has one wave of eight minutes.

Compare the rows of the autoscaler with the row of three GPUs that run all the time.
"""

from fleet import PARAMETERS, Fleet, check_conservation, serve
from fleet_trace import trace

# --8<-- [start:starts]
WEIGHTS = 2 * PARAMETERS  # bytes
COLD_STARTS = {  # bytes/s at which the weights arrive, and seconds for everything after that
    "weights in host memory, engine asleep": (32e9, 0.5),
    "weights on a disk, graphs cached": (6e9, 10),
    "weights in an object store, no cache": (1.25e9, 45),
}
# --8<-- [end:starts]


def main() -> None:
    requests = trace(240.0, 240.0)
    rows = {f"{n} GPUs all the time": Fleet(gpus=n) for n in (2, 3, 4)}
    autoscaler = {"gpus": 1, "max_gpus": 5, "requests_per_gpu": 25}
    for name, (bandwidth, seconds) in COLD_STARTS.items():
        cold_start = WEIGHTS / bandwidth + seconds
        rows[name] = Fleet(**autoscaler, cold_start=cold_start, scale_down_delay=120)
    warm = rows["weights in host memory, engine asleep"].cold_start
    rows["asleep, released without a delay"] = Fleet(**autoscaler, cold_start=warm)
    print(f"{'':39}  cold    GPUs      in    TTFT  cached")
    print(f"{'':39} start    paid    time     p99  tokens")
    in_time, paid = [], []
    for name, fleet in rows.items():
        result = serve(fleet, requests, 0.5)
        check_conservation(result)
        in_time.append(result.in_time())
        paid.append(result.gpu_seconds / result.end)
        ttft, _ = result.percentiles(0.99)
        print(
            f"{name:37} {fleet.cold_start:5.1f} s {paid[-1]:7.1f} {in_time[-1]:7.1%} "
            f"{ttft:5.1f} s {result.cached_share():7.1%}"
        )
        assert fleet.max_gpus or abs(paid[-1] - fleet.gpus) < 1e-9
    two, three, four, asleep, disk, store, no_delay = in_time
    assert two < 0.9 < three < four
    assert asleep > disk > store and store < 0.9, "requests that wait for a cold GPU are late"
    assert no_delay < asleep, "a released GPU loses its cache"
    assert paid[4] > paid[1], "on a wave as short as this one, the autoscaler saves nothing"


if __name__ == "__main__":
    main()
