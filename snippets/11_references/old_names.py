"""Which older names of torch still work in the release that is installed, and which of them
warn.

Each is called as its users call it, in one process. A name can be silent, warn (a
`FutureWarning` is shown by default, a `DeprecationWarning` only where `__main__` calls), or be
gone. The last column says what to write in its place.
"""

import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

X = torch.arange(4.0)


def gathered() -> None:
    dist.all_gather_into_tensor(torch.empty(4), X)


def scattered() -> None:
    dist.reduce_scatter_tensor(torch.empty(4), X)


def saved() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save_state_dict({"x": X}, dcp.FileSystemWriter(folder), no_dist=True)


def flat_state() -> None:
    model = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.state_dict()


def attention() -> None:
    with torch.backends.cuda.sdp_kernel(enable_flash=False):
        nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)


def buffers() -> None:
    nn.parallel.DistributedDataParallel(nn.Linear(4, 4), broadcast_buffers=False)


def profiled() -> None:
    with torch.profiler.profile(use_cuda=False):
        X.sum()


def dynamic() -> None:
    torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})


OLD: dict[str, tuple[Callable[[], object], str]] = {
    "dist.all_gather_into_tensor": (gathered, "dist.all_gather_single"),
    "dist.reduce_scatter_tensor": (scattered, "dist.reduce_scatter_single"),
    "DDP(broadcast_buffers=False)": (buffers, "DDP(forward_sync_buffers=False)"),
    "dcp.save_state_dict": (saved, "dcp.save"),
    "FSDP.state_dict_type": (flat_state, "get_state_dict, and fully_shard for FSDP"),
    "torch.cuda.amp.autocast": (
        lambda: torch.cuda.amp.autocast(),
        'torch.amp.autocast("cuda")',
    ),
    "torch.cuda.amp.GradScaler": (
        lambda: torch.cuda.amp.GradScaler(enabled=False),
        'torch.amp.GradScaler("cuda")',
    ),
    "torch.backends.cuda.sdp_kernel": (attention, "torch.nn.attention.sdpa_kernel"),
    "profile(use_cuda=…)": (profiled, "profile(activities=…)"),
    "torch.jit.trace": (lambda: torch.jit.trace(nn.Linear(4, 4), X), "torch.export.export"),
    "torch.ao.quantization.quantize_dynamic": (dynamic, "torchao's quantize_"),
    "torch.quantize_per_tensor": (
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        "torch.int8 and a scale",
    ),
}


def verdict(call: Callable[[], object]) -> str:
    """Call an older name: "silent", the category that it warns with, or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except (AttributeError, ImportError, TypeError) as error:
            return f"gone: {type(error).__name__}"
    found = [each for each in caught if "deprecat" in str(each.message).lower()]
    return found[0].category.__name__ if found else "silent"


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = {name: verdict(call) for name, (call, _) in OLD.items()}
    finally:
        dist.destroy_process_group()
    for name, said in found.items():
        print(f"{name:<40}{said:<20}{OLD[name][1]}")
    assert verdict(lambda: X.sum()) == "silent"
    assert verdict(lambda: torch.no_such_name) == "gone: AttributeError"


if __name__ == "__main__":
    main()
