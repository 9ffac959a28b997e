"""What the compiler's counts predict for kernels that go over rows, beside what a GPU measured.

    python predicted_times.py machine_code.cpu.txt [softmax.cuda.txt layer_norm.cuda.txt]

A loop over a row takes the longest of three times: its bytes at the memory's rate; its bytes at
what is under way in a latency (Little's law); its instructions at what the SMs issue. The first
loop of a kernel reads from memory. The others may find their row in a cache: so each kernel has
two times, one with every read from memory, one with the later reads free of it. A measured
share of the copy's rate, from a GPU's transcript, lies between them, or the model is wrong.
The prediction is for the kind of GPU that the transcripts name.
"""

import re
import sys
from pathlib import Path

# bytes/s that a copy reaches (92% and 86% of the datasheet's), and the clock; SMs of both
GPUS = {"H100": (3.08e12, 1.755e9), "H200": (4.13e12, 1.98e9)}
SMS, LATENCY = 132, 0.5e-6
WRITES = ("result",)  # the loops that store as many bytes as they load
FILES = {"softmax": "three_passes online", "layer_norm": "squares two_passes welford"}


# --8<-- [start:predict]
def seconds(
    gpu: str, loop: str, instructions: float, under_way: float, from_memory: bool
) -> dict[str, float]:
    """Of one loop, for an element of 4 bytes, by each of its three bounds."""
    copied, clock = GPUS[gpu]
    return {
        "memory": (4 * from_memory + 4 * (loop in WRITES)) / copied,
        "latency": 4 / (SMS * under_way / LATENCY) if from_memory else 0.0,
        "instructions": instructions / (128 * SMS * clock),
    }


def longest(gpu: str, *loop: float | str, from_memory: bool) -> float:
    return max(seconds(gpu, *loop, from_memory=from_memory).values())


def shares(gpu: str, loops: list[tuple[str, float, float]]) -> tuple[float, float]:
    """Of a copy's rate, if one read and one write of each element count as useful."""
    copy = 8 / GPUS[gpu][0]
    slow = sum(longest(gpu, *loop, from_memory=True) for loop in loops)
    fast = sum(longest(gpu, *loop, from_memory=n == 0) for n, loop in enumerate(loops))
    return copy / slow, copy / fast


# --8<-- [end:predict]


def counted(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """By kernel: loop, instructions for an element, bytes under way in an SM."""
    kernels: dict[str, list] = {}
    row = r"^(\w+) +(\w+) +≈(\d+) +≈\d+ \(≈\d+\) +≈(\d+)$"
    for kernel, loop, instructions, kib in re.findall(row, path.read_text("utf-8"), re.M):
        kernels.setdefault(kernel, []).append((loop, float(instructions), 1024 * float(kib)))
    return kernels


def measured(paths: list[Path]) -> tuple[str, dict[str, list[float]]]:
    """The GPU that transcripts name, and by kernel the shares of a copy that they give."""
    found: dict[str, list[float]] = {}
    gpu = "H100"
    for path in paths:
        text = path.read_text("utf-8").replace("three passes", "three_passes")
        gpu = re.match(r"# recorded .* NVIDIA (\w+)", text)[1]
        for kernel, share in re.findall(r"(\w+) +≈\d+ GB/s useful, ≈(\d+)% of", text):
            found.setdefault(kernel, []).append(int(share) / 100)
    if gpu not in GPUS:
        sys.exit(f"this program knows an H100 and an H200, and no {gpu}")
    return gpu, found


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(
            "give it the transcript of machine_code.py, and those of a GPU if there are any"
        )
    kernels = counted(Path(sys.argv[1]))
    gpu, seen = measured([Path(each) for each in sys.argv[2:]])
    print(f"kernel        slowest loop, bound by   of an {gpu}'s copy: predicted  measured")
    for program, names in FILES.items():
        for name in names.split():
            loops = kernels[name]
            low, high = shares(gpu, loops)
            worst = max(loops, key=lambda loop: longest(gpu, *loop, from_memory=True))
            times = seconds(gpu, *worst, from_memory=True)
            bound = max(times, key=times.__getitem__)
            said = ", ".join(f"≈{share:.0%}" for share in seen.get(name, []))
            print(f"{name:12}  {worst[0]:8} {bound:15}", end="")
            print(f"{low:15.0%} to {high:4.0%}     {said or 'by nobody yet'}")
            assert 0 < low <= high <= 1.001, program
    # what the counts say apart from any constant: reading once more costs at most a third of
    # the useful traffic, and a loop with one load at a time cannot fill the memory
    assert shares(gpu, kernels["two_passes"])[1] > shares(gpu, kernels["welford"])[1]


if __name__ == "__main__":
    main()
