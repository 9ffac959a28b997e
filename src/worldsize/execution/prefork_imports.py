"""What the process that starts commands warm imports before it forks for the first of them.

``PATH`` is what `python` of a reader's shell has behind the program's folder: not the engine.
``AGAIN`` is what each command imports anew, if at all: no program has the engine, and Triton
asks for its variables when it is imported (but what is compiled loads once). The modules stay
here: to take one apart costs each start milliseconds.

A fork costs what it copies: the page tables, and each page that the child writes to. To read a
Python object is to write its count of references. So what a short command would touch without
need is taken out of its way here: most of its time was that.
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
import torch._inductor.compile_fx  # as torch.compile does, and DeepSpeed with its optimizers
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor.parallel

with contextlib.suppress(ImportError):
    import matplotlib.pyplot  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]
PATH = [entry for entry in sys.path if entry not in ("", str(ROOT), str(ROOT / "src"))]
_AGAIN = re.compile(r"(worldsize|sitecustomize|triton(?!\._C\b))(\.|$)")
AGAIN = {name: module for name, module in sys.modules.items() if _AGAIN.match(name)}

MADV_COLLAPSE = 25  # Linux 6.1: make pages of 2 MiB now
HUGE = 2 << 20


def collapse() -> None:
    """Put what this process has allocated on huge pages, where Linux can: less to copy."""
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
    finalizer.atexit = False  # a child need not take torch's operators out one by one
gc.collect()
gc.freeze()  # a collection in a child would write to, and so copy, every page
if sys.platform == "linux":
    collapse()
