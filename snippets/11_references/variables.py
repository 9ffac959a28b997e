"""Runs the same small job with several environment variables, and prints what torch then logs.

torch reads most of these variables when it starts, so each set needs its own process. The job
is a group of one rank with a DDP model. At its end it multiplies two matrices of wrong shapes.
"""

import os
import re
import subprocess
import sys

# --8<-- [start:run]
WORK = """
import torch, torch.distributed as dist
import torch.distributed.nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
dist.destroy_process_group()
torch.ones(2, 3) @ torch.ones(2, 3)
"""


def stderr_with(**variables: str) -> str:
    """Run the job with these variables, and return what it writes to stderr."""
    command = [sys.executable, "-c", WORK]
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    ).stderr


# --8<-- [end:run]


def line_with(text: str, words: str) -> str:
    """The first line with these words, without its time, rank, folder and line number."""
    line = next(line for line in text.splitlines() if re.search(words, line))
    line = re.sub(r"^(\[rank\d\]: ?)?(\[[IWE]\d{4} .*?\] ?)?|/\S*/", "", line)
    return re.sub(r"(\.\w+):\d+", r"\1", line).strip()


def main() -> None:
    plain = stderr_with()
    detailed = stderr_with(
        TORCH_CPP_LOG_LEVEL="INFO",
        TORCH_DISTRIBUTED_DEBUG="INFO",
        TORCH_SHOW_CPP_STACKTRACES="1",
        TORCH_DISABLE_ADDR2LINE="1",  # faster: no files and lines for the C++ frames
    )
    print("without these variables")
    print(f"  {line_with(plain, 'RuntimeError')}")
    print("TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO")
    for words in ("debug level is set", "bucket_bytes_cap", "DDP Initialized"):
        print(f"  {line_with(detailed, words)}")
        assert not re.search(words, plain)
    for option in ("find_unused_parameters", "gradient_as_bucket_view"):
        print(f"    {line_with(detailed, option)}")

    print("TORCH_SHOW_CPP_STACKTRACES=1")
    print(f"  {re.sub(r' at /.*', '', line_with(detailed, 'Exception raised from'))}")
    frames = re.findall(r"^(?:\[rank0\]: ?)?(?:#\d+|frame #\d+:) ", detailed, re.MULTILINE)
    found = "at::_ops::mm" in detailed
    print(f"  C++ frames: ≈{len(frames)}, among them at::_ops::mm: {found}")
    assert len(frames) > 10 and found and "at::_ops::mm" not in plain

    print("GLOO_SOCKET_IFNAME=nope0")
    nowhere = line_with(stderr_with(GLOO_SOCKET_IFNAME="nope0"), "RuntimeError")
    print(f"  {nowhere}")
    assert "Unable to find address for: nope0" in nowhere


if __name__ == "__main__":
    main()
