"""The snapshots of memory that lab 08 and its grader make have the form of torch's own."""

import importlib
import re
from itertools import pairwise
from types import ModuleType

import pytest

INPUTS = ["graders", "labs"]


@pytest.fixture(scope="module")
def grader() -> ModuleType:
    return importlib.import_module("graders.labs.lab08_memory")


@pytest.fixture(params=["of the lab's allocator", "of the grader"])
def snapshot(request: pytest.FixtureRequest, grader: ModuleType) -> dict:
    if request.param == "of the grader":
        segments = [grader.SMALL, grader.LARGE, grader.FULL]
        return {"segments": segments, "device_traces": [grader.HISTORY]}
    lab = grader.LAB.finished
    allocator = lab.Allocator(lab.LIMIT)
    with pytest.raises(lab.OutOfMemory):
        lab.replay(lab.layers_trace(), allocator)
    return allocator.snapshot()


def test_a_made_snapshot_has_the_form_of_torch(snapshot: dict, grader: ModuleType) -> None:
    """torch's own readers take it, and all of its keys are documented or known to be written."""
    torch = importlib.import_module("torch")
    viz = importlib.import_module("torch.cuda._memory_viz")
    known = set(re.findall(r"^ +(\w+):", torch.cuda.memory._snapshot.__doc__, re.MULTILINE))
    known |= {"device", "frames", "is_expandable", "time_us", "requested_size"}
    known |= {"pool_id", "segment_pool_id"}  # not yet in the text of torch 2.11
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


def test_an_account_is_what_segments_say_of_themselves(grader: ModuleType) -> None:
    segments = [grader.SMALL, grader.LARGE, grader.FULL]
    total = grader.LAB.finished.account(segments)
    for name in ("requested", "allocated"):
        assert getattr(total, name) == sum(segment[f"{name}_size"] for segment in segments)
