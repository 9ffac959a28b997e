"""Shows what torch.compile logs: TORCH_LOGS is for people, and TORCH_TRACE is for programs.

The graph of the function breaks at an `if`, and the function is compiled again for a different
length. Both logs come from one run. `--read` prints the lines that explain what happened.

    --read LOG FOLDER    read the two logs
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import torch


# --8<-- [start:step]
def step(x: torch.Tensor, rate: float) -> torch.Tensor:
    y = x * rate
    if y.sum() > 0:
        y = y + 1
    return y.sin()


def train() -> None:
    compiled = torch.compile(step, backend="eager")  # records graphs, generates no code
    for length in (4, 5, 6):
        y = compiled(torch.ones(length), length * 0.5)
    torch.testing.assert_close(y, torch.full((6,), 6 * 0.5 + 1).sin())


# --8<-- [end:step]


def decisive(log: str) -> list[str]:
    """The lines of TORCH_LOGS that name an event or its reason, without prefix and folder."""
    text = re.sub(r"^[VIWE]\d{4} .*?\[__\w+\] ?", "", log, flags=re.MULTILINE)
    wanted = r"Graph break.*in user code|Graph Break Reason|Recompiling function|^ +- \d+/\d+: "
    lines = [line for line in text.splitlines() if re.search(wanted, line)]
    return [re.sub(r"/\S*/|\s+#.*", "", line).strip() for line in lines]


# --8<-- [start:events]
def events(folder: Path) -> Counter:
    """Count the events of TORCH_TRACE: one JSON object per line, its data indented below."""
    found: Counter = Counter()
    for file in folder.glob("*.log"):
        for line in file.read_text().splitlines():
            if line.startswith("V"):
                event = json.loads(line[line.index("] ") + 2 :])
                name = event["artifact"]["name"] if "artifact" in event else next(iter(event))
                found[name] += 1
    return found


# --8<-- [end:events]


def read(log: str, folder: str) -> None:
    """Print the important lines of both logs, and check that the logs agree."""
    lines = decisive(log)
    for line in lines:
        print(line)
    print(f"{len(lines)} decisive lines of ≈{len(log.splitlines())} that TORCH_LOGS wrote")
    again = sum("Recompiling" in line for line in lines)
    assert again == 2 and not any("actual 6" in line for line in lines)

    counts = events(Path(folder))
    for name in ("dynamo_graph_break_reason", "recompile_reasons", "compilation_metrics"):
        print(f"TORCH_TRACE, {name}: {counts[name]}")
    assert counts["recompile_reasons"] == again and counts["dynamo_graph_break_reason"] == 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", nargs=2, metavar=("LOG", "FOLDER"))
    args = parser.parse_args()
    if args.read:
        read(Path(args.read[0]).read_text(), args.read[1])
    else:
        train()
