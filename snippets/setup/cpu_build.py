"""Torch not compiled with CUDA enabled: a build for CPUs is asked for a GPU, and for NCCL.

The build is decided when torch is installed, and no driver changes it. On a build with CUDA the
program first takes away what a build for CPUs lacks, so that the same lines speak.
"""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def become_a_cpu_build() -> None:
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        del torch._C._cuda_getDeviceCount
    distributed_c10d._NCCL_AVAILABLE = False


def said_by(call) -> str:
    """The error of a call, its first line."""
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError("it did not fail")


def main() -> None:
    become_a_cpu_build()
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}

    for text, call in (
        ('torch.ones(1, device="cuda")', lambda: torch.ones(1, device="cuda")),
        ('torch.nn.Linear(2, 2).to("cuda")', lambda: torch.nn.Linear(2, 2).to("cuda")),
        ('init_process_group("nccl")', lambda: dist.init_process_group("nccl", **alone)),
    ):
        print(f"{text}\n  {said_by(call)}")
    assert not torch.cuda.is_available()  # this one asks, and does not fail

    # the fix in a program: take what there is
    device = torch.device("cpu")
    dist.init_process_group(dist.get_default_backend_for_device(device), **alone)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    print(f"device {device.type}, backend {dist.get_backend()}: the sum is {one.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
