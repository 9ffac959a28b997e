"""Tests of programs that use the streams and events of a GPU, with a stand-in for the GPU."""

from __future__ import annotations

import runpy
import time
from unittest import mock

import pytest
import torch
from conftest import ROOT

PREFETCH = "snippets/06_gpu_computing/prefetch.py"
EVENT_TIME = "snippets/06_gpu_computing/event_time.py"
INPUTS = [PREFETCH, EVENT_TIME]


def test_each_batch_is_copied_while_the_previous_batch_is_in_use() -> None:
    """The stand-ins record what each of the two streams gets, in the order of the calls."""
    calls: list[tuple[str, str]] = []  # a stream, and what it gets
    active = ["compute"]

    class Stream:
        def __init__(self, name: str = "copies", device: object = None) -> None:
            self.name = name

        def __enter__(self) -> None:
            active.append(self.name)

        def __exit__(self, *_: object) -> None:
            active.pop()

        def wait_event(self, event: Event) -> None:
            calls.append((self.name, f"waits for {event.after}"))

    class Event:
        def __init__(self, device: object) -> None:
            self.after = "nothing"

        def record(self, stream: Stream) -> None:
            self.after = [what for name, what in calls if name == stream.name][-1]

    class Batch:
        def __init__(self, name: str, pinned: bool = False) -> None:
            self.name, self.pinned = name, pinned

        def pin_memory(self) -> Batch:
            return Batch(self.name, pinned=True)

        def to(self, device: torch.device, non_blocking: bool) -> Batch:
            assert device.type == "cuda" and non_blocking and self.pinned
            calls.append((active[-1], f"copy of {self.name}"))
            return self

        def record_stream(self, stream: Stream) -> None:
            calls.append((stream.name, f"keeps {self.name}"))

    prefetch = runpy.run_path(str(ROOT / PREFETCH))["prefetch"]
    compute = Stream("compute")
    with (
        mock.patch.multiple(torch, Stream=Stream, Event=Event),
        mock.patch.object(torch.accelerator, "current_stream", lambda device: compute),
    ):
        for batch in prefetch([Batch("A"), Batch("B"), Batch("C")], torch.device("cuda")):
            calls.append((active[-1], f"uses {batch.name}"))
    started = {
        name: [("copies", f"copy of {name}"), ("compute", f"keeps {name}")] for name in "ABC"
    }
    used = {
        name: [("compute", f"waits for copy of {name}"), ("compute", f"uses {name}")]
        for name in "ABC"
    }
    assert calls == [
        *started["A"], *started["B"], *used["A"], *started["C"], *used["B"], *used["C"],
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", [1.0, 20.0])
@pytest.mark.parametrize("products", [False, True])
def test_the_clocks_of_a_simulated_gpu_show_what_the_model_predicts(
    kernel: float, products: bool
) -> None:
    program = runpy.run_path(str(ROOT / EVENT_TIME))
    host, device = 0.0, 0.0  # the time in µs at which each is free

    def launch(duration: float) -> None:
        nonlocal host, device
        host += program["LAUNCH"]
        device = max(device, host) + duration

    def wait(until: float | None = None) -> None:
        nonlocal host
        host = max(host, device if until is None else until)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = max(device, host)

        def synchronize(self) -> None:
            wait(self.time)

        def elapsed_time(self, end: Event) -> float:
            return (end.time - self.time) / 1e3

    x = mock.Mock(add_=lambda _: launch(kernel))
    work = mock.MagicMock(__matmul__=lambda *_: launch(100.0)) if products else None
    launch(3000.0)  # of an earlier program: `measure` waits for it
    with (
        mock.patch.object(torch, "Event", Event),
        mock.patch.object(torch.accelerator, "synchronize", wait),
        mock.patch.object(time, "perf_counter", lambda: host / 1e6),
    ):
        measured = program["measure"](x, work)
    # ten products of 100 µs: after their ten launches, 955 µs of them are left
    predicted = program["simulate"](kernel, before=955.0 if products else 0.0)
    assert measured == pytest.approx(predicted)
