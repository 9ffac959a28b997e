"""Tests of labs/rank_trace.py: the recorder, the merging of ranks, and the comparison of traces."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import EXIT_TIMEOUT, HANG, until

from worldsize.execution import runner
from worldsize.execution.prefork import Launcher
from worldsize.execution.trace_run import load_recorder
from worldsize.model import BookError
from worldsize.model.program import Program
from worldsize.model.traces import TraceSettings, trace_path, trace_settings
from worldsize.testing import traces
from worldsize.testing.plugin import SESSION
from worldsize.testing.program_check import CheckOptions

INPUTS = [
    "src/worldsize/execution",
    "src/worldsize/model",
    "src/worldsize/testing",
    "labs/rank_trace.py",
]
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "labs/rank_trace.py"
recorder = load_recorder(ROOT)
TraceError = recorder.TraceError
PATH = "/program.py"


# --- recordings that are written by hand ------------------------------------------------------


class Recording:
    """A recording of one rank that a test writes event by event."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.events = rank, world, []
        self.calls = self.operations = 0

    def line(self, number: int, **changes: object) -> "Recording":
        """Add a line."""
        self.events.append(["L", 0, 1, "main", PATH, number, changes])
        return self

    def start(self, name: str, *, visible: bool = True, **data: object) -> "Recording":
        """Add the start of a call."""
        self.calls += 1
        self.operations += 1
        data = {"group": "0", "ranks": list(range(self.world))} | data
        if name in recorder.SENDS | recorder.RECEIVES:
            data = {"tag": 0} | data
        found = [{"name": name, "id": self.operations, **data}]
        self.events.append(["S", 0, self.calls, "main", PATH, 50, visible, found])
        return self

    def end(self, error: str | None = None, peer: int | None = None) -> "Recording":
        """Add the end of the last call."""
        described = [error, "message"] if error else None
        self.events.append(["E", 0, self.calls, described, peer])
        return self

    def call(self, name: str, **data: object) -> "Recording":
        """Add a call that returns."""
        return self.start(name, **data).end()

    def launch(self, name: str, **data: object) -> "Recording":
        """Add an asynchronous call."""
        self.start(name, **data)
        self.events.append(["A", 0, self.calls, None, None])
        return self

    def wait(self, operation: int) -> "Recording":
        """Add a wait for an operation, which is the n-th of this rank."""
        self.calls += 1
        self.events.append(["W", 0, self.calls, "main", PATH, 60, True, [operation]])
        self.events.append(["D", 0, self.calls, None, None])
        return self

    def stop(self, how: str = "finished", status: object = 0) -> "Recording":
        """Add the end of the program."""
        self.events.append(["X", 0, how, status, None])
        return self


def ranks(count: int) -> list[Recording]:
    """Return empty recordings. Each has one line, because a trace needs one."""
    return [Recording(rank, count).line(1) for rank in range(count)]


def merged(*written: Recording, times: int = 0, limit: float | None = None) -> dict:
    """Merge recordings; `times` seconds pass between the ranks, which must not matter."""
    recordings = []
    for each in written:
        header = {"program": PATH, "files": [PATH], "wall": 0, "python": "3", "torch": "2"}
        events = [
            [event[0], index + times * each.rank * 10**6, *event[2:]]
            for index, event in enumerate(each.events)
        ]
        recordings.append(recorder.Rank(header, events))
    return recorder.merge(recordings, limit)


def tick(trace: dict, rank: int, kind: str, number: int = 0) -> int:
    """Return the tick of the n-th step of this kind on a rank."""
    return [step[0] for step in trace["steps"] if step[1:3] == [rank, kind]][number]


def test_every_rank_executes_one_event_in_a_tick() -> None:
    one, two = ranks(2)
    trace = merged(one.line(2), two.line(7).line(8))
    assert [step[:4] for step in trace["steps"]] == [
        [1, 0, "line", 1],
        [1, 1, "line", 1],
        [2, 0, "line", 2],
        [2, 1, "line", 7],
        [3, 1, "line", 8],
    ]


def test_a_receive_ends_after_its_send_has_started() -> None:
    sender, receiver = ranks(2)
    for number in range(2, 12):
        sender.line(number)
    trace = merged(sender.call("send", peer=1), receiver.call("recv", peer=0).line(90))
    assert tick(trace, 1, "call") == 2  # it waits from here on
    assert tick(trace, 0, "call") == 12
    assert tick(trace, 1, "done") == 13
    assert tick(trace, 1, "line", 1) == 14
    assert trace["messages"] == [[1, 0]]  # the receive started first, so it is operation 0
    assert trace["operations"][1]["rank"] == 0


def test_a_send_does_not_wait_for_its_receive() -> None:
    sender, receiver = ranks(2)
    for number in range(2, 12):
        receiver.line(number)
    trace = merged(sender.call("send", peer=1), receiver.call("recv", peer=0))
    assert tick(trace, 0, "done") == 3


# which ranks wait, from the documentation of torch.distributed and not from the recorder
EVERY_RANK_WAITS = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
]
ALL_WAIT_FOR_THE_ROOT = ["broadcast", "broadcast_object_list", "scatter", "scatter_object_list"]
ONLY_THE_ROOT_WAITS = ["gather", "gather_object", "reduce"]


@pytest.mark.parametrize("name", EVERY_RANK_WAITS)
def test_a_collective_ends_after_all_ranks_have_started_it(name: str) -> None:
    early, late, third = ranks(3)
    for number in range(2, 9):
        late.line(number)
    trace = merged(early.call(name), late.call(name), third.call(name))
    started = tick(trace, 1, "call")
    assert [tick(trace, rank, "done") for rank in range(3)] == [started + 1] * 3
    assert [each["parts"] for each in trace["collectives"]] == [[0, 2, 1]]


@pytest.mark.parametrize("name", ALL_WAIT_FOR_THE_ROOT)
def test_the_root_of_a_broadcast_does_not_wait_and_the_others_wait_for_the_root(
    name: str,
) -> None:
    root, other, third = ranks(3)
    for number in range(2, 6):
        root.line(number)
    for number in range(2, 20):
        third.line(number)
    trace = merged(*(each.call(name, root=0) for each in (root, other, third)))
    assert tick(trace, 0, "done") == tick(trace, 0, "call") + 1
    assert tick(trace, 1, "done") == tick(trace, 0, "call") + 1
    assert tick(trace, 1, "call") == 2


@pytest.mark.parametrize("name", ONLY_THE_ROOT_WAITS)
def test_only_the_root_of_a_reduce_waits(name: str) -> None:
    root, other, third = ranks(3)
    for number in range(2, 20):
        third.line(number)
    trace = merged(*(each.call(name, root=0) for each in (root, other, third)))
    assert tick(trace, 0, "done") == tick(trace, 2, "call") + 1
    assert tick(trace, 1, "done") == 3


