"""The steps of the kernel challenge: the numbers, the memory accesses, and the machine code."""

import os
import shutil
import sys
import tempfile

import torch

from graders.dsl import Condition, Lab, Wrong, at_most, require, require_equal
from graders.labs.lab06_cuda_basics import check_blank, line_of

LAB = Lab()
LAB06 = sys.modules[LAB.finished.Kernels.__module__]


def launch(submission, reference, rows: int, columns: int):
    """Launch the learner's kernel, and return x, the codes, the scales, and the counts.

    The largest number of row 0 is its last number. The third row contains only zeros.
    """
    check_blank(LAB06.source_of, submission.fast)
    tempfile.tempdir = os.getcwd()  # the supervisor removes this folder
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[0, -1], x[2:] = -9, 0
    # the largest number of row 1 is the first, second or third of four numbers that are loaded
    # together
    x[1, 8 + columns // 2048] = -8
    q, scales = torch.full(x.shape, 77, dtype=torch.int8), torch.full((rows,), torch.nan)
    hint = "compile"
    try:
        kernels = reference.Kernels(submission.fast)
        hint = "fault" if "fast" in kernels.kernels else hint
        counts = kernels.run("fast", rows, reference.THREADS, x, q, scales, columns)
    except LAB06.Fault as fault:
        raise Wrong(f"{rows} rows of {columns}: {fault}{line_of(fault)}", hint) from None
    return x, q, scales, counts


@LAB.alone(1, "the same numbers", "every code is the nearest, of short and long rows", "fast")
def numbers(submission, reference, lesson):
    for columns in (1024, 3072, 4096):
        x, q, scales, _ = launch(submission, reference, 3, columns)
        true = x.double().abs().amax(1) / 127
        error = (scales - true).abs().max().item()
        fact = f"largest error of the scale of a row of {columns} numbers"
        require_equal(fact, error, at_most(1e-6), "codes")
        error = ((x - q * true[:, None]).abs() / true[:, None].clamp(min=1e-9)).max().item()
        fact = "largest difference between a number and its code, in units of the scale"
        require_equal(fact, error, at_most(0.501), "codes")


@LAB.alone(2, "what memory does", "gold: the least bytes, in few requests", "fast", needs=(1,))
def memory(submission, reference, lesson):
    rows, columns = 2, 1024
    *_, counts = launch(submission, reference, rows, columns)
    moved = reference.moved(counts) / (rows * columns)
    require_equal("bytes moved for a number", moved, at_most(10), "far")
    yield f"bronze: {moved:.2f} bytes are moved for a number; the limit is 10"
    loads = 32 * counts.load_sectors / (rows * columns)
    hint = "twice" if loads > 4.1 else "stores"
    fact = f"bytes moved for a number, {loads:.2f} of them by loads"
    require_equal(fact, moved, at_most(5.1), hint)
    yield "silver: the limit is 5.1 bytes, and the minimum is 5: 4 for x and 1 for the codes"
    requests, least = reference.requests(counts) / rows, 2 * columns / 128 + 1
    fact = "loads and stores of warps for a row"
    require_equal(fact, requests, at_most(1.1 * least), "narrow")
    require_equal(
        "passes of shared memory for a row", counts.shared_passes / rows, at_most(40), "banks"
    )
    yield f"gold: {requests:g} loads and stores of warps for a row; the minimum is {least:g}"


@LAB.alone(3, "machine code", "nothing spills, and loads have 16 bytes", "fast", needs=(1,))
def code(submission, reference, lesson):
    check_blank(LAB06.source_of, submission.fast)
    if not shutil.which("nvcc"):
        return
    try:
        found = reference.compiled(submission.fast())
    except ValueError as error:
        raise Wrong(f"nvcc: {error}", "compile") from None
    require_equal("bytes of local memory of a thread", found["local"], 0, "local")
    require_equal("registers of a thread", found["registers"], at_most(64), "registers")
    some = Condition("one or more", lambda loads: loads >= 1)
    require_equal("loads of 16 bytes in the code", found["wide"], some, "narrow")


MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
from graders.rank import load
from graders.step import lab_of
finished = lab_of("challenge_kernel").finished
print(finished.share_of_copy(load(sys.argv[2]).fast))
"""


@LAB.trial(4, "on a GPU", "nothing contradicts the counts", needs=(1, 2, 3), world_sizes=(1,))
def gpu(workspace):
    if not shutil.which("nvcc"):
        yield "nvcc is not installed on this machine, so step 3 checked nothing"
    if not workspace.has_gpus:
        yield "--gpu was not said: the counts are the verdict"
        return
    result = workspace.run("python", "-B", "-c", MEASURE, LAB.path.parents[2], workspace.path)
    last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
    require(not result.status, f"on this machine's GPU it failed: {last_line}", "gpu")
    fraction = float(result.stdout.splitlines()[-1])
    enough = Condition("half or more", lambda fraction: fraction >= 0.5)
    require_equal("fraction of copy_'s bandwidth", fraction, enough, "gpu")
    yield f"≈{100 * fraction:.0f}% of copy_'s bandwidth"
