"""Tests of the program that emulates CUDA on a CPU, with shell scripts in place of its programs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT

EMULATOR = "snippets/06_gpu_computing/cuda_on_cpu.py"
INPUTS = [EMULATOR]


@pytest.mark.parametrize(
    ("script", "status", "output", "error"),
    [
        ("echo 3 of 4", 0, "3 of 4\n", ""),
        ("echo ≈$EMU_SEED ms", 0, "≈1 ms\n", ""),  # a measured number may differ
        (
            "echo sum $EMU_SEED",
            1,
            "sum 1\n",
            "x.cu: results depend on the order of the threads",
        ),
        ("test $EMU_SEED = 0 || exit 3", 3, "", ""),  # a fault that only the random order finds
    ],
)
def test_a_program_runs_in_two_orders_and_both_outputs_are_compared(
    script: str, status: int, output: str, error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def build(program: Path, binary: Path) -> None:
        binary.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        binary.chmod(0o755)

    main = runpy.run_path(str(ROOT / EMULATOR))["main"]
    arguments = ["cuda_on_cpu.py", "x.cu"]
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.dict(main.__globals__, build=build),
    ):
        assert main() == status
    printed = capfd.readouterr()
    assert printed.out == output and printed.err.strip() == error