def test_real_time_does_not_change_the_order() -> None:
    def trace(times: int) -> dict:
        one, two = ranks(2)
        return merged(
            one.call("send", peer=1).call("all_reduce"),
            two.line(2).call("recv", peer=0).call("all_reduce"),
            times=times,
        )

    early, late = trace(-5), trace(5)
    assert early["times"] != late["times"]
    assert {**early, "times": 0} == {**late, "times": 0}


def test_messages_are_matched_in_their_order_within_group_and_tag() -> None:
    sender, receiver = ranks(2)
    for tag, group in ((0, "0"), (7, "0"), (0, "0"), (0, "1")):
        sender.call("send", peer=1, tag=tag, group=group)
    for tag, group in ((0, "1"), (0, "0"), (0, "0"), (7, "0")):
        receiver.call("recv", peer=0, tag=tag, group=group)
    trace = merged(sender, receiver)
    by_number = {
        number: (
            each["rank"],
            [o["rank"] for o in trace["operations"][:number]].count(each["rank"]),
        )
        for number, each in enumerate(trace["operations"])
    }
    pairs = {by_number[send][1]: by_number[receive][1] for send, receive in trace["messages"]}
    assert pairs == {0: 1, 1: 3, 2: 2, 3: 0}


def test_a_receive_from_any_rank_is_matched_with_the_rank_that_it_got() -> None:
    zero, one, two = ranks(3)
    zero.start("recv", peer=None).end(peer=2).start("recv", peer=None).end(peer=1)
    one.call("send", peer=0)
    two.call("send", peer=0)
    trace = merged(zero, one, two)
    senders = [
        trace["operations"][send]["rank"]
        for send, _ in sorted(trace["messages"], key=lambda pair: pair[1])
    ]
    assert senders == [2, 1]


def test_an_asynchronous_receive_ends_in_its_wait() -> None:
    sender, receiver = ranks(2)
    for number in range(2, 12):
        sender.line(number)
    receiver.launch("irecv", peer=0).line(2).line(3).wait(1)
    trace = merged(sender.launch("isend", peer=1).wait(1), receiver)
    assert tick(trace, 1, "start") == 2
    assert tick(trace, 1, "line", 2) == 5  # the launch takes two events: S and A
    assert tick(trace, 1, "waited") == tick(trace, 0, "start") + 1
    assert tick(trace, 0, "waited") < 20
    assert not any(step[1:3] == [1, "done"] for step in trace["steps"])


def test_the_wait_for_an_isend_does_not_need_the_receive() -> None:
    sender, receiver = ranks(2)
    for number in range(2, 12):
        receiver.line(number)
    trace = merged(sender.launch("isend", peer=1).wait(1), receiver.call("recv", peer=0))
    assert tick(trace, 0, "waited") < tick(trace, 1, "call")


def test_an_all_to_all_does_not_wait_for_a_rank_that_sends_nothing() -> None:
    early, late = ranks(2)
    for number in range(2, 9):
        late.line(number)
    early.call("all_to_all_single", splits=[[1, 2], [3, 0]])
    late.call("all_to_all_single", splits=[[0, 3], [2, 3]])
    assert tick(merged(early, late), 0, "done") == 3


def test_groups_have_their_own_order_of_collectives() -> None:
    zero, one, two = ranks(3)
    pair = {"group": "1", "ranks": [0, 1]}
    zero.call("all_reduce", **pair).call("all_reduce")
    one.call("all_reduce").call(
        "all_reduce", **pair
    )  # a different order, but the groups differ
    two.call("all_reduce")
    with pytest.raises(TraceError, match="cycle"):  # so neither of the two can have ended
        merged(zero, one, two)
    zero, one, two = ranks(3)
    zero.launch("all_reduce", **pair).call("all_reduce").wait(1)
    one.call("all_reduce").call("all_reduce", **pair)
    trace = merged(zero, one, two.call("all_reduce"))
    assert sorted(len(each["parts"]) for each in trace["collectives"]) == [2, 3]
    assert trace["groups"] == [[0, 1], [0, 1, 2]]


def test_two_groups_of_the_same_ranks_are_not_mixed() -> None:
    zero, one = ranks(2)
    for written, names in ((zero, "ab"), (one, "ba")):
        for name in names:
            payload = {"t": "int32", "s": [1 if name == "a" else 2]}
            written.launch("all_reduce", group=name, payload=payload)
    found = merged(zero, one)["collectives"]
    assert sorted(sorted(each["parts"]) for each in found) == [[0, 3], [1, 2]]
    assert not any("mismatch" in each for each in found)


def test_two_receives_before_their_sends_are_a_cycle() -> None:
    zero, one = ranks(2)
    zero.call("recv", peer=1).call("send", peer=1)
    one.call("recv", peer=0).call("send", peer=0)
    message = (
        "the recording contradicts itself, because its events form a cycle: event 2 of rank 0 "
        "needs event 3 of rank 1; event 2 of rank 1 needs event 3 of rank 0"
    )
    with pytest.raises(TraceError, match=re.escape(message)):
        merged(zero, one)


def test_an_error_comes_after_everything_that_other_ranks_can_still_do() -> None:
    zero, one = ranks(2)
    zero.start("all_reduce").end("RuntimeError").line(9)
    for number in range(2, 9):
        one.line(number)
    trace = merged(zero, one)
    assert tick(trace, 0, "done") == 9
    assert trace["steps"][-2][2:] == ["done", 50, [0], "RuntimeError"]
    assert trace["hangs"] == [8]
    assert trace["operations"][0]["end"] == "error"
    assert trace["collectives"] == [{"group": 0, "parts": [0], "missing": [1]}]


def test_the_trace_shows_the_call_in_which_a_rank_was_killed() -> None:
    zero, one = ranks(2)
    trace = merged(zero.start("recv", peer=1), one.line(2).line(3))
    assert trace["ends"][0] == {"how": "killed", "line": 50, "function": 0, "in": ["recv"]}
    assert trace["ends"][1] == {"how": "killed", "line": 3, "function": 0}
    assert trace["hangs"] == [3]
    assert trace["operations"][0]["end"] == "never"
    assert "was killed, or called os._exit, at line 50, in recv" in recorder.describe_end(
        trace, 0
    )


def test_a_program_that_still_makes_progress_at_the_time_limit_does_not_hang() -> None:
    """The time limit ends the ranks of a slow program in any of their calls."""
    zero, one = ranks(2)
    waits = merged(zero.start("recv", peer=1), one.line(2), limit=1)  # rank 1 computes
    assert waits["hangs"] == [] and waits["ends"][0]["in"] == ["recv"]
    zero, one = ranks(2)
    assert not merged(zero.start("recv", peer=1), one.start("send", peer=0), limit=1)["hangs"]
    zero, one = ranks(2)
    assert not merged(zero.start("barrier"), one.start("barrier"), limit=1)["hangs"]


