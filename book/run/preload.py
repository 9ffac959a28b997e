"""What the process that starts commands warm imports before it forks for the first of them.

``PATH`` is what `python` of a reader's shell has behind the program's folder: not the engine.
"""

import contextlib
import gc
import sys
import threading
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

ROOT = str(Path(__file__).resolve().parents[2])
PATH = [entry for entry in sys.path if entry not in ("", ROOT)]

assert torch.get_num_threads() == 1  # a thread pool would not survive the fork
assert threading.active_count() == 1
gc.collect()
gc.freeze()  # a collection in a child would write to, and so copy, every page
