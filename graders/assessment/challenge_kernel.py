"""The kernel challenge: numbers, what memory does for them, the machine code."""

import os
import shutil
import sys
import tempfile

import torch

from graders.dsl import Condition, Lab, Wrong, at_most, require, require_equal
from graders.labs.lab06_cuda_basics import filled, place

LAB = Lab()
LAB06 = sys.modules[LAB.finished.Kernels.__module__]


def launched(submission, reference, rows: int, columns: int):
    """x, codes, scales and counts of one launch; row 0 has a far number, a third is zeros."""
    filled(LAB06.source_of, submission.fast)
    tempfile.tempdir = os.getcwd()  # the runner's, which it empties
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[0, -1], x[2:] = -9, 0
    x[1, 8 + columns // 2048] = -8  # in the first, second or third of four numbers
    q, scales = torch.full(x.shape, 77, dtype=torch.int8), torch.full((rows,), torch.nan)
    hint = "compile"
    try:
        kernels = reference.Kernels(submission.fast)
        hint = "fault" if "fast" in kernels.kernels else hint
        counts = kernels.run("fast", rows, reference.THREADS, x, q, scales, columns)
    except LAB06.Fault as fault:
        raise Wrong(f"{rows} rows of {columns}: {fault}{place(fault)}", hint) from None
    return x, q, scales, counts


@LAB.alone(1, "the same numbers", "every code is the nearest, of short and long rows", "fast")
def numbers(submission, reference, lesson):
    for columns in (1024, 3072, 4096):
        x, q, scales, _ = launched(submission, reference, 3, columns)
        true = x.double().abs().amax(1) / 127
        off = (scales - true).abs().max().item()
        require_equal(
            f"largest error of a scale, of {columns} numbers", off, at_most(1e-6), "codes"
        )
        steps = ((x - q * true[:, None]).abs() / true[:, None].clamp(min=1e-9)).max().item()
        require_equal("scales between a number and its code", steps, at_most(0.501), "codes")


@LAB.alone(2, "what memory does", "gold: the least bytes, in few requests", "fast", needs=(1,))
def memory(submission, reference, lesson):
    rows, columns = 2, 1024
    *_, counts = launched(submission, reference, rows, columns)
    each = reference.moved(counts) / (rows * columns)
    require_equal("bytes moved for a number", each, at_most(10), "far")
    yield f"bronze: {each:.2f} bytes for each number, of no more than 10"
    loads = 32 * counts.load_sectors / (rows * columns)
    hint = "twice" if loads > 4.1 else "stores"
    fact = f"bytes moved for a number, {loads:.2f} of them by loads"
    require_equal(fact, each, at_most(5.1), hint)
    yield "silver: of no more than 5.1, and 5 are the least: 4 of x, 1 of the codes"
    found, least = reference.requests(counts) / rows, 2 * columns / 128 + 1
    require_equal("loads and stores of warps for a row", found, at_most(1.1 * least), "narrow")
    require_equal(
        "passes of shared memory for a row", counts.shared_passes / rows, at_most(40), "banks"
    )
    yield f"gold: {found:g} loads and stores of warps for a row, of {least:g}"


@LAB.alone(3, "machine code", "nothing spills, and loads have 16 bytes", "fast", needs=(1,))
def code(submission, reference, lesson):
    filled(LAB06.source_of, submission.fast)
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


CLOCK = """
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
        yield "nvcc is not on this machine: step 3 looked at nothing"
    if not workspace.has_gpus:
        yield "--gpu was not said: the counts are the verdict"
        return
    done = workspace.run("python", "-B", "-c", CLOCK, LAB.path.parents[2], workspace.path)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    require(not done.status, f"on this machine's GPU it failed: {last}", "gpu")
    share = float(done.stdout.splitlines()[-1])
    wanted = Condition("half or more", lambda share: share >= 0.5)
    require_equal("share of copy_'s bandwidth", share, wanted, "gpu")
    yield f"≈{100 * share:.0f}% of copy_'s bandwidth"
