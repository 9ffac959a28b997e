"""The imports of the fork server, which happen before it forks for the first command.

``PATH`` is the module path of a reader's `python` after the program's folder. It does not
contain the engine. ``REIMPORTED`` lists the modules that each command imports again if it needs
them: a program must not see the engine, and Triton reads its variables when it is imported (its
compiled part loads only once). The modules stay referenced here, because deleting one would
cost each start several milliseconds.

A fork costs time for what it copies: the page tables, and each page that the child writes to.
Reading a Python object writes to its reference count. This module therefore prepares the memory
so that a short command touches as few pages as possible. Before, a short command spent most of
its time on copying pages.
"""

import contextlib
import ctypes
import gc
import re
import sys
import threading
import weakref
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer imports it
import torch._inductor.compile_fx  # torch.compile imports it, and so do DeepSpeed's optimizers
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor.parallel

with contextlib.suppress(ImportError):
    import matplotlib.pyplot  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]
PATH = [entry for entry in sys.path if entry not in ("", str(ROOT), str(ROOT / "src"))]
_REIMPORTED = re.compile(r"(worldsize|sitecustomize|triton(?!\._C\b))(\.|$)")
REIMPORTED = {name: module for name, module in sys.modules.items() if _REIMPORTED.match(name)}

MADV_COLLAPSE = 25  # Linux 6.1: create huge pages of 2 MiB now
HUGE = 2 << 20


def collapse() -> None:
    """Move the memory of this process to huge pages on Linux, so that a fork copies less."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, *_, last = line.split()
        if rights == "rw-p" and not last.startswith("/"):
            low, high = (int(end, 16) for end in area.split("-"))
            low, high = -(-low // HUGE) * HUGE, high // HUGE * HUGE
            if low < high:
                madvise(low, high - low, MADV_COLLAPSE)


assert torch.get_num_threads() == 1  # a thread pool would not survive the fork
assert threading.active_count() == 1
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False  # a child does not need to deregister torch's operators one by one
gc.collect()
gc.freeze()  # a garbage collection in a child would write to every page, and so copy it
if sys.platform == "linux":
    collapse()
