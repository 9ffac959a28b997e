"""Reads the error counters of links twice, and judges how much they have grown.

The total of a whole year does not show the state of a link today. The growth per minute does.
The program shows three traps: a large old total, a counter that was cleared between the two
readings, and a counter of 8 or 16 bits that is full and stops counting.

    python link_rates.py [SECONDS]     on a machine with InfiniBand or RoCE ports

Elsewhere it writes SYNTHETIC counters into a folder and reads them through the same function.
The limits for PCIe and NVLink are the ones of NVIDIA's DCGM (DcgmHealthWatch.cpp). The rules
for InfiniBand are rules of thumb of this book.
"""

import math
import sys
import tempfile
import time
from pathlib import Path

# bits of a counter (Linux, drivers/infiniband/core/sysfs.c), which stops when it is full
WIDTH = {
    "symbol_error": 16,
    "link_error_recovery": 8,
    "link_downed": 8,
    "port_rcv_errors": 16,
}


def read_ports(root: Path) -> dict[tuple[str, str], int]:
    """(device/port, counter) -> value, for every port under /sys/class/infiniband."""
    found = {}
    for path in sorted(root.glob("*/ports/*/counters/*")):
        if path.name in WIDTH:
            device, port = path.parts[-5], path.parts[-3]
            found[f"{device}/{port}", path.name] = int(path.read_text())
    return found


def added(name: str, before: int, after: int) -> int | None:
    """The growth of the counter, or None if the counter is full."""
    if name in WIDTH and after == 2 ** WIDTH[name] - 1:
        return None
    return after if after < before else after - before  # smaller: it was cleared in between


def judge(name: str, before: int, after: int, seconds: float) -> str:
    count = added(name, before, after)
    if count is None:
        return "full: clear the counter, read it again"
    per_minute = count * 60 / seconds
    if name == "link_downed":
        return "the link went down: look at cable and port" if count else "no new error"
    return f"{per_minute:,.0f} per minute: watch this link" if count else "no new error"


def bit_errors_per_minute(bits_per_second: float, error_rate: float) -> float:
    return bits_per_second * error_rate * 60


def pcie_replay_limit(transfers_per_second: float, lanes: int) -> int:
    """Replays per minute that one bit error in 10^12 explains; DCGM warns above it."""
    return math.ceil(bit_errors_per_minute(transfers_per_second * lanes, 1e-12))


def judge_nvlink(replays: int, recoveries: int, crc_errors: int, seconds: float) -> str:
    """DCGM's health check of one NVLink, for what was added in the time between."""
    if replays or recoveries:
        return "failure: one replay or recovery is enough"
    if crc_errors / seconds >= 100:
        return "failure: 100 CRC errors per second"
    return "warning: CRC errors, corrected by sending again" if crc_errors else "no new error"


SYNTHETIC = [  # port, counter, before, after; what the reader should conclude
    ("mlx5_0/1", "symbol_error", 48_211, 48_211, "no new error"),
    ("mlx5_0/1", "link_downed", 3, 3, "no new error"),
    ("mlx5_1/1", "symbol_error", 12, 252, "240 per minute: watch this link"),
    ("mlx5_1/1", "link_downed", 0, 1, "the link went down: look at cable and port"),
    ("mlx5_2/1", "symbol_error", 65_535, 65_535, "full: clear the counter, read it again"),
    ("mlx5_2/1", "link_downed", 255, 255, "full: clear the counter, read it again"),
    ("mlx5_3/1", "port_rcv_errors", 900, 7, "7 per minute: watch this link"),
]


def write(root: Path, column: int) -> None:
    for row in SYNTHETIC:
        device, _, port = row[0].partition("/")
        folder = root / device / "ports" / port / "counters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / row[1]).write_text(f"{row[column]}\n")


def main() -> None:
    root, seconds = Path("/sys/class/infiniband"), float((sys.argv[1:] or ["60"])[0])
    if read_ports(root):
        before = read_ports(root)
        print(f"ports of this machine, {seconds:.0f} s between the readings")
        time.sleep(seconds)
        after = read_ports(root)
    else:
        print("no port here: SYNTHETIC counters, as if 60 s lay between the readings")
        seconds = 60.0
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), 2)
            before = read_ports(Path(name))
            write(Path(name), 3)
            after = read_ports(Path(name))
        for port, counter, first, second, expected in SYNTHETIC:
            assert (before[port, counter], after[port, counter]) == (first, second)
            assert judge(counter, first, second, seconds) == expected, (port, counter)
        assert judge("symbol_error", 12, 252, 10.0) == "1,440 per minute: watch this link"
    for (port, counter), value in after.items():
        old = before.get((port, counter), 0)
        print(
            f"  {port} {counter:15} {old:>6} {value:>6}  {judge(counter, old, value, seconds)}"
        )

    print("\nPCIe replays per minute above which DCGM warns, 16 lanes:")
    limits = {n: pcie_replay_limit(rate, 16) for n, rate in ((3, 8e9), (4, 16e9), (5, 32e9))}
    print("  " + ", ".join(f"generation {n}: {limit}" for n, limit in limits.items()))
    assert limits == {3: 8, 4: 16, 5: 31}
    print("one NVLink in 60 s:")
    for case in ((0, 0, 0), (0, 0, 30), (0, 0, 6_000), (1, 0, 0), (0, 1, 0)):
        print("  {} replays, {} recoveries, {} CRC errors: ".format(*case), end="")
        print(judge_nvlink(*case, 60.0))
    verdicts = [judge_nvlink(0, 0, n, 60.0).split(":")[0] for n in (0, 1, 5_999, 6_000)]
    assert verdicts == ["no new error", "warning", "warning", "failure"]
    assert all(judge_nvlink(*c, 0, 60.0).startswith("failure") for c in ((1, 0), (0, 1)))
    for rate in (1e-12, 1e-15):
        minutes = 1 / bit_errors_per_minute(400e9, rate)
        print(f"400 Gb/s, one bit error in {1 / rate:.0e}: one every {minutes * 60:,.1f} s")


if __name__ == "__main__":
    main()