def test_ranks_that_wait_for_each_other_at_the_time_limit_hang() -> None:
    zero, one = ranks(2)
    assert merged(zero.start("recv", peer=1), one.start("barrier"), limit=1)["hangs"] == [2]
    zero, one = ranks(2)
    assert merged(zero.start("recv", peer=1), one.stop(), limit=1)["hangs"] == [2]
    zero, one = ranks(2)
    shapes = [{"payload": {"t": "float32", "s": [size], "b": 4 * size}} for size in (1, 2)]
    zero.start("all_reduce", **shapes[0])
    assert merged(zero, one.start("all_reduce", **shapes[1]), limit=1)["hangs"] == [2]


def test_with_until_error_the_trace_ends_before_the_error() -> None:
    zero, one = ranks(2)
    zero.start("all_reduce").end("RuntimeError").stop("error", "RuntimeError").line(77)
    trace = merged(zero, one.stop())
    assert [step[2] for step in trace["steps"]] == ["line", "line", "call"]
    assert trace["hangs"] == [2]
    assert trace["ends"][0]["how"] == "error" and trace["ends"][0]["in"] == ["all_reduce"]
    assert trace["ends"][1]["how"] == "finished"


def test_steps_of_other_ranks_after_the_error_are_not_in_the_trace() -> None:
    zero, one, two = ranks(3)
    zero.start("all_reduce", group="1").end("RuntimeError").stop("error", "RuntimeError")
    one.line(2).call("barrier").line(3).stop()  # rank 0 called the barrier after its error
    two.start("recv", peer=0).end().line(4).stop()
    trace = merged(zero, one, two)
    last = {step[1]: step[2:4] for step in trace["steps"]}
    assert last == {0: ["call", 50], 1: ["call", 50], 2: ["call", 50]}
    assert [each["how"] for each in trace["ends"]] == ["error", "waiting", "waiting"]
    assert [each["in"] for each in trace["ends"]] == [["all_reduce"], ["barrier"], ["recv"]]
    assert [each["end"] for each in trace["operations"]] == ["never"] * 3
    assert trace["hangs"] == [3]
    assert "rank 1 was waiting at line 50, in barrier" in recorder.describe_end(trace, 1)


def test_a_group_may_be_destroyed_by_its_members_only() -> None:
    zero, one = ranks(2)
    zero.call("destroy_process_group", group="destroy_process_group", of=[0])
    assert "missing" not in merged(zero, one)["collectives"][0]


@pytest.mark.parametrize(
    ("mine", "yours", "expected"),
    [
        ({}, {}, None),
        ({"name": "barrier"}, {}, "name"),
        ({"name": "broadcast", "root": 0}, {"name": "broadcast", "root": 1}, "root"),
        (
            {"payload": {"t": "int32", "s": [4]}},
            {"payload": {"t": "float32", "s": [4]}},
            "dtype",
        ),
        ({"payload": {"t": "int32", "s": [4]}}, {"payload": {"t": "int32", "s": [5]}}, "shape"),
    ],
)
def test_a_collective_with_different_arguments_is_marked_as_a_mismatch(
    mine: dict, yours: dict, expected: str | None
) -> None:
    zero, one = ranks(2)
    for written, data in ((zero, mine), (one, yours)):
        written.start(
            data.get("name", "all_reduce"), **{k: data[k] for k in data if k != "name"}
        )
    found = merged(zero, one)["collectives"]
    assert [each.get("mismatch") for each in found] == [expected]


def test_calls_outside_of_the_section_are_matched_but_not_shown() -> None:
    zero, one = ranks(2)
    zero.call("all_reduce", visible=False).call("all_reduce")
    one.call("all_reduce", visible=False).call("all_reduce")
    trace = merged(zero, one)
    assert len(trace["operations"]) == 2
    assert [each["parts"] for each in trace["collectives"]] == [[0, 1]]
    assert trace["steps"][-1][0] == 3  # ticks without a visible step have no number


def test_a_trace_without_lines_is_an_error() -> None:
    with pytest.raises(TraceError, match="the section never ran"):
        merged(Recording(0, 1).call("barrier"))


# --- reading the files of the ranks -----------------------------------------------------------


def write_rank(folder: Path, rank: int, *lines: str, **header: object) -> None:
    header = {"format": recorder.FORMAT, "rank": rank, "world": 2, "run": "a", **header}
    header = {"program": PATH, "files": [PATH], "wall": 0} | header
    text = "\n".join([json.dumps(header), *lines])
    (folder / f"rank{rank}.jsonl").write_text(text, "utf-8")


LINE = '["L", 0, 1, "main", "/program.py", 3, {}]'


