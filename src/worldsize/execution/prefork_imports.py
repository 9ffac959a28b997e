"""Import the modules that commands need, and prepare the memory of the fork server.

The fork server imports this module before it forks for the first command. ``PATH`` contains the
entries of `sys.path` for a command, except for the folder of its program and the folders of
this package. ``REIMPORTED`` contains the modules that a command must import again. A program
must not get the modules of this package, and Triton reads its variables when it is imported
(its compiled part can be loaded only once). The dictionary keeps the modules alive, because
deleting one would cost each start several milliseconds.

The time of a fork depends on the memory that it copies: the page tables, and each page that the
child writes to. Reading a Python object also writes, because it changes the reference count.
This module therefore prepares the memory so that a short command writes to as few pages as
possible. Without this preparation, a short command spends most of its time on copying pages.
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

MADV_COLLAPSE = 25  # create huge pages now, since Linux 6.1
HUGE_PAGE = 2 << 20  # bytes


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages, so that a fork copies less. Linux only."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, permissions, *_, last = line.split()
        if permissions == "rw-p" and not last.startswith("/"):  # private, and not a file
            low, high = (int(end, 16) for end in area.split("-"))
            low, high = -(-low // HUGE_PAGE) * HUGE_PAGE, high // HUGE_PAGE * HUGE_PAGE
            if low < high:
                madvise(low, high - low, MADV_COLLAPSE)


assert torch.get_num_threads() == 1  # a thread pool would not survive the fork
assert threading.active_count() == 1
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False  # a child does not need to deregister torch's operators one by one
gc.collect()
gc.freeze()  # a garbage collection in a child would write to every page, and so copy them all
if sys.platform == "linux":
    use_huge_pages()
