"""Default process group has not been initialized: code for many processes runs in one.

Started with `python`, a training script has no process group unless it creates one. Every call
that needs the group then raises this error. The fix calls `is_initialized` first, so that the
same script runs in one process and in many. SyncBatchNorm has done so since torch 2.0.

    (no flag)      calls without a group
    --fix          the average of a loss over all processes, or over the only one
    --alone        a group of one process, which silences the error: wrong with two processes
"""

import argparse
import os
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

MESSAGE = (
    "Default process group has not been initialized, "
    "please make sure to call init_process_group."
)


# --8<-- [start:average]
def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def average(value: torch.Tensor) -> torch.Tensor:
    """The mean over all processes. With one process it is the value itself."""
    value = value.clone()
    if world_size() > 1:
        dist.all_reduce(value)
    return value / world_size()


# --8<-- [end:average]


def functions_and_classes(error: Exception) -> set[str]:
    """Return the names of functions in the traceback, and of the classes of their objects."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    classes = {type(frame.f_locals.get("self")).__name__ for frame in frames}
    return classes | {frame.f_code.co_name for frame in frames}


def without_group() -> None:
    """Print what each call raises in a process that has no group."""
    # --8<-- [start:calls]
    calls = {
        "get_rank()": dist.get_rank,
        "barrier()": dist.barrier,
        "all_reduce(loss)": lambda: dist.all_reduce(torch.tensor(1.0)),
        "DistributedSampler(data)": lambda: DistributedSampler(range(8)),
        "DistributedDataParallel(model)": lambda: DistributedDataParallel(nn.Linear(2, 2)),
    }
    # --8<-- [end:calls]
    for name, call in calls.items():
        try:
            call()
            raise AssertionError(f"{name} needs no process group")
        except (RuntimeError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {error}")
            assert str(error) == MESSAGE
            assert name.partition("(")[0] in functions_and_classes(error)
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, 4) * 2 + 1
    layer = nn.SyncBatchNorm(3)
    synced = layer(x)
    # BatchNorm from its definition, in float64: the mean and the variance of each channel
    y = x.double()
    mean = y.mean((0, 2, 3), keepdim=True)
    variance = y.var((0, 2, 3), unbiased=False, keepdim=True)
    torch.testing.assert_close(synced.double(), (y - mean) / (variance + 1e-5).sqrt())
    print(f"{type(layer).__name__}(x): no error, equal to BatchNorm in one process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    if not (args.fix or args.alone):
        without_group()
        return
    number, started = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    # --8<-- [start:init]
    if args.alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif "RANK" in os.environ:  # torchrun has set it
        dist.init_process_group("gloo")
    # --8<-- [end:init]
    loss = torch.tensor(1.0 + 2 * number)  # the mean of the first n of 1, 3, 5, … is n
    mean = average(loss)
    if number == 0:
        print(f"started: {started}, in the group: {world_size()}, average {mean.item():.1f}")
    assert mean.item() == (loss.item() if args.alone else started)
    assert loss.item() == 1 + 2 * number  # the loss itself is unchanged
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