def test_a_line_that_a_killed_rank_did_not_finish_is_left_out(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, LINE, LINE[:20])
    write_rank(tmp_path, 1, LINE)
    (tmp_path / "rank1.sigterm").write_text("Current thread 0x1 (most recent call first):")
    (tmp_path / "rank0.sigterm").write_text("")
    found = recorder.read_ranks(tmp_path)
    assert [len(each.events) for each in found] == [1, 1]
    assert [each.signal for each in found] == ["", "terminated"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "contains no recording: it has no file rank0.jsonl"),
        (lambda folder: write_rank(folder, 0), "lacks rank1.jsonl. Either this rank never"),
        (
            lambda folder: (write_rank(folder, 0), write_rank(folder, 1, run="b")),
            "contains files of different runs",
        ),
        (
            lambda folder: write_rank(folder, 0, "{", LINE),
            "rank0.jsonl:2: this line is not JSON",
        ),
        (lambda folder: write_rank(folder, 0, format="x"), "rank0.jsonl:1: this is not a rec"),
        (lambda folder: (folder / "rank0.jsonl").touch(), "rank0.jsonl is empty"),
    ],
)
def test_an_invalid_recording_is_reported_with_its_cause(
    tmp_path: Path, prepare, message: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(TraceError, match=re.escape(message)):
        recorder.read_ranks(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a program"),
        (["gone.py"], "the file gone.py does not exist"),
        (["ok.py"], "say how many ranks to start"),
        (["--nproc-per-node=0", "ok.py"], "say how many ranks to start"),
        (["--nproc-per-node=2", "--section=none", "ok.py"], "neither a function `none` nor"),
        (["--nproc-per-node=2", "--functions=none", "ok.py"], "ok.py has no function `none`"),
        (["--nproc-per-node=2", "--section=half", "ok.py"], "has only one of the comments"),
        (["--nproc-per-node=2", "--section=run", "ok.py"], "choose from A.run, B.run"),
        (["--nproc-per-node=2", "--pass=1", "ok.py"], "--pass needs --section"),
        (["--nproc-per-node=2", "--pass=0", "--section=A.run", "ok.py"], "--pass must be 1"),
        (["--nproc-per-node=2", "--max-events=0", "ok.py"], "--max-events must be 1"),
        (["--nproc-per-node=2", "wrong.py"], "wrong.py is not a Python program"),
        (["--merge", "gone"], "gone contains no recording"),
    ],
)
def test_an_invalid_command_is_reported_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    source = """
    class A:
        def run(self): pass
    class B:
        def run(self): pass
    # [start:half]
    """
    (tmp_path / "ok.py").write_text(textwrap.dedent(source), "utf-8")
    (tmp_path / "wrong.py").write_text("if\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TRACE_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TraceError, match=re.escape(message)):
        recorder.main(arguments)


# --- recording programs without torch, on this Python and on a newer one ----------------------


def newer_python() -> str | None:
    """Return a Python from 3.12 on, which has sys.monitoring."""
    if sys.version_info >= (3, 12):
        return sys.executable
    found = [shutil.which(f"python3.{minor}") for minor in (13, 12)]
    found += sorted(map(str, Path.home().glob(".pyenv/versions/3.1[23].*/bin/python")))
    return next((path for path in found if path and _is_newer(path)), None)


def _is_newer(python: str) -> bool:
    """Return whether this command starts, and is Python 3.12 or newer."""
    test = "import sys; sys.exit(sys.version_info < (3, 12))"
    return not subprocess.run(
        [python, "-I", "-c", test], check=False, capture_output=True
    ).returncode


NEWER = newer_python()
PYTHONS = [
    pytest.param(sys.executable, id="this Python"),
    pytest.param(
        NEWER,
        id="sys.monitoring",
        marks=pytest.mark.skipif(NEWER is None, reason="no Python 3.12 or newer"),
    ),
]


def record(folder: Path, source: str, *options: str, python: str, status: int = 0) -> dict:
    """Record a program on one rank without torch, and return its trace."""
    (folder / "program.py").write_text(textwrap.dedent(source).lstrip("\n"), "utf-8")
    (folder / "torch.py").write_text("raise ImportError\n")
    env = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "TRACE_FOLDER": "events", "PYTHONPATH": "."}
    command = [python, str(SCRIPT), *options, "program.py", "one", "two"]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return recorder.merge(recorder.read_ranks(folder / "events"))


def lines(trace: dict) -> list[int]:
    """Return the lines of all line steps."""
    return [step[3] for step in trace["steps"] if step[2] == "line"]


@pytest.mark.parametrize("python", PYTHONS)
def test_lines_of_functions_classes_generators_and_exceptions_are_recorded(
    tmp_path: Path, python: str
) -> None:
    trace = record(
        tmp_path,
        """
        import sys
        class Box:
            size = 3
            def fill(self, x):
                self.x = (
                    x
                )
                return self
        def count(n):
            for i in range(n):
                yield i
        def fails(x):
            try:
                raise ValueError(x)
            except ValueError as error:
                text = str(error)
            finally:
                done = True
            return [
                y
                for y in text
            ]
        box = Box().fill(7)
        total = 0
        for k in count(2):
            total += k
        z = fails("ab")
        sys.exit(0)
        """,
        python=python,
    )
    assert lines(trace) == [
        *(23, 5, 8, 24),
        *(25, 10, 11, 26, 25, 10, 11, 26, 25, 10),  # a generator continues where it was
        *(27, 13, 14, 15, 16, 18, 19),
        28,
    ]
    assert trace["functions"] == [
        ["<module>", 0], ["Box.fill", 0], ["count", 0], ["fails", 0],
    ]  # fmt: skip
    frames = {step[4]: step[5] for step in trace["steps"] if step[2] == "line"}
    assert len(set(frames.values())) == 4  # the generator is one frame
    assert trace["ends"] == [{"how": "finished", "line": 28, "function": 0}]
    values = {}
    for step in trace["steps"]:
        values |= step[6] if step[2] in ("line", "return") and step[4] == 0 else {}
    assert values == {"total": 1, "k": 1, "z": {"l": ["a", "b"]}}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_program_runs_as_usual(tmp_path: Path, python: str) -> None:
    """The program has its own arguments, `__main__`, name and status."""
    record(
        tmp_path,
        """
        import pickle, sys
        class Point: pass
        assert sys.argv == ["program.py", "one", "two"], sys.argv
        assert __name__ == "__main__" and __file__.endswith("program.py")
        assert type(pickle.loads(pickle.dumps(Point()))) is Point
        assert sys.path[0].endswith(__file__.removesuffix("/program.py"))
        sys.exit(7)
        """,
        python=python,
        status=7,
    )


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("ending", "status", "end"),
    [
        ("sys.exit(3)", 3, {"how": "exit", "status": 3}),
        ("sys.exit('text')", 1, {"how": "exit", "status": 1}),
        ("x = 1 / 0", 1, {"how": "raised", "status": "ZeroDivisionError"}),
        ("os._exit(4)", 4, {"how": "killed"}),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, {"how": "killed"}),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, {"how": "terminated"}),
        ("os.kill(os.getpid(), signal.SIGABRT)", -6, {"how": "aborted"}),
    ],
)
def test_the_trace_contains_how_a_program_ended(
    tmp_path: Path, python: str, ending: str, status: int, end: dict
) -> None:
    source = f"import os, signal, sys\nx = 5\n{ending}\n"
    trace = record(tmp_path, source, python=python, status=status)
    assert lines(trace) == [2, 3]
    assert trace["ends"] == [end | {"line": 3, "function": 0}]


@pytest.mark.parametrize("python", PYTHONS)
def test_lines_of_other_threads_and_processes_are_left_out(tmp_path: Path, python: str) -> None:
    trace = record(
        tmp_path,
        """
        import os, threading
        def work(n):
            x = n
            return x
        thread = threading.Thread(target=work, args=(5,))
        thread.start()
        thread.join()
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            work(6)
            os._exit(0)
        work(7)
        """,
        python=python,
    )
    assert lines(trace) == [5, 6, 7, 8, 9, 13, 3, 4]
    assert [step[6] for step in trace["steps"] if step[3] in (3, 4)] == [{"n": 7}, {"x": 7}]


@pytest.mark.parametrize("python", PYTHONS)
def test_no_code_of_the_program_runs_while_values_are_read(tmp_path: Path, python: str) -> None:
    """Every special method of the class, and the properties of its type, end the program."""
    trace = record(
        tmp_path,
        """
        import os
        def stop(*args): os._exit(9)
        class Meta(type):
            __name__ = property(stop)
            __eq__ = __hash__ = None
            __repr__ = stop
        class Evil(metaclass=Meta):
            __repr__ = __str__ = __eq__ = __len__ = __iter__ = __bool__ = __getattr__ = stop
            __getattribute__ = __hash__ = __format__ = __index__ = __float__ = __class__ = stop
        class List(list):
            __iter__ = __len__ = __getitem__ = __repr__ = stop
        class Text(str):
            __str__ = __repr__ = __len__ = __getitem__ = stop
        class Key(int):
            __hash__ = int.__hash__
            __repr__ = __str__ = stop
        def run():
            evil, items, text = Evil(), List([1]), Text("a")
            both = [evil, items, text, {Key(3): evil}]
            return None
        run()
        """,
        python=python,
    )
    found = [step[6] for step in trace["steps"] if step[6] and step[4] == 1]
    dictionary = {"d": [[{"o": "Key"}, {"o": "Evil"}]]}
    assert found == [{"both": {"l": [{"o": "Evil"}, {"o": "List"}, {"o": "Text"}, dictionary]}}]


