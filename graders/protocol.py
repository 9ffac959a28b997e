"""The reports that a rank sends to the checker, and the format in which it sends them.

A rank writes each report into a pipe, as one line of JSON. The supervisor reads the lines and
collects them in a `RankReport`. The learner's code runs in the same process as the rank and can
also write into the pipe, so the supervisor ignores every line that is not a valid report.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LONGEST_LINE = 1 << 20  # bytes
STACK_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')  # the format of faulthandler

Judge = Iterator[str]  # yields a sentence for each correct result, and raises Wrong or Blank


class Wrong(Exception):
    """A mistake in the learner's program: a sentence about it, and the name of its hint."""

    def __init__(self, what: str, hint: str):
        super().__init__(what)
        self.what, self.hint = what, hint


class Blank(Exception):
    """A step that the learner has not written yet. The message says what to write."""


@dataclass
class Call:
    """One call of a collective by one rank."""

    name: str
    numel: int
    asynchronous: bool
    phase: str
    detail: str = ""
    sent: float = 0  # the bytes that this rank sends if a ring performs the collective
    members: tuple[int, ...] = ()  # the ranks of the group; empty for the group of all ranks
    returned: bool = False  # the call has returned; if asynchronous, it delivered its result
    waited: bool = False  # this rank called wait() on an asynchronous call
    touched: bool = False  # the tensor was changed between the call and wait()


@dataclass
class RankReport:
    """The reports of one rank, and how the rank ended."""

    facts: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    end: str = "waiting"  # or "done", "wrong", "error", "exited"
    correct_results: list[str] = field(default_factory=list)  # one sentence for each
    error: dict[str, Any] = field(default_factory=dict)  # the last report of the rank
    status: int | None = None  # the exit status of a rank that exited without a report
    output: str = ""  # the beginning of the text that the rank printed
    output_bytes: int = 0  # the length of the whole text that the rank printed
    events: int = 0  # the number of lines that the rank has sent
    partial_line: bytes = b""  # the beginning of a line that has not arrived completely
    stack: list[tuple[str, int]] = field(default_factory=list)  # file, line: innermost first
    line: int | None = None  # the line of the learner's file in which the rank was stopped
    is_busy: bool = False  # the rank used processor time until it was stopped at the limit
    is_closed: bool = False  # the pipe is closed

    def receive(self, descriptor: int) -> None:
        """Read what has arrived in the pipe. Lines that are not valid reports are ignored."""
        try:
            text = os.read(descriptor, LONGEST_LINE)
        except OSError:  # nothing has arrived yet
            return
        self.is_closed = not text
        *lines, self.partial_line = (self.partial_line + text).split(b"\n")
        if len(self.partial_line) > LONGEST_LINE:
            self.partial_line = b""
        for line in lines:
            self.events += 1
            event = None
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
            if frame := STACK_FRAME.match(line.decode(errors="replace")):
                self.stack.append((frame[1], int(frame[2])))
            if self.end == "waiting":
                self._add(event)

    def _add(self, event: Any) -> None:
        """Add one report, if it is valid."""
        match event:
            case {"fact": str(name), "value": value}:
                self.facts[name] = value
            case {"right": str(right)}:
                self.correct_results.append(right)
            case {
                "call": [str(), int(), bool(), str(), str(), int() | float()] as call,
                "members": [*members],
            } if all(isinstance(member, int) for member in members):
                self.calls.append(Call(*call, members=tuple(members)))
            case {"returned": int(number), "touched": bool(touched)}:
                for call in self.calls[number : number + 1]:
                    call.returned, call.touched = True, touched
            case (
                {"end": "done"}
                | {"end": "wrong", "what": str(), "hint": str()}
                | {"end": "error", "doing": str(), "kind": str(), "text": str()}
            ):
                self.end, self.error = event["end"], event


def send(descriptor: int, event: dict[str, Any]) -> None:
    """Write one report into the pipe that leads to the supervisor."""
    text = json.dumps(event).encode() + b"\n"
    while text:
        text = text[os.write(descriptor, text) :]


@dataclass
class Group:
    """All ranks of one run of one step."""

    world: int
    ranks: list[RankReport]
    stopped: str = ""  # why the group was stopped: "asleep", "limit", "failure" or "excess"
    excess: Wrong | None = None  # describes a limit of the sandbox that the group exceeded

    def facts(self, name: str) -> list[Any]:
        """Return the value that each rank reported under this name, in rank order."""
        return [rank.facts.get(name) for rank in self.ranks]
