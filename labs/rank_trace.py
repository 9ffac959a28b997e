"""Record what N ranks of a program do, line by line, and merge it into one ordered trace.

    python rank_trace.py --nproc-per-node=4 program.py ARGS
    python rank_trace.py --nproc-per-node=4 --section train_step --open run.html program.py ARGS

The first command writes `program.trace.json`. The second command records only the function
`train_step`, and also writes one HTML file that a browser can open without the network.

torchrun alone works too. Each rank then writes its events into a folder:

    TRACE_FOLDER=events torchrun --nproc-per-node=4 rank_trace.py program.py ARGS
    python rank_trace.py --merge events

A trace contains the lines that each rank executes in the program's own file, the calls of
torch.distributed, and the local variables. The order of the events does not depend on time. It
follows from the messages: a receive ends after its send has started, and an all-reduce ends
after every rank has started it.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import dis
import faulthandler
import functools
import html
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = "worldsize-trace 1"
WHAT_IT_COSTS = """\
what recording costs: On two busy CPU cores, a recorded line took about 30 µs, and about 0.3 ms
more for each local tensor of a million elements. Other lines of the recorded files needed about
1 µs. On Python 3.11 every call of a Python function is a little slower, also in libraries. A
tensor on a GPU is copied to the CPU when it is read, so the program waits for the GPU at every
line. Do not measure times in a recorded run. An object can stay in memory until the next line.
torch.empty, torch.empty_like and Tensor.new_empty fill their memory with NaN (with the largest
number for integers), so that the trace shows which tensors were not written yet. A storage that
grows from zero bytes is filled, too. --no-fill turns this off.