@pytest.mark.parametrize("python", PYTHONS)
def test_limits_cut_long_values_and_long_loops_with_a_note(tmp_path: Path, python: str) -> None:
    source = """
    text, items, big = "x" * 99, list(range(20)), 10**30
    deep, numbers = [[[[1]]]], {3, 1, 2}
    table = {str(i): float(i) / 3 for i in range(9)}
    for i in range(50):
        a = i
    b = 1
    """
    trace = record(tmp_path, source, "--max-repeats=4", python=python)
    values = {}
    for step in trace["steps"]:
        values |= step[6]
    assert values["text"] == "x" * 60 + "…"
    assert values["items"] == {"l": [0, 1, 2, 3, 4, 5, 6, 7], "n": 20}
    assert values["big"] == {"o": "large int"}
    assert values["deep"] == {"l": [{"l": [{"l": [{"o": "list", "n": 1}]}]}]}
    assert values["numbers"] == {"e": [1, 2, 3]}
    assert values["table"]["n"] == 9 and values["table"]["d"][1] == ["1", 0.333333]
    assert lines(trace) == [1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 6]
    assert trace["notes"] == [
        "rank 0: program.py:4 ran more than 4 times; the rest is cut",
        "rank 0: program.py:5 ran more than 4 times; the rest is cut",
    ]
    trace = record(tmp_path, source, "--max-events=6", python=python)
    assert lines(trace) == [1, 2, 3, 4, 5, 4]
    assert trace["notes"] == ["rank 0: recording stopped after 6 lines"]


