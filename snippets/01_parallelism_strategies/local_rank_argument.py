"""unrecognized arguments: --local-rank=0: an old launcher adds an argument to the script.

torch.distributed.launch adds `--local-rank=0` to the arguments of the script. Since torch 2.0
it writes a dash, and an old script accepts an underscore only. torchrun adds no argument: it
sets the variable LOCAL_RANK. Look at the local ranks that an old script uses under torchrun:
all of them are 0.

    (no flag)      the argument parser of an old script
    --fix          the parser accepts both spellings, and its default is LOCAL_RANK
"""

import argparse
import contextlib
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist


# --8<-- [start:parsers]
def old_parser() -> argparse.ArgumentParser:
    """The parser of a script for torch 1, whose launcher wrote an underscore."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    return parser


def new_parser() -> argparse.ArgumentParser:
    """A parser for every launcher. It accepts both spellings, and the default is LOCAL_RANK."""
    parser = argparse.ArgumentParser()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    parser.add_argument("--local-rank", "--local_rank", type=int, default=local_rank)
    return parser


# --8<-- [end:parsers]


def check_new_parser() -> None:
    """Check both spellings on a second node, where the rank differs from the local rank."""
    with mock.patch.dict(os.environ, {"RANK": "5", "LOCAL_RANK": "1"}):
        for given, expected in (([], 1), (["--local-rank=3"], 3), (["--local_rank=3"], 3)):
            assert new_parser().parse_args(given).local_rank == expected, given


def main() -> None:
    check_new_parser()
    fix = "--fix" in sys.argv
    parser = new_parser() if fix else old_parser()
    parser.add_argument("--fix", action="store_true")
    with contextlib.redirect_stderr(sys.stdout):  # so that the transcript shows the error
        args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")

    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    used = [torch.zeros((), dtype=torch.int64) for _ in range(n)]
    dist.all_gather(used, torch.tensor(args.local_rank))
    used = [int(each) for each in used]
    passed = any(each.startswith("--local") for each in sys.argv[1:])
    if rank == 0:
        print(f"the launcher passed an argument: {'yes' if passed else 'no'}")
        print(f"local rank that each of the {n} processes uses: {used}")
    # On one node, the local ranks are 0, 1, …, n - 1, and no two processes share a GPU.
    assert used == (list(range(n)) if fix else [0] * n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
