"""Environment variables that speak: a process with each, and the lines it makes torch say.

All are read when torch starts, so each needs a process of its own. The process is a group of
one rank with a DDP model, or multiplies two matrices that do not fit.
"""

import os
import re
import subprocess
import sys

WORK = {
    "group": """
import os, torch, torch.distributed as dist
import torch.distributed.nn
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
""",
    "product": """
import torch
torch.ones(2, 3) @ torch.ones(2, 3)
""",
}


# --8<-- [start:say]
def say(work: str, **variables: str) -> str:
    """What a process with these variables writes to stderr."""
    command = [sys.executable, "-c", WORK[work]]
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    ).stderr


def line_with(text: str, words: str) -> str:
    """The first line with these words, without time, rank and folder, or a line's number."""
    line = next(line for line in text.splitlines() if re.search(words, line))
    line = re.sub(r"^(\[rank\d\]:)?\[[IWE]\d{4} .*?\] ?|/\S*/", "", line)
    return re.sub(r"(\.\w+):\d+", r"\1", line).strip()


# --8<-- [end:say]


def main() -> None:
    quiet = say("group")
    loud = say("group", TORCH_CPP_LOG_LEVEL="INFO", TORCH_DISTRIBUTED_DEBUG="INFO")
    print("TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO")
    for words in ("debug level is set", "bucket_bytes_cap", "DDP Initialized"):
        print(f"  {line_with(loud, words)}")
        assert not re.search(words, quiet)
    for option in ("find_unused_parameters", "gradient_as_bucket_view"):
        print(f"    {line_with(loud, option)}")

    print("GLOO_SOCKET_IFNAME=nope0")
    print(f"  {line_with(say('group', GLOO_SOCKET_IFNAME='nope0'), 'RuntimeError')}")

    error = say("product")
    print("an error, as it is")
    print(f"  {line_with(error, 'RuntimeError')}")
    deep = say("product", TORCH_SHOW_CPP_STACKTRACES="1", TORCH_DISABLE_ADDR2LINE="1")
    frames = re.findall(r"^(?:#\d+|frame #\d+:) (.*)", deep, re.MULTILINE)
    print("TORCH_SHOW_CPP_STACKTRACES=1")
    print(f"  {re.sub(r' at /.*', '', line_with(deep, 'Exception raised from'))}")
    print(f"  C++ frames: ≈{len(frames)}, among them at::_ops::mm: {'at::_ops::mm' in deep}")
    assert "at::_ops::mm" in deep and "at::_ops::mm" not in error


if __name__ == "__main__":
    main()