@pytest.mark.parametrize("python", PYTHONS)
def test_options_select_sections_passes_functions_and_variables(
    tmp_path: Path, python: str
) -> None:
    source = """
    class Model:
        def __init__(self):
            self.w = 0
        def step(self, x):
            y = x + 1
            self.w += y
            return y
    model, scale = Model(), 2
    def train(n):
        for i in range(n):
            # --8<-- [start:once]
            y = model.step(i)
            z = y
            # --8<-- [end:once]
    train(3)
    train(1)
    """

    def recorded(*options: str) -> list[int]:
        return lines(record(tmp_path, source, *options, python=python))

    assert recorded("--section=step") == [5, 6, 7] * 4
    assert recorded("--section=Model.step", "--pass=2") == [5, 6, 7]
    assert recorded("--section=once", "--pass=3") == [12, 5, 6, 7, 13]
    trace = record(tmp_path, source, "--section=once", "--pass=3", python=python)
    last = trace["steps"][-1]
    assert last[2:4] == ["return", 13] and last[6] == {"z": 3}
    assert recorded("--section=once", "--functions=train") == [12, 13] * 4
    assert recorded("--section=train", "--pass=2") == [10, 12, 5, 6, 7, 13, 10]
    options = ("--section=train", "--pass=2", "--functions=step")
    trace = record(tmp_path, source, *options, python=python)
    assert [step[6] for step in trace["steps"]] == [{"x": 0}, {"y": 1}, {}]
    trace = record(
        tmp_path, source, "--section=step", "--pass=2", "--variables=self.w,y,scale,gone",
        python=python,
    )  # fmt: skip
    changes = [step[6] for step in trace["steps"]]
    assert changes == [{"self.w": 1, "scale": 2}, {"y": 2}, {"self.w": 3}]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_call_of_a_recursive_function_has_its_own_values(
    tmp_path: Path, python: str
) -> None:
    source = "def f(n):\n    m = 10 * n\n    if n:\n        f(n - 1)\n    return m\nf(1)\n"
    steps = record(tmp_path, source, "--section=f", python=python)["steps"]
    assert [(step[3], step[5], step[6]) for step in steps] == [
        (2, 0, {"n": 1}),
        (3, 0, {"m": 10}),
        (4, 0, {}),
        (2, 1, {"n": 0}),
        (3, 1, {"m": 0}),
        (5, 1, {}),
        (5, 0, {}),
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_variable_that_was_deleted_can_come_back(tmp_path: Path, python: str) -> None:
    source = "x = 1\ny = 2\ndel x\nz = 3\nx = 1\nw = 4\n"
    steps = record(tmp_path, source, python=python)["steps"]
    changes = [step[6] for step in steps if step[2] == "line"]
    assert changes == [{}, {"x": 1}, {"y": 2}, {"-": ["x"]}, {"z": 3}, {"x": 1}]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_second_file_is_recorded_if_it_is_named(tmp_path: Path, python: str) -> None:
    helper = "def double(x):\n    y = 2 * x\n    return y\n"
    (tmp_path / "helper.py").write_text(helper, "utf-8")
    source = "from helper import double\nz = double(4)\n"
    assert lines(record(tmp_path, source, python=python)) == [2]
    trace = record(tmp_path, source, "--file=helper.py", python=python)
    assert lines(trace) == [2, 2, 3]
    assert trace["files"] == ["program.py", "helper.py"]
    assert trace["functions"] == [["<module>", 0], ["double", 1]]
    rows = recorder.table(trace, [source, helper])
    assert "<td>2</td><td><code>z = double(4)</code></td>" in rows
    assert "<td>2</td><td><code>y = 2 * x</code></td>" in rows
    assert "<td>3</td><td><code>return y</code></td>" in rows


@pytest.mark.skipif(NEWER is None, reason="no Python 3.12 or newer")
def test_both_ways_of_following_lines_give_the_same_trace(tmp_path: Path) -> None:
    source = """
    import contextlib
    @contextlib.contextmanager
    def managed(n):
        try:
            yield n
        finally:
            n = None
    def f(n):
        with managed(n) as m, contextlib.suppress(KeyError):
            if m > 1 and (
                n > 0
            ):
                raise KeyError
            else:
                x = [i
                     for i in range(n)
                     if i]
        match n:
            case 1:
                y = 1
            case _:
                y = 2
        while True:
            n -= 1
            if n < 0:
                break
            continue
        return (lambda q: q + 1)(y)
    async def g():
        return f(1)
    try:
        g().send(None)
    except StopIteration as stop:
        r = stop.value
    for n in (0, 1, 2): f(n)
    assert r == 2, (
        "text"
    )
    """
    found = []
    for name, python in (("this", sys.executable), ("newer", NEWER)):
        (tmp_path / name).mkdir()
        trace = record(tmp_path / name, source, python=python)
        found.append([step[:] for step in trace["steps"]])
    assert found[0] == found[1]
    assert len(found[0]) > 60


# --- recording programs with torch -------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return request.config.stash[SESSION].launcher or Launcher()


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Return the root of a small book that contains the recorder."""
    (tmp_path / "labs").mkdir()
    (tmp_path / "snippets/t").mkdir(parents=True)
    shutil.copy2(SCRIPT, tmp_path / "labs/rank_trace.py")
    return tmp_path


def program_of(root: Path, source: str) -> Program:
    path = root / "snippets/t/p.py"
    path.write_text(textwrap.dedent(source).lstrip("\n"), "utf-8")
    return Program(root, path)


TENSORS = """
import math
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

class Count(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Count.calls += 1
        return function(*args, **(kwargs or {}))

class Special(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise SystemExit("the recorder called a method of a subclass")

def values(rank, n):
    small = torch.tensor([[1.0, 2.0], [3.0, 1 / 3]], requires_grad=True)
    whole = torch.arange(100_000.0)
    part = whole.chunk(2)[rank]
    empty = torch.empty(3)
    counts = torch.empty(2, dtype=torch.int32)
    nan = torch.tensor([math.nan, math.inf])
    special = [torch.ones(2).as_subclass(Special)]
    freed = torch.ones(50)
    freed.untyped_storage().resize_(0)
    freed.untyped_storage().resize_(200)
    with Count():
        a = torch.ones(2)
        b = 1
    assert Count.calls == 1, Count.calls
    incoming = torch.zeros(2)
    send = dist.isend(
        small.detach()[rank],
        1 - rank, tag=3,
    )
    receive = dist.irecv(incoming, 1 - rank, tag=3)
    c = 2
    receive.wait()
    send.wait()
    rows = torch.zeros(4)
    dist.all_gather_into_tensor(rows, incoming)
    objects = [None] * n
    dist.all_gather_object(objects, rank)
    scattered = torch.zeros(2)
    dist.scatter(scattered, list(rows.view(2, 2)) if rank == 1 else None, src=1)
    return None

dist.init_process_group("gloo")
values(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
"""


def test_tensors_and_calls_of_torch_distributed_are_recorded(
    book: Path, launcher: Launcher
) -> None:
    program = program_of(book, TENSORS)
    settings = TraceSettings("torchrun --nproc-per-node=2 p.py", "", ("values",))
    run = traces.record_trace(program, settings, limit=HANG, launcher=launcher)
    assert run.result.status == 0, run.result.stderr
    trace = run.trace

    history: dict[str, list] = {}
    for step in trace["steps"]:
        if step[1] == 1 and step[2] == "line":
            for name, value in step[6].items():
                history.setdefault(name, []).append(value)
    assert history["small"] == [{"t": "float32", "s": [2, 2], "v": [1, 2, 3, 0.3333]}]
    ((mean, rms, _),) = (each["c"] for each in history["part"])
    assert abs(mean - 75_000) < 100 and abs(rms - 76_370) < 100
    assert history["empty"] == [{"t": "float32", "s": [3], "state": "not written"}]
    assert history["counts"] == [{"t": "int32", "s": [2], "state": "not written"}]
    assert history["nan"] == [{"t": "float32", "s": [2], "v": ["nan", "inf"]}]
    assert history["special"] == [{"l": [{"o": "Special"}]}]
    states = [each.get("state") or each["c"][0] for each in history["freed"]]
    assert states == [1, "freed", "not written"]
    incoming = [each.get("v") or each["state"] for each in history["incoming"]]
    assert incoming == [[0, 0], "in flight", [1, 2]]  # rank 0 sends its first row
    assert history["objects"][-1] == {"l": [0, 1]}

    calls = [each for each in trace["operations"] if each["rank"] == 1]
    assert [each["name"] for each in calls] == [
        *("isend", "irecv", "all_gather_into_tensor", "all_gather_object", "scatter"),
    ]
    texts = program.path.read_text("utf-8").splitlines()
    assert all(f"dist.{each['name']}(" in texts[each["line"] - 1] for each in calls)
    send, _, gather, _, scatter = calls
    assert (send["peer"], send["tag"], send["async"]) == (0, 3, True)
    assert send["payload"] == {
        "t": "float32", "s": [2], "b": 8, "part": [2, 4], "value": {"v": [3, 0.3333]},
    }  # fmt: skip
    assert gather["payload"]["b"] == 8 and scatter["root"] == 1
    assert scatter["payload"]["n"] == 2 and scatter["payload"]["b"] == 16
    assert len(trace["messages"]) == 2
    assert all(
        trace["operations"][s]["rank"] != trace["operations"][r]["rank"]
        for s, r in trace["messages"]
    )
    assert [len(each["parts"]) for each in trace["collectives"]] == [2, 2, 2]
    assert trace["hangs"] == []
    text = "; ".join(recorder.describe_step(trace, step) for step in trace["steps"])
    assert "starts isend to rank 0: float32 2, 8 bytes" in text


MESSAGES = """
import torch
import torch.distributed as dist

def exchange(rank, pair):
    other = 3 - rank
    numbers = torch.arange(4).view(2, 2) + 10 * rank
    received = torch.zeros(2, dtype=torch.int64)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, numbers[1], other, pair),
        dist.P2POp(dist.irecv, received, other, pair),
    ])
    a = 1
    for work in works:
        work.wait()
    rows = [torch.zeros_like(received) for _ in range(2)] if rank == 2 else None
    dist.gather(received, rows, group=pair, group_dst=1)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, pair)
    if rank == 1:
        dist.send_object_list(["a"], 2, pair)
        dist.send(numbers, group=pair, group_dst=1)
    else:
        dist.recv_object_list([None], 1, pair)
        work = dist.irecv(numbers, group=pair)
        work.wait()
    return None

def create():
    return dist.new_group(range(1, 3))

dist.init_process_group("gloo")
dist.barrier()  # rank 0 does not exchange anything, and must not leave before the others have joined
pair = create()
if dist.get_rank():
    exchange(dist.get_rank(), pair)
