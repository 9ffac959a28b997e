"""Ranks that share GPUs: whether the machine allows it, and with which environment variables.

NCCL 2.30 and newer let several ranks use one GPU if ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1. The
page docs/01_ranks_on_one_gpu.md explains what such a run proves.
"""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

from worldsize.execution import runner
from worldsize.execution.requirements import gpus_needed
from worldsize.model.program import Program
from worldsize.model.transcript import Transcript

FIRST_VERSION = (2, 30)  # the first version of NCCL with this setting

# With its default settings, NCCL supports only two ranks on one GPU. With 4 thread blocks
# (CTAs) for each rank, eight ranks fit on every GPU that has at least 32 multiprocessors.
VARIABLES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}

_PRINT_VERSION = """
import ctypes, torch
code = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
print(code.value)
"""


@lru_cache(maxsize=1)
def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library that torch loads; None if it loads none.

    A separate process reads it, because ``torch.cuda.nccl.version()`` returns the version with
    which torch was compiled.
    """
    words = [sys.executable, "-c", _PRINT_VERSION]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    if process.returncode:
        return None
    code = int(process.stdout)
    return code // 10_000, code % 10_000 // 100, code % 100


def needs_sharing(ranks: int) -> bool:
    """Return whether this machine has at least one GPU, but fewer GPUs than ``ranks``."""
    return 0 < len(runner.gpu_names()) < ranks


def missing_gpus(program: Program, transcript: Transcript) -> str | None:
    """Return why this machine has too few GPUs for a program; None if it has enough.

    Fewer GPUs than ranks are enough if the ranks can share a GPU.
    """
    ranks, gpus = gpus_needed(transcript), len(runner.gpu_names())
    if ranks <= gpus:
        return None
    if program.needs_own_gpus:
        return f"needs {ranks} GPUs, this machine has {gpus}"
    version = nccl_version()
    if version is not None and version >= FIRST_VERSION:
        return None
    first = ".".join(map(str, FIRST_VERSION))
    found = f"NCCL {'.'.join(map(str, version))}" if version else "no NCCL"
    needs = f"needs {ranks} GPUs, this machine has {gpus}"
    return f"{needs} and {found} (from NCCL {first} on, ranks can share a GPU)"


def is_shared(device: str) -> bool:
    """Return whether the ranks of this recording shared GPUs; see `describe_gpus`."""
    return " ranks on " in device


def describe_gpus(ranks: int) -> str:
    """Return the text for the GPUs in a transcript: `4 ranks on 1 × NVIDIA H100, NCCL 2.30.7`.

    The ranks and NCCL are included only if ranks share a GPU.
    """
    gpus = runner.describe_device("cuda")
    if not needs_sharing(ranks):
        return gpus
    return f"{ranks} ranks on {gpus}, NCCL {'.'.join(map(str, nccl_version() or ('unknown',)))}"
