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
c-qB%+mho(cHlnqE6`Aj4HQ8Z$+~nmx<IZZ%bwZMWkRjl*$6f@1W8mC+$@4afK{YPMEGf*_Yxa^@xJaa_}%^!eaW6nUO
}*0BS)+~Ru`DplbI*aEl-}DWy`#9l11{6EQ`o1;=3R&igh~O6iFWK%b?Tgq{}>=Cw?^8H)d4)A)Y7EJezH>QfIbK;v)H
)o4^+Q#%;FtsOV@JKP16pyx1h;?AG~y`uEAK=s>x3n&h7D$@j6%PM#EB$TUw^^&6BMuU5%&?rDe`>!jGMmjq9v6u@m(K
W5P~8jPUa7wdJr^Ok<+W3tOVe=Lg37V*O>@)p@sunq3hyL%Yhw{dabd5E`^%0JSjhnd0F_eI4dpT(<W9u>*9hz9Qg(&e
3pKm5)*SuNsO;+>D0Hv@NkeitP1>^>TJd$;L^ZWDTZ=LYT#elH6A9N_02e!g;F!RMbh8T=^y5mp?_F8@ADm(b%=ww~wF
fc|tA$?~qazv&P8Cl>Ks*AFKz_neY1QUIkJw0pkD4II}mop?ESWSO||AiJE1esH$u(K=p!gl_1M=w{FxPJY1OP?Lf2C>
yGVlmY3KFzSv~Yj^8xgA=vfJWP|dnkxQjOxA}ly<y~inC~x2zxC3GS%Zm@Lr<4q?hp&N3iC#rWm*Jz`VYxC8jak)OTTo
3{@K|@cN~n|Z^f@Z{ra8w)$5MOo!b=fhSy^|i11_78~elIXd6XQZ|F{;A6O0ile<B0ED;MP^g9CC^S0;Mt=}oK->;Kdn
y1;)yYT(;!=~GfyD#?$84O=yVSW#Y^8IZ@f1?5Y0rXmVVrJyJ{M$dd{^8&PUM=FaD+iwcm@M;b9TE0N1N!qKg4tXwn$2
RjN?<Q>UKF_*Z7R3fbPE^ej5AbA-=ul*SGME13*8U^x6!}k(yVsHeYTAD*iz_zmn{=FDAt=Kbbo|@-QYG}<nZHf@sC?J
lI<#6!@d(!lRZg@_Koz`lMrBIhl2^$3k{YpmZS=GPMGBmC+^EVC6?|aWbj5zcZNfOePRUAqnu!o<m=_8gicWcQi~<zG9
AG85EC~K5Ak{@Dk^+`$kqvusk0os8IIha|MCC2<8U+%;>99Li{v3^ibS7;2sjNsl2@!dHnu4OXs&>QZuD{wtqFJ*emR~
{(M?TJ&n&v}OF6KO*wl>n0pL6k9BwA5X=ZOW1H&!3=v)_VHaT<N$+L&V^F{%Va0~<$|0*QI9|n%;8K0-K!g)%Id#AWh9
3;~)$v9E6S)3|w1R2;S&Y1__e(l5^LuU@8wowJ`1lL<M&I^sdFc+Gw?+v;W&2zJv-u#Rt7Lo&^0+&1nO<)&hQn6VL^bb
kAbmS7wOgj6N&S5b{8-k>ZtabL3s~pKO4u=<1WypJ@^EeKXUy2oe6y?sTj8D^)3bFy2%vI7e$_>1<)${pV@kio|*fCXw
4`3zP6a8T7D>f!^xZx20m<&pOzr$T%&yRp?h?@X=0pt(yubT5Te-FYzl&z9=TmW&72I{keybXkodHzR0G*}7vR7~b0um
+&hMm=uHQz`zCYUFNsvPIwsk1mvhze)NCJS22+B)KH$t9V^NC#!h3$l|%ch!^7Lu!Grhv0YJTbepd8B6zyb7QpO8Q7TF
NPo?C*Oy?U|7cUN`fXMOLH0Tix!D54m8Za6cU)1{NSmbb^BJ@3++^(|+DGmb432x<4apL$00c21DvBc7W{S86|Ho^&-3
ko2AM6{?Me0A6$%Pn_maLXa=OZB4!{6eao2Sh9g1ZNVeL5+BtJ=t^sm9e=}w_y=>HH9#+KnNQuaq6Skuqc4{f0@D1;-$
n+=U@K?@l%cw{spkC<y8wy$UBrgLpIHu8{xM2;zKr17E!SV!AJ=_`@Be2d7uz44@lH1xtM@p5d({-f`S47g)oT#?QoXa
nDPOdjK+Qd!%J#2yGq^#4A)yDR|UL%sbyjqKA<4z3WnHUq_d9%YJmGISb*3Fs2mrl1Q4V?VF6|$TfltxaF9QFIb9zC9A
PVC9&hJ%vz!qmBWi4fk{XPV%XC(o{NCGB*Sc41Bh(EUQyB{0giT?uES$Q-(Ky7U(m#UG_rzdF6Wjr^%`$ws$NX{vG%bR
eWk?VZYNNg%9}y>Af~cmZ%|U|bh@$okfqb|yW(fGj8rUeV4-?Z4r9k&Qegem=KhLZgeu{y$&8-IDvr@g(3@y1sf{<(4j
>Mf7*w-Z9!<7wELs47`elP-FAyE>gKP=cWVR47_2MDK?MWY@viPi);A5kIWH^}&~pJv&^3YAG$_5KLD#|s3a*@SLUnp9
<)O|h*#MlG5N#-ns8xz8T>J`D<L2h?0pWFa;<#D6+CSs|qlaTB(B3_d2edN6&)CP5~nhX9))o!!$+iJq|Q&=`{X9Cv6R
0VD*XP9ISlfO52EA^p<0G3<s6QmL2mA<6Uj4m2trvivE;A!Kra;9w{cHM~70g#^1txf1VWF_9;J1uikxV3olv%&U2#YK
L~EAcf|Du>;t{f^-gz90`-m)YJM97qfd*Gm|IheNuRpaosL}9ztP*g27(<8qnP{mVyyBH4v<`N&s=9XtSIrx2W+R4x*>
deVltKXlyTNF;cPb4hLNqG7!-SE2P#UQ6FeW#M6@MxhyETf&c_UKnp9Dv7v^=bZ!B&9G;L>K>iSu<{nSAoW`Jm`p8iOy
yys%T4jQ;3_0gCpje7<zf?7G0~OqsU5juUQGsg_!6|{{mcC-Eiv_3(C`}1;HBuO3_sH+_;33U(Q15{7;wLRsKypiIP$H
CTB4ySAsHm<XnI4f+8p&|j)xvESDI?MI4In8M)p_xJMNlk|EAR#gBoLSYrOP}-g+(HEwKHRPaF<xc_s6B4z}rQ7cV8TH
fBZBXpk4AU&ZoU4?6rd3fPb1zogC-8<*eDXHbP@K+T$ofE0yK~DW}4HA{3kqq&2Kkc+hP@ch<8;2*9FGfHN9Mh7@2wf!
rB^fg*tze<=R4GPC>v7?>XjHm)fnXGAHcgLsx}#MuCoUI1=M!C4hCRzo9M0s<9QAdAy)fqZN|)JhOJZpiM`!Px=&2}}@
6-*ksup4FQW(;AdAf+AzCQe*}@!W67dD_ym$pceT>5qZ{x$+;?NmzsMb0|IvfKlWOHjAR2sf?7fnvV0ukH?SBI{|Qv+;
U-d&&kHCkNZ=mV*_|dpfPp9(QW$JofE&oiXe?JFL%xmOMAQ)rwaq3rJHT{%Mj(NZ2x|=yvp}#3u@o}x2S}aMFRTp>63)
pE18xONh>hmcylO!<E(|f2L|E9RXqcYe$4fvt6lj?|8Dec*3}_0b>m>dtrLY%LiflIJPbudrNzhovh*n2TIay01O79Tt
CVuJJC&*xo^p_TZDh{HqZ`KtiAj)g?8p$G0_KL=>tZsxw0fpFX)ogm4CufbgA!KmJz!mXZh`A)fTHUU)mFG9C6k=pNpE
R|P@j8vC3m|@bVg^D9a@%fr2LddTcvx`QB>8<Ai4_oKRMoO>0OH^w2C{p%^i<h^nljd#%-|@2V|PC2V@Z)XsyLlyj7_m
xu3%+e;yI|yya=VzxN$wJI~GKxl(s>{vWwiJVkdi~6LOZ%d4lzk6opVAlfxgwkxCkeXh~J3+QnuaFT{}r{;RF;KY8oT@
_>T3pMRL12ky(BYZ&K$N;x%#9cw1Ts#E%X{Ag!9iHxTNYl!~m88T-N&u9V~mQ)+|#>qn-ncR+Nv!Zu0p3^}PZ@5!DP^#
&8*umCRZttE5iX=hG@BpK6mRaFUle^8*Ju1%h#FzRw(iF_!0G=7JXzf7~CfJ~94iaNX9mrp9kZjW;oZ!F7oDHAc9NHzg
-3d%knnTSA_05Hh++@AZ*5O2mSaUP0foloV9fCHML&ND};fN#`Py?9boU{1b4S<({JQNo)oqL?_ocF)|yC1*);afL|r+
}?8Tl{bXz?)^IACcsiBbcLcqdb~PrFyBUhbsB;jI$!BjGy!qcF!6HN~ogku3U}vFHtUC>SEy}#RNPmH0qXGB_qUSUTMm
TB#h;xRG?hsH}o27{lUNlHZ-Km5Y<({<Z-D{90n(brBJ}u37E9g4xTu1;oz4e?Fpgl20Va>+E!Lj9;Y~tqb#3FD~k{;Y
$P!l@ddaJ13R3c?F_3pgk~n<g`$RB=AnyaSL<vB0v0bmnl@e2+PfEMHPLAGa!-Q-d^FH&Qioo;<nt)s_yxO$@op#(;pL
v^tyEn|dvCIfCc=h%fO*E5f=pg>Jb=a{fB>nHNV?-BJS`m4x{eJkB}YkeITQ4YYmBu-O-BqQTa7h-jj->4Ivz(*pp&l_
Y2mpCW%Ne#5}n7&lU8}es*hxus`J@18N$oX1bHJhI~+~E!M}kc2Y6K9b+V;0H^D0Bi9;pmM5r@C@q3KJ6ab+bN1Fh7u0
q3+`y=DW9q>AbvPj1bN!<df`UJfM@R!;KZT%yl8x;q9>hSp(T3F;HD$;G3SO56^4}bF>P!fna5}-U!fO(SY;l#Mo4hdO
!qz@=61t|ygcKC1MB#ZRcK>^1}wzFhaARz|S-w{0_Anz90G+sDREPWux3_A<R#v*>0&SM8pHUa+SB7+@6Yy#@7uq#4XM
;=P9cMcwWI&|RaJl&^@gwb@DCX2b;Fh73(yRW|^y7EJE_w{z=O+43i53gRm@<%_7&xRj9^bVhme){lXIX*kM-Z1<C|JO
N;esVw1|1HP<85B1%Ug?ZihYug7ko9s;QzqH+7mEc>Xn^Qd`cMRmefTgRefaRy8J|r8_s%tR?rej$+#LR}6&eH}=e~GY
L_mo^uIn125(zYjK3uv(nk;rl!}KM~9HG0xn8jHVPso>H)Ey(G`3z_b@C8&a-0=LTk^5?V-T@v_cvuLn8GO78c^~F>jx
eK!E^Hx8avKO|D-u2$o`8xEtx#-706Hnk%%E6uS*$0w-v<!mNYFrCI~q)G@>RTKyo%hHdy=)>!OOjDpAK!xn{zBSn8?E
cY^4DcW%SmfUU<tWanK_GPQdE>z6q7u3-_BOB9g!~MS88Qu`jQGan<rJuDfT%d(OGU=a8T)qY2WgKFN#SB8l8~`yTKHN
|@QDJ5k3t1rQMwQqy@rRj_X3Mx;CG9A_w<mwZk}L>UT|;&{@%c7ZIQ7EYg{)*qHYrXzO)8~XhU5cT`zAM(T<+<;tD$Z4
N~2=CUmaz4P`?`6Sz#68ymIKFN7oY&6lb`L+`fADdI3C<PPITxJ|YJgXVcmL7w^9a7ZqQ5kbD;UY^Pr=V8j{mX1cb$vh
Tz`AvbpI<<fW4c2OxmJ_-lyPax$plI{IhgD0~#%g&NJ+JwvF5i__L!w>ng}{H((zTX@J2t*adtV&W#7;2jaT8JuFxx{c
yJU-P(4F>~GU8?ED^VGiOJMJ3CPT4jJ@iXUeg_rlqeE=M6hA&lQ~PGNu6~SpfmVk9xqi5}2Ju>Zm4=I{d4epT=vV2lwP
fSD6P|LOwC!>1g0=peWqpV-&2Rtf@V&?918{g#&8<tB<3ss1QTf4JW|N7r>Y{>xK6jVGxxoeRon$d|S_cOp~XGtswy`+
Dvlus#l|>aPR9Zj?Wnzm0^)|LuqD1k%R31=!AqB%0!DN*d!19;fHVDC-HiA|N9t3soX<(gN&>>rTQd=x@Z6Zc7QyYtXb
s82(xE!0pYGjEf0q@;LbcQVi0VFMY`wvheMAB#ZArbGoah#eMJ`Ns23FJ11wxOSY>4HjL4l!S*MU?u$7Q_ipeu1ZfuGo
TSmmH^I(PI9&e4ksb`@@N4OezE?04bJ)V|^>ZfqLDFbTCZ$KTiu6+FnmC&^<S;A=D*#c*VJ5rt_P*icwY*PT@=-&9Zt8
FClF5)gd_xJF_4e*$oreT;DXt)Z=lI;Of(9Q|n;<1g@T&)YN5)hqK7kPr%0RwW;eAHgV(_{hC%6ly3mUQ?s8oBu*dvb$
bze`Sw%WVA+FWlgof8N3xxdG;l#Tgw>DEqYmfO<SD#1`m`vT)XT_v1knx7lp&86wo>-BM1dK1$2@gm*9SJG4#*4I?A+_
zs(*gnxw29CUqSTZGjU8_QIgJ=8Z)8fV8Ku#m(!5YUatyj4?;;mKjcD?ga_6#XEEL-WwbYDRh3ZXQ6}7ZyTt6c)u4e04
CeJm)uPU|c{T(BwO$uY#~n2$AkGkB37geL$ijEfz^Q`CYOLMNx9=(np)fy%b8mFOn6dxUxAMa2vKVh_&mdcs;j@TBYdp
Nr-@;p+$9ioT?1;lYDD1TeU)@!bfe*aCup0i(Di7JbiS{odL|j4WJ0@WKxRVz}^MlW{(MU1X*|N`3LL)@R96CK?C<yfW
wueLxiSf!ViQkP(5>t!M+T5Yk{gm8_^GVkE`9eNasMwRK0YG1VECTHJXy$0MI1t1;CO*rui_J@Y@FcM<O-xrpS;Rp@BG
bv)fyw1KdXqeG;9C`4lu-lol?izG)3bkp|?dqF9CJ=TA>hou`XVw!S+DQqVomAMd0>37>g1azW`LhL8(o-k8mRRCFTFb
gbeaO>>!?(1>huT<_HX-Fr`g6}Z?x6JpC<-^JyI{?do~Y-17w`ePGnG5!$(iQF2>ER%d3;Si-&E4jnNG_`~)3*|W1Ajh
o3o<vd3e-=yMbCJ^U;yBg2)ioYno$MDfb;$zH6;78`Cl77_B}tnMy8_~Maz`ZJ2Km3r8i)#H-@&yvW`(R}_9#RP=q(Vs
s|@r`m=<HAsETglAx@X4LB?Fz!zc4;S)l;^4S3P;Kz5Gjib5(2Xj&8{%(f@HgN7tA3K}Q-M4W<>3blCW`2oUeRI^v~K3
S}wk_#j{51pU?^55w|;pe~nPY2Hw(TIt*Av#WUegmw5vcHD^D7(lEA4SX&2}oB&CHzTS3PouWLGq5{Hd-M460K9lUS;V
0l|0H|QIntl@t-xj`S~CJ4?&wt=$0nu^8K<y?v>@F(Q?0VNXSC7Va!HqRTJ&*R5RHovki%@j#(W3f4xRq;F@d0g3={`+
(9ced54o}IPbWM3}O$0`rtLBh7i}a{hf@c=z}NC?6QP3ar(ljB5n<xL=J2N)>$|hrg+SU|Be+X=)o^7W1fA0_F?(*JaD
ZuFz4(ur`>*Y({4MRvzO<0516kQa1zgR<*g)BL5rP7&<o3We<JUTilZUA7^baWIT;@g#&I({-Qy=7878aI1zOdhAX@w3
XMb#*I+MF+6m_jR&i_OwgQmGDKstld&iTwL;FHf8g+>Bne}8y+4s9XydRfw3`%}G0^Q!+-JeRFX?*Tr<_W1A;YJR*)n@
s`1=;QcCex~DQ^Zcg|`I*PYUw?=;USSf%+CCliVHbGbO*2jBu=r(I?3Vz3L@*n(&84Mp7v-`oPN}HfAZ=g3)U+;ro^<I
H%sNyWbsJ>$_0k($NwM?Te#$N+sVG3dj6%&Of;6IJTs``gj(tjKwam35BoSWt0p*M1U^FHM)|o2byGmOi{srR5L*fzVk
;^kqZ6s%y)7!nV?bvK+G^-d@3{n8YNxMBqq@>CyxHd%jPPzn{=Qlro`%Q#knWxQUQXTy?7@rONq0<rv&WD5RxW+I~^A<
wnz(swQze9#OP#`Tsanb=0X&y8Mq}GBT35((;S|ETX+>v{ZE}Ov8A+}51dA$LiXXHzJuGkVaa*)tq{kkHOnY(yHj|-es
YEfw1<8Hc3iua_!;ng#|h$gNz`98>$7Hr0KH?18Fhh`Zd|2}zGn1q&cXoE`8jJ`|Z%fpD-Y!WU?I(zMFccO(-Lnfq2@G
+(=TGA~k#$?B1dWP%+@6G`#mp<!C*o;IPx?O>%T3E+Yy|EOD+!m3?R2UQ;_}DqBkw(fMS`EWh4v(%$5F^icJdxtMf8He
P9nX2Trh}9b;U1J9yZ%^pezbHjkMryaHcNu(dRrnZk)3%y9;o1sCR703Pzm2L>C9qP4EMwR7syBd23ii|0yZ}N{KE=<w
0q@<`a<Dg%sxmrT}ge(edmSY&+0?BBeouO(cw^2Bfv+%9{?l=_C)iD8$-5?_Jpqyi(G0UF2)_gQdw5?$K_XR`ujJ@ZM<
0^x8r0qr~H1Mt>U|wF<Gxe{1op%oq+<le=@+N2cfDY^Si__cT@=jR&*s5c)7>YW!NQcTC5QOLwJBC5%(*IL&?1{6Z407
{ZTj-)A@gZ!pbsI>hB7~#^MWv)$@&;8Z+4ViyyNUh|VcM`5QLOinBCrhoaMbL^AG1T6Ty5;^8UUb@VUtE$D!L2?PY%zE
QoPf47y@>b)JP+?EN$uow1WXgEgAsBw;1(tr=S-@XD4HD4!WD-oa`8(ToCKq14g1KiXlrBOkUFnPu$L5yth+a|>4{Sq{
Dsqp}EvqGsk3oNqx^I!hQ&wu$}E|4TVA160r?Y}s?Px+G<k9~901v9)0Z8%yeD$iaQwqEKZl{~rAc{u20EpWm&k%SdUc
1R<i(kf~-7`3<n`^FhEZpB>+i7>moki27wR>U|hT0UXd2$pG)@9U}{Mp9#DGYlCyK+uY63?<t$6|J~H=%ZkoOMMc2OgG
6%lZhv~`3EDpxY4WbE1;#4-O`rE*#(S5{larmUG^Ko6VF;KXb4A9Wz#+-K>H+FM(rLARSX41JQfzI6sc!~^hY}YS6#b-
Y9xnIa$CnBqqHgDt+uW)x8B{Bus2=K7MppJQ<^_CP?+#S;BbighD2l2n<<ajk`Fp45^n`O`x2o!05W{r`PasnuD-}blS
XCCdrEkwZA^dUx*`$PS{|v)US>rS3BA?y?PD*hDor7@1gb)7Q?(V-fxkaCuH0?bYvij2j*0*eH7%$4R~gJc8ossFWeqq
TiDs(el7&pfJE^$Oe>7%wO%JX-@?>*DZ5KboUm#E5mH>Ie95}f&YU&u+KU>C6rkG=v(HIs1!r|~jbZpYr3f;(_>}wI+f
V~39FntP?Vc&qLE!$I?^QTxMZr<!kv$R(K@^HXjPVljI|5BkZ`E^H<U{)58GMi0>SW3QF!VXzSBD+d0DOpiV{v~&V=ro
<rK}tjr+X%S@+~pgXZ|-4;<7!c0k@J4YX?pP*N1Tw`t#ClVcEwaY1NVU{L<U(fm@b)kYMfVxt|PqSNBRUckdClpO?OmX
AJ11^hfm~HFbvBh2Ba<oMV%juBU`3jAlKvhM&zz_d=O;P<O_V{3QT9sR785y7^9UGO~_h^<eVt*ctoU%llV@KFYnYjX6
o^E4eFBa+63mEG;z1~$h{a9U%Y*dcc4&)75=~a+K<#Ffey<n!RjiqdCQM`qZ?DkO(Qyw3ke!D$XKCOO1@;93oq8P>L>b
gFS{O2r0=9mA-B*HR|jN9T-AWgk*T;IDMa=ho&Lm?60vuU+koOmUw~K6O2K7Nd7=3X<{2HMOMq$D=><=66I`_=p*zEcG
TO5n;GAcH@38Sa#D%<iNWMjW8Qf)DUINEe<bAi2$x2RFZTY6ZKosmKFe}>g%!vYWIXCPP<P`U5E^kl5JdI@^vT1A;z)}
#)9t`K@Sk^~5No)%`N~I11hpummerc$%M8U)_CGFwe8u3aroBS7aIte#>5EDX?QC6fIbI(;uUVro2yqcKWA-vpk*CqO~
qmfvQgJ3I_!!aHu86=qYT*I(kQ!1SzVKfpZ(|ij~J2fNfg4*Fo?^m-F8a%$qo|5%fz?(f^qO~kS&WFQE=*-jG+honr3#
`min6g6(DL{b&1f;x0r3n<*$Hk-L!(k$tQ1|(ZA#9=2sU*vI0%l?-_o+MOcf81!cafw&NX7ItDW=BpLNxWT;4_`BCu?J
`X)L1C2{X$=YCLE*0y5aG%Lp;B3jg{qGS-NkGC@vx^8ywPr2{pWRq1NW4M7Z^X7ioiL1_V`M<h!0hNi6;9um5MBU+pw#
5`ws<=cqTMEFM|!jW)&7>XyqOP_{PodRR@H5hp~*w}?WM}b~^WGd3KMFRb#v=|pqNwwg@$42~#D1Au5lkkffy}{(!0Q5
x>0g)wxl<7%vEaIXw#SN5gHsj((-WlYeHR>w#Q6=TaQK>0$hKz<v^1;<LWj|75$T2`hiIFf<To`Ep_ZxWijwAz=Fj=-i
?fv4qb<sPM4ouj5aP60??Zi}{zoSqAQg=3|CQ`leT|*sNN=|aK`GU)6@kYoE!;#=%Fbpm-4*Bn?`yZds%dLwACq$fsse
cm{`FGzru&x~Fh(;At3`NQyk)wLqAkbG&noUner=UAIuyyQvD92Y*d}H@9wZ@KpWs0fZRG|BS99TnM$p8_c^bMDPF}yg
foU)gJ95OG(Chs8G_)45lOwc0(x}}@v9E=7Lv+OX3rHYCSb0{uC6cr`!+R`|cV+kJ=2rCwnZ>BF~&EoAX62t*Id7q(_O
$|i?4@>RZ0r`dKS{l!XqiTN>j?rfpYhSbJe8N6BxTC7p3Y;{3#Iadaj!kl)wSkO27LW*pE<J2fGI|0$P!vPbK$G;yU5y
}A&sBM)Cf}h!ztYIim9h_rQQ4Btd(mQxAv<K_n5C|ebtb-l(y&1%H7W`sFwZ(@jvSJ*;-2S#>K@<SCcbJPb@>fC8r8NN
vdAd;HsCAGTBEWqHLLA<m;EVHccTYgp_Ve?MLae1RON^@`MZpc<QcJ51?^3yl7wHD<k0r;OOoc;c0gYw<Ne8(R!!mn#!
eDfq!Fqid#$3BsP4$mqe=1ja?jqTfTr1lc?@*{+lY5mKX~nz?THnKfUegoL&IfY9IWDvUU5gC19nvHKWk8?dwLs9vu%P
`^|48>-o?;UH|2{gR9y+i7$}|zt>V!KZP?Q4zy|la0xm&t5=uNmxJ$B!q*(8icx;^&2;XkiX#Y)@{b5k5fQ1lN31PPRB
l$)vAE?_RqUtx7Z@R<RZ^B-`A1o3K0i~1s-LT)6ePLiOTGN(y?EBYj_Vw+b&9cygrh0ndV##h7S+@2(>Z*;v_~+EQp1o
PJSm;*XUI$iT>I7q+AgU=C@!EOsx+Nz5toJ&&i&v4NB6Q$x8VgbN8eY5!t90g~8}=@x1d)Qw7Ewnnje}>`EoizS*C*Pu
+d2Xl5NrX$&tca9c~${6!|)3C^bnF;B=DV4W*Zu8z0t8Gwj{O59y-``%ZrOPxxAjKbnHje*a>%Pm4`iCQXjfJ^(BQMJo
pppH;XRDK@<&u0cPN7a5T;`svu?@jl{mtZoMsR;JhE~JX^i+Th!=ze;iCzHA`Bo)HJmZT^Z@O!m1eL_+X0m#T$h3a8QV
&a|V1lpc*I+4_Fz`=uZE1)El>Bv_7JDdv<#(L_`+i6+33b7W!){z4|U)MkDGDtGBS-Gc{5)n?$220|Px+xk|Nz&8L+km
lE(IC7($CDPqf5Wj2YADQs5pHV9hk#bfNE&ipeE(+1sPxAQuL|E}!%+Sq{r1E3L&3&%q(^6{)pi$tL|=h3h3*x35CVc&
KGuFxH~dY%3mF0N8hM)Pej-;JY@sN9xC1KGChY#fMq6V&|uZj}`tRmO#qVSTs31{<4i&$%#Ui?4BjSB;{{w`hle7K!XG
qruX+5aXBMuz{;SQ*xprg{2&I1N5zLzX>inSNze&FDXK=f<KFRpq?07Yjw8Sw*P##+4<%roIsZ7QHfm(N^GqXlVjm_wl
Oh<T<|e^<lGHpXMH(=t;?WBv7Y?=&;Oh3Nhj5O5Z0*-UT&>76HNSYa<j@7ySq%8bI}9p<sSA$={j`lgYE{wjFqmwQ3P~
NIt_SR&)o8A`TcWPTv%8?=;;6uh1iRrlNmOI${j3(fNot~cCPp?mRNC|mAE*Y<K?8;PAB&`c}Eaxa~9{)EDG94^BABr5
{&y!TB`q4+PBz<rt%cLq~Kb@C}5BdVNj+!(sbVqtqDL?0f3i#SlSZRKa2w1npjQWt>Y<_$D<y>v9PLQUef=A%@<a~gBv
oW8+Wm^B0@K^D3|W2-NT=|!9?>R(h%l`+XCK}^33UBxu+rnj|^K%VA_b#EstYlT86Gq1<GX3!(N8GrO&Q9Z(BWeFEv}`
k#QA_KI3U#p_lDrmZBu=7+S!6-MP97+W4=&f}h`~ATSNcT!B3)bH&I@TTs+L$JBs|aWGpvzS0N39B>tL@#GhKQluJCly
`&8>ZuW6f(m!Bi8HTCC;b++8mP)lbVcp9mdbXTlp8G>1lBjBPw}F6(2TtEG7P;YE(zm|((le}+n#Oxf%ruoGSL2czttB
k*eJeh&vyQx_lDI)>_s05i|#m(&ukma#67@Ln+Noct8&0{KxTK;9aHq70KnwrL8ouTjl$k_@CvU1zHwinolelqhjfk=p
dipmc|Y-vPL8yoP@2Z1Z&1Llnv<Rt|BgjJLw>?@VbtMBkAPVt?T&s>JMBxK?$SvM7v0w}?&(pXGqVZc?AO5AFMQv+7>S
UyskCvC=P}Jwx;S7&-pU3MHUuiXQVu!7GT*hji8OFVRALNQ5{L*qycT@Ts2lVyX<FJBV(jhSr7{Pu$&9!4l*FLh4phWD
+(f7g;ca-xeis)vx)>WAu`HywS~6~y2+(yn!1w1@=&jsrDtrVPnt09tT4(bs;T>ZHFl<$Q=uUw~=h<!HmUw783AT8vUW
%u^UVwM(O$U#?R0A=z8r^~nnNAiNdQOnS$1oNdjpA^id}GC{QM{({Jo+U@Wh`g}RpA(s+QO_O5*%5>F`1)-9$$Tvx=2@
(R$9$Vm<od22bu2554OFk*w=#+Mdr6Dd)Gz1OqIaN5lULS=YyUm1%vtD18kr@lIf3QZng27!#o%U!FEsGmW-EqBr6U_B
VD{Z+;zj9CldVjRlq+)!$Os?mAZ@ZIIOsUjdpw(P4x{Oq*_rwH-TOqra{4C%mLrZQggADx0c)6u5ouOGTA5kdrst`EuE
E^rw^Yv-q2?=6QXdD_R>7Nz9DFah_=|e8L=*yQj}$!Uvrz#?w-Kvf&3KDpBHXm!*qjK)1eE%6Bwo+OxtlVAwfpZ6J6iO
nF7%T3H7Br(H9~>G;)K<FBM}D#sS*?j<z>|JS0ImguNYDIIUl6*>-^$FczEQ#&ze?M^tY0E|^u|);ImIq+wr%KCI4~iz
@|0k$Mxj6c7z0s|K?OQ*2O?b?nfIQce=&TZKqD+NQzQwD28oQk9>v5qI0WiC}p&Th;@Z#%rXFbUU7<e-`TK+I|;BAT=U
dW7z-9@eFqkuEBA(Tt1^lH1V|#TD_m&Y*J%`-gOP728t|n5-YkktL99#4Nrl=+qcaoQtq4nHS`Vx+zA}T_1^Y;GC1)5?
p+1i>BsP279hT;1MyNj6|oK27_03f5t>8gXd4K#noi*!q`|t67q^z+d(r8&E{Kb8OlrtK>)-I+Izl>T#KJcSi>hH>23!
+)^eYaL@XF^4-JS_P)OC2zkhsK6nUke<L#d3_%cK(TQ&3&9cFQAKBitPf1}lMThkv-|W|O{wRYoSqAGtE@oQg0OxH?1_
{NN~H@WC<54A&%dO7i!|bb*!UttUG4TNmc|NE7C$5EGl>s~sv#&%bhml4vF5is$#KEX3P&U@!Rdo3z5ddYT_g!*g)qpI
!6*4X(_c>+3URjw))pk}_ARKd@|&OvunpZqWZDy<77ALktztm2pA@i@h)dmXM%vZAB>|Q5x0RdHU#V9~R5J?s{|Y?c2B
KTU69t!_5pKaR(E+7+LX&^-JewI<SsbC*qXS^mayaadSQ$+)URsQB43OU_I6lfd}DvtI%$Q{i<skU-PIYJ_6;iRknJ>j
{kB5+qz?Rzp6nWvmoHNn};Q$I@Q3fPpXO(&aZ8*iD%nu6|LXU6L5CPH9%yGj=jBMD?yupw$y+|QEN)|ZK>0ncI@o77k8
=^NSXyAKoGDuP=ilC><dzOP4~-e3!+2U>Ei1mq*OX8+|8uE8t1xVQe+w9+Q7{`xy=Cw>b<aKoU7_yv^JE!LI9}4t?|68
^ogx_elM;af9eECUQhn?ArN`uz7?b7H`~rIt#uvXLt+V^1f5e1gIK-(#gF`;+)jloB~X%l9lEgQeFw&(MlHi1GM274ON
<j|NH2jn$Do(=JezVAnba2Bx&lK--p1{|HT5iV9FuUl6Me(6ij3;Uewf@Sx=?3{5V5Kv_Yo*@yPf#11H{}#ow9N~LPjG
DlSJ7Utx8jrO@qalN`12lbH}Sz`erMpb<1q%oaj-_$PH!1uMu1E^$fKd9C*C1W#|5<mV*zhXgOqPruHRq6osmP^{zcpv
$}CrG3&~YC5(6Be`d@nzdYKAH+O6k)y+xQe%>a$53J4lN03M}d#iF;5wxSeCEwnQZ(G;8OMNv$k42jdNi@2l6L%in69M
1`WKvO^wbcuHfnA9+V2g;A>C^r|(=%bZ;GeV28i=&SW)2%em_@Y(9(N_G*5&ujC}Zb_Z?=4l=R4GT<wK9vcX~J-ubU2y
o4}p38;Yoz4?cA00{u{hn#E9}(iQ>|9<(_c8`^DPMq+<92>UOMxsE2Pk4rpEr0$L`6PWSLiM~)_p9|Aw<Jx-yNj%*!F6
)AdoADb2=)Mn4Vm`vw1~|ES=8anX<<Qn<7WKRoA;zWpg0EwJh3D@~>&5)c4P;h6>ect?hDYxGT)+^RjHl{!;LETYC{y$
~bj1gsmKe?0Pblh^42Lr1ynd5E01+EJ|1KjmK&6b=H-WIM<Rq~Ba**R(>4{)RF!7e+a44Qf4CoFsRTyHj{M?`?9>+AG2
OQM}8~(}WcKNELdfgBmJS9Z<W*fbNsLk=>tv^g1;y?7XUr1k%!w#Ch4u@`V<a%j5A&D=N>SI)Ly~rb-Pwy964>FO&U*E
5R5ITp_Lb+n}9HM#IWb|L&fB#*FW3;BXq5xoWB^f3aBN{ZD3MYa}Z}@nr#JH2kNv>ai6-C`aA;VNk_NdZzRBY47P&zG<
>AlzOp5e?fwC6a#e)+j8udEn|s-A%4D=LUVUg{6s$Z>`Dc}10ww^xh{dJ1CHe9X-S7>bS3nyL3W@$pc4JCs!xQcdI*Ff
p%m{_UR}kpzopZw!@MyEll<sW3qiJG16um-yDpA2|k$HRziCpbi}x2-jGClz^UGDEavU@kT}Ufe`C;2yvi9^vn*bQFZp
fZ7B*;SNvv#kWU$Op~35}Pri&X6z^5w`+Q;=hQobnJ)FrzRv;qTbq6M(+#V-2n?&CMlj)~!ROmZg+w$?x&B2&$86fdv6
Q<k0AXi*V2=$enCTMEFEQu<~LFfk{tVjUL>lR>0?MMa3y@@AZE1h~(DvHF?#~rWGpX8!Juh~Q!Hd9NzI_v=ntAjBGx=1
Hp@R#O)uLQk#W!!lE^Cn(Is$u4h>UCR67mw2((P!x3=snh)d*&(Q@_NSbTnRHMa)3!|jVTh`#=Na9A1T(eE%ExMn1g5v
|G4VD01-yf4WV*99i=QAH^d78l}C+-S{$fI10lZ(Ey`i2AfQE}Or;Cvnwp3K#4@t};b2qYhisV{+}}CL{*kIyd4EZhF=
?3R#>IMYgMt2M*$QtGf>3OBWj0A-5Rzj=iQ%iNAVbOSAYzmeUA|%pTii<;Z0hyUwFwIuO5`mifJ?S5#ax#F1!W9dMh-&
Q*Xkh?QqXgRxdA=gAOSZ;X!elz872Y&+QE*sUBUFmrC3TP^|dY~OpKWWxQNjlna<41nbhmV;9J!jy!`b|a$A%Ug=cHfz
m{=@QjCeG-!wTGm8r6z1eT<BVj-{`Pd_GbCA=~OSuAghXN7?=S#}sM1b?wDSUUT;A4(1C$Ku<3(N_G}S3teRgC<h8X^6
{sM>!bHhr>?(q8kd6h8Y8rY=knUCUznf!e&9gE>1M)H}KS;Gf#6I^IUp#_ZlLQ=1~q-YiR!nAr1HqLmBqOukYZ~%2q-|
MTTe?u`hIuqfo>=-jWoscs|G56UxSlx38lj!?my?9SakMuWn4uKwen?m_8&h?Vf1G=j)jwf->lo7^-u@Ptl17o6+`6Q7
2@_cr{zJVxquiy^!&lRf~QDQbiav4%bXqcsM#UBS_;O=xYX=x=?xF<0N=8k$0-=2G9=RUvSawnrATNaw>o@M@P|!{f3C
mOhHmDEaSk%@`g-Z@J)ITQbu_6jYA(X)g0-#L4h}l%sM()7y1IWfjT~w?fG@k#G5?%1>m4Bu5Z2<%l$AA9KW{OseqG?_
jo#t<-;}t8DbS9!O94$Fr2@t@HE^0qR>t%K+>#OFMgNo4hR1EkQA};GhP(NFA;(wia1!U{Ui`!q*;#N)_{#BqKXA03^F
Dn?2KI>&(`pb501@b$W1D8ldrGOi7-+>kT1I(D3~KkAz=*dIKu%(xRhz|^Xuh2G@}Ct4d_2S88iEVvP5u7c_~rdK+w^V
<vk(Tn!(Jfqb;3v)pRb@tVY7Zdw_=n#|D2sKot};!%=bc^Lb<k@uK6ckisVkpL#xJfMxm;^-GY|z9N(T4+%9VpMS%HQ1
c3fL>eml-`d!qf9Bclfak))#PTro&#gNI6vT}nI7U_xzr8LNnRGuj;&qoc&IwwLQz**5s1aqwO*m<TABhi+N21$)rmA7
Y9_eprKt`W0)@Y`a$34I2)UV<dG?Iu}6h(gv`V622a|?P+RjeTw^U1TTW!q8FqX^gh6LX04NY5cYt;p#Ze9!L0w`_lCn
g9+xlI>8GVevhSm#~8F*gw%XnL3FaT7mdW(*~1ABP*&0-rtlFT0M%)%8?FT3@Fbr6l5#~Oi_=X1o{)x*}WlfQw-Q@Y%k
2?upoi>J03UGAtF7&h4C~ir$dK>b-?8LM^}2d2A=XC4wc(rr;FlUD~um(2%$73!j&IS&&f-G9QsKs7~JHKcaAuxh+I6T
=wCX$3)dl*bf3=W2}tmWaVRtEbNTLs9=bqx8T_w*5%lEYRG0Ob$Gd^>PCa@Q2+i`I_Bs=$)<JO(vkP5>sDz^V8)dgUGE
yn)D%O=Olx|Va^880O;w{ou8~wgRSSgS{uDYN5@5BwI-fH^}4<LZlJcT@{ck-#pFrMbw0+!_+5f>`^bPp0in_SB9t<-h
Aa)rQFy=V$dQM`JGJ7y<kLwUyOX~_)5IzHv(mW*@E20wv?M!4^%In+elk<!IT9P1cd?5F{0AZncIfI;KeEKWjL`kjos=
N_s;>KYV~U8FA-++_hu`en_tyC5EMSX#bQt>j1Y=41m9>GG?14HQoWdIT~nj(NY_{Z{C)rW7UBFzd;ZGOEbZYw`rd-RS
X?XtxPS3tmkrJiX2-=3>ZglFuX`sU>YJ>iV)9D@&w-vL*Q$&1Kz#D)#+@=+sz6!`KXllT?q@`Ybbu1^G{%;?dbR+U-^7
@X_oF6z6r|&}IUN*B`ylZf|b`=d<2r?``ka_uoP3RF+Ob-L=a0=KZVw9E#81&To?|E}k33+vtF1*SVZuy}iDII`Kt(JB
_){Le^PtK)JNa!*=T@uc7=!_aeR&eax%@v}f78QtS5W_Vw*s9LTia?~7g@>{=M?%&rAJCASD$|MKF^rKlClT2nOXSmnF
%)$JQB|N3%vk-QPG-KQ|Wy-T13IC&J(H*|o`&F(Q_tA?7)?bfE<{zX5A)^0D~zJ5E!)-Y1`TFoaU+-BGqHh$jgT#Af`I
eBQdF|&OeKctIY;N&~tdk^hR3ZL;ZZ^PD1Z=nSk^<BCIfZ%_<b@K2IPz>?n3@`)eQ5)z8zD4Rx$wttIBw1oaH1mueICI
B@NFPHd`?!GZ(YbOuy$b=)Jx@dun!~Fv7s&drUqePuXZW&LT3h-836noMXtIL-jq!$hDzJh*6`Qn;HTcB^M}3Ov#1R9i
z5Ys#ROkit&F{S6<S2fk&<I-KX@csjtpl7Oor}C&<+a!GJl(*qAdEO#Q9e@+g?zl0OPnr&Vx$GESGsHqM&w*{v56IkHn
c<lvD52T!4B`~X^J|4AN)#DX~3YhCtxl37F86?4S?q?>B|;FigVi*&VJA!XoM&?F_`Am#L$SyY;znpnm*AGzIFn&V?do
{n+{(>XO{5P0Jx|chtBOHf%5oo8~JPK;J@!0clddYO)-|YIqa=St6xAho3K1i7k*35jxX`fKJMN%K>Lyv&<vNY0;dZV|
DnwRRh_<^f{u8_sCMpSjS$w9#??7qNxXa#tA2geWi((B!+G7eCyQ-lazBs}5dMOs3J3&*vWTafMZCs@ytZYYDpJH8e2G
Q2Ezn3$$T|TT6698^0ElX|QTQzi{0Vi`LQNOh?BhEOYrk&uP73h_P-p^xn0`!)c1@NTXRq7+-0F%Reu35{1}0BHL~-}N
YsekKbx4K_ovuOc0OerMr^PO`7g@<~r+N)B%BhXq{=Wme@s$j7g6`JoTp;cn+|EQKFcC=l!wTP<4IP)C`JlydFbtvm6t
Av`Ul=S^eCnr8IN{s@{NacTPVaUt$$*eVYVmdU3~^hWAZ`SA43b_bg4f~#Y!&&syv`qi2P#?GVPRSz9VW9axjjwp<Hr=
2n6pl!AO@H`3H}l3IwJSh=6|DCi4?x0RT9j%Pt5n~*Kr(cY1{0FiWDwh%sg&z=>snog8)&&cUnlke5a52QNN4??!cLvA
Tx<1#IlEqi`lOXb>O79uj=QE0)adH@|kL<y%r<{TO#R$D0axV*(#0G5z<~Qyr9|fa`%K{v2K%TkTDl?Jr^uU;cWD0_x>
|*NQtZ6M}f;!#!!N2GpEqt=^*q5Wl_wywp`6@rL{zx;F;s|Q8A-0T5Z-eDRbaV$-KUUU&6tu3I>9%6eFnG59!teIs>v*
JPj0Ka(Y*v2Wo%#$DL#7+`pE#wJW$}w8RS^hVgB2VmR?JA-On`l2){pNreNXDT=j6U0_UP-;fE?CBY>)4)4|LE(p23f3
L7C@Un;aq_$DlxjI6*t|<xN^9hwfGkcR%wObiyY>vhlhDEVVaj<`VBo0<-SVz3)T*X%+St8HYLS9e%@tYaybZ_G8<l06
PN1UJ6Hpf{N4e|B$)dlJ_Z*J!o@kO;YHmB9LCLSZPT6+sRWA_?0B!KbtQETGu>)Pf-p55Nn^>zOm2=r%fZ{z9I7%LLqT
7>;*aK-BG`1riYkDB!-(Dk)K*9&aB4k-;$=e5KKA-NcIlNm=FLG&%0?N!OO6s`5RI~->9d4<Q8VUsGeO{|&hP{8D0q(U
)SG_{Q?Pbv*zb8ku<lw{|#Fj^xn7TIQY-;QTYm4QgLcXI1u9eUFj<mq&=s8PNV&R;=G1W##`T|1Y=KzG`iN)cZ25I_g3
02)&&V5u455_q3aw!&27ZRbiWh*SpevF!y8P%!OKgyObJt!cr`uC`ScXMjfrv5%DsGX+~m+OAcJ(`*W)>;9!;Q!Ct)e4
XG3w;Z}CkPDlDG`NeOWO5hZ5}{AFV;2D8kl)AaHSW?2L%ZYqi`8bf3P8CJbq#vUTaB3){1^zkcCT}->f=k=l}R<Ao*qy
6%A9f(Ei3uNz@;A4>FJ($j~opyer9m^@LY|=RP7Fbw{@T0i+7*w1B7d{7Z_+AE}mQlWBIO}3)K=on`bXZ{hs`5mWW!#a
P%lQsZm~DRSMt@n&(jG1kC8QQ-c7{krJx&96%U9=k&tW&kIATX9l+WGUuCBN0Xy5gfFV;eI-g<7|V;-*J^P1m#&Lw1%&
3BS<<7wGM3}0zsjD_Mfvi`v)ea4xj)1Us&!h`r>s~<GM`l9qzEW%8f36iGN<fN=vvR)&xG({=!ln^OPGxj1I1!;{7U*D
Ib9A~*KYHmg_OX8^JPU)I^rbP$Vm)V4sBSbn^Ph#z8(Oobg?rPUt=@0g?{ww%^1*t(fzg6y(4>A*({f*#<a6v9M|cHP_
id%K~w|twfenG>gS|;vgrW`yUyOMWEX_ofv^NWV*oxH8KI8CgU*Ek%Y~dEQ^Z6hs57rAI2eSH8TXgm6vii@BCYWm)fmI
m>Z)YEty_Ab+)=)%NpZ@RVPwVj@W#QfG)o`NpxkjhS8{#&Y=AcURBLn6Mym{cwk)iYO>3J`&#~*WtEoBJi+GhMB&N~V2
}QKVWU3nt)7&fW1E-k#x@l>UuUij`BwTiD_C5W*tj8}HW|4vlBvWA#k6|J=SckEr{xqQ8`rkcnN?pt2=8mYmg-q8PnG9
ekem~VdHXR)mo<C<m`z4nDx`n6fEYI?&8ao8(kcwmW40caG>a|+TX-n8q9>?ee^(_~cOUhT}mEp;-JCV=*vGKG1eCVj2
;Fu;tU`H@<cgPkn1T=<^#&aJ@X~f5)ADE($O8x831qq-}PPn1OU(}5t4B270ZZ&JHXQ}VFj%)YRHQSAgs$m@;eS{T4J8
flpdKXvo<StNqnPIf&23f;vGDleYKFGbvr{<=9=yd<!8Sb9{65C?+RDh=7m=Ia?_o@yi%g)SRKN3)U`~0+Z-6W~Ug57_
9Naktmcm}n-?j{dNQKd77@HcpE`x}t4vU147%qve8w;{XP*vB&_85hS?)q^O}lyx2@(vFU$9OFDnq!`Ci_CdzE@e_ZW*
?l_bkU+9G;&s1^_(c{k06TxYciK+x3KC&QzU_7i&q_Uit943tL3w0~yh$ALiv#|EU)}Kob@0buXvGaoslt*oofqi?`Yy
%G;?x13*v}GvlX<I!F;_u~uR?&u%W!+c@^p?Tgul*|Z5+fA53QcVNwDx~Q|MC`u00c1hu=N37JG>N6w#xz<6l6KYpTkZ
YOBH)=>*TW*G3oQb)J~Kjs~OTsOQb;mq+Jhf^Yvn-+LFt
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
