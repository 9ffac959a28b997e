"""Tests of the program that runs Nsight Compute, with fake versions of its tools."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

INPUTS = ["snippets/06_gpu_computing/sectors.py", "snippets/06_gpu_computing/sgemm.cu"]
TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","k","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","1,000"
"0","k","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","{}"
"""


def run(folder: Path, naive: str, table: str = TABLE) -> subprocess.CompletedProcess:
    """Run the program with a fake ncu that counts 1,000 requests, and `naive` sectors.

    sgemm.cu first launches each kernel once for each size of its check. The fake ncu counts
    nothing unless the program skips exactly these launches.
    """
    source = (ROOT / INPUTS[1]).read_text("utf-8")
    sizes = re.search(  # those after `small ? … :`
        r"\? std::vector<std::vector<int>>\{\{.*?\n.*?:.*?\n(.*?)\};", source, re.S
    )
    checks = sizes[1].count("},") + 1
    options = f"*--launch-skip\\ {checks}\\ --launch-count\\ 1\\ *"
    for name, script in {
        "nvidia-smi": "",
        "nvcc": "touch sgemm",
        "ncu": f'case "$*" in {options}) ;; *) exit 1;; esac\n'
        f"case \"$*\" in *naive*) cat '{folder}/naive';; *) cat '{folder}/other';; esac",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "naive").write_text(table.format(naive))
    (folder / "other").write_text(table.format("2,500"))
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    command = [sys.executable, str(ROOT / INPUTS[0]), "sgemm.cu"]
    env = os.environ | {"PATH": path}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("sectors", "table", "output"),
    [
        ("16,500", TABLE, "naive       16.5 sectors a request, by hand 16.5"),
        ("32,000", TABLE, "AssertionError: one of us is wrong"),
        (
            "",
            "==ERROR== ERR_NVGPUCTRPERM {}\n",
            "ncu counted nothing: ==ERROR== ERR_NVGPUCTRPERM",
        ),
    ],
    ids=["as predicted", "different", "no permission"],
)
def test_counts_are_compared_with_the_prediction(
    sectors: str, table: str, output: str, tmp_path: Path
) -> None:
    done = run(tmp_path, sectors, table)
    assert output in done.stdout + done.stderr
    assert (done.returncode == 0) == (sectors == "16,500")
