"""Tests on a machine with one GPU: two ranks use only the CPU, and so do their libraries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import HANG, start

ROOT = Path(__file__).resolve().parent.parent
FSDP2 = "snippets/04_zero_and_fsdp/fsdp2.py"
PROGRAMS = [
    FSDP2,
    "snippets/02_ddp/communication_hooks.py",
    "snippets/04_zero_and_fsdp/engine_backward.py",
    "labs/launch/train.py",
]
INPUTS = PROGRAMS
# torch reports one GPU, but using it fails. An optimizer reads the current stream in each step.
ONE_GPU = """
from types import SimpleNamespace
import torch
torch._C._get_accelerator = lambda: torch.device("cuda")
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.accelerator.is_available = torch.cuda.is_available = lambda: True
torch.accelerator.device_count = torch.cuda.device_count = lambda: 1
torch.accelerator.current_stream = lambda: SimpleNamespace(is_capturing=lambda: False)
"""


def run(text: str, folder: Path) -> tuple[int | None, str]:
    """Run a program with two ranks and one GPU; return its exit status and its error output."""
    (folder / "sitecustomize.py").write_text(ONE_GPU)
    (folder / "program.py").write_text(text, "utf-8")
    words = ["torchrun", "--nproc-per-node=2", "program.py"]
    words += ["--checkpoints", "saved"] if "--checkpoints" in text else []
    env = {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}  # hide real GPUs
    process = start(words, folder, dict(os.environ) | env)
    _, err = process.communicate(timeout=HANG)
    return process.returncode, err


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_do_not_use_the_only_gpu(name: str, tmp_path: Path) -> None:
    status, err = run((ROOT / name).read_text("utf-8"), tmp_path)
    if "this program needs: pip install" in err:
        pytest.skip(err.splitlines()[0])
    assert status == 0, err


def test_fully_shard_without_a_mesh_uses_the_gpu(tmp_path: Path) -> None:
    text = (ROOT / FSDP2).read_text("utf-8")
    status, err = run(text.replace(", mesh=mesh", ""), tmp_path)
    assert status == 1 and "_init_default_mesh" in err
