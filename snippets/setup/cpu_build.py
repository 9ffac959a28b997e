"""Reproduces "Torch not compiled with CUDA enabled": a CPU build should use a GPU and NCCL.

The build is chosen when torch is installed, and a different driver does not change it. On a
CUDA build, the program first removes what a CPU build lacks, so that the same lines fail.
"""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def become_a_cpu_build() -> None:
    """Remove from this process what a CPU build of torch lacks."""
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        del torch._C._cuda_getDeviceCount
    distributed_c10d._NCCL_AVAILABLE = False


def error_of(call) -> str:
    """Call a function that must fail, and return the first line of its error."""
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError("the call did not fail")


def main() -> None:
    become_a_cpu_build()
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}

    for text, call in (
        ('torch.ones(1, device="cuda")', lambda: torch.ones(1, device="cuda")),
        ('torch.nn.Linear(2, 2).to("cuda")', lambda: torch.nn.Linear(2, 2).to("cuda")),
        ('init_process_group("nccl")', lambda: dist.init_process_group("nccl", **alone)),
    ):
        print(f"{text}\n  {error_of(call)}")
    assert not torch.cuda.is_available()  # this function returns False instead of failing

    # the fix in a program: use the device that exists, and its backend
    device = torch.device("cpu")
    dist.init_process_group(dist.get_default_backend_for_device(device), **alone)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    print(f"device {device.type}, backend {dist.get_backend()}: the sum is {one.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
