"""Tests of the memory snapshots of lab 08 and its grader: they have the format of torch."""

import importlib
import re
from itertools import pairwise
from types import ModuleType

import pytest

INPUTS = ["graders", "labs"]


@pytest.fixture(scope="module")
def grader() -> ModuleType:
    return importlib.import_module("graders.labs.lab08_memory")


@pytest.fixture(params=["of the allocator in the lab", "of the grader"])
def snapshot(request: pytest.FixtureRequest, grader: ModuleType) -> dict:
    if request.param == "of the grader":
        segments = [grader.SMALL, grader.LARGE, grader.FULL]
        return {"segments": segments, "device_traces": [grader.HISTORY]}
    lab = grader.LAB.finished
    allocator = lab.Allocator(lab.LIMIT)
    with pytest.raises(lab.OutOfMemory):
        lab.replay(lab.layers_trace(), allocator)
    return allocator.snapshot()


def test_a_snapshot_has_the_format_of_torch(snapshot: dict, grader: ModuleType) -> None:
    """The tools of torch can read the snapshot, and torch writes all of its keys, too."""
    torch = importlib.import_module("torch")
    viz = importlib.import_module("torch.cuda._memory_viz")
    known = set(re.findall(r"^ +(\w+):", torch.cuda.memory._snapshot.__doc__, re.MULTILINE))
    known |= {"device", "frames", "is_expandable", "time_us", "requested_size"}
    known |= {"pool_id", "segment_pool_id"}  # the docstring of torch 2.11 does not list them
    (history,) = snapshot["device_traces"]
    segments = snapshot["segments"]
    parts = [*segments, *history, *(block for each in segments for block in each["blocks"])]
    assert {key for part in parts for key in part} <= known
    for segment in segments:
        blocks = segment["blocks"]
        assert all(a["address"] + a["size"] == b["address"] for a, b in pairwise(blocks))
        assert segment["total_size"] == sum(block["size"] for block in blocks)
    reserved = grader.LAB.finished.account(segments).reserved
    assert f"total_reserved: {reserved / 2**20:.1f}MiB" in viz.segsum(snapshot)
    assert f"{len(history)} entries" in viz.trace(snapshot)


def test_the_totals_equal_the_sums_over_segments(grader: ModuleType) -> None:
    segments = [grader.SMALL, grader.LARGE, grader.FULL]
    total = grader.LAB.finished.account(segments)
    for name in ("requested", "allocated"):
        assert getattr(total, name) == sum(segment[f"{name}_size"] for segment in segments)