dist.destroy_process_group()
"""


def test_messages_of_a_smaller_group_join_the_right_ranks(
    book: Path, launcher: Launcher
) -> None:
    """Ranks 1 and 2 are the ranks 0 and 1 of their group. The last receive names no sender."""
    program = program_of(book, MESSAGES)
    settings = TraceSettings("torchrun --nproc-per-node=3 p.py", "", ("create", "exchange"))
    run = traces.record_trace(program, settings, limit=HANG, launcher=launcher)
    assert run.result.status == 0, run.result.stderr
    trace, operations = run.trace, run.trace["operations"]
    ends = [
        [(operations[number]["rank"], operations[number]["name"]) for number in message]
        for message in trace["messages"]
    ]
    assert sorted(ends) == [
        [(1, "isend"), (2, "irecv")],
        [(1, "send"), (2, "irecv")],
        [(1, "send_object_list"), (2, "recv_object_list")],
        [(2, "isend"), (1, "irecv")],
    ]
    for send, receive in trace["messages"]:
        steps = [step for step in trace["steps"] if step[2] not in ("line", "return")]
        started = next(step[0] for step in steps if send in step[4])
        ended = next(
            step[0] for step in steps if step[2] in ("done", "waited") and receive in step[4]
        )
        assert ended > started
    batches = [each for each in operations if each["name"] == "isend"]
    for each in batches:
        first = 10 * each["rank"]
        assert each["peer"] == 3 - each["rank"]
        assert each["payload"] == {
            "t": "int64", "s": [2], "b": 16, "part": [2, 4], "value": {"v": [first + 2, first + 3]},
        }  # fmt: skip
    assert [each["of"] for each in operations if each["name"] == "new_group"] == [[1, 2]] * 3
    assert [each["reduce"] for each in operations if "reduce" in each] == ["max"] * 2
    gathers = [each for each in operations if each["name"] == "gather"]
    assert [(each["root"], each["payload"]["b"]) for each in gathers] == [(2, 16)] * 2
    text = recorder.describe_operation(gathers[0])
    assert text == "gather to rank 2: int64 2, 16 bytes"
    assert recorder.describe_operation({"name": "broadcast", "root": 1}).endswith("from rank 1")
    waits = [step[4] for step in trace["steps"] if step[1:3] == [1, "wait"]]
    assert [[operations[number]["name"] for number in each] for each in waits] == [
        ["isend"],
        ["irecv"],
    ]
    texts = program.path.read_text("utf-8").splitlines()
    assert all("work.wait()" in texts[s[3] - 1] for s in trace["steps"] if s[2][:4] == "wait")
    mine = [step for step in trace["steps"] if step[1] == 1]
    history = [
        (number, step[6]["received"])
        for number, step in enumerate(mine)
        if step[2] == "line" and "received" in step[6]
    ]
    values = [each.get("v") or each["state"] for _, each in history]
    assert values == [[0, 0], "in flight", [22, 23]]
    last_wait = max(number for number, step in enumerate(mine) if step[2] == "waited")
    assert history[-1][0] == last_wait + 1  # and not after the wait for the isend


SPAWNS = """
import sys
import torch.distributed.nn  # imported after init_process_group, it keeps the group alive
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, world, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    dist.all_reduce(torch.ones(1))
    del model  # if DDP is the last object that uses the group, the process can hang
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2, sys.argv[1]), nprocs=2)
"""


def test_the_function_of_spawn_runs_in_the_ranks(book: Path, launcher: Launcher) -> None:
    program = program_of(book, SPAWNS)
    command = f"torchrun --nproc-per-node=2 p.py {book / 'store'}"
    settings = TraceSettings(command, "", ("work",))
    run = traces.record_trace(program, settings, limit=HANG, launcher=launcher)
    assert run.result.status == 0, run.result.stderr
    assert lines(run.trace) == [line for line in (7, 8, 9, 10, 11, 12) for _ in range(2)]
    names = [each["name"] for each in run.trace["operations"] if each["rank"] == 1]
    assert names == ["init_process_group", "all_reduce", "destroy_process_group"]
    ddp, spawn = run.trace["notes"]
    assert ddp.startswith("ranks 0, 1: DistributedDataParallel calls collectives from C++")
    assert spawn.startswith("ranks 0, 1: torch.multiprocessing.spawn started no processes")


@pytest.mark.parametrize(("nprocs", "join"), [(4, True), (2, False)])
def test_processes_of_spawn_that_are_not_the_ranks_are_started_with_a_note(
    monkeypatch: pytest.MonkeyPatch, nprocs: int, join: bool
) -> None:
    started, notes = [], []
    spawn = SimpleNamespace(spawn=lambda *arguments: started.append(arguments))
    monkeypatch.setitem(sys.modules, "torch.multiprocessing.spawn", spawn)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch = SimpleNamespace(multiprocessing=SimpleNamespace())
    calls = SimpleNamespace(recorder=SimpleNamespace(note=notes.append), torch=torch)
    recorder.Calls._replace_spawn(calls)
    torch.multiprocessing.spawn(print, (1,), nprocs, join)
    assert started == [(print, (1,), nprocs, join)]
    assert notes == [
        f"the {nprocs} processes of torch.multiprocessing.spawn were not recorded: "
        f"to record them, use --nproc-per-node={nprocs} and join=True"
    ]


HANGS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
if dist.get_rank() == 0:
    dist.recv(x, 1)
else:
    y = 1
    dist.barrier()
"""


def test_a_program_that_hangs_shows_where_each_rank_is(tmp_path: Path) -> None:
    """Ctrl-C during the hang; the time limit takes the same path."""
    (tmp_path / "p.py").write_text(HANGS, "utf-8")
    env = runner.environment(tmp_path, "cpu") | {"TRACE_FOLDER": str(tmp_path / "events")}
    env["TMPDIR"] = str(tmp_path)
    command = [sys.executable, str(SCRIPT), "--nproc-per-node=2", "--open=p.html", "p.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=runner.use_default_signals,
    )  # fmt: skip

    def is_last(rank: int, name: str) -> bool:
        path = tmp_path / f"events/rank{rank}.jsonl"
        return path.exists() and name in path.read_text("utf-8").rpartition('["S"')[2]

    def in_their_calls() -> bool:
        return is_last(0, '"recv"') and is_last(1, '"barrier"')

    until(in_their_calls, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=EXIT_TIMEOUT * 3)
    assert process.returncode == 0, err
    trace = json.loads((tmp_path / "p.trace.json").read_text("utf-8"))
    ends = [(each["how"], each["line"], each["in"]) for each in trace["ends"]]
    assert ends == [("running", 7, ["recv"]), ("running", 10, ["barrier"])]
    assert trace["hangs"] == [trace["steps"][-1][0]]
    assert "rank 0 was still running at the time limit, at line 7, in recv" in out
    assert recorder.HANG in (tmp_path / "p.html").read_text("utf-8")


# --- the page ----------------------------------------------------------------------------------


