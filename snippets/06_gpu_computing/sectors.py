"""Sectors of 32 bytes that a warp's loads ask for: as ncu counts them, and by pencil.

    python sectors.py sgemm.cu

`naive` has a row of the matrix for each lane: one of its two loads asks for 32 sectors, the
other for one. `coalesced` asks for four and one. Their means are 16.5 and 2.5. The program
compiles sgemm.cu, has ncu count one launch of each kernel after the five that check it, and
compares. It takes an NVIDIA GPU, nvcc, ncu, and permission to read the GPU's counters.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXPECTED = {"naive": (32 + 1) / 2, "coalesced": (4 + 1) / 2}
COUNTERS = [
    f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum" for what in ("sectors", "requests")
]


# --8<-- [start:counted]
def counted(table: str) -> dict[str, float]:
    """Return the counters that `ncu --csv` prints. Other lines may precede its table."""
    lines = table.splitlines()
    start = next((n for n, line in enumerate(lines) if '"Metric Name"' in line), None)
    if start is None:
        sys.exit(f"ncu counted nothing: {' '.join(lines[-2:])}")
    rows = csv.DictReader(lines[start:])
    return {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows}


# --8<-- [end:counted]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give it one program in CUDA C++, sgemm.cu")
    if missing := [tool for tool in ("nvidia-smi", "nvcc", "ncu") if not shutil.which(tool)]:
        sys.exit(f"it needs an NVIDIA GPU, nvcc and Nsight Compute; there is no {missing[0]}")
    source = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        build = ["nvcc", "-O3", "-std=c++17", "-arch=native", str(source), "-o", "sgemm"]
        subprocess.run(build, cwd=folder, check=True)
        for kernel, expected in EXPECTED.items():
            command = ["ncu", "--csv", "--metrics", ",".join(COUNTERS)]
            command += ["--kernel-name", f"regex:{kernel}", "--launch-skip", "5"]
            command += ["--launch-count", "1", "./sgemm"]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False
            )
            found = counted(done.stdout + done.stderr)
            sectors, requests = (found[name] for name in COUNTERS)
            print(
                f"{kernel:10} {sectors / requests:5.1f} sectors a request, by hand {expected}"
            )
            assert abs(sectors / requests / expected - 1) < 0.02, "one of us is wrong"


if __name__ == "__main__":
    main()
