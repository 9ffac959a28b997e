"""Environment variables that speak: a process with each, and the lines it makes torch say.

Most are read when torch starts, so each set needs a process of its own. The process is a group
of one rank with a DDP model, and at its end it multiplies two matrices that do not fit.
"""

import os
import re
import subprocess
import sys

# --8<-- [start:say]
WORK = """
import torch, torch.distributed as dist
import torch.distributed.nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
dist.destroy_process_group()
torch.ones(2, 3) @ torch.ones(2, 3)
"""


def say(**variables: str) -> str:
    """What a process with these variables writes to stderr."""
    command = [sys.executable, "-c", WORK]
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    ).stderr


# --8<-- [end:say]


def line_with(text: str, words: str) -> str:
    """The first line with these words, without time, rank and folder, or a line's number."""
    line = next(line for line in text.splitlines() if re.search(words, line))
    line = re.sub(r"^(\[rank\d\]: ?)?(\[[IWE]\d{4} .*?\] ?)?|/\S*/", "", line)
    return re.sub(r"(\.\w+):\d+", r"\1", line).strip()


def main() -> None:
    quiet = say()
    loud = say(
        TORCH_CPP_LOG_LEVEL="INFO",
        TORCH_DISTRIBUTED_DEBUG="INFO",
        TORCH_SHOW_CPP_STACKTRACES="1",
        TORCH_DISABLE_ADDR2LINE="1",  # faster: no files and lines for the C++ frames
    )
    print("none of them")
    print(f"  {line_with(quiet, 'RuntimeError')}")
    print("TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO")
    for words in ("debug level is set", "bucket_bytes_cap", "DDP Initialized"):
        print(f"  {line_with(loud, words)}")
        assert not re.search(words, quiet)
    for option in ("find_unused_parameters", "gradient_as_bucket_view"):
        print(f"    {line_with(loud, option)}")

    print("TORCH_SHOW_CPP_STACKTRACES=1")
    print(f"  {re.sub(r' at /.*', '', line_with(loud, 'Exception raised from'))}")
    frames = re.findall(r"^(?:\[rank0\]: ?)?(?:#\d+|frame #\d+:) ", loud, re.MULTILINE)
    print(f"  C++ frames: ≈{len(frames)}, among them at::_ops::mm: {'at::_ops::mm' in loud}")
    assert len(frames) > 10 and "at::_ops::mm" in loud and "at::_ops::mm" not in quiet

    print("GLOO_SOCKET_IFNAME=nope0")
    nowhere = line_with(say(GLOO_SOCKET_IFNAME="nope0"), "RuntimeError")
    print(f"  {nowhere}")
    assert "Unable to find address for: nope0" in nowhere


if __name__ == "__main__":
    main()
