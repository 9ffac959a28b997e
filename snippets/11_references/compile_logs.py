"""What torch.compile writes when asked: TORCH_LOGS for the eye, TORCH_TRACE for a program.

The function breaks its graph at a value, and is compiled again for another number and another
length. The program runs itself with the two variables set, and keeps the decisive lines.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch


# --8<-- [start:step]
@torch.compile(backend="eager")  # the eager backend: graphs are taken, and no code is made
def step(x: torch.Tensor, rate: float) -> torch.Tensor:
    y = x * rate
    if y.sum() > 0:
        y = y + 1
    return y.sin()


def train() -> None:
    for length in (4, 5, 6):
        step(torch.ones(length), length * 0.5)


# --8<-- [end:step]


# --8<-- [start:read]
def run_with(**variables: str) -> str:
    """Run this file's `train` in a process with these variables; what it wrote to stderr."""
    command = [sys.executable, __file__, "--train"]
    environment = os.environ | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def decisive(log: str) -> list[str]:
    """The lines of TORCH_LOGS that say what and why, without prefix and folder."""
    text = re.sub(r"^[VIWE]\d{4} .*?\[__\w+\] ?", "", log, flags=re.MULTILINE)
    wanted = r"Graph break.*in user code|Graph Break Reason|Recompiling function|^ +- \d+/\d+: "
    lines = [line for line in text.splitlines() if re.search(wanted, line)]
    return [re.sub(r"/\S*/|\s+#.*", "", line).strip() for line in lines]


def events(folder: Path) -> Counter:
    """The structured log of TORCH_TRACE: one JSON object a line, payloads indented below it."""
    found: Counter = Counter()
    for file in folder.glob("*.log"):
        for line in file.read_text().splitlines():
            if line.startswith("V"):
                event = json.loads(line[line.index("] ") + 2 :])
                found[
                    event["artifact"]["name"] if "artifact" in event else next(iter(event))
                ] += 1
    return found


# --8<-- [end:read]


def main() -> None:
    log = run_with(TORCH_LOGS="graph_breaks,recompiles")
    lines = decisive(log)
    for line in lines:
        print(line)
    print(f"{len(lines)} decisive lines of ≈{len(log.splitlines())} that TORCH_LOGS wrote")
    assert sum("Recompiling" in line for line in lines) >= 2

    with tempfile.TemporaryDirectory() as folder:
        run_with(TORCH_TRACE=folder)
        counts = events(Path(folder))
    for name in ("dynamo_graph_break_reason", "recompile_reasons", "compilation_metrics"):
        print(f"TORCH_TRACE, {name}: {counts[name]}")
    assert counts["recompile_reasons"] == sum("Recompiling" in line for line in lines)


if __name__ == "__main__":
    train() if "--train" in sys.argv else main()
