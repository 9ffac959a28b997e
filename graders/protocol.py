"""Protocol: what a rank reports to the checker, and how these reports are sent.

A rank writes each report, as one line of JSON, into a pipe. The supervisor reads the lines and
collects them in a `RankReport`. The learner's code runs in the same process and can write into
the pipe too, so the supervisor ignores every line that is not a valid report.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LONGEST_LINE = 1 << 20  # bytes
STACK_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')  # as faulthandler writes it

Judge = Iterator[str]  # yields a sentence for each correct result, raises Wrong for a mistake


class Wrong(Exception):
    """A mistake in the learner's program: a sentence about it, and the name of its hint."""

    def __init__(self, what: str, hint: str):
        super().__init__(what)
        self.what, self.hint = what, hint


class Blank(Exception):
    """The learner has not written this step yet."""


@dataclass
class Call:
    """One call of a collective by one rank."""

    name: str
    numel: int
    asynchronous: bool
    phase: str
    detail: str = ""
    sent: float = 0  # bytes that this rank sends, if the collective is done by a ring
    members: tuple[int, ...] = ()  # the ranks of the group; empty for the group of all ranks
    returned: bool = False  # the call returned; asynchronous: its result was delivered
    waited: bool = False  # this rank called wait() on an asynchronous call
    touched: bool = False  # the tensor was changed between the call and wait()


@dataclass
class RankReport:
    """What one rank reported, and how it ended."""

    facts: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    end: str = "waiting"  # or "done", "wrong", "error", "left"
    rights: list[str] = field(default_factory=list)  # the sentences about correct results
    error: dict[str, Any] = field(default_factory=dict)  # the report with which the rank ended
    status: int | None = None  # the exit status, if the rank left without a report
    output: str = ""  # the beginning of what it printed
    printed: int = 0  # bytes
    events: int = 0  # lines received
    unread: bytes = b""  # the beginning of a line that has not arrived completely
    stack: list[tuple[str, int]] = field(default_factory=list)  # file, line: innermost first
    line: int | None = None  # the line of the learner's file in which the rank was stopped
    busy: bool = False  # it used processor time until it was stopped at the limit
    closed: bool = False  # the pipe is closed

    def receive(self, descriptor: int) -> None:
        """Read what has arrived in the pipe. Lines that are not valid reports are ignored."""
        try:
            text = os.read(descriptor, LONGEST_LINE)
        except OSError:  # nothing has arrived yet
            return
        self.closed = not text
        *lines, self.unread = (self.unread + text).split(b"\n")
        if len(self.unread) > LONGEST_LINE:
            self.unread = b""
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
                self.rights.append(right)
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
    """Write one report into the pipe to the supervisor."""
    text = json.dumps(event).encode() + b"\n"
    while text:
        text = text[os.write(descriptor, text) :]


@dataclass
class Group:
    """All ranks of one run of one step."""

    world: int
    ranks: list[RankReport]
    stopped: str = ""  # why it had to be stopped: "asleep", "limit", "failure", "excess"
    excess: Wrong | None = None  # the limit of the sandbox that it exceeded

    def facts(self, name: str) -> list[Any]:
        """Return what each rank reported under this name, in rank order."""
        return [rank.facts.get(name) for rank in self.ranks]