what the recorder cannot see: lines that run in other threads, for example autograd hooks of a
backward pass on a GPU; other processes that the program starts; calls of torch.distributed from
C++, for example those of DistributedDataParallel; collectives inside of torch.compile; and the
work of NCCL on a GPU, because a call returns when this work has only been queued. Parts of one
statement are one event. Lambdas, comprehensions and class bodies have no events of their own.
"""
SMALL = 16  # the values of tensors with at most this many elements are stored
SAMPLE = 2048  # about this many elements of a larger tensor enter its checksum
ITEMS = 8  # at most this many items of a list, a tuple or a dict are stored
TEXT = 60  # at most this many characters of a string are stored
DEPTH = 3  # lists inside of lists, at most this deep


class TraceError(Exception):
    """Wrong input or a wrong recording; the message is one sentence for the user."""


# --- the source of a recorded file ------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """Lines `first` to `last` of a file, which belong to the code object of `code_line`."""

    name: str
    path: str
    first: int
    last: int
    code_line: int  # co_firstlineno of the function, or 0 for lines outside of functions


class Source:
    """A recorded file: the first line of each statement, its sections and its functions."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.text = Path(path).read_text("utf-8")
            self.tree = ast.parse(self.text, path)
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
        except (SyntaxError, ValueError) as error:
            raise TraceError(f"{path} is not a Python program: {error}") from None
        self.statement: dict[int, int] = {}  # each line → the first line of its statement
        self.ignored: set[int] = set()  # definitions, imports and docstrings
        self.functions: dict[str, Section] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                self._add_statement(node)
        self._add_functions(self.tree, "")

    def _add_statement(self, node: ast.AST) -> None:
        inner = getattr(node, "body", None) or getattr(node, "cases", None)
        first = getattr(node, "lineno", None) or node.pattern.lineno
        if inner:
            start = inner[0].pattern.lineno if isinstance(node, ast.Match) else inner[0].lineno
            last = max(first, start - 1)
        else:
            last = node.end_lineno
        for line in range(first, last + 1):
            self.statement.setdefault(line, first)
        definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        no_event = definition | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal
        if isinstance(node, no_event) or text:
            for decorator in getattr(node, "decorator_list", ()):
                self.ignored.update(range(decorator.lineno, decorator.end_lineno + 1))
            if not inner or inner[0].lineno > first:
                self.ignored.add(first)

    def _add_functions(self, tree: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                body = [each for each in node.body if each.lineno not in self.ignored]
                start = (body or node.body)[0].lineno
                name = f"{prefix}{node.name}"
                self.functions[name] = Section(name, self.path, start, node.end_lineno, first)
                self._add_functions(node, f"{name}.<locals>.")
            elif isinstance(node, ast.ClassDef):
                self._add_functions(node, f"{prefix}{node.name}.")
            else:
                self._add_functions(node, prefix)

    def section(self, name: str) -> Section | None:
        """Return the lines between two markers, or a function; None if there is neither.

        The markers are comments that contain `[start:NAME]` and `[end:NAME]`.
        """
        places = {}
        for number, line in enumerate(self.text.splitlines(), start=1):
            if match := re.search(rf"#.*\[(start|end):{re.escape(name)}\]", line):
                places[match[1]] = number
        if places:
            if len(places) < 2:
                raise TraceError(
                    f"{self.path} has only one of the comments `# [start:{name}]` and "
                    f"`# [end:{name}]`: add the other"
                )
            first, last = places["start"] + 1, places["end"] - 1
            around = [f for f in self.functions.values() if f.first <= first <= f.last]
            inner = max(around, key=lambda each: each.first, default=None)
            return Section(name, self.path, first, last, inner.code_line if inner else 0)
        if name in self.functions:
            return self.functions[name]
        short = [f for full, f in self.functions.items() if full.split(".")[-1] == name]
        if len(short) > 1:
            names = ", ".join(each.name for each in short)
            raise TraceError(f"{self.path} has several functions `{name}`: choose from {names}")
        return short[0] if short else None


def find_section(sources: Iterable[Source], name: str) -> Section:
    """Return the section of the first file that has it. Raise TraceError if no file has it."""
    sources = list(sources)
    for source in sources:
        if section := source.section(name):
            return section
    raise TraceError(
        f"{os.path.basename(sources[0].path)} has neither a function `{name}` nor the comments "
        f"`# [start:{name}]` and `# [end:{name}]`"
    )


# --- values of variables ----------------------------------------------------------------------


class _Skipped:
    """The type of `SKIPPED`, the result for an object whose value is not stored."""


SKIPPED = _Skipped()
_TYPE_NAME = type.__dict__["__name__"].__get__


def number(x: float, digits: int = 4) -> float | int | str:
    """Return a float with this many significant digits; a text for NaN and infinity."""
    if not math.isfinite(x):
        return str(x)
    rounded = float(f"{x:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 2**53 else rounded


def is_one_of(kind: type, *kinds: type) -> bool:
    """Return whether a type is one of these types. A comparison could run its metaclass."""
    return any(kind is each for each in kinds)


class Values:
    """Convert objects to JSON by fixed rules, without calling any method of the program.

    None, bool, int, float and str stay as they are, apart from limits. A tensor is
    `{"t": dtype, "s": shape}` with `"v": [values]` if it is small, else with
    `"c": [mean, root mean square, weighted mean]` of evenly spaced elements. A list is
    `{"l": [...]}`, a tuple `{"u": [...]}`, a set `{"e": [...]}` and a dict
    `{"d": [[key, value], ...]}`, with the whole length `"n"` if it was cut. Any other object
    is `{"o": name of its type}` inside of a list, and is skipped elsewhere.
    """

    def __init__(self, torch: types.ModuleType | None = None) -> None:
        self.torch = torch
        self.in_flight: dict[int, list[tuple[int, int]]] = {}  # operation → memory it writes
        self._weights: dict[int, object] = {}

    def convert(self, x: object, depth: int = 0) -> object:
        """Return the JSON of an object, or `SKIPPED`."""
        kind = type(x)
        if x is None or kind is bool:
            return x
        if kind is int:
            return x if abs(x) < 2**53 else {"o": "large int"}
        if kind is float:
            return number(x, 6)
        if kind is str:
            return x if len(x) <= TEXT else f"{x[:TEXT]}…"
        if kind is range or kind is slice:
            ends = (x.start, x.stop, x.step)
            plain = all(is_one_of(type(end), int, type(None)) for end in ends)
            return f"{kind.__name__}{ends}" if plain else SKIPPED
        if self.torch is not None:
            if kind is self.torch.Size:
                kind, x = tuple, tuple(x)
            elif is_one_of(kind, self.torch.dtype, self.torch.device):
                return str(x).removeprefix("torch.")
            elif is_one_of(kind, self.torch.Tensor, self.torch.nn.Parameter):
                return self.tensor(x)
        if is_one_of(kind, list, tuple, set, frozenset, dict):
            return self._container(x, kind, depth)
        return {"o": _TYPE_NAME(kind)} if depth else SKIPPED

    def _container(self, x: object, kind: type, depth: int) -> object:
        if depth == DEPTH:
            return {"o": kind.__name__, "n": len(x)}
        if kind is dict:
            items = [
                [self.convert(key, DEPTH), self.convert(value, depth + 1)]
                for key, value in list(x.items())[:ITEMS]
            ]
            found = {"d": items}
        elif is_one_of(kind, set, frozenset):
            if not all(is_one_of(type(item), int, str) for item in x):
                return {"o": kind.__name__, "n": len(x)}
            items = sorted(x, key=lambda item: (type(item) is str, item))[:ITEMS]
            found = {"e": items}
        else:
            items = [self.convert(item, depth + 1) for item in x[:ITEMS]]
            found = {"l" if kind is list else "u": items}
        return found | ({"n": len(x)} if len(x) > ITEMS else {})

    def tensor(self, x) -> dict:
        """Return dtype, shape, and the values or a checksum. Nothing is read if a message is
        still being written into the tensor, or if its memory was freed."""
        found = {"t": str(x.dtype).removeprefix("torch."), "s": list(x.shape)}
        try:
            with self.quiet():
                return found | self._contents(x.detach())
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return found | {"state": f"unreadable: {_TYPE_NAME(type(error))}"}

    def _contents(self, x) -> dict:
        torch, count = self.torch, x.numel()
        if x.is_meta or x.layout != torch.strided:
            return {"state": "meta" if x.is_meta else "sparse"}
        low, high = memory(x)
        if high > x.untyped_storage().data_ptr() + x.untyped_storage().nbytes():
            return {"state": "freed"}
        ranges = (each for ranges in self.in_flight.values() for each in ranges)
        if any(low < end and start < high for start, end in ranges):
            return {"state": "in flight"}
        if not x.is_contiguous() and count > 2**20:
            return {"state": "not contiguous"}
        sample = x.reshape(-1)
        if count > SMALL:
            sample = sample[:: max(1, count // SAMPLE) | 1]
        sample = sample.cpu()
        if count and self._is_fill(sample):
            return {"state": "not written"}
        if sample.is_complex():
            sample = sample.abs()
        if count <= SMALL:
            values = sample.tolist()
            return {"v": [v if is_one_of(type(v), bool, int) else number(v) for v in values]}
        sample = sample.to(torch.float64)
        if len(sample) not in self._weights:
            weights = torch.arange(len(sample), dtype=torch.float64, device="cpu") % 97 / 97
            self._weights[len(sample)] = weights
        weighted = (sample * self._weights[len(sample)]).mean()
        sums = sample.mean(), sample.square().mean().sqrt(), weighted
        return {"c": [number(each.item()) for each in sums]}

    def _is_fill(self, sample) -> bool:
        """Return whether all elements have the value that `fill` writes."""
        torch = self.torch
        if sample.is_floating_point() or sample.is_complex():
            return bool(sample.contiguous().view(torch.uint8).eq(255).all())
        return sample.dtype != torch.bool and bool(
            sample.eq(torch.iinfo(sample.dtype).max).all()
        )

    def fill(self, tensor) -> None:
        """Fill new memory: with a NaN that no computation returns, or the largest integer."""
        torch = self.torch
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError), self.quiet():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.untyped_storage().fill_(255)
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hide operations on tensors from autograd and from the modes of the program."""
        from torch.utils._python_dispatch import _disable_current_modes

        torch = self.torch
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            yield


def memory(x) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and the address after the last."""
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


# --- the recorder, which runs in each rank ----------------------------------------------------


@dataclass
class Options:
    """What a rank records."""

    sections: list[str] = field(default_factory=list)
    only_pass: int | None = None
    functions: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    until_error: bool = False
    max_events: int = 5000
    max_repeats: int = 100
    fill: bool = True


class Recorder:
    """Write the events of this rank, one JSON list per line, as soon as they happen.

    `["L", time, frame, function, file, line, changes]` is a line that is about to run, with the
    variables that have changed. "R" is the same for the end of a function. `["S", time, call,
    function, file, line, visible, operations]` is the start of a call of torch.distributed, and
    `["E", time, call, error, peer]` is its end. "A" is the same for a call that returns before
    its operations are complete. "W" and "D" are the start and the end of a wait for earlier
    operations. "X" is the end of the program, and "N" is a note.
    """

    def __init__(self, program: str, options: Options, output: int) -> None:
        self.options, self.output = options, output
        self.sources = {path: Source(path) for path in [program, *options.files]}
        self.sections = [find_section(self.sources.values(), each) for each in options.sections]
        self.thread = threading.get_ident()
        self.values = Values()
        self.active = not self.sections  # whether lines are recorded now
        self.finished = False  # nothing more is recorded, not even calls
        self.lines_finished = False
        self.owner: tuple[int, Section] | None = None  # the frame that entered the section
        self.passes: Counter[str] = Counter()
        self.frames: dict[int, int] = {}  # id of a frame → its number in the trace
        self.frame_count = 0
        self.variables: dict[int, dict[str, object]] = {}  # number of a frame → last values
        self.last_line: dict[int, tuple[str, int]] = {}
        self.repeats: Counter[tuple[str, int]] = Counter()
        self.events = 0
        self.calls = 0
        self.operations = 0
        self.works: dict[int, tuple[weakref.ref, list[int]]] = {}
        self.nested = threading.local()
        self.stop_lines: Callable[[], None] = lambda: None

    # --- writing -------------------------------------------------------------------------

    def write(self, *event: object) -> None:
        """Write an event at once, so that it is not lost if this process is killed."""
        text = json.dumps([event[0], time.monotonic_ns() // 1000, *event[1:]])
        os.write(self.output, f"{text}\n".encode())

    def note(self, text: str) -> None:
        """Write a remark about this recording."""
        self.write("N", text)

    # --- lines ---------------------------------------------------------------------------

    def follows(self, code: types.CodeType) -> bool:
        """Return whether the lines of this code are recorded."""
        if code.co_filename not in self.sources:
            return False
        if code.co_name == "<module>":
            return True
        return code.co_name[0] != "<" and bool(code.co_flags & inspect.CO_OPTIMIZED)

    def on_start(self, frame: types.FrameType) -> None:
        """Forget an earlier frame that had the same address."""
        if old := self.frames.pop(id(frame), None):
            self.variables.pop(old, None)
            self.last_line.pop(old, None)

    def on_line(self, frame: types.FrameType, line: int) -> None:
        """Record that a frame is about to run a line."""
        if self.lines_finished or threading.get_ident() != self.thread:
            return
        code = frame.f_code
        source = self.sources[code.co_filename]
        line = source.statement.get(line, line)
        if line in source.ignored:
            return
        if self.sections:
            self._update_section(frame, line)
        if not self.active or not self._is_selected(code):
            return
        known, place = self._number(frame), (code.co_filename, line)
        if self.last_line.get(known) == place:
            return  # a different part of the same statement, or a loop on one line
        self.last_line[known] = place
        if self._is_cut(*place):
            return
        self.write("L", known, code.co_qualname, *place, self._changes(frame, known))

    def _is_selected(self, code: types.CodeType) -> bool:
        names = self.options.functions
        return not names or code.co_qualname in names or code.co_name in names

    def _is_called_by_selected(self, frame: types.FrameType | None) -> bool:
        """Return whether a frame, or one that called it, runs a function that is recorded."""
        while frame is not None:
            code = frame.f_code
            if code.co_filename in self.sources and self._is_selected(code):
                return True
            frame = frame.f_back
        return False

    def _is_cut(self, path: str, line: int) -> bool:
        """Return whether a limit forbids another event of this line; write a note once."""
        self.repeats[path, line] += 1
        if self.repeats[path, line] > self.options.max_repeats:
            if self.repeats[path, line] == self.options.max_repeats + 1:
                name, limit = os.path.basename(path), self.options.max_repeats
                self.note(f"{name}:{line} ran more than {limit} times; the rest is cut")
            return True
        self.events += 1
        if self.events > self.options.max_events:
            self.note(f"recording stopped after {self.options.max_events} lines")
            self.finish_lines()
            return True
        return False

    def on_return(self, frame: types.FrameType) -> None:
        """Record the variables that the last line of a function has changed."""
        if self.lines_finished or threading.get_ident() != self.thread:
            return
        known = self.frames.get(id(frame))
        if known is not None:
            self._write_last_changes(frame, known)
            self.on_start(frame)
        if self.owner is not None and self.owner[0] == id(frame):
            self._leave_section()

    def _write_last_changes(self, frame: types.FrameType, known: int) -> None:
        if self.active and (changes := self._changes(frame, known)) and known in self.last_line:
            path, line = self.last_line[known]
            self.write("R", known, frame.f_code.co_qualname, path, line, changes)

    def _update_section(self, frame: types.FrameType, line: int) -> None:
        if self.owner is not None:
            _, section = self.owner
            if self.owner[0] != id(frame) or section.first <= line <= section.last:
                return
            if (known := self.frames.get(id(frame))) is not None:
                self._write_last_changes(frame, known)
            self._leave_section()
        code = frame.f_code
        for section in self.sections:
            if (
                section.path == code.co_filename
                and section.first <= line <= section.last
                and section.code_line == (code.co_firstlineno if code.co_flags & 2 else 0)
            ):
                self.passes[section.name] += 1
                self.owner = id(frame), section
                wanted = self.options.only_pass
                self.active = wanted in (None, self.passes[section.name])
                return

    def _leave_section(self) -> None:
        self.owner, self.active = None, False
        self.last_line.clear()  # so that the next pass can begin with the same line
        wanted = self.options.only_pass
        if wanted is not None and all(self.passes[s.name] >= wanted for s in self.sections):
            self.finish_lines()

    def finish_lines(self) -> None:
        """Record no more lines. Calls are still recorded, because other ranks need them."""
        self.active, self.lines_finished = False, True
        self.stop_lines()

    def _number(self, frame: types.FrameType) -> int:
        if id(frame) not in self.frames:
            self.frame_count += 1
            self.frames[id(frame)] = self.frame_count
        return self.frames[id(frame)]

    def _changes(self, frame: types.FrameType, known: int) -> dict[str, object]:
        """Return the variables of a frame that differ from their last values."""
        before = self.variables.setdefault(known, {})
        now = {}
        for name, x in self._selected_variables(frame):
            try:
                value = self.values.convert(x)
            except RuntimeError as error:  # a container that a different thread changes
                value = {"o": _TYPE_NAME(type(error))}
            if value is not SKIPPED:
                now[name] = value
        changes = {
            name: value
            for name, value in now.items()
            if name not in before or not _same(before[name], value)
        }
        if gone := sorted(before.keys() - now.keys()):
            changes["-"] = gone
        self.variables[known] = now
        return changes

    def _selected_variables(self, frame: types.FrameType) -> Iterator[tuple[str, object]]:
        found, wanted = frame.f_locals, self.options.variables
        if not wanted:
            for name, x in list(found.items()):
                if name[:1] not in ("_", "."):
                    yield name, x
            return
        for path in wanted:
            first, *rest = path.split(".")
            x = found.get(first, frame.f_globals.get(first, SKIPPED))
            for name in rest:
                x = attribute(x, name)
            if x is not SKIPPED:
                yield path, x

    # --- calls of torch.distributed --------------------------------------------------------

    def program_frame(self) -> types.FrameType | None:
        """Return the innermost frame of a recorded file that is running."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.sources:
            frame = frame.f_back
        return frame

    def start(self, kind: str, operations: list[dict], earlier: list[int] | None = None) -> int:
        """Record the start of a call ("S") or of a wait ("W"), and return its number."""
        self.calls += 1
        frame = self.program_frame()
        place = (
            [None, None, 0]
            if frame is None
            else [frame.f_code.co_qualname, frame.f_code.co_filename, self._line_of(frame)]
        )
        in_thread = threading.get_ident() == self.thread
        visible = self.active and in_thread and self._is_called_by_selected(frame)
        self.write(kind, self.calls, *place, visible, operations if kind == "S" else earlier)
        return self.calls

    def _line_of(self, frame: types.FrameType) -> int:
        line = frame.f_lineno
        return self.sources[frame.f_code.co_filename].statement.get(line, line)

    def end(self, kind: str, call: int, error: BaseException | None, peer: int | None) -> None:
        """Record the end of a call ("E") or of a wait ("D")."""
        described = None
        if error is not None:
            described = [_TYPE_NAME(type(error)), str(error)[:300]]
        self.write(kind, call, described, peer)
        if error is not None and self.options.until_error and self.active:
            self.write("X", "error", described[0], None)
            self.finish_lines()
            self.finished = True


def _same(a: object, b: object) -> bool:
    """Return whether two values are equal and have equal types (1, True and 1.0 differ)."""
    return a is b or json.dumps(a) == json.dumps(b)


def attribute(x: object, name: str) -> object:
    """Return an attribute from the object's own dict, so that no code of the class runs."""
    try:
        own = object.__getattribute__(x, "__dict__")
    except (AttributeError, TypeError):
        return SKIPPED
    if type(own) is not dict:
        return SKIPPED
    if name in own:
        return own[name]
    for group in ("_parameters", "_buffers", "_modules"):  # of a torch.nn.Module
        members = own.get(group)
        if type(members) is dict and name in members:
            return members[name]
    return SKIPPED


def follow_lines(recorder: Recorder, code: types.CodeType) -> None:
    """Call the recorder for each line of the recorded files; `code` is the main program."""
    if sys.version_info >= (3, 12):
        _monitor(recorder, code)
    else:
        _settrace(recorder)


def _settrace(recorder: Recorder) -> None:
    yields = dis.opmap["YIELD_VALUE"]
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

    def in_file(frame: types.FrameType, event: str, arg: object) -> Callable | None:
        if event == "line":
            recorder.on_line(frame, frame.f_lineno)
        elif event == "return":
            code = frame.f_code
            is_yield = code.co_flags & generators and code.co_code[frame.f_lasti] == yields
            if not is_yield:
                recorder.on_return(frame)
        return in_file

    def on_call(frame: types.FrameType, event: str, arg: object) -> Callable | None:
        code = frame.f_code
        if not recorder.follows(code):
            return None
        if not code.co_flags & generators:
            recorder.on_start(frame)
        return in_file

    recorder.stop_lines = lambda: sys.settrace(None)
    sys.settrace(on_call)


def _monitor(recorder: Recorder, code: types.CodeType) -> None:
    monitoring = sys.monitoring
    tool = next((n for n in (3, 4, 2, 1, 5, 0) if monitoring.get_tool(n) is None), None)
    if tool is None:
        raise TraceError(
            "all tools of sys.monitoring are in use: stop the debugger or profiler"
        )
    monitoring.use_tool_id(tool, "rank_trace.py")
    events = monitoring.events
    local = events.LINE | events.PY_RETURN

    def on_start(code: types.CodeType, offset: int) -> object:
        if not recorder.follows(code):
            return monitoring.DISABLE
        if threading.get_ident() == recorder.thread:
            recorder.on_start(sys._getframe(1))
        monitoring.set_local_events(tool, code, local)
        return None

    def on_line(code: types.CodeType, line: int) -> None:
        recorder.on_line(sys._getframe(1), line)

    def on_return(code: types.CodeType, offset: int, value: object) -> None:
        recorder.on_return(sys._getframe(1))

    def on_unwind(code: types.CodeType, offset: int, error: BaseException) -> None:
        if code.co_filename in recorder.sources:
            recorder.on_return(sys._getframe(1))

    def stop() -> None:
        monitoring.set_events(tool, 0)
        for each in (events.PY_START, events.LINE, events.PY_RETURN, events.PY_UNWIND):
            monitoring.register_callback(tool, each, None)
        monitoring.free_tool_id(tool)
        recorder.stop_lines = lambda: None

    monitoring.register_callback(tool, events.PY_START, on_start)
    monitoring.register_callback(tool, events.LINE, on_line)
    monitoring.register_callback(tool, events.PY_RETURN, on_return)
    monitoring.register_callback(tool, events.PY_UNWIND, on_unwind)
    monitoring.set_events(tool, events.PY_START | events.PY_UNWIND)
    monitoring.set_local_events(tool, code, local)
    recorder.stop_lines = stop


# --- torch.distributed ------------------------------------------------------------------------

# the parameters of each function that name the tensors it reads, and those it writes
TENSORS = {
    "all_reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_single": ("input_tensor", "output_tensor"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("scatter_list", "tensor"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter_single": ("input", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": ("input", "output"),
    "send": ("tensor", ""),
    "isend": ("tensor", ""),
    "recv": ("", "tensor"),
    "irecv": ("", "tensor"),
}
FROM_ROOT = {"broadcast", "scatter", "broadcast_object_list", "scatter_object_list"}
TO_ROOT = {"reduce", "gather", "gather_object"}
FROM_ALL = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all"),
    *("all_to_all_single", "all_gather_object", "barrier", "monitored_barrier"),
}
SENDS = {"send", "isend", "send_object_list"}
RECEIVES = {"recv", "irecv", "recv_object_list"}
SETUP = {"init_process_group", "new_group", "destroy_process_group", "split_group"}
WRAPPED = [*FROM_ROOT, *TO_ROOT, *FROM_ALL, *SENDS, *RECEIVES, *SETUP]


class Calls:
    """Replace the functions of torch.distributed by functions that record and call them."""

    def __init__(self, recorder: Recorder, torch: types.ModuleType) -> None:
        self.recorder, self.torch, self.dist = recorder, torch, torch.distributed
        recorder.values.torch = torch
        self.c10d = torch.distributed.distributed_c10d
        for name in sorted(WRAPPED):
            if original := getattr(self.dist, name, None):
                self._replace(name, self._wrap(name, original))
        self._replace("batch_isend_irecv", self._wrap_batch(self.dist.batch_isend_irecv))
        work = self.dist.Work
        work.wait = self._wrap_wait(work.wait)
        if recorder.options.fill:
            for owner, name in (
                (torch, "empty"),
                (torch, "empty_like"),
                (torch.Tensor, "new_empty"),
            ):
                setattr(owner, name, self._wrap_empty(getattr(owner, name)))
            storage = torch.UntypedStorage
            storage.resize_ = self._wrap_resize(storage.resize_)

    def _replace(self, name: str, wrapper: Callable) -> None:
        setattr(self.dist, name, wrapper)
        setattr(self.c10d, name, wrapper)

    def _is_passive(self) -> bool:
        """Return whether this call is part of a recorded call, or nothing is recorded."""
        return self.recorder.finished or getattr(self.recorder.nested, "inside", False)

    def _wrap(self, name: str, original: Callable) -> Callable:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            if self._is_passive():
                return original(*args, **kwargs)
            try:
                arguments = signature.bind(*args, **kwargs)
                arguments.apply_defaults()
                operation = self.describe(name, arguments.arguments)
            except Exception:  # wrong arguments: the original prints the best message
                operation = None
            if operation is None:
                return original(*args, **kwargs)
            written = self.tensors(arguments.arguments.get(TENSORS.get(name, ("", ""))[1]))
            return self._run(original, args, kwargs, [operation], [written])

        return call

    def _wrap_batch(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(p2p_op_list: list) -> object:
            if self._is_passive():
                return original(p2p_op_list)
            try:
                found = [self.describe_p2p(each) for each in p2p_op_list]
                written = [
                    [each.tensor] if operation["name"] == "irecv" else []
                    for each, operation in zip(p2p_op_list, found, strict=True)
                ]
            except Exception:  # wrong arguments
                return original(p2p_op_list)
            return self._run(original, (p2p_op_list,), {}, found, written)

        return call

    def _run(
        self,
        original: Callable,
        args: tuple,
        kwargs: dict,
        operations: list[dict],
        written: list,
    ) -> object:
        """Record the start, call the function, record the end; remember works."""
        recorder, values = self.recorder, self.recorder.values
        ids = []
        for operation, tensors in zip(operations, written, strict=True):
            recorder.operations += 1
            operation["id"] = recorder.operations
            ids.append(recorder.operations)
            values.in_flight[recorder.operations] = [memory(each) for each in tensors]
        call = recorder.start("S", operations)
        recorder.nested.inside = True
        result, error = None, None
        try:
            result = original(*args, **kwargs)
            return result
        except BaseException as raised:
            error = raised
            raise
        finally:
            recorder.nested.inside = False
            works = self._works(result)
            if works:
                for number_, each in enumerate(works):
                    group = [ids[number_]] if len(works) == len(ids) else ids
                    self._remember(each, group)
            elif error is None:
                self._complete(ids)
            peer = result if type(result) is int and operations[0]["name"] == "recv" else None
            if not recorder.finished:
                recorder.end("A" if works else "E", call, error, peer)
            del error, result, works

    def _works(self, result: object) -> list:
        found = result if type(result) is list else [result]
        return [each for each in found if isinstance(each, self.dist.Work)]

    def _remember(self, work: object, ids: list[int]) -> None:
        key = id(work)
        self.recorder.works[key] = (
            weakref.ref(work, lambda _: self.recorder.works.pop(key, None)),
            ids,
        )

    def _complete(self, ids: Iterable[int]) -> None:
        for each in ids:
            self.recorder.values.in_flight.pop(each, None)

    def _wrap_wait(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def wait(work: object, *args: object, **kwargs: object) -> object:
            _, ids = self.recorder.works.get(id(work), (None, None))
            if ids is None or self._is_passive():
                return original(work, *args, **kwargs)
            call = self.recorder.start("W", [], ids)
            error = None
            try:
                result = original(work, *args, **kwargs)
                self._complete(ids)
                return result
            except BaseException as raised:
                error = raised
                raise
            finally:
                self.recorder.end("D", call, error, None)
                del error

        return wait

    def _wrap_empty(self, original: Callable) -> Callable:
        torch, values = self.torch, self.recorder.values

        @functools.wraps(original)
        def empty(*args: object, **kwargs: object) -> object:
            tensor = original(*args, **kwargs)
            plain = type(tensor) is torch.Tensor and kwargs.get("out") is None
            if plain and not tensor.is_meta and tensor.layout == torch.strided:
                values.fill(tensor)
            return tensor

        return empty

    def _wrap_resize(self, original: Callable) -> Callable:
        values = self.recorder.values

        @functools.wraps(original)
        def resize_(storage: object, size: int) -> object:
            before = storage.nbytes()
            result = original(storage, size)
            if before == 0 and size > 0 and storage.device.type != "meta":
                with values.quiet():
                    storage.fill_(255)  # these bytes are a NaN in every floating-point dtype
            return result

        return resize_

    # --- describing a call -----------------------------------------------------------------

    def describe(self, name: str, arguments: dict) -> dict | None:
        """Return an operation: its name, group, root or peer, and the tensors that it sends."""
        if name in SETUP:
            ranks = arguments.get("ranks")
            world = int(os.environ.get("WORLD_SIZE", "1"))
            members = sorted(ranks) if type(ranks) is list else list(range(world))
            return {"name": name, "group": name, "ranks": list(range(world)), "of": members}
        group = arguments.get("group")
        members = self.members(group)
        if members is None:
            return None
        found = {"name": name, "group": self.group_name(group), "ranks": members}
        if arguments.get("async_op"):
            found["async"] = True
        if name in FROM_ROOT:
            found["root"] = self._rank(group, arguments.get("src"), arguments.get("group_src"))
        elif name in TO_ROOT:
            found["root"] = self._rank(group, arguments.get("dst"), arguments.get("group_dst"))
        elif name in SENDS:
            found["peer"] = self._rank(group, arguments.get("dst"), arguments.get("group_dst"))
        elif name in RECEIVES:
            ends = arguments.get("src"), arguments.get("group_src")
            found["peer"] = None if ends == (None, None) else self._rank(group, *ends)
        if name in SENDS | RECEIVES:
            found["tag"] = arguments.get("tag", 0)
            found["async"] = name in ("isend", "irecv")
        if name in ("all_reduce", "reduce", *(n for n in FROM_ALL if "reduce_" in n)):
            found["reduce"] = str(arguments.get("op")).rpartition(".")[2].lower()
        if name == "all_to_all_single" and arguments.get("output_split_sizes") is not None:
            splits = arguments["input_split_sizes"], arguments["output_split_sizes"]
            found["splits"] = [[int(each) for each in part or ()] for part in splits]
        reads, writes = TENSORS.get(name, ("", ""))
        tensors = self.tensors(arguments.get(reads)) or self.tensors(arguments.get(writes))
        return found | self.payload(tensors, name not in RECEIVES)

    def describe_p2p(self, op: object) -> dict:
        name, group = op.op.__name__, op.group
        found = {"name": name, "group": self.group_name(group), "ranks": self.members(group)}
        found |= {"peer": self._rank(group, None, op.group_peer), "tag": op.tag, "async": True}
        return found | self.payload([op.tensor], name == "isend")

    def tensors(self, x: object) -> list:
        """Return the tensors of an argument, which is a tensor, a list or None."""
        found = x if type(x) in (list, tuple) else [x]
        return [each for each in found if isinstance(each, self.torch.Tensor)]

    def payload(self, tensors: list, with_value: bool) -> dict:
        """Return dtype, shape, number and bytes of tensors, and the value of the first one.

        `part` is the first element of a view and the number of elements of the tensor that it
        is a part of.
        """
        if not tensors:
            return {}
        first = tensors[0]
        found = {"t": str(first.dtype).removeprefix("torch."), "s": list(first.shape)}
        found["b"] = sum(each.numel() * each.element_size() for each in tensors)
        if len(tensors) > 1:
            found["n"] = len(tensors)
            shapes = [list(each.shape) for each in tensors]
            if any(shape != shapes[0] for shape in shapes):
                found["shapes"] = shapes[: 2 * ITEMS]
        with contextlib.suppress(RuntimeError, NotImplementedError):
            whole = first.untyped_storage().nbytes() // first.element_size()
            if len(tensors) == 1 and 0 < first.numel() < whole and first.is_contiguous():
                found["part"] = [first.storage_offset(), whole]
        if with_value and len(tensors) == 1:
            value = self.recorder.values.convert(first)
            found["value"] = {key: value[key] for key in ("v", "c", "state") if key in value}
        return {"payload": found}

    def _group(self, group: object) -> object:
        return self.dist.group.WORLD if group is None else group

    def members(self, group: object) -> list[int] | None:
        """Return the global ranks of a group; None if this rank is not a member."""
        group = self._group(group)
        if group is None or not isinstance(group, self.dist.ProcessGroup):
            return None
        return list(self.dist.get_process_group_ranks(group))

    def group_name(self, group: object) -> str:
        """Return a name that is the same on all members of the group."""
        return str(self._group(group).group_name)

    def _rank(self, group: object, rank: int | None, group_rank: int | None) -> int:
        if group_rank is not None:
            return self.dist.get_global_rank(self._group(group), group_rank)
        return 0 if rank is None else rank


def record_rank(program: str, arguments: list[str], options: Options, folder: Path) -> None:
    """Run a program in this process as torchrun would run it, and record it."""
    path = os.path.abspath(program)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    source = Source(path)
    code = compile(source.text, path, "exec", dont_inherit=True)
    options.files = [os.path.abspath(each) for each in options.files]
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"rank{rank}{end}" for end in (".jsonl", ".sigterm", ".crash")]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    output, at_sigterm, at_crash = (os.open(each, flags) for each in files)
    recorder = Recorder(path, options, output)
    try:
        import torch.distributed

        if torch.distributed.is_available():
            Calls(recorder, torch)
        release = torch.__version__
    except ImportError:  # a program without torch has lines and variables, too
        release = None
    wall = time.time_ns() // 1000 - time.monotonic_ns() // 1000
    header = {"format": FORMAT, "rank": rank, "world": world, "program": path, "wall": wall}
    header["run"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    header["files"] = list(recorder.sources)
    header["python"], header["torch"] = ".".join(map(str, sys.version_info[:3])), release
    os.write(output, f"{json.dumps(header)}\n".encode())
    if hasattr(faulthandler, "register"):
        # written by C code, so it also works while this rank waits in a call
        faulthandler.register(signal.SIGTERM, file=at_sigterm, all_threads=False, chain=True)
    faulthandler.enable(file=at_crash, all_threads=False)

    def stop_in_child() -> None:
        recorder.finished = recorder.lines_finished = True
        recorder.write = lambda *_: None
        recorder.stop_lines()

    os.register_at_fork(after_in_child=stop_in_child)
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = path, __builtins__
    sys.modules["__recorder__"], sys.modules["__main__"] = sys.modules["__main__"], main
    sys.argv, sys.path[0] = [program, *arguments], os.path.dirname(path)
    error = None
    follow_lines(recorder, code)
    try:
        exec(code, main.__dict__)
    except BaseException as raised:
        error = raised
        raise
    finally:
        recorder.finish_lines()
        if not recorder.finished:
            recorder.finished = True
            recorder.write("X", *_describe_end(error, recorder))


def _describe_end(error: BaseException | None, recorder: Recorder) -> tuple:
    """Return how a program ended: a word, a status or the type of an error, and a line."""
    if error is None:
        return "finished", 0, None
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return ("finished" if status == 0 else "exit"), status, None
    line, trace = None, error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path in recorder.sources:
            line = recorder.sources[path].statement.get(trace.tb_lineno, trace.tb_lineno)
        trace = trace.tb_next
    return "raised", _TYPE_NAME(type(error)), line


# --- merging the ranks ------------------------------------------------------------------------


@dataclass
class Rank:
    """The recording of one rank."""

    header: dict
    events: list[list]
    signal: str = ""  # "terminated" or "aborted", if a signal ended it


def read_ranks(folder: Path) -> list[Rank]:
    """Read the files that the ranks of one run have written.

    Raise TraceError if a rank is missing, or if the files are from different runs.
    """
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise TraceError(
            f"{folder} contains no recording: it has no file rank0.jsonl. Record a program "
            f"with `TRACE_FOLDER={folder} torchrun --nproc-per-node=2 rank_trace.py program.py`"
        )
    ranks = {}
    for path in paths:
        lines = path.read_text("utf-8").splitlines()
        try:
            header, *events = map(json.loads, lines)
        except ValueError:
            if not lines:
                raise TraceError(f"{path} is empty: this rank failed at its start") from None
            header, events = json.loads(lines[0]), []
            for number_, line in enumerate(lines[1:], start=2):
                try:
                    events.append(json.loads(line))
                except ValueError:
                    if number_ < len(lines):  # only the last line may be incomplete
                        raise TraceError(f"{path}:{number_}: this line is not JSON") from None
        if header.get("format") != FORMAT:
            raise TraceError(f"{path}:1: this is not a recording of {FORMAT}")
        ends = {".sigterm": "terminated", ".crash": "aborted"}
        dumps = {word: path.with_suffix(end) for end, word in ends.items()}
        found = [w for w, p in dumps.items() if p.exists() and p.stat().st_size]
        ranks[header["rank"]] = Rank(header, events, found[-1] if found else "")
    headers = [rank.header for rank in ranks.values()]
    if len({(each["world"], each["run"], each["program"]) for each in headers}) > 1:
        raise TraceError(f"{folder} contains files of different runs: remove the older files")
    if missing := sorted(set(range(headers[0]["world"])) - ranks.keys()):
        names = ", ".join(f"rank{rank}.jsonl" for rank in missing)
        raise TraceError(
            f"{folder} lacks {names}. Either this rank never started, or it ran on a different "
            "machine: copy its file"
        )
    return [ranks[rank] for rank in sorted(ranks)]


@dataclass
class Operation:
    """One rank's part of a collective, or one end of a message."""

    rank: int
    data: dict
    start: tuple[int, int]  # rank and index of the event that started it
    visible: bool
    line: int
    error: bool = False
    ended: bool = False


def operation_ids(event: list) -> list[int]:
    """Return the ids of the operations that an event "S" starts, or that "W" waits for."""
    return [data["id"] for data in event[7]] if event[0] == "S" else event[7]


def match(ranks: list[list[list]]) -> tuple[dict, list[dict], list[dict]]:
    """Match the operations of all ranks.

    Return the operations by rank and id, the messages and the collectives. The k-th send from
    one rank to another is matched with the k-th receive in the same group with the same tag.
    The k-th collective of a rank in a group is matched with the k-th of every other rank.
    """
    operations: dict[tuple[int, int], Operation] = {}
    peers: dict[tuple[int, int], int] = {}  # the source of a receive from any rank
    for rank, events in enumerate(ranks):
        started: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            if event[0] in "SW":
                _, _, call, _, _, line, visible, found = event
                if event[0] == "S":
                    for data in found:
                        operations[rank, data["id"]] = Operation(
                            rank, data, (rank, index), visible, line
                        )
                started[call] = operation_ids(event)
            elif event[0] in "ED":
                for id_ in started.get(event[2], ()):
                    operation = operations[rank, id_]
                    operation.ended, operation.error = True, event[3] is not None
                    if len(event) > 4 and event[4] is not None:
                        peers[rank, id_] = event[4]
    sends, receives, groups = defaultdict(list), defaultdict(list), defaultdict(dict)
    counts: Counter[tuple] = Counter()
    for key, operation in operations.items():
        data, rank = operation.data, operation.rank
        if data["name"] in SENDS:
            sends[data["group"], data["tag"], rank, data["peer"]].append(key)
        elif data["name"] in RECEIVES:
            source = peers.get(key, data["peer"])
            receives[data["group"], data["tag"], source, rank].append(key)
        else:
            # the members of a group can have the same name in different subgroups
            group = data["group"], tuple(data["ranks"])
            groups[*group, counts[*group, rank]][rank] = key
            counts[*group, rank] += 1
    messages = []
    for place in sorted(sends.keys() | receives.keys(), key=str):
        sent, received = sends.get(place, []), receives.get(place, [])
        for number_ in range(max(len(sent), len(received))):
            messages.append(
                {
                    "send": sent[number_] if number_ < len(sent) else None,
                    "receive": received[number_] if number_ < len(received) else None,
                }
            )
    collectives = []
    for (_, members, _), parts in groups.items():
        found = {"members": list(members), "parts": dict(sorted(parts.items()))}
        is_setup = operations[next(iter(parts.values()))].data["name"] in SETUP
        if (missing := sorted(set(members) - parts.keys())) and not is_setup:
            found["missing"] = missing
        if difference := _mismatch([operations[key].data for key in found["parts"].values()]):
            found["mismatch"] = difference
        collectives.append(found)
    return operations, messages, collectives


def _mismatch(parts: list[dict]) -> str:
    """Return how the parts of a collective differ: in "name", "root", "dtype" or "shape"."""
    if len({part["name"] for part in parts}) > 1:
        return "name"
    if len({part.get("root") for part in parts}) > 1:
        return "root"
    equal = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"}
    if parts[0]["name"] in equal:
        payloads = [part.get("payload", {}) for part in parts]
        if len({each.get("t") for each in payloads}) > 1:
            return "dtype"
        if len({str(each.get("s")) for each in payloads}) > 1:
            return "shape"
    return ""


NOT_RECORDED = -1, 0  # an event of a rank whose recording had stopped before


def causes(
    operations: dict, messages: list[dict], collectives: list[dict], stopped: set[int]
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Return the events that must come before the end of each operation, other than its own.

    `stopped` are the ranks whose recording stopped at an error. What other ranks receive from
    them later is not in the trace, so the other ranks wait for it forever.
    """
    before: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for message in messages:
        if message["send"] and message["receive"]:
            before[message["receive"]].add(operations[message["send"]].start)
        elif message["receive"] and operations[message["receive"]].data["peer"] in stopped:
            before[message["receive"]].add(NOT_RECORDED)
    for collective in collectives:
        parts = collective["parts"]
        if collective.get("mismatch") in ("name", "root"):
            continue
        for rank, key in parts.items():
            data = operations[key].data
            if data["name"] in FROM_ALL:
                sources = set(data["ranks"])
                if data.get("splits") and data["splits"][1]:  # only ranks that send some rows
                    counts = zip(data["ranks"], data["splits"][1], strict=True)
                    sources &= {source for source, count in counts if count}
            elif data["name"] in FROM_ROOT:
                sources = {data["root"]}
            elif data["name"] in TO_ROOT and data["root"] == rank:
                sources = set(data["ranks"])
            else:
                sources = set()
            before[key] |= {operations[parts[r]].start for r in sources & parts.keys() - {rank}}
            if (sources - parts.keys()) & stopped:
                before[key].add(NOT_RECORDED)
    return before


def order(
    ranks: list[list[list]], before: dict
) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Give each event a tick, and return the ticks after which no rank could continue.

    The ticks are a Lamport clock. In each tick, every rank executes its next event, if all
    events that must come before it have earlier ticks. A call that ends with an error ends only
    when no other event is possible on any rank, because a time-out is longer than all other
    waits. Events that need an event that was not recorded get no tick. Raise TraceError if the
    events contradict each other.
    """
    ticks: dict[tuple[int, int], int] = {}
    hangs: list[int] = []
    position = [0] * len(ranks)
    needed = [_causes_of_events(rank, events, before) for rank, events in enumerate(ranks)]
    tick = 0
    while any(position[rank] < len(events) for rank, events in enumerate(ranks)):
        enabled, failing = [], []
        for rank, events in enumerate(ranks):
            if (index := position[rank]) == len(events):
                continue
            event = events[index]
            if event[0] in "EDA" and event[3] is not None:
                failing.append(rank)
            elif all(cause in ticks for cause in needed[rank].get(index, ())):
                enabled.append(rank)
        if not enabled:
            if not failing:
                waiting = [needed[rank].get(index, ()) for rank, index in enumerate(position)]
                if any(NOT_RECORDED in each for each in waiting):
                    break
                raise TraceError(_cycle(ranks, position, needed, ticks))
            hangs.append(tick)
            enabled = failing
        tick += 1
        for rank in enabled:  # the loop above looked only at earlier ticks
            ticks[rank, position[rank]] = tick
            position[rank] += 1
    return ticks, hangs


def _causes_of_events(rank: int, events: list[list], before: dict) -> dict[int, set]:
    """Return, for each event that ends operations, the events that must come before it."""
    started: dict[int, list[int]] = {}
    found = {}
    for index, event in enumerate(events):
        if event[0] in "SW":
            started[event[2]] = operation_ids(event)
        elif event[0] in "ED":
            keys = ((rank, id_) for id_ in started.get(event[2], ()))
            found[index] = set().union(*(before.get(key, ()) for key in keys))
    return found


def _cycle(ranks: list[list[list]], position: list[int], needed: list, ticks: dict) -> str:
    lines = []
    for rank, events in enumerate(ranks):
        if position[rank] < len(events):
            open_ = [c for c in needed[rank].get(position[rank], ()) if c not in ticks]
            waits = ", ".join(
                f"event {index} of rank {other}" for other, index in sorted(open_)
            )
            lines.append(f"event {position[rank]} of rank {rank} needs {waits}")
    return "the recording contradicts itself, because its events form a cycle: " + "; ".join(
        lines
    )


def merge(recordings: list[Rank], limit: float | None = None) -> dict:
    """Merge the recordings of all ranks into one trace (docs/contributing/recording.md)."""
    ranks = [[e for e in each.events if e[0] != "N"] for each in recordings]
    _drop_after_error(ranks)
    stopped = {
        rank for rank, events in enumerate(ranks) if events[-1:] and events[-1][2] == "error"
    }
    operations, messages, collectives = match(ranks)
    ticks, hangs = order(ranks, causes(operations, messages, collectives, stopped))
    if len(ticks) < sum(map(len, ranks)):  # remove the events that came after the errors
        for rank, events in enumerate(ranks):
            del events[sum(1 for key in ticks if key[0] == rank) :]
        operations, messages, collectives = match(ranks)
    writer = _TraceWriter(recordings, ranks, operations, ticks)
    program = recordings[0].header["program"]
    trace = {"format": FORMAT, "program": os.path.basename(program), "ranks": len(ranks)}
    trace["files"] = [os.path.basename(path) for path in recordings[0].header["files"]]
    steps = writer.steps()
    if not any(step[2] == "line" for step in steps):
        raise TraceError(
            "no rank recorded a line: the section never ran. Choose a different --section, "
            "--pass or --functions"
        )
    trace["functions"], trace["groups"] = writer.functions, writer.groups
    trace["operations"] = writer.listed_operations()
    numbers = writer.numbers
    trace["messages"] = sorted(
        [numbers.get(m["send"]), numbers.get(m["receive"])]
        for m in messages
        if m["send"] in numbers and m["receive"] in numbers
    )
    trace["collectives"] = writer.listed_collectives(collectives)
    trace["hangs"] = sorted({h for tick in hangs if (h := writer.new_tick(tick))})
    trace["ends"] = [
        writer.end_of(rank, each.signal, limit) for rank, each in enumerate(recordings)
    ]
    if any(writer.open_call(rank) for rank in range(len(ranks))):
        trace["hangs"] = sorted({*trace["hangs"], steps[-1][0]})
    trace["notes"] = writer.notes()
    trace["steps"] = steps
    trace["times"] = writer.times()
    headers = recordings[0].header
    trace["recorded"] = {"python": headers["python"], "torch": headers["torch"]}
    return trace


def _drop_after_error(ranks: list[list[list]]) -> None:
    """Remove what follows the event X. If X is an error of a call, also remove its end.

    With `--until-error`, the trace shows where each rank is before the error. Which rank
    receives an error, and which rank is ended by torchrun before, depends on time.
    """
    for events in ranks:
        ends = [index for index, event in enumerate(events) if event[0] == "X"]
        if ends:
            first = ends[0]
            del events[first + 1 :]
            if events[first][2] == "error":
                del events[first - 1]


class _TraceWriter:
    """Convert the events in the order of their ticks to the steps of a trace."""

    def __init__(self, recordings: list[Rank], ranks: list, operations: dict, ticks: dict):
        self.recordings, self.ranks = recordings, ranks
        self.operations, self.ticks = operations, ticks
        self.functions: list[list] = []
        self.groups: list[list[int]] = []
        self.visible = sorted(
            (key for key in ticks if self._is_visible(*key)), key=lambda k: (ticks[k], k[0])
        )
        used = sorted({ticks[key] for key in self.visible})
        self.renumbered = {tick: number_ for number_, tick in enumerate(used, start=1)}
        self.numbers = self._number_operations()
        self.frames: dict[tuple[int, int], int] = {}

    def _is_visible(self, rank: int, index: int) -> bool:
        event = self.ranks[rank][index]
        if event[0] in "LR":
            return True
        if event[0] in "SW":
            return event[6]
        if event[0] in "ED":
            return self._start_of(rank, event[2]) is not None
        return False

    @functools.cached_property
    def _starts(self) -> dict[tuple[int, int], list]:
        return {
            (rank, event[2]): event
            for rank, events in enumerate(self.ranks)
            for event in events
            if event[0] in "SW" and event[6]
        }

    def _start_of(self, rank: int, call: int) -> list | None:
        return self._starts.get((rank, call))

    def _number_operations(self) -> dict[tuple[int, int], int]:
        """Number the operations that a step starts or waits for, in the order of the steps."""
        found: dict[tuple[int, int], int] = {}
        for rank, index in self.visible:
            event = self.ranks[rank][index]
            if event[0] in "SW":
                for id_ in operation_ids(event):
                    found.setdefault((rank, id_), len(found))
        return found

    def new_tick(self, tick: int) -> int | None:
        """Return the number of the last visible tick up to this one."""
        return max((new for old, new in self.renumbered.items() if old <= tick), default=None)

    def _function(self, name: str | None, path: str | None) -> int:
        files = self.recordings[0].header["files"]
        entry = [name, files.index(path) if path in files else 0]
        if entry not in self.functions:
            self.functions.append(entry)
        return self.functions.index(entry)

    def _group(self, ranks: list[int]) -> int:
        if ranks not in self.groups:
            self.groups.append(ranks)
        return self.groups.index(ranks)

    def steps(self) -> list[list]:
        """Return the steps: `[tick, rank, kind, line, ...]`."""
        found = []
        for rank, index in self.visible:
            event = self.ranks[rank][index]
            start = [self.renumbered[self.ticks[rank, index]], rank]
            if event[0] in "LR":
                _, _, frame, name, path, line, changes = event
                count = sum(1 for known in self.frames if known[0] == rank)
                frame = self.frames.setdefault((rank, frame), count)
                kind = "line" if event[0] == "L" else "return"
                found.append([*start, kind, line, self._function(name, path), frame, changes])
                continue
            opening = event if event[0] in "SW" else self._start_of(rank, event[2])
            numbers = [self.numbers[rank, id_] for id_ in operation_ids(opening)]
            kind = {"S": "call", "E": "done", "W": "wait", "D": "waited"}[event[0]]
            if event[0] == "S" and self._is_async(rank, index):
                kind = "start"
            step = [*start, kind, opening[5], numbers]
            if event[0] in "ED" and event[3] is not None:
                step.append(event[3][0])
            found.append(step)
        return found

    def _is_async(self, rank: int, index: int) -> bool:
        call = self.ranks[rank][index][2]
        following = self.ranks[rank][index + 1 : index + 2]
        return bool(following) and following[0][0] == "A" and following[0][2] == call

    def listed_operations(self) -> list[dict]:
        """Return the operations in the order of their numbers."""
        found = []
        for key in self.numbers:
            operation, data = self.operations[key], dict(self.operations[key].data)
            entry = {"rank": operation.rank, "name": data.pop("name"), "line": operation.line}
            if data["group"] in SETUP:
                entry["of"] = data["of"]
            entry["group"] = self._group(data["ranks"])
            for name in ("root", "peer", "tag", "reduce", "splits", "async", "payload"):
                value = data.get(name)
                if value is not None and value is not False and (name, value) != ("tag", 0):
                    entry[name] = value
            if not operation.visible:
                entry["outside"] = True
            if not operation.ended or operation.error:
                entry["end"] = "error" if operation.error else "never"
            found.append(entry)
        return found

    def listed_collectives(self, collectives: list[dict]) -> list[dict]:
        """Return the collectives with at least one visible part."""
        found = []
        for each in collectives:
            parts = [self.numbers[key] for key in each["parts"].values() if key in self.numbers]
            if parts:
                entry = {"group": self._group(each["members"]), "parts": parts}
                found.append(entry | {k: each[k] for k in ("missing", "mismatch") if k in each})
        return sorted(found, key=lambda each: each["parts"])

    def end_of(self, rank: int, by_signal: str, limit: float | None) -> dict:
        """Return how the recording of a rank ended, its last line, and the call it was in."""
        events = self.ranks[rank]
        last = next((e for e in reversed(events) if e[0] in "LRSW" and e[3] is not None), None)
        end = events[-1] if events and events[-1][0] == "X" else None
        found: dict[str, object] = {}
        if end:
            found["how"] = end[2]
            if end[3]:
                found["status"] = end[3]
        else:
            found["how"] = "running" if limit is not None else by_signal or "killed"
            if any(event[0] == "X" for event in self.recordings[rank].events):
                found["how"] = "waiting"
        if last is not None:
            found["line"] = last[5]
            found["function"] = self._function(last[3], last[4])
        if open_ := self.open_call(rank):
            ids = operation_ids(open_)
            found["in"] = [self.operations[rank, id_].data["name"] for id_ in ids]
        return found

    def open_call(self, rank: int) -> list | None:
        """Return the start of the call in which the recording of a rank ends."""
        events = self.ranks[rank]
        ended = {event[2] for event in events if event[0] in "EDA"}
        open_ = [event for event in events if event[0] in "SW" and event[2] not in ended]
        return open_[-1] if open_ else None

    def notes(self) -> list[str]:
        """Return the notes of all ranks; a note that several ranks share appears once."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(self.recordings):
            for event in each.events:
                if event[0] == "N":
                    found[event[2]].append(rank)
        return [f"{_rank_list(ranks)}: {text}" for text, ranks in sorted(found.items())]

    def times(self) -> list[int]:
        """Return the real time of each step in microseconds since the first one."""
        walls = [each.header["wall"] for each in self.recordings]
        # on one machine all ranks share a monotonic clock, and wall clocks differ by noise
        same = max(walls) - min(walls) < 10_000
        found = [
            self.ranks[rank][index][1] + (0 if same else walls[rank])
            for rank, index in self.visible
        ]
        return [each - min(found) for each in found]


def _rank_list(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def trace_text(trace: dict) -> str:
    """Return a trace as JSON, with one line for each step and each operation."""
    lines = []
    for key, value in trace.items():
        if key in ("steps", "operations", "collectives", "ends") and value:
            items = ",\n".join(_compact(each) for each in value)
            lines.append(f"{json.dumps(key)}:[\n{items}\n]")
        else:
            lines.append(f"{json.dumps(key)}:{_compact(value)}")
    return "{" + ",\n".join(lines) + "}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# --- describing a trace -----------------------------------------------------------------------


def show(value: object) -> str:
    """Return a stored value as text."""
    if isinstance(value, dict):
        if "t" in value:
            shape = "×".join(map(str, value["s"])) or "scalar"
            if "v" in value:
                return f"{value['t']} {shape}: {', '.join(map(show, value['v']))}"
            detail = value.get("state") or f"mean {value['c'][0]}"
            return f"{value['t']} {shape} ({detail})"
        more = ["…"] if value.get("n", 0) > ITEMS else []
        if "l" in value:
            return f"[{', '.join([*map(show, value['l']), *more])}]"
        if "u" in value:
            return f"({', '.join([*map(show, value['u']), *more])})"
        if "e" in value:
            return f"{{{', '.join([*map(show, value['e']), *more])}}}"
        if "d" in value:
            items = [f"{show(key)}: {show(x)}" for key, x in value["d"]]
            return f"{{{', '.join([*items, *more])}}}"
        return f"<{value['o']}>"
    return str(value)


def describe_operation(operation: dict) -> str:
    """Return an operation as text: `send to rank 1: float32 4, 16 bytes`."""
    text = operation["name"]
    if "peer" in operation:
        word = "to" if operation["name"] in SENDS else "from"
        text += f" {word} rank {operation['peer']}"
    if "root" in operation:
        text += (
            f" {'from' if operation['name'] in FROM_ROOT else 'to'} rank {operation['root']}"
        )
    if payload := operation.get("payload"):
        shape = "×".join(map(str, payload["s"])) or "scalar"
        count = f"{payload['n']} tensors of " if "n" in payload else ""
        text += f": {count}{payload['t']} {shape}, {payload['b']:,} bytes"
    return text


def describe_step(trace: dict, step: list) -> str:
    """Return what happens in a step as text."""
    if step[2] in ("line", "return"):
        changes = dict(step[6])
        gone = [f"{name} deleted" for name in changes.pop("-", ())]
        return "; ".join([*(f"{name} = {show(x)}" for name, x in changes.items()), *gone])
    texts = [describe_operation(trace["operations"][number_]) for number_ in step[4]]
    word = {
        "call": "enters",
        "start": "starts",
        "done": "leaves",
        "wait": "waits for",
        "waited": "has waited for",
    }[step[2]]
    ending = f", which raises {step[5]}" if len(step) > 5 else ""
    return f"{word} {' and '.join(texts)}{ending}"


def describe_end(trace: dict, rank: int) -> str:
    """Return how a rank ended as text."""
    end = trace["ends"][rank]
    place = f"line {end['line']}" if end.get("line") else "an unknown line"
    if end.get("in"):
        place += f", in {' and '.join(end['in'])}"
    text = {
        "finished": "reached the end of the program",
        "exit": f"exited with status {end.get('status')}",
        "raised": f"ended with {end.get('status')}",
        "error": f"received {end.get('status')} at {place}",
        "waiting": f"was waiting at {place} when an error ended the recording",
        "killed": f"was killed, or called os._exit, at {place}",
        "terminated": f"was ended by SIGTERM at {place}",
        "aborted": f"was aborted at {place}",
        "running": f"was still running at the time limit, at {place}",
    }[end["how"]]
    return f"rank {rank} {text}"


HANG = "From here on, no rank makes progress."


def table(trace: dict, sources: list[str]) -> str:
    """Return all steps as an HTML table, which needs no JavaScript."""
    lines = [source.splitlines() for source in sources]
    rows = []
    steps = trace["steps"]
    files = [0] * trace["ranks"]  # the file in which each rank is
    for step, following in zip(steps, [*steps[1:], [None]], strict=True):
        if step[2] in ("line", "return"):
            files[step[1]] = trace["functions"][step[4]][1]
        file = files[step[1]]
        text = lines[file][step[3] - 1].strip() if 0 < step[3] <= len(lines[file]) else ""
        cells = [*map(str, (step[0], step[1], step[3])), f"<code>{html.escape(text)}</code>"]
        cells.append(html.escape(describe_step(trace, step)))
        kind = "" if step[2] == "line" else f' class="{step[2]}"'
        rows.append(f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        if following[0] != step[0] and step[0] in trace["hangs"]:
            rows.append(f'<tr class="hang"><td>{step[0]}</td><td colspan="4">{HANG}</td></tr>')
    ends = "".join(
        f"<li>{html.escape(describe_end(trace, rank))}</li>" for rank in range(trace["ranks"])
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in trace["notes"])
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("tick", "rank", "line", "source", "what happens")
    )
    return (
        f'<table class="trace">\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + f"\n</tbody>\n</table>\n<ul>{ends}{notes}</ul>\n"
    )


PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 1rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .1rem .6rem; text-align: left;
vertical-align: top; border-bottom: 1px solid #8885 }} tr.hang td {{ font-weight: bold }}
code {{ white-space: pre-wrap }} details {{ overflow-x: auto }}
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>A tick is a moment in logical time. Steps in one tick do not depend on each other.</p>
<div id="trace-viewer"></div>
<details{open}><summary>All steps as a table</summary>
{table}</details>
<script type="application/json" id="trace-data">{data}</script>
<script type="application/json" id="trace-sources">{sources}</script>
{viewer}</body>
</html>
"""


def page(trace: dict, sources: list[str], viewer: str = "", style: str = "") -> str:
    """Return one HTML page with the trace, the sources, the table of all steps and the viewer.

    `viewer` is the text of the viewer's module, and `style` its style sheet.
    """
    viewer = viewer.replace("</script", r"<\/script")
    script = f'<script type="module">{viewer}</script>\n'
    return PAGE.format(
        title=html.escape(f"{trace['program']} on {trace['ranks']} ranks"),
        style=style,
        open="" if viewer else " open",
        table=table(trace, sources),
        data=_compact(trace).replace("</", "<\\/"),
        sources=_compact(sources).replace("</", "<\\/"),
        viewer=script if viewer else "",
    )


def viewer_files() -> list[str]:
    """Return the viewer's module and its style sheet. `VIEWER` contains both."""
    return zlib.decompress(base64.b85decode("".join(VIEWER.split()))).decode().split("\0")


# --- the command ------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="rank_trace.py",
        description=__doc__,
        epilog=WHAT_IT_COSTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--nproc-per-node", type=int, metavar="N", help="start N ranks with torchrun")
    add(
        "--section",
        action="append",
        default=[],
        metavar="NAME",
        help="record only while this function runs, or the lines between the comments "
        "`# [start:NAME]` and `# [end:NAME]`, with all functions that they call (repeatable)",
    )
    add(
        "--pass",
        type=int,
        dest="only_pass",
        metavar="K",
        help="record only the K-th time that the section runs",
    )
    add("--functions", metavar="A,B", help="record only the lines of these functions")
    add(
        "--variables",
        metavar="A,B",
        help="record only these variables; `self.live` is an attribute that the object itself "
        "stores, and a name that is not local is a global variable",
    )
    add(
        "--file",
        action="append",
        default=[],
        metavar="FILE.py",
        help="also record the lines of this file, which the program imports (repeatable)",
    )
    add(
        "--until-error",
        action="store_true",
        help="stop recording a rank when a call of torch.distributed raises an error",
    )
    add("--max-events", type=int, default=5000, metavar="N", help="lines of a rank (5000)")
    add("--max-repeats", type=int, default=100, metavar="N", help="events of one line (100)")
    add("--no-fill", action="store_true", help="do not fill the memory of torch.empty")
    add(
        "--limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end a program that hangs after this time, and show where each rank is (600)",
    )
    add("--output", metavar="FILE.trace.json", help="default: the name of the program")
    add(
        "--open",
        metavar="FILE.html",
        help="also write one self-contained HTML file. Recording slows the program down, and "
        "some events are invisible: the end of this text says which",
    )
    add("--merge", metavar="FOLDER", help="merge what the ranks have written to this folder")
    add("program", nargs="?", help="your program, and after it its arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return found


def rank_options(args: argparse.Namespace) -> Options:
    """Return the options of a rank from the command line."""

    def names(text: str | None) -> list[str]:
        return [name.strip() for name in (text or "").split(",") if name.strip()]

    for name in ("only_pass", "max_events", "max_repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise TraceError(
                f"--{name.replace('only_', '').replace('_', '-')} must be 1 or more"
            )
    if args.only_pass and not args.section:
        raise TraceError("--pass needs --section, because it counts how often a section runs")
    return Options(
        sections=args.section,
        only_pass=args.only_pass,
        functions=names(args.functions),
        variables=names(args.variables),
        files=args.file,
        until_error=args.until_error,
        max_events=args.max_events,
        max_repeats=args.max_repeats,
        fill=not args.no_fill,
    )


def run_torchrun(args: argparse.Namespace, words: list[str], folder: Path) -> float | None:
    """Run torchrun with this file in each rank.

    Return the seconds after which the program was ended, by the time limit or by Ctrl-C; None
    if it ended by itself.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={args.nproc_per_node}", os.path.abspath(__file__), *words]
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # handled like Ctrl-C
    start = time.monotonic()
    process = subprocess.Popen(
        command, env=os.environ | {"TRACE_FOLDER": str(folder)}, start_new_session=True
    )
    try:
        process.wait(args.limit)
        return None
    except subprocess.TimeoutExpired:
        print(f"rank_trace.py: the time limit of {args.limit:g} s has ended", file=sys.stderr)
    except KeyboardInterrupt:
        print("rank_trace.py: the program is ended, and its trace is written", file=sys.stderr)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, first with SIGTERM, then SIGKILL
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return time.monotonic() - start


def write_trace(args: argparse.Namespace, folder: Path, limit: float | None) -> None:
    """Merge the recordings of a folder, and write the trace and the HTML file."""
    recordings = read_ranks(folder)
    trace = merge(recordings, limit)
    program = recordings[0].header["program"]
    output = Path(args.output or f"{Path(program).stem}.trace.json")
    output.write_text(trace_text(trace), "utf-8")
    kinds = Counter(step[2] for step in trace["steps"])
    print(f"{output}: {len(trace['steps'])} steps, {kinds['line']} of them lines", end="")
    print(f", {len(trace['messages'])} messages, {len(trace['collectives'])} collectives")
    for rank in range(trace["ranks"]):
        if trace["ends"][rank]["how"] != "finished":
            print(f"  {describe_end(trace, rank)}")
    for note in trace["notes"]:
        print(f"  {note}")
    if args.open:
        try:
            sources = [Path(p).read_text("utf-8") for p in recordings[0].header["files"]]
        except OSError as error:
            raise TraceError(f"--open needs the program: {error}") from None
        Path(args.open).write_text(page(trace, sources, *viewer_files()), "utf-8")
        print(f"{args.open}: open this file in a browser")


def main(arguments: list[str]) -> int:
    """Run the command, in a terminal or in a rank; return the exit status."""
    args = parser().parse_args(arguments)
    options = rank_options(args)
    if args.merge:
        write_trace(args, Path(args.merge), None)
        return 0
    if not args.program:
        raise TraceError("name a program: python rank_trace.py --nproc-per-node=4 program.py")
    if not os.path.exists(args.program):
        raise TraceError(f"the file {args.program} does not exist")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and args.nproc_per_node is None:
        folder = Path(os.environ.get("TRACE_FOLDER", f"{Path(args.program).stem}.events"))
        record_rank(args.program, args.arguments, options, folder)
        return 0
    if args.nproc_per_node is None or args.nproc_per_node < 1:
        raise TraceError(
            "say how many ranks to start: python rank_trace.py --nproc-per-node=4 "
            f"{args.program}. Or start this file with torchrun"
        )
    check_names([os.path.abspath(each) for each in [args.program, *args.file]], options)
    words = arguments[:]
    for name in ("--nproc-per-node", "--open", "--output", "--limit"):
        words = _without(words, name, len(words) - len(args.arguments) - 1)
    with contextlib.ExitStack() as stack:
        folder = os.environ.get("TRACE_FOLDER")
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trace-"))
        limit = run_torchrun(args, words, Path(folder))
        write_trace(args, Path(folder), limit)
    return 0


def check_names(paths: list[str], options: Options) -> None:
    """Raise TraceError if a file, a section or a function does not exist."""
    sources = [Source(path) for path in paths]
    for name in options.sections:
        find_section(sources, name)
    for name in options.functions:
        if not any(source.section(name) for source in sources):
            raise TraceError(f"{os.path.basename(paths[0])} has no function `{name}`")


def _without(words: list[str], name: str, end: int) -> list[str]:
    """Remove an option and its value from the words before index `end`."""
    found, index = [], 0
    while index < len(words):
        if index < end and words[index] == name:
            index += 2
            continue
        if not (index < end and words[index].startswith(f"{name}=")):
            found.append(words[index])
        index += 1
    return found


# --- the viewer -------------------------------------------------------------------------------

# The text of docs/assets/instruments/trace_viewer.js and trace_viewer.css of the book, without
# comments, compressed, and written in base 85. `python docs/assets/pack_viewer.py` writes it.
VIEWER = """
c-qB%TXW;cmF7O{SD?^k79fEXNnNT6Es$$_dd432#o=n(8^L0mAPGruQ3OpuC22@T%#)vYcVc#4ys!HgW}o(9_Mh}G+4
G%~nMi=3s@oH>GoCJic|DnV^4#*|$yv6{3ny75cgeDdydu5{;-Xlm)B7UHqs=bpbUNuWPv?mr4K_zJE`Ar!lW3mJ?op{
TTPJamd?8Js1^?(eTYFq|w2beP;A6bFPsZ7`^Ud^+$*ky5xpkW4UfGlHqs>m96hGBzURl*Y;@o((N|tl4gy?9U6!+^T!
*jF~;5OHbEL#V6@ndk8E`xP;znt%)uj1lX0sqH5TSnY$H2C{>-+bN4sl(+>di~_7&ZHcbqQR_hk|Ibx62w6~D`*ZRsT0
rVUm*3%G%u26vi8a{s{Z}z+bmi}gAu{|)Ac%j@|J$*L-Le+{#X^6E#kXX<Snv?;4!#OZ*Hl50-O^Fcn?Xzqpw>`@>#q}
=24M67SZ4xgYDsm-&rTCMLbKq(^2bc;Eqpkf+U{ZMgwo-w%pKdQ9qx%fqRATMS;%&K5y{(%6&zjf4a};$Ic(2;#hb2$1
Gh^j}O^;o<{@z(^(|To8tDWKa`&+;<>ILPF`*#C10cjN;hcte3ctGuD^5Q<=oL_;=-fs-9+_+wVp@oc=>_4;XkUIL2o$
u4SrKi0mkEOsv2?zrE|ilJ2tJ|(5hpimiKqlWNoHOep-|D{%77W^4`xkXFLDorBAa)6QhToE`RofJ@9DoessS~iy%+`A
sI)bk^6V)&)lGYe0<g&2P5|@^{danex-i(y5n)@Iwh=?^>`da_!#xZ{%|;YjH0MFbf?r0tp@(&ZqOTRw5AFDnnCuw$5V
9ccZ%%S>tvSZX}0vve1G@;zT1tvFE@aUhQHI8@<@odcmnK?SG{ike5gj_J@Pu0zjluIa--&pe=-!lp2_@{Fz%b{i2p_d
{-aigVV{(hIgeI>+EC==<wmE;IBATzOY0`B+{G(T)zxV7fB(hxw_BIcd=al*y$<=e$uiH@de8Eo7ZEM)V$o_9PpgCoi{
wR-n=yrPTP?S6X$d96w1nOIBir%ZMcEJmcVGU}n6i2*Zi!lK&{F7roh=hLDAxB$=zdH8y1{k4$mz%5;*YyKN*-6)nl`_
h;Os#|v^h$zJq-aG+iq>JUX)<@3Pb8p3n_Dl6ZhqY6L;<;6!1nugoi`58Po`<M?JwR$uF^w6FSAtQ7ie40<S~cFGS+~-
Cexabkl6VyKJ4vm^#bBo8id){vZFBI}S(VAYLq@v`Fr9A&dOUh=6JE!D~==Y*7sWXs>{QZuD|PttogG{%$<sqW29&J-g
_=ztaP|w=tP^e&`bYlV*~JW;S*+G~AsOotH&hEy<jB^6W10yitG=j)|({uR${WuyCxL@p(EcoQJfyb&A`>0k5D*#zg66
F;(7(GSDXG%%g9=apLx&vj@`HsDXBZ^;V6`LgN>5soCb<s5{lXG@BV(q>!Y7<b<dsGVFt<unU=7Y}Nq%T@o)Hy@WHH>_
4P)T1?f3;xH;}ojv3xM>DYP_61iN%HHUF9EV`qYK1?la;IFz=V?k6*`Q2ea_KSW23~s7^X1#HYi85vn5)tUaklJ%e+V;
B8<QFCaEL!PztrEKV;5BCM?p5kCO|KQ{2~6DIZyL<Bq>GNDp|(`@rr0*K09EwB!SKI-xH$IO3<g_c^`;V5w*AKNlTtd@
rPU^cf*4%5`+5aQaSpYq#uc;g)T;tYl6Ot*9CR5ik}u)JXaX;Lj4?ekgXTnRdq(!={hfhhudsHyjK<FlFW`xN>03eeoy
P-#le&iIX<2SJ*FWjHi)<Zt8w+kt^Wi?wp%X3-^0oEI=j=%%qck?7iR$k5KsmuFo)hbw7*HlK_ik-GGztiw?K>L!PkdP
g6;Cj3~mW-Ykuqqzd*I~fQbcz;7md@sF6&wr<)F_GMd|!ZBz)mnL-*^pyUUWIQ1dLED91uewNYD;-$t;=imMn_^HQ8{}
Nc0<uwb-$UD?LLpLp(8*o?n;$1dR7E!S#InBsl8xplwd0-GP4_NZsNihY%A|@8k1r-G#3Skog-r*ub3gsg-8IApbhL<#
Ec8&N=7+!9T+!XLOyHZ4_;S&l%aRMMT51XB(4HfC^0|Omkrv(d=X9=m}BDh}D9)gC%ko$}kC;~QtQto!Ef6DT@J^&t}t
+9;1bA7*@F=Qh&IUYffq!CM*&gwqD^)?JZ**Dq<%Z99}4Hd6KQ|MJ>XLmRnhe+D-rfM$Z%g9F)k<51?Z4eA^Hz7!=|Gl
yKo|-mPDWO3{<Ws%jFrqb*F`$X(dIt)oOA`9bv^yZJjw)K6Taq*v*4z^3SrbFXN());a0+!VGuJd}JG;GkR#~fun3(3g
(ja|)qPbnkI+Giap1kBDU?Yq`e#uNc;7pKO`uS3Eo)K{+jr@=^QLtmf<_`G}k?2Ym&&p7kK}q`a5f`$4lX62lcb46)pu
@YS_m8A>y#Nrc7Ih1`)s$(q6an!BX?bP@L(`?^a~qN{cu-V3;O2rN3(?>Z|8y{UA*T<4YbQMcAIT>@nm%hgf}NE^pv{)
fZh59uPv|<dhGag+9p0w|34>UskGKs&NnXQ{f0ej1?1lo;u3W~uB+ug;QYB@``lk}Sz)l0jD<OOxc^f2!47<m<8ZUJ*m
8X6MF0=4pmC-EB>v^hbhjC32U3<XjfT)8a(nBjp!=y9IX}yb!*)8<z<iUBD6kcsy*9)S&RM?`Gv=_f1^!Kc#5QI%F1na
C4LYyeNU(S<jsQTNj>Zx-Z=Uz&>;R{}jRPD>{wyaATKs3e*tsiOBC)yIpw4~)+7Mxr|00tr8g;mRVWQHXabV0Km9*~Mi
(ovJ<?oYLz#^4B=&t3zv=zz(rGDElvCFd}pD8;zHGc~b+3Tdlai*XvLAhnph?ueN0e8a#O3sOoTw<&bBQUqf+kSy}xF3
odNB#AKNlNTyr32A3hB1ljXOj!gFSF^<5Ju1tC7!JFo1f4}Nhdo~x1Xb0PCG!m#sQ_AoG5}~qRsu+`c?g9_qjSA8Yfng
*sN(w|)f&?4MS62v>`NE;v>V{P@fBvVx)G`?M0)^#TCFlU&YzaER;z;kN5jzuqX;XhJQtvs2IHALNHP)Buuj)WcP8Duo
Hbr{5v^E=2{aoD&`+TELtr6BpvE7nzoINHe?x4`4-|7(0#Qj8B|l1$O;TW9V$D5q@C6~3md{NQYf(xJOGs`*1-7&Ol4!
@H2jvGia>drR4kn3+CviZOzUmI8yl7D&(vCP~L`B9@rN}H^gcMZg1+N=$psfD1h`h?YnJH6)=ACNq3z(%3V9TZyS0mky
lFycu1h$Wnen~Cs-M|o24_A?qj$Tk%MFuxmb$6N&5hlW9$#}GN349_Uqp@C;47?lNMBI^x(5)7l9U#3rF_ge4g<3=483
{WfN`Y|`kntj{w-ww`;W-yVqm;*pso@Buag<QI(dSt&WoVL?O9|SNo`czKyd=DY6fKm?lBMHfz%w&lC$SMgUuXfe)zUw
;aBYN0Ymp;fG_?|JL5?`R!?4@fS1t-eMq}i^ye?dE5OsaKuChaM-bwE$S>(ya(7;ut8)epj{F|*>El=|FtTCgc4C$B{C
cc$~%+hbA+f}ym{G&<=^EjDLp4yM`I*q3bqL3Tr6G{_v+irM6vM#7U;Q?)-{B{?q6;NeN)m_s7)KO4OwE1S~nX&;lWvw
?K4M2EDcRneFNs&0FIG-<#Z3$ejU~OLFIqB`P2vEpqAxoKri)yKQW6wuzfms1o)3Xawm@{G9qi*R-En>U3-5yqe7z=4t
>awpAlL?2?{1zGma9&#{0BxP@kg%8XCXPh<(ga44BaiiG$?_#nF>jUwF<D^K_%R%rq;UwVvoUKg?$_}`oi^d$^5En<Z+
*YqLUq{EAhyY4TKM_<>1p7;?77wf%Xg`y#zc7RWWrKTzl}duGagjNLxLI#ka-3<!^0_GP+O}KMe@jI;j(TuWnK0qA0^5
H9AfO+wt)jHF+odvw@k}4B{kL>8jZ8e3TK+!+%Mg|;zAaEZNva+ME*VP3k#MK88m&>$PjV|1~mfAb~wSm$y}_((j1IA(
(Z&ND9x$ng!`64R&KIhXX|jHq{X?Nb%aHw=?+OT%&FmYv2aw9OE^Lte=b?_?FO_ZNWO~;oi062pPYBU{JU?z_{~>t5Kj
qhb+-E9282M%T0bhu-Hm9D#z(uonKWADkDg4S;2ma3t=2{lByAo?+B6JnO7s00HEWU|SP~i3cI(n8Nmbq-oG9YP%*{V(
@2{y1#_!U?F4aW;RpruUSuC8SNWclXRd-ja#JrnCT(M<!7K?LM>L8)|N9A0Ww9=Y!F<+$15at5fe&b!aFKKXUSS3lT=w
!k_nf^?ixNz|0XnRlSx`7NJ;<k;wTgIu*fjP_P(iOQ;Z#y74v33EL>T)g{OHtF|^|V(gR24Of4qdCtYMsqU@D==pN!zu
p{2HMq<<5Ay;UN-kSeP|w+974h=XdSV57_vEWkZD)IOxSJ?sOM8D5en+I>=(f;etH~0uWD?cB9g8LOtds9a{=w4sm`tQ
}kA<kmf<N;(4QZ9E_$gV#K10s1pH&+U;pms(+*mAq)pg!|Du*odWc6zdq+L{Q`tP38;MhvFl7U(*$gSz7R<a0*&0ig-I
W}uS1#_QEdl}I(P90LIqmm8<IZqjvQ9P2&D&WSb}Bi{{1(<`I~oyF2p22*z!Cf?#z0c6Ju-+3!8BAAiU86r87^i>A!`O
EYfQSf}WE+&XQH(Fl|~q@s{U<hnqz<jTa6TOYfNT6Y|r}Uc`6PdF<ernc!b8GQwtNKU8mpt{96PeL}o`a&QXm@aePjaG
Nd?!JVfxS<E#SfBVg^zWAEA{%?|-FCJIk#B*JD`|8yzfArn>c=-N(Z~NKkyZ7&x<KwOC4a4{Jf1T~<JNG^R-*W69Q*kT
fRhjW>`~LluvR-a@$~3$G>0*Hi4cx8k?|dqPV(;J2NAKT1bjHV%z`b!TvqW|e!+K7C<Vb)7LFcx(TSP=GNWSe_A|p#ok
Qt?Pht+;`$HVkB_ZYzyWh`Pn%RlVrBJK+AXSDx`-$46v!_)6Z?yK=>hj>rnp%4r{a@J0H@8{JVWr+^m56Kgf+#|qw5-I
;3PeCOoh)`cx98IA+&~A{jsMpC?i?s0E_ax5p9)V$kcE(k{ikE^{k^6GP!kjyJxzX+O3EJ-J6vYM;eNux~j%cE+-cGm|
*&Bq`f-)WhZ~#`{_id=mUbwwaBHpR8f!R7u-FW@8ixcncvU|*&;Z!nzLJ4I(7-%asCwcL-NFul0z9p2Q5_a~^otWdaf+
#Bl;B+2v71TYtQt3`Q$K<5*ot#%Pk)%R9bxiDDx<m(Ht>8~p>$gjyNs)U`d->gpaP*tyZ}Y?*T#=|$=oz1qGT=70aymf
ox4Pgh(9U%Tj<4E1=e6^?-NOg{k3KGt;9Q{2sp@>t0K7Rw{f~xUM)1`I|K)L9&`4f?3Vu2H{f`B{>zw`K@~bna`#Y*Y+
cx`<v{ehePr)xt>i-k`vvfTp@~n!^GxR)rjNCK&^TdDFb&&OLKpzn+!NFtj6o^-XG#;=&j_YE3RAAAh!+FH_$z!L;{x*
H2P2Zz!<~(uYQ#DZmP8s}F&D3L|P0L?9%o{r2of<gBlduGoxi<jAM>AlL8knaFmE)R3<?z=uKaJN+4{q6|vNjLAgmRuF
({Y5^fS`IJhfJsegL6;n`MTo7EdQDy>SKU4g#^xR6Jp^DVn_Guh4&dF50~5d?qo-TNkx7Cm?jUA*n$Gl--XcTbuZhB9=
~Za%06e0)wWkrj<oF&f(9Rmzz+-=#)=Im0+s@P`<pM{CGmQ8`|Efe-{l^p47Nk(oa(cX=)$f*OaPpiZF%g^O0y@lU->R
_qr)MOwKI>4m}E|6ukZQ(cH86eNGr43jHosHzOj8i>IFr5N6Xa>RvBA?BX*`UW;rklv6?a`u{njti2I^|D=#Bnu!4Li8
)9SYJ}_k|M-R`HDsHgB33F(EDz~Ryz)kr_+0vtGfje7Z8l-7sw4ofs9JBj^u%v8Xe!HceC4P#e6VLrM{cr=g74X1^c>x
<;$a1qs7{EIubc>H|RC7zQe3g)NWV*-`paKoSg{7>$h^NVd1d?|s<?i?hYBX~5MfTtZy?&Q{R+riOE?&67rTo06RdEC4
jg^2dQz(9f1YkLy6;OjZ<1EaR>~b8(Nt>i{3q;Va-JPDo@<1_@bMB2o=CE=`YS~l4%R6GuQs%fabI|pzJrLH<ttwX8?5
??ioppjvf(Z+S0|niPO=Jz#1Rha=l;2T%YWbb~@&0b5nv!;z{Q0fcP3GANzE%ELDZEXTk(9m06%+>UCfG!jv)jod(;Cl
$)Kb_s`5Hu5QQHY)9ZD-`%npJfRO9EnB3W^YASsOiqi@qrCNXyX5U=NzqLos7G^gY~(#oPH1x;19Ob?*UPhxn$jvXn*K
5(^J3Z4VA#r-_VLCSp+z~9kd*4oiF&|d$>NtlL+sg4g#&+=VbXN$btMf3EdYi~K?E-n$b1rY^SeBGeBy}rsmCe#mQ-G~
b(@fSjLwrK@N*suYnPR|r}3a=490BT@*mKKA}E|5J-Y7*~oKM>+!w*7+C`*jI%x&&p>lxq!hyo;*@VGoQg6wX2GLcgn^
f6Fv1zArNHG#J@KH@m(DfuZG)ZUWuBnn6Y2B~v+anH6Tc6Qm###foATo}NBDJait;I@$W>l&DJgH2-*`)ld4&qmfH08Z
(j{x?6Sr0{2_|=9>UGZE`>!U7<`ohAJ&@zMS&)JI{a>xac3Ft6e*BvB1<{de@w7O<TZ!sx)7Xe*_@G<*Cdv$;T0fXb%4
tb0XHXCkm2B*zA$5l4a$1aAEe5l){uFwFwxKEMm4X2QOGE>fEODIkC|f)(^kJJJ6CwUQ-)x0!xCw(gf1<_-gxN7oZuD;
0&)@BsVyGHAPpI4J5f1*Ai|1;D(d@XZPGYDYCO%eh&3s=^E#f2m7VWvSfjiro&~;S(F=4N!F{wu7Y@-+%RXXg8VyO18B
~^X~1i1R@j(V9ffKEt|g(n%18sJX|X1XtCUUL#p&`e$jBv%bTFS$*4+u}27<1h`+HKUcvs%VYubhI!=@d;D;ltc<*Q_#
#-8gDy%GH?bS}HeozK<_`0)_OhYtacv6Z|V@Z=h<kU|I`IzV&2qV43wVi#7_K&m)6K+c^ab71%e|8$baWOmQK6ntb8m(
_`4SIdLEbll*`>Vy8DILZU;XIzKR>eL`ng$@4c(gLC5d~2p*p60lhM*Te8CQIijyXOwkUrd?T*Cc;03)Ao9SH#Oh=leh
ZR|fU_KmT_rK79iD;9@T~O)Ps7IN$%{UxZh~>HYhE{Ga8>0NT>#<-WO=wd*)Py(W2qpkYB3V`PJNI-^aU1kNu=f?!y_p
#L=JrAsk#R06mMLnzbC^8r%IvkdN*cP5&dPP4~@_-AdDc5fGGz8f4JL`V=*!bd|>h2{7G5IH!~2>NZj${8}qOKxz03fv
}(6}82<R$6ua;6(+8mAVm<R1mN8q=Lhm)Ddbb#=<uxi|oGQ6{j^c<qu~Gp`=fW9Ga3&8LA(0^g*pFO|U$3VGe<^`e;R$
(57%-p{2SYd2kxh1`S=g3#T|g$G>AUB;3!@rdF?d<oka4@-%QOhqcb}XHL8Q=BnLxI>#?hZ|;z9_Hq)>b2As_Qe;jOgu
`;yDE`2{Pio%SbwN1*V^Y$S9#2O(+4&#%Fxoai20$aszvPQJK%a87t+Z7F{@wQFDYb>}%Xv-n(h2cJn%A8M<GF5CyW5C
+hbQOdRP)1C+G;5XMjysk`ZFE3TBqN=&yPJh4)BMt`YR(bYWsYsj4t2_!c)Z_3iz_lT9yQU#4uaaC8f1PB<G5C7M6={k
hafgR!+`+xr3zL^+mr<qwWzO0eI<E>9XL9F<nm2QdNL|S%q3HKr`ZG7|8ioI`%o?<iuVkUSM@UCg6PKd;rUGP&v4l3!3
Q(=>`Gq+Q?de$s@HyW;N22E9vdtxO(Nl(tTH8Ok%MKC++qe$i$U*6Pa3+C#7MTtbg(CS6@Z|%l2(x`}*j+!T5OK51kX`
)v(<Xov?;^n7y)3QQ*SXA>X0E92k(6p*qbXh)Oy&C44R=d6ux$mDNB2&1j>Y<@p*IEgcYD+f~;0#P+RxZQNJ8p+U@5)(
yX@h$ho6uJS?;V9eJB4~V22Y@M5=c*oj3Zl&Ums=8w6`=lgPps{YkmYVZ$XqVv|q>v|V^2#~98?`LT-#g{$CaBnIG4^S
yc<DDu(-YPO<)B#?-SLe@!ChR31?2(H)2F5Wq!hmun(zrGX>D9*U$ow7Dy~T~QfW|p-dD{rjU1)o#&~48mBJ%}rBA-4f
&)pZ`=@)-iDk~SHJ_u67~81)*!9P(vWa|!GpKp?KpTQDsFzz0q+U1g`8YwtuI1(a=Grs*Q_L0=wGNhF?&hbEnf``a4&#
D0FaP}QihdAFA8}tWTa3l|?y9SaEBmdzuzb9I>UJcC!!F!$ZBHuPIwC-FVjnznKz`jatV>@2Z(MF6F2)_kOI=p=C*@ab
{`)t{b$q`7H<Dx+*M7auR`E?NxLeMA{188pBuWLaM>4{lJEd(V^P9vne$_WWD!O{76Kki^yRbXi8O9D^c;!(N*j_^wPV
S9`U_-`KA_e<o1h|R0jEv1<MFLRqQ^4x^);*~iZSKXl*@`rTl%V{DnB&#qX=#;Y4-24`bffKjyvuP$4l7^zi~T)1+4VI
M32OVw^nyDNm8_HA+kweFv0)hY!afZRV=VbF=7?DvKJ*UzIdP#miO$#{3e<hm+o%s#l=@A8+vWgml2SxVA8Kk4qbm4q8
{*UcF4)-es@Mcd?m>&}e*fqH_Whs#$t5BLKLvKJFa3FEx2b%};)!39Z%OF3^NXS6A`Vtf3qI(gwYOyexND%Wz_-ytG-G
jLWasKSG93vrNda+t%ny1+g3yZN5eqOCS&7+Ug<em@B_%N;Zdr9VVWRNDZbl$uZxmj`5-0hffs59>QOeVPts)+zjqIi@
1QM5Bf{|X%=vDU>(M!!lc@rZ<0O24MA<u;!z&}z>r<LWQhA@gc^YuA_+GkNQYWH}kYABG|MEc`WtY0yj@8P^SscMhs60
K>J($+r65FZu1_0~&VZFV?kd^I*yUh$!Yw2T)DYeQ%N8gXr(vOJQr8&V=ct_|=TbH^>}?qKeqe81`iUq>8`GB&bsN&9L
ad>E{?h+J1CLP?cj>+EG#B$4tNvwcLxv8_&07)Oby@IuuO4%orNA6xfb@7GZ8Eh4Hzyfn0&=0DG9DR2r>+LjPaCQ{AR<
)aE_G3(^wzKTI((5!1a)#Z_=n^Q)0^)vhd0tEI42@v+c*)_H#jzRV3iS<(m=2(O>fklC^-M&yA+oZKdM6w5SQ%LGoCm*
cR=O{VmQcz>Do>6B%#Rsu}vxkz8o%GMQTXb-MdA0lJ26g!sL!@bDZP_@p)iUU0go-6?l69oA>v+$}hG5Dsy$4jM>3mKb
2_Uusc?G!hH#E!A!w};-;ebM?{ZP`%B|F+<f6{J^?GcU}zT#OJPlO?|D1*gm*-+Ks`aE<Ubv0yEo|p&PjoLcCF?D?o7U
PKXg$ajK@p~ds3!oTR0d+(#<cq|2Sj{7MT}B83XJ$|GJx6kOE8rs9XUZC_CTdE+0%}X5!rl=RC`poQYQDZ)>e#9KSC_a
;zJ3<imowFM_C4oxXtW4;fXjdoT$RIfc@s`6iA0L^EqrtP-@fi@T{~9y?(i*l39XBGd`25Gc(A%uqAl&@qI<6Vi+6Po-
j^E<%W$IoSak|J?C!8!BspT4wKXx##W8oDCE`!7u5#=;6Ls-Q?P}}7th)3X;8x~Nu^{L&JktSMf^&(2ocCji3Q2CmUE1
I}6U)^#+K3zIT&6>=dCG*ug}$B34rcx?xXGlv22QHzE1^3fI62=|m#`ZOh0sx8SFBFBBr3?+Q^nD4VKQy%w4CN?tozVS
qg4XSK&*SP{L5oqA3~JcFnrF=9R?2Ha8~{1Vhk^WiN7<ZUf#!%tVF9Ne@VsDaEp_-c>Y4IR_WH<OO>4<f*r%cOibetUT
&o89qvc)!Gw&1VKWC(d^l(kXWorRh^3)q0#4;~L4*bp0xnlZOTTmAFlix<c1pHO!Q$~{_K>W9PQ2RlHGb<NY&ITFLhCS
~mMJwRM<K`e;HVu6QrW!P;EDBd;a9NTY74Rnu2BqWFYTOKvJUQHCw6k5yE9>P7TNM9(v%7Gt(+#q?j(3mNmnZH*`Dx|w
YAquEaHO>JF9}!2r*<uN2#{1!!^+={M*0kz(0D*^vNV|Ucw?QE4zYAS(9$I+|boN-)0M?1rZ^gsu3J<%IuIj8oodR%p4
%nGHZy7V8w7_4CFCkEK;8a<LU36uP{ch+N3@oW-4l^W#Q;{Tg5l{qXi{8fB|V^7t8;XU4_XJ-83kmoUqiNh|`B0+YDbK
6j%a*ScraFL_~JkMrAwR><hv0y}6>YtyWxI>ASWPQ_92-*sEmRerh!}7O@@CNJ&_4r~w1G84NE&B`&h^!(JacmXijZqc
>?|c<E6E=Y_M&le6Bjc5Fk_!KHtM+p8>Y(1b5VV1gZhtL#>f6I%`cngefW9o(L?$n-C_cFTxxdiGnb7gDB_k(BT;94Tf
;1Ct`-Q2rje&GQNUUWssGgFhfAZEZcC2~OoA2||d~?vWsZ*t6G2Dz`|=NMto54o9?Mxn&$twkC*MM7=N<iCQgB$AaNIR
<y^ew~F>J8u`{X6~c~=ePhI_-!<VYv=RVEU#TH!Vdq=7L)7r%wC0Ae3-pj>Dem(Q=*!R5>BR&NIMgl2agZQVK-FDGm@!
v06k9^*F`}4Yo0k=3)%X#~F@myxfzk^hVmp}ZdzGL(4A_eiqB=JeDLmYjem#_5sIIl4eK@N3H<3`EcCq%QnAs=da)ljK
w|ZdG$^(%5MeR@}C!!qasDS}XOYq<l%aqj<;ejC~nmF1tN$+!jP(Lx1m707F<A1G@p{vCtlDM)Zy9U74ivT#fab%fWjG
c+^A2g8gIgSaYN_@5nnmzxsthkjqNVIc6H5dZ3;Oaq`^5-dSKy2ADqHrL=0ZO&35+1;8*PHAQk%=-e=qlY-C^GQWQg)3
G-{kKy_8btzHWiekA&!Q05=YBazIcaxjrb5;YT%1y!aw-hD9Zf7+D<C806-gxzcZvt6M14DO^S~%H;4+1S(s;c_PNy=?
Iqb({ou8~YfmacJ~(Iv3>D{roVeoty9#@;chWEOOv-rA@~6xm6NJ4$Lte9&s%N536dAKG#U}&9La9L<mGCy*RoXW2U6$
~1mj}VZK?ChXV~DAqCMchOwAFvp6`vqT6g17sdZCOuzh|F$;|F$KL|pUg{7rZG`c2sD_k%@(=xk+jzZ>@Zx*NpI;}tvc
_B}&eEnX~Q_Y3ds<taDhm$$?2Y0WWaZiL5u9&jLN&*R?OfXCO>Oub~W;A(F#gGxDW5FvtqMg~HJV(49-s5w6Fy$){TRb
<EnpSRnFM5tlIvo~R#keqeH-nkYLQj*qqa?4q{=!R#P()me=bH|q_)SVAE(q*)fiw%G_U|<7`MFJ!e&a47%SK3gw7(z-
uVcGAPGus|DH|U)Yd)*L@&+w&DLJcu<9E&CE;>mN{ZJsq3`WE``NOLDF?3|okbRqDR;@~68fm{&Kop^E4W`FBrP6L>#<
dgE;=X3yf&frNo2GNe<^)uY;*c2IjfU#s;N@n5FE3yG^bxFh|ob+hCrC$q9CzVk^q$KOKjAu?}N@k5`m7Cs0*1m|Nk=l
r*7y1b*pZ0?%ud49)C*0s^e;iCrwTiS_t7+>)Wo57l;6_X;MKFa0^a{Xjx0r!4aUj=K>d_-{?#q$SI~-$UI_izvG3=wb
bdg<OEBRAY2gB>d^akHwqu<}8%V@;iq528hJvQTm9VZ%11sLj~l51k2vuF6eI@W5T_!Th}G(TXBdD}ILDU~c$JC_r1^;
(Ws{}74AuQv0{TFw45!E|_x44WtD&mj889?}NgVYl--r2j6e^-EI?hDpPVcs4K#+@hQ{>$FG}YD*sf>W+mlF?D&{4Ww*
$eA4UmkAVZ+p-hmkYv@AlOTDi~^T%NRG>%59NLv>Pbe|fCaiF5f@XFslt+K-7%2;+C$ow(5M`QEHQz=Z@>T4X}7F{&?3
f2{Bk-5e)8Z525UjFV&vEMakYJORygczf4fa@gfH^EuwLO$B~($fAa_>;Qs?Wv)itd8#=+kZN~fAa17Wq~fy;}TCNRN}
ExVzMuX&+csu;#((bt`VPh?&zRxb2rev>-=^<?E89lPtJn|Tf*e~zx*?s&<<KQNa^4*xX;~e8JYOu<Z6{Io^CQ@+lGtR
%MES8o$Ih8BHxLl>D;;HO*$g8+HJyn^lX}9aKk^Pm8VtrgI*a+rBK_RbW6)@QoDNy2>7<)dFMjzAS!gg48_Iq9GCKDPi
1mXlAjpD(t;<sJd29(@;nA`xuS93XtVtvcGcUPOt57NUUJAiW%aPAl(MdK)Na1#37ZL#Yy#lrhSq%tH5NhfPbQV7Z`Sd
Y%Hy<4F=kXXJX(9eh`pxL@ZgG16|6gmr9#Cw5jmIdX5P}Do57?EcE*~{+;ZH&RYA|59+Bi~vi!(09tE~p41R|a!@pwN`
&6J_VQb<>Df|8SqVx8oXYONXt2~k`kW4<}X<nnR?R|D-l!TZnW50JUE`m1x9h-P}`E5!9;ec&0=)~AyMqYYCMg3Ex23$
<yXyX{KJOh_l&&b6gIC?Uqov>3jLMe1`1H@bn%A)$QSErr+3AY%OvP4_eZ1)WXc`8Z1)rv)MeLE7Jth2hblpzLVG%z#C
zdN(X_UzFgs9)Tn0PLUkPx{+!z4%jm_T&$GZ$#5YFXchF>Q2IT%^ri9y7F2^kFqvdom1`xe7FF$H-#Gs0j4L8I(?%q&-
N~ZSGe~2#(f3*rO;6KE}f$S6(rKAuj1bD$yq6e>})&Omrxw)mau2#*nJsR$zwPPhw90S5X~4XrTl~2XrKFhc~o2N_=cL
?N#*=wyEZZYOJe+IzOS$TqVF~rv@WcDO!Jhlfmi|evO$D4TCGx(l`!sd!SE_7L9#-hBT`PFB38-l%XPYL&^zaeXrHOkw
tMHssJUhv<0I}?cxAJJiFk>f0zD1^9w__sxVS2diNzFUDgER`hs0B{_qJR5{>cUX>MAV@$VXy3^OOO#F7{(aGFg7&)~5
Q<o#J7S?7DDwIH8`9JRTQDzU}n_gpIHrS~gm7MNCD$=Nk$gB<Y?uH!G_GW0CPFwp-4(mbf0EZyGD<@)K5Z6tsf(NMzX3
L|z8j*fZ}VSz-e3U-i_gPnSt2ui-h(0t4-npm*U1k3CBa>;+n-5sjwJMV`9QE>Q~8qO{C*&nHDwv;6rV2`W-`**GbI^x
F8Am?f6UvfV4K*vmZ96^ElyS-d-Z>V{9AO7Pnkf&5SnD=nm|fu4=WVa>g5^dx8QT;Eb(>J`g(b>OmM+dV2QHxRo!rr}Z
F!*4%!ty_hW%@g6qI?<=leCA^xoP6StraWVs1j25qIXRK%Hw}zWc<0#hhLJi1^!Xlya%L8t63&b1pr_DHG1kk@`4tbQ6
1_5*a+r54i@mRy5=>~(NuY}7&r3VB!@5Dt<m!wNi)P0UrtLVGuuxOZEQheb+>#gr3V!ZR%Ig~>CXq`2Lq!^ZH?VGFP@z
9mqzD=;&fPWs^Yc}YUE&SOtbz(+tL4vufL)&eMGA@bkYe0DISaUO(CbsxJt9Q&#6motPC^~j=$#2O0===F-Snx4j<CAd
F)-zWD~w2?alkZ}EkeSCY=OkYl&?l;)xwuz7bet@O&fy8l3(~t8RP_-<GC5az)KJsnqewsGK-JBtB5AB6a>lvO{w-o#h
(xrLnKFziP43yWk$%WK;%extmQxxSRlD__7BwaOYOKG0i)I8#s<C126jPgK`B0!!2e=u5Y}ONU<}^AZMDEYuKJhMI}Pw
j;XP35vFEedL`Y5VA}HOgEH`ll;)^B_&r3HhF_>FptvjED_FyHL4WKp?s$8;4z;5Hkb!BIqb$Taf%*-SpKII?xub#z!<
&TA;W}xSR)P$7qO2Ux5@+FRfXAgktI<hHPM3biM=`#CcXKee+q!wsc$Li%v_t9QVMH&n$kp_uB(leqN!1Xn=#hzAc<mv
#6CazxKmJ#vjhXlQ&54qQ0zs<kd-}s`hKYFS|pXh`&K32FT^2($tcbGk^%=JHh%d%XjB%3NvxAv#bmu)(zF7xx7v&KPt
EDdO5eQ@R<U&@vZF6_<fm)2JaRBXHK3S(<N&^=-?Q~;Y?!IdVxSxU?agx=}uxI2o$pV<L`SjxGqMEzlT9cuDC{pdX2Et
YxH-T&U(w{K4$VE}L~Up_$M4xp@)@?P~l_IJ+JbWk~Zo~Tn?+p8QD;_7rdxSFmTq6860#KtN^98CB;TB%UVXx6nY#(C5
bhlF#4?bm%1@UO(mZt_p?>zesK7b4z$f42l~a}Dfu)`zq{a9QPpIQw6lw?Qn`1hdON6)M|=F1Bniur-txAW~u)t-*d(+
V!TLYIfU;JM{`IMboZl2*k1KNRExF*UNB~_h;E7i6LF5i&v9ab9GGks7Z4*$#vDF=rY!YjH`Kaof8f;d%NqnarJFj*-+
)>3_=}gP3GOCL(_%Ag~tjLThIMQT~dDL42{IR>X{igBIjbKP}9tP_?z44ts1Djj(Lo<lS{~2>OnPmt_*rY6%=Til`F_!
)!vWUl$Xq)lUn*2h!MMk+G-iq^mSm@3R^9O5XwYjihB%+7!q2D7G$L(xyaNlEhLNe!t~{rHU!Qtaa%SCB|_X2x+tv&>g
b3cO!W-WEHbSix2?i5PwYufVrGqwHi>we2>6zJ93L)NTXAw_NK%ufMTMP<+>b>6+wH`69pWA?)acrg5*x!1@r<+2PHIh
YHjfkG(fW21HnB0S^zBw`tDW7@DU-s6ky~1t-yk&OnIN+g^2kD;)sp@*iy()AyaqbJTKimXHmRNS<H^K<nsrKHidAlJR
TO|O{m%{>=kNA*{?*Muo4TxR|9cW_v+Aa=?Ax~|mu3IuC6y8qF<-LSbj6360@nk#>jrG~F}wVv7xaR%f+P|)tNHBnMIB
ha87mc=o!zgAmTSzDz)g$=TwCE>SEE%^e%}u6cWO<6etYa|=;!*`-TJd+l8zg`L+iSA=lF_a*ye-x9oDReLsvyyzFEh2
+Ehc5AGK-h=X|}1!!EFU2Y<!IJ2)9vpIrMZ9*g*)Z$p6me^}y>m4Vy424cUvz?6dv`%;*<k<{KWT<RSf_}r+0G(8}Im(
aMl9U4px#vlLChqrYF883=rfNdJAz$je1l*A=2zMaM3bMlca#Xhj1GRrW~@(!=8)pJEv!BRV+E|Ya$f8wt8_+B~eaw@H
1bDJ<}^0b!mf3G>tAR=HiKcR<UTZD9btBZO=JC-%Pj%y7V3;@3GIvU3<r?3@5D<-%`5ph4QmWt~kK{<vJaKy8NG9!!x&
6%~?#3ga}{=MgMpl1L5d*5@~gKg+fL|ZSr@%JCq5a|q$Z~=nGWha~{n;7-R4Pd>0KUE7zU(~HHi>BTo<R?00h&&->&|t
)Efma8=udxfv+Q~Z>>P;2vog0QaRqoy<?h=Wvsy}Paxl?70=P5E9Q7is<JoD#p01^R8QG~fgzs-G``g66zy{kx4z|uRc
mu$;W%waurv+8r`st-BLw3?~Duw1re`K_9JHCOo^G33GX&o)y7Txw#ejBDKJl1Y#Y6+sT-fwv5;*$}5w_1^MusGd*`IJ
N@U8X{SL-oxux0;}*N&*mPW{FL)C{qnSV0U2KAmTy)bl`ll|^TU-_4q35PPXr@#h=2G+;LuvIGKbSbJ)``Zv3+rE^v66
~N-_~c{y}3yh?7>!tWQvD8Sjki)jxRh>iW%B*v#EEw%ev`uHCu%>Y9ZF=JjQ{s)p6^Qh(@1jw=@euvA{k?>AHO_kZ~(o
l#eV_4PLE60ZRbTDy(Wgcj(H7s9-mjR(E?J#SIBS*_N1XRq|m`M>|-s3cmEDmI$bMucQ>%EU;E#8Ew0sOeYU$I1~r++v
@*T6QD^O|1(b9t>W1nvB>~%9n>Cv>Tt;Q3gVxl&gG6o|KL&?UfIa@tK}#g&#G4z7gThxx5V}HRQRd0sk3xYOfq=Y{ibV
>PV%!Quh$6hVcX^_b>COj6x+Cdi|*a9O&b``ev2<+HR47N-u<rZnu(aCHX^?slgnYI3K0!KX6eI5*dL~WO>UeLKlc+#6
|V;l@AeB;)fWIdjdMG#y8pTLp{^ZU3qm{29o7t!<$KA(S6WswGfp=XjUoTiO;h<{)7WGT-M;Pl7YTb<l>ceSN>1;@ggz
}i%ezSq33k<jQk#zqz?98PS2%hnJ6h=&J#{(k-<?$Y_e)ij3WGYoCldJdye&y{#7w2-G}~h&D9~Mi>e#OEt`0%TOXCXB
^Alf*kG$-U@#JE0LzQxNS^=Bm8d_i-}pwH8D>7#FIi0E^t4POO&@Cvq@?<4(JOPz88W?*8W#g0Y(e27CyO^oYQ+XnFWB
hiQ>Z;GC6Aim5vCl;L6rkNA_}a^n8~zQb4j^rLG)8E+ijJ{+-1wmk~5rxf(Cd@UCP+;T2GE_Z<1m?xWdabvuuU?)ufu*
UD-`Cc>xas#t&cBMJ7&m2a)Uu)#WQ;E5)s5JhmZ@y0&3q%cj1eNpR`5wRr3@ptEd&mcdVXbDi{v#g@=ZOwj?qE2IJ6m#
=++i9w)t&~a%9v~L!0)HsU;RBu^LteGRYn7i)Ty6r3L+^ZGLaWAfce0`Z*7rTf<X_|Wg^CzXZu;r6kWxXATBV&x*-!U~
%_jpZ&&txulrPv1N{FZ3J8o%eE#vzG`nVOiIe9vJ1R8l`IF5;%uQq9`?!;u?>vi=-;lV4@R8$ad&o?2CwY*39pLJ4FqW
Ke3@uk`S2RII|BVj&>^CM2On$7<7JU_NNhbpovxBJ|Zzo)=EDIfbeyCkToJsRYm|3xANsKj|-O5gJ#YKjhS)d0qXgU{t
X%DQ_zC=pW8^<m5nI%HGT2KyDmD`UhP<n;hBEo#pv<mC_K1m<yp<H<%O$8uX8F#@RvGR2uVK-_+?Hsi4?<IcyK-Fxghb
DD8A1hsLJL3l&b?1W*M*#u<-sKvUABN)n@;r+$4+pOtJQgw|xxBP+gAS!3^k1DP&4CWz;A+^jR_O9<}~c|{g{NRkz=Xp
xl;YngfzK}SoIgQXW-)_No1NP5Z4o!lAe9qVt?yM&h5Q(Y>j3-x}(YMmj(_oDI=7Y^w-43dTtfkIR(HoD!f7y5Mw)1rS
wsVdN>JQl%sLFH`-LB=B@5=FLt(nh~`m@!W$3WaptfZ8Ek56-$>`*fPG7bqa?(ed*Lw9Vyt2oA1Z!Dx9&L0`3O3gOMqb
n95kzI7a4T^D(Q;fMo5>2&+NbzPL9K`fN@xkArxf-JtzlOF&Y?qK-Vg9NG{fkfiz*E?0f^4W?^jkT0$BhW$H5lvplY^U
M;sKO-f=m3ES0}O5?ND-oX?jp|8Px|rc7tICXY_2031sk|POPoCfHc6MbKKwKIY^KYbpYvJSZ(t7>2NaIpH<xIBzn0j3
cr9MiXT^H)tK>=lyi1DM`WY_@{-q)>MUlkSFT)eQ5HLv@Qel>63)*nG4z3@_Ll%6j9<P%)7%2lxGEbR|Tk*xluDrlI5H
=*X`8Qo~L=5!mP1mozipaZ9^{e6y>-R{45h8Y~P<GTZd@JyJngl_#ln&gvF7KJENR7YYD`3^f7$j&Tm`qrG%OSW6&07%
q)~o9WGb^<`8KMk+(O%8k2JxhId(_ky%Xw(OxDXJ~;i30UcDs=d8i|YV+pRpR@_a1En9)KWDk#xX1u3mXy(A(lt<=``R
Xn;~C)eLa?vS^WJAUO4fr9pF5*2Xu&CpA+=oi^1fGeL#V9zb!zVP;6E{p7UY4TtPos^){^Qg9y;A#<akVJJUO-{TIZ4m
uzFuZWo9Z0of<jncMw9%G-Y+a!{ReqMngWf+ixAoM9mss$wii_R2;}xb@kFe~jv#ppT-)fVxFB-H=buC?=x{lO`#1$*s
ex|B*Y&j~wsR8|n5bhh7z6HOQ)Sr{scfU^5T&beJobwtAXU3GOhlu7<%xCxIlky}Ej<X6Et1||wUCtQn@{*1ixz#59${
{pNgd{(WbUXY4g8H7tOIjg!?3>>BoQv5+<-MexZRyOTQ6&x+1biK7-{YA25_H(bD?k$4NXIxrig}SPC_j-d&T)7n1fk|
j@_;-E<Q1sD<MEO4Na6QN5!JfpPPpCH!>8A;*Gdieh;6sE``3qy;<7UyEU*-V4<^t)10ybVd?k%F*1=W&@y1bS(2<KH=
>ECWJ98ao)#{xL7Z?S7uJrHfPWTlvxLe}C{#nq|-UeOKu|M7n)P0J*#~N{XJ1QNhVP?LiiKW&<Ja0f+QhuGR^{WJssBi
d!1I_WxI(bq{7)scFJ_1&UmbB9PH2^-n-w%vHeNBnci#;=}u4Qo4bTgZ8(v`)b#ua!gqV7u>JbzW18v6b({~TKJsH&~R
>ow!ko|zqMCofLvHG6hiM=o3t)oU`W-ZG9l8cEZ_;RlrU9C4-uu;a{I{f4h=E-~`9+e4h`r()H0{oSAopS5S;6}6%sDu
eildW9MOPfuEd(Y{Cew<nkT#rsHFviy#Y<P0xQ{~`Hino~_|NG-~alplm8SnM@mq?bb-2x#(>+d&9-ekYUerH8sIMMBp
6DJriN-edvPS*Qq=H}ymomx%ik6~^+!AYE9@^?(2Fo3C*LfY^iya!tHRg);cr(=V0b$`;wR-KFwU-!7_Ye8?Q~%fFty|
9hR_ptPYB{L6BVHyuiwe5XQuP?9!^l2E0(sbr}%*Eb$gJeN)H2v%<%Mu*0#8b&h+rOgM%ya*zZsRj8@o#LajIcm38p(7
qlt9X^H1BWRTLA?IpeRh3)9XOx$&U<fr*S`Nbl}>f(borrLwm0uz^ygH3{&s$yTuAZUD&B@yc(u;?{NnB91=Weq;_GQF
br!nL`hJmA%M)SlC$FjeS@$eHSAEPX18C2(d9Bv<#r5m!w;0H@-|wql?y9w59;?=(o|0?8);~XcbFON|x)$hZwR|_exP
F83ug_;^$r}Y5(TLFLov$8w^7zSu&>`kAyG6pI8EP`Gwl?kd&-yX7c76W#_1h_0!z&(ZGoO@jouM%_e%kAttBkvO8))7
}X8St6OBYXplRxD}a@W33>67?Oo3>_pO)b!<Z_*_JME~ople^E4M3QYwMw=vg-65=Nq|Z5Bs<t}<@*ETT5YcKAu_1Xib
f#>aY*UghF=Co{%<ulXW5%`*p_6@B&>resIGx^^YW!Aai<pfy2hHUIUH|oK%IK9D1};Vb{vy#`J~}XDQ~%bagynppLUq
3G(>7|zt74A%RCA6I6R5rZ%8XR$bNnsZBqqo3aD!{qf=m-tUp+c`wn*nHFE@GZbv#e+Y3nfB>@B<ae1%H2SZh2;mqb?5
f)<q)PQ?dt&bnw~70>6qL<F(Z>(;>zZ~6JPCV=n!T2XD6<F#jCEATDqc$!-PEA3vj81g#+)J}F^K%OBi)O|@-Te<JsMf
$Z#i>Y~)*_LRyJh7@FyzWP}V?wHBn@^}iXO_sM(Li9v37zXjLgn#q`(YguzT@A|k8bdJiKf(E5CvbQH7~81XIeOnW|ie
B3~C`UGEzaGK0i9Jq5h#QvFM$?o`Q~g4zzJq;u2LVlO5M*f2A?@LE*#YMOP3+J?8bgU!5$mBkP^QCUN>pq9>si(b*!N-
Y?=c67t5DWvW=ab@1|_Zd)N(IU(zW<a(0*Dg{V<<}D<zmEkAVF$*<aWU~*S<H4VGTlQE;LgbQ~ARwk6(xTmvrN-Ioc7I
aoiVZ*1y2j1qfoL%H_2)-=??@fefPhq8i&zrM5j9AQr?9%n@sv=LRGovph6op5MQ;D!f!(mF*%NfLPUi}7-(aIN`9LCZ
ggYuyP#3N|1jmcxAegiMRPXYsUx+%dKFi1OB;nK{{E;wJPVaiH34{`48u4}Z4B1;8AbSiqtZ|`w1po{1Xb9W+W&V*^C}
#C~kv)WtXl)AVkgPb_G`WpGrdVRhI*fvF(K`tK9#Pw41eMMIrd%b~)%I3N@$NqJ?u);U7gd(FEf-Bd;o`;2lLnVQacMO
Ol0<yx1mw$i`oNFoWn^#%&eR53NF*axb*Na(er>1&C&j*Mo-ckw#gQk3O*`$iA|Ysrg%_sSq1=$KHO@!Q8?*3=X2;8?2
T0Xrn?i%ExtN!8A#xaIqd&X#pMgUQZ0$bewTD~cA#I-h5VA#EI7JCw`C^YnSqz(QEY~nwX(Q2Qc;<LKH5T-}*T=UA08=
FM<_>-cZ|5p_QKMFjp=#fyj~+a$J}lyCU<i}byZA|9_J_aUIi4N(v9zsS!zHUFS@<v%Q^zNmq9!C~d-BtYw=!#hgfvC5
_P7h268n}+kS-Z6#c^b>UUo@F?)`gZZH1RT;FH-#UFTvC<+`>cfVZY<gBJFtscN@2&e$G}HH-?yvIWKd<({Be(l7(VsP
eq*I1H78!KR#4_xu0xza97aifpVsRQvywwMRnK$2KjJaa$w-{_-%j)VC2+Qk7TLtzJ+2@tYYm)i?2Fa#_V*r;~HY$j0U
*tETt9zPvbtruOD~eionATNATgV{7UOxk_tqNfYi~LhmCOU+=Xx%kH4(H#Vp8s_k7|UiL4EZ+!OlI-X9gv4S5o?xPPDv
#xL256|l;uorw{7ri#S=nQQ)?G;M`d#%w_2~-w27k<_Th<;@&_3B(iOZ?@yI}$1Xc@3>9S|@cGAgRn`hpmS{Naqu3ZL3
FhR=Kle;EgQ^aZ)v3WaI`ZmY?8k$1`CTwC~zadRw6mCJ17Fx>z)r6aeR6LE;pvYxAK;UfHYMX=kc63(eXH9V!K2BC3I9
W<*LLbbxL}h}qlDMM<f+3@*%X6b|r9DWQ62rBaHPtX_(eDn-`3rZzN>b>?i1fGvR^Y87S%{Ej{eF(nQ&Skepn=Z3+qux
;hK;U4-qe339$b`E`fqki%Mj{4R(f3Tfu0iqxIZM<G%BcEA%sXQ7{Z|2besJCia;}(bBX3T;U`#@A{_d1uRK5dx1HmMf
W)BP!5*;5XoxR%eNht}Xay|O3SMtg&cpBdaVdu)>R>fPaYyX>=j_W39KAhp2mg$CM$iwBp%TD}YC%(Nu$VpkWVdE5S&C
E`}`91$cwGs^ReS^=C1J%>66V21Zy0|GopZMe>J03l@H;e~6S7lE>z89uX<u*rLqQ(}lXca{4}l{mAO7dPu0aQKI=i)w
|${f1d8M}J{0$6kN6Jy8+`cBgxG_ofH8M_W#2o7BNincwz=Rjqw$*;N^1*wSW%W!<4t5}!BxDe=ToZqKU{uWpQ4EQ;yz
8~KD43_a+wc3TFm<Oq@Y&ugO89wWH~Be9r0^CHXUbU-#oUtw~$DxMBW$x5;N>+LVpfYtrwzG{FTR#m1fQ)8bmobA`?s7
C+}7_qnp@=LqHGHITZ?!l%9Bn~?pyHd3v<qni_`x%?|-pCkr3?6jOELhI;1ld9;kf6yfXy6bKM)r#hq9z@Hiq+j`bb35
2P*!ETbJNn>2R*h5C@B|~br|j8KG|PsPv4tCz2juA^!oJ0a&Gl$*5;sb*;pv6(y~dm&4gAxr&?Eh$?eHr#H&1EDUH7lX
wVI|-m+2UcYfF))?`4$9Go{JP`&*y&As9_aEiHKg04?0n%28Qa?ZOAbmh73X&Q@^lrWu2NU{$Td&@h5ea*)t&Br3${ie
+2YiVw84lBrdSt6?i44m|(_P$MRukidi%i<3?5@|v#z6|*+4{R{duoi0=a?g?`<f2BC9(CA6xR)oP(n*2Ll}VTLO?hLH
vkY>4cWK`$+<b7hS5I-|A947}O?+~SEXDt<sn3d$seUfGZwO3%$A$gL?x$<F8yEF60zCaqa|)Alif8NFHy8mPI_aHV%#
)kI>^^}pu;oT(7O&ZaQLzz_Ae?+^ZkmTKS8smQOz)dX>-34IV4rkUDDp)UOcj$ku{q0NF1}7!mqog2BfvI9GF&vc=>Ej
Fge=|(wR4^W$8Jr%Y5H7F(QUF={UD0mAY}gMyJVimj%QK+%WiT9>Z=`Ul+VZOs?P^od}}9V!btOEaUF`QQ}v9?W-02du
YQ`RnyMV?skFVbJ;yrKQz_QjUiCES)cT3vc6Ogni!_i(RS3>6u>_7d)?W6zz;zl!{_)mnJG~43{kBVg#0qI9bG1&{q^S
>~!PJyPg>t3{<jqGvFh{BK1=Dh1i#rto*m;rO!I>;x7Ke^Z6<N`Pv84*LO7@ayxmroqxOKj<jAo}ebN%ZM2dtyb^Ja{f
KH~>=3ebfcy$p;yLC>xw-Z<YyE^$kD`~xU?LsbzixOPPfWM$>~_S*2HU+0O<BzZ7Kz<d6H;(YJqQ8Ro#Hf2)o;JbKQB}
7I@tgq=LcngG`oG{yJ^IlwXO0|{SUJaVgnXXuI1?hG!nrpN9fm!K?iq}I)stoeyvvq=VYtk4!3$F9?&fB*_S0KT#=Rn7
H?DJ);*=kSib8z>EuS$yhp#4JxMzk1+oaQ&|hDvqfR-cwE#Z&LIH*elt*m6yI)LoVQo6oKLoy+8o{(Zy$;=6uAT~V>Rb
wHbBVe!`Z#91-8l_Bv>GWUUA!ewy_YQLC!7rrLWG8|gKdPVlIrfMPX%t*C*o&IUNr?E+6vE2lYc^Z!a59<=$XO69RNB<
ANwr>6
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
