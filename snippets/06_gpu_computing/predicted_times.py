"""Predicts from the compiler's counts what fraction of a copy's speed each kernel reaches.

    python predicted_times.py machine_code.cpu.txt [softmax.cuda.txt layer_norm.cuda.txt]

The model gives each loop over a row the longest of three times: its bytes divided by the
bandwidth of a copy, its bytes divided by what Little's law allows, and its instructions divided
by the rate at which the SMs issue them. The first loop of a kernel reads from memory. Later
loops may find the row in a cache, so each kernel gets two predictions: every loop reads from
memory, or only the first loop does. Look at the last column: the fractions that a GPU measured,
from its transcripts, are compared with this range. The transcripts also name the GPU.
"""

import re
import sys
from pathlib import Path

# Bytes per second of a copy, and the clock. The H200's copies reached 86% of the datasheet's
# bandwidth in the transcripts. The 92% for the H100 is an assumption. Both have 132 SMs.
GPUS = {"H100": (3.08e12, 1.755e9), "H200": (4.13e12, 1.98e9)}
SMS, LATENCY = 132, 0.5e-6  # the latency is an assumption: half a microsecond
TOLERANCE = 0.06  # how far outside the range a measured fraction may be
WRITES = ("result",)  # the loops that store as many bytes as they load
FILES = {"softmax": "three_passes online", "layer_norm": "squares two_passes welford"}


# --8<-- [start:predict]
def seconds(
    gpu: str, loop: str, instructions: float, under_way: float, from_memory: bool
) -> dict[str, float]:
    """Return the seconds that one loop needs for an element of 4 bytes, for each limit."""
    copied, clock = GPUS[gpu]
    return {
        "memory": (4 * from_memory + 4 * (loop in WRITES)) / copied,
        "latency": 4 / (SMS * under_way / LATENCY) if from_memory else 0.0,
        "instructions": instructions / (128 * SMS * clock),
    }


def longest(gpu: str, *loop: float | str, from_memory: bool) -> float:
    return max(seconds(gpu, *loop, from_memory=from_memory).values())


def shares(gpu: str, loops: list[tuple[str, float, float]]) -> tuple[float, float]:
    """Return both predictions as fractions of the speed of a copy (one read, one write)."""
    copy = 8 / GPUS[gpu][0]
    slow = sum(longest(gpu, *loop, from_memory=True) for loop in loops)
    fast = sum(longest(gpu, *loop, from_memory=n == 0) for n, loop in enumerate(loops))
    return copy / slow, copy / fast


# --8<-- [end:predict]


def counted(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Return for each kernel its loops: name, instructions per element, bytes under way."""
    kernels: dict[str, list] = {}
    row = r"^(\w+) +(\w+) +≈(\d+) +≈\d+ \(≈\d+\) +≈(\d+)$"
    for kernel, loop, instructions, kib in re.findall(row, path.read_text("utf-8"), re.M):
        kernels.setdefault(kernel, []).append((loop, float(instructions), 1024 * float(kib)))
    return kernels


def measured(paths: list[Path]) -> tuple[str, dict[str, list[float]]]:
    """Return the GPU that the transcripts name, and the measured fractions of each kernel."""
    found: dict[str, list[float]] = {}
    gpu = "H100"
    for path in paths:
        text = path.read_text("utf-8").replace("three passes", "three_passes")
        gpu = re.match(r"# recorded .* NVIDIA (\w+)", text)[1]
        for kernel, share in re.findall(r"(\w+) +≈\d+ GB/s useful, ≈(\d+)% of", text):
            found.setdefault(kernel, []).append(int(share) / 100)
    if gpu not in GPUS:
        sys.exit(f"this program has the numbers of an H100 and an H200, but not of a {gpu}")
    return gpu, found


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(
            "predicted_times.py needs the transcript of machine_code.py, and optionally"
            " the transcripts of softmax.cu and layer_norm.cu from a GPU"
        )
    kernels = counted(Path(sys.argv[1]))
    gpu, seen = measured([Path(each) for each in sys.argv[2:]])
    print(f"kernel        first loop, limited by   of an {gpu}'s copy: predicted  measured")
    first_limits = {}
    for program, names in FILES.items():
        for name in names.split():
            loops = kernels[name]
            low, high = shares(gpu, loops)
            times = seconds(gpu, *loops[0], from_memory=True)
            first_limits[name] = max(times, key=times.__getitem__)
            fractions = seen.get(name, [])
            column = ", ".join(f"≈{fraction:.0%}" for fraction in fractions)
            print(f"{name:12}  {loops[0][0]:8} {first_limits[name]:15}", end="")
            print(f"{low:15.0%} to {high:4.0%}     {column or 'not yet'}")
            assert 0 < low <= high < 1.001, program  # no kernel is faster than a copy
            for fraction in fractions:
                assert low - TOLERANCE < fraction < high + TOLERANCE, (name, fraction)
    # One load at a time: Little's law limits this loop, and no other first loop.
    assert {name for name, limit in first_limits.items() if limit == "latency"} == {"welford"}
    assert shares(gpu, kernels["two_passes"])[1] > shares(gpu, kernels["welford"])[1]


if __name__ == "__main__":
    main()