def test_the_page_contains_every_step_and_no_text_of_the_program_as_html() -> None:
    zero, one = ranks(2)
    zero.line(2, text="</script><b>").call("send", peer=1)
    trace = merged(zero, one.call("recv", peer=0))
    source = "a < b\n" * 60
    trace["notes"] = ["rank 0: <b>cut"]
    text = recorder.page(trace, [source], viewer="let a = '</script>';")
    assert "<p>rank 0: &lt;b&gt;cut.</p>" in text.partition('id="trace-viewer"')[0]
    assert text.count("<tr") == len(trace["steps"]) + 1  # and the head
    assert "&lt;/script&gt;&lt;b&gt;" in text and "a &lt; b" in text.partition("trace-data")[0]
    assert text.count("</script>") == 3
    data = re.search(r'id="trace-data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data) == json.loads(json.dumps(trace))
    sources = re.search(r'id="trace-sources">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(sources) == [source]


# --- comparing traces --------------------------------------------------------------------------


def example() -> dict:
    zero, one = ranks(2)
    tensor = {"t": "float32", "s": [2], "v": [1.5, 0]}
    large = {"t": "float32", "s": [99], "c": [0.1234, 10, 5]}
    zero.line(2, x=tensor, i=3).line(3, y=large, f=0.25).call(
        "send", peer=1, payload={"t": "float32", "s": [2], "b": 8, "value": {"v": [1.5, 0]}}
    )
    return json.loads(json.dumps(merged(zero, one.call("recv", peer=0))))


def changed(path: list, value: object) -> dict:
    trace = example()
    place = trace
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return trace


SETTINGS = TraceSettings("torchrun --nproc-per-node=2 p.py", "")
FIRST = next(n for n, each in enumerate(example()["steps"]) if each[1:4] == [0, "line", 2])
SECOND = next(n for n, each in enumerate(example()["steps"]) if each[1:4] == [0, "line", 3])
SEND = next(n for n, each in enumerate(example()["operations"]) if each["name"] == "send")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["steps", FIRST, 3],
            7,
            f"p.py:7: step {FIRST}, tick 2, rank 0: the trace has `line` at",
        ),
        (["steps", FIRST, 0], 9, "the trace has tick 2 of rank 0 at this place"),
        (["steps", FIRST, 6, "i"], 4, "`i` was 3, and is now 4"),
        (["steps", FIRST, 6, "i"], True, "`i` was 3, and is now true"),
        (["steps", FIRST, 6, "x", "v", 1], 0.01, "`x` was "),
        (["steps", FIRST, 6, "x", "s"], [1, 2], "`x` was "),
        (["steps", SECOND, 6, "y", "c", 1], 10.1, "`y` was "),
        (["steps", SECOND, 6, "f"], 0.26, "`f` was 0.25, and is now 0.26"),
        (["steps", SECOND, 6, "new"], 1, "`new` changes only in the new run"),
        (["steps", SECOND, 6], {}, "`f` changes only in the trace"),
        (
            ["steps", SECOND, 5],
            8,
            "the trace is in call 0 of this rank, and the new run in call 8",
        ),
        (["functions", 0, 0], "other", "the trace is in `main`, and the new run in `other`"),
        (["messages"], [], "p.py:1: messages was "),
        (["operations", SEND, "peer"], 0, f"p.py:50: operations {SEND} was "),
        (["operations", SEND, "payload", "value", "v", 0], 2, "operations"),
        (["operations", SEND, "payload", "b"], 12, "operations"),
        (["hangs"], [2], "p.py:1: hangs was [], and is now [2]"),
        (["ends", 1, "how"], "aborted", "ends 1 was "),
        (["groups"], [[0]], "groups"),
    ],
)
def test_a_difference_is_reported_with_file_and_line(path: list, value, message: str) -> None:
    found = traces.trace_difference("p.py", example(), changed(path, value), SETTINGS)
    assert message in found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["times"], []),
        (["recorded"], {}),
        (["steps", FIRST, 6, "x", "v", 0], 1.501),
        (["steps", FIRST, 6, "x", "v", 1], 1e-7),
        (["steps", SECOND, 6, "y", "c", 0], 0.1241),
        (["steps", SECOND, 6, "f"], 0.25003),
    ],
)
def test_times_and_rounding_are_not_compared(path: list, value) -> None:
    assert traces.trace_difference("p.py", example(), changed(path, value), SETTINGS) == ""


def test_a_missing_step_is_reported_at_its_line() -> None:
    shorter = example()
    shorter["steps"].pop()
    found = traces.trace_difference("p.py", example(), shorter, SETTINGS)
    count = len(example()["steps"])
    assert found == f"p.py:50: the trace has {count} steps, and the new run {count - 1}"


def test_ends_that_depend_on_timing_are_not_compared() -> None:
    settings = replace(SETTINGS, racing_ends=True)
    other = changed(["ends", 1, "how"], "aborted")
    assert traces.trace_difference("p.py", example(), other, settings) == ""


CONTROL = """
import torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.tensor([1.0 + rank])
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    total = x * 2
    dist.destroy_process_group()
main()
"""


def test_a_trace_is_recorded_compared_and_recorded_again(
    book: Path, launcher: Launcher
) -> None:
    program = program_of(book, CONTROL)
    settings = TraceSettings("torchrun --nproc-per-node=2 p.py", "", ("main",))
    options = CheckOptions(limit=HANG, launcher=launcher)
    with pytest.raises(BookError, match=r"p\.trace\.json does not exist: run `make record"):
        traces.check_trace(program, settings, options)
    assert traces.check_trace(program, settings, replace(options, record=True)).recorded
    first = trace_path(program).read_text("utf-8")
    assert not traces.check_trace(program, settings, options).recorded
    assert not traces.check_trace(program, settings, replace(options, record=True)).recorded
    assert trace_path(program).read_text("utf-8") == first
    program.path.write_text(program.path.read_text().replace("x * 2", "x * 3"), "utf-8")
    expected = r"snippets/t/p\.py:11: step \d+, tick \d+, rank \d: `total` was .*v.* \[2.*"
    with pytest.raises(BookError, match=expected):
        traces.check_trace(program, settings, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "not valid TOML"),
        ('["p.py"]\ncommand = "torchrun --nproc-per-node=2 p.py"', "key: watch"),
        ('["p.py"]\ncommand = "python p.py"\nwatch = ""', "the command must be `torchrun"),
        ('["p.py"]\ncommand = "torchrun --nproc-per-node=2 p.py"\nwatch = ""\nx = 1', "key: x"),
    ],
)
def test_an_invalid_list_of_traces_is_an_error(book: Path, text: str, message: str) -> None:
    (book / "snippets/traces.toml").write_text(text)
    with pytest.raises(BookError, match=re.escape(message)):
        trace_settings(book)


def test_the_recording_command_puts_the_recorder_before_the_program() -> None:
    settings = TraceSettings(
        "A=1 torchrun --nproc-per-node=2 p.py --case x", "", ("a", "b"), 2, ("f",), ("x", "self.y"),
        until_error=True,
    )  # fmt: skip
    assert settings.recording_command() == (
        "A=1 torchrun --nproc-per-node=2 rank_trace.py --section=a --section=b --pass=2 --functions=f "
        "--variables=x,self.y --until-error p.py --case x"
    )
