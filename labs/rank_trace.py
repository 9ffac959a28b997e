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
c-qB%+mhqRb>KepE6`968>mXMNY<sh(FJm6#$!vXxhSSbtBqiDM36*P!ObEl0IVWSBEnC8-q?r@zj$Bw7yNGjiN0jdC2
s)1?vWg^)~Jg>UQcG8Jhwb~Fi%%`;l#`MF<up+S48(BDvB(bZHhP#_oe7|yU8j~7O@`=_pLb<e~cD!xJc(4tkj)naa6?
La1+>q-?~dPkBW|0(PJ#0qU9!@q<78_v%in$MHk9tNt}D8C*Q|5yLnuEsnR@C)o)R5v|h)ng=ZjYWpS~|Rs>J0l)!D)K
c(R+9FC#fmsu9=yp`Ym81Hh=pU5KfW%RfXy=D3=w&EeVe}J)l7ZnfP$7oBb{F1CZ%oJPSmlflD9<Ad=Sj5{R9KHugSN9
&i_}wgCFQa+vU5wkeLw9m<FXCwa5DvY)+jaxD4L!bdg?o$7%K{&V_;`<xuiRJg_@_+@FQq@miWAl4->1n6dVEf^MIH|6
r@M?-_r=5QV8pLj#B*Ign7-U|O1?}0l%DAHeVHp9*DsxDwQy9KsPG`WoXUQ1wijU*tv*6G^dq|&_D9nn@f~V1Fdk(?)q
pY}of5{qiEiyaOE)-CtIgvq&h%9At2J34zVb$)_hGTWEdBGBKFk_Sj2e2f`f7(*xYd|9-mH>B<jFt8lW;tC|1SB;6@#<
0%ictc-S6bvfZl#9-}=4Dq<fbD-tc;Chao<U`xAdO8gIie?2p_T^aHDbKe;RV6NOkXq2Ck8p0~ZgZvAeN{w|B>NuH!D@
6z|n51U>u>b=|}WH5Y%h4}*@$`5xT{f0yO0rXmXa%R-J{QEz<{^8&PUM-`{RRhm|idT7>g@pa#kbYi-Fq_L|yIt(oG3+
JI3qv=hP35-RZsEe5afWW`+axdk!gf4&X&M6HHs(z&&3acnq^od`Ed}oP=_+<bk!|9@{R#fM;x1a|@bb6#<Cd*>yG}FM
cXDddX9dx|mE3s>0&MJXu)%s^!1Cpi)S=D^v)s|teYvN^(wznj-k9mmXe6;ujsSX86D*T_v)q)>ElNOYxrAJ%3-}&j;^
y%&%677%#`niGi+N1l)$q+|?Ed*5|F1g<#uE`Omtj)Gk2zB$dL%@^Y4DM}V%>?gO%XtQ1vGTymwRYU!n5?t$&`w28j5;
$(T!iKfo<fbX0#W8^FVO8nYf{uz1<89x8$M=Q?%XY%tbd(A7jrO3moAD2rB++B*PaA$IOf`l6m1gC&hzPJj4!?X_#c3D
Ag=Zl{bbAY!m0qgJ-{S;*O!S2h!N6hIWeUEgR>B#y8A`W}AD1?qu`aY-%<?BS{6x0a1ZV9)l*a3p1(MyaD>hI9fSs3Fk
JQeNGmzn6eE?(q&ebKIb||ag4*^1yvdG-snC}0_2x+g`Z@(3o7H&G$oR3KqhmQ<cxBKmz?)~e%Abv_#$>pRp9|xN%~AL
Onv3XBn~$k;g8Lr)bl&s1=abHkd1H?U@w6D0siVaPxAL59E9mQ&Y}W{b2!wGUF2;bbS&~e0HVQ4z@ug|AAvOhown+6OP
)^gM^qzsgOe=+M|g6f9Q?+~6Y!A0#gXKSps%B>fKJxYZka|4i4ia4>!^#_YO!5eXMC4rc_E%3(j_oES(Hi=|I;ZsFw?~
b*2Rm&3=lawn~6Tr5G*zfsR65T`9!UMfkh4nDnier>0OpSDsd1{PI4=ciWA322q1$Jh$WT|>~9b%un|r$Tu=h}6QV`);
OoN%S#Gt{gIkSYU+R|<@C&JSE{IqV2+lOngBtTRd#Y&xm9e?fv{51KdJ17+LJAu?apt4guq=T0f0e?}qLso<=imMn@l%
Zv{sLH)<<$#I$U9OzLp9Bt8{w|-#m96JFT)}O!AJ`{`@D$PxzLE03lg<TE+!#ZM!@2!primmA#5T*JDg=UrhI@V<B2a|
cyVK9Ps_W2;bv>(x`4MYjZ6%~2NVQd!4mt6Wd4yr6}Z2|62wM8<)}a<fFSh=3osMe0_MAigL>uVbbSPHjIB&~yxqIaYE
F=hsj)FiYA`}B(_L@!2X9YZn_jVvz%*n{WgvMIHif;iaO#f6lK_)S{|G|glY<>kaR;b2%i!f6^UEpFv=C;NAwfW>jplx
QM4V&=qMDvI2MMAhi&kd{<in*kL%=UGV57J`Oia6!0^RfY2^_orBCX8ua|EnyQE31kYt>7`(BgX}2)Uu{NZe_GeM90sT
v?G=isDN0gE8<5g_0=!VZp8qi#wtpAe@yf8uf@tv?0j(m<n0%AmhV+nx~IzR3=^B`xEFMFA#`!8@felQkQAB<+k=1wP+
?7kCK(*K6~K%G$^Pos5w!j0X8_oKV6)xfYL{}3D5fsJ|>^{Vfw61f=tE?0X9Q2f1sI?Jz>{@H6;Bw>C!#|NC-reKBhJR
<!H?UdNa5&>IDo^X_oOZ&hzLVG%6mldX?f3GC3hR7>YzKZ;wd<!R}G6!aG$==E*nV5@QwX6lP&j&y!WVv@0bkv<HkGz#
f*Qb7bWxm{g{j*2k!rKcJc!KRfT^!mEwzZVB`d3R@Hm_S!dq?w++2jIfD?VBK{Lh!cjJ)grz_jrVYnJ#`<V+)F@XdqIn
l$bEM>n7WXGh(=hUv=)W>Ks!R7mc-0uLCG})AP@vCtX#&H9v0KNCCqYgLRJC!Lr$7|Jk@F%MGN(jqXu}<5hlIL1YsF)&
S^lg6ybiUYvKkfxUFg}!f8YWu0;f=1d?0&nyoIEpemp=CDGMNVT|1)zt6>ElINh_0pZ0*S|~wsOKDLelxsq5)&Z!ft|g
fsky0ATXw);pZ5nDL(We_gQYx$S;`y4OR6wr5D-cK^Fao8^JV1p-A$GkpYj<#$SjG1zrJ2CHWpe*e9CLqsv>TvZ@*U1+
bxTy&3U&kjwA&^*%6F@IyIt7`t<iXoqX;UgG#5xYHSQCk;A9}JL7l>bZVS4znKeQH7JUTHs89?^U_V0b3}K;&kmC>JFD
o;vAAy1SLb7o~895_NFdf9R+#t>dnDi2GO9{@ph_xC9$zl+wumV|}egouV>!DVH$Z<<{r!LM8&`)53So*d%;_|HC1en&
Mlra>UaFrsp*b$~+bz14VWd*g!FN@HtOqiOhl6I-RCsH7AC-7r$1jtY|ASI|3Bq7VkA$|*sq41wTg&uB0E&05FvXTVua
h=^+3<Ma6k|l+~wgtF>e2gb*HB#i;*iA?su~6G?W3xj{ug(Z05E5an5n>hyHUXAGru_)13wp!a&>-QQ>QHbiSVC?zpXS
vFvQc4)u_VI6E=9xi{2^Ka%Ar8Z<jE3iqhd%?Fw5fTqmsg2C@HetR<BCV)smpKj3KR#oN}_3hLqkV*lqkWvrmx080nW5
fGQ5do^RKcCLqc?@3-P*9`7}cTUWY~76lYy({;P;ah{qr;)amH9RpXyXDQ~A2wUlPovuB<RY@U6#`8&2`xIqKG+P4k+Y
>X8N|4)egL@EQk;KD-!zRfe%22L=ETgNIO#_ez4-t^v`<1853Tnz)Z!&|U1diSLppV5x?C9cjnlZ7(YPEv3d5IRFGV>y
oTI0s`tnXM5l@i(pA<Hgmi^`qskxs~2KIci+M^Y3*flLlxMq`~c3DA<NO|{ES7A@tG1^zYG_n*CNvpS&Q?dKn67s7qnc
P-=m&k3hSuw(6HSanK&h@Pq$&objV#u~E!MT*SX!!sH|!%}L)-a2{6Lz~<2Y}WKn#&bFd;th9-2P!ok4?EbJ%I!T6K~W
?~8y;XZ&MGaOS$w})xktsBp7=^1N1B598^ALQ7Nb2V!UP*M$w6War~~!pig=q8!4&_-3pRXmb7+^~cBe2wNe(rq)HfHh
a^oyZvtTMktc9J`!nK6y4nUjAq2Xk?bYzkXr~%Az!CCz53gBfR4@HGa=N@M}=lyT~?x$~l{LU5846s#Y%NJJw-mGf<$R
xKM!yHXo<<U%P)k{x3RLPHLoE1TB{G?adJsAv?P{r6?xf<(VvRtw<#e!*q33ya!)h&%mMu^G0(v}rT7|ThiK)J|onKd^
0gM|rfXh>E8s;hv>lhU9#3{DP9qd-+BVA4)Ic<MxjgHMjKCj_o5cmN@_t*xLuPI(+hSw5B479m*JP+>6Q3ve9<b~HuX8
CG!!&1}RAWDT{<BNxlAvvdvu7B4=UHeK7=yO(G+HE8v6PlEz{w9sqXgkGlPr%}H33w90T-AE$B%RSFqsk>12-gp;Ir49
K2^NceEnY`wB0F6fg0;!Qqy5}T3Eu7H0PAn}YM@e!um-LHkOpHWLM+_ueO$>gGv2Q^gPeLfr&DYDM@Z5todZT%X&STX{
t2$yeN3u-S`Rtht;bnJ<ypft6ji=w@uW-}=kLtTly3*z*Smiu+s05t|b*CtPPjHwLAXMXM6ClskXgGF%V*I!VUguC2>9
_%@TR>Hxp%($a)HZ1A9|7H{IN(#4&&SZhq9#$3Zp*y-haZ0YoA-c{K+KT<<#`OulT;5U!j*PN$igFiKv5+~IiR=0zoio
|lRF0m94Fq+<8^_A7*Kyl^n`%CU#7EY=|HjMkr*@VEFc@p=yA4)96Z?s_*csmb_}rzsJF(h2w@#{D4FdXJot3zz|(ntN
R~09=`M+v3$<Z>`r)_Vd{1=c$N2u6?b@4quInCNy?W)3f1aF;K78mOel`C2!-v)6?BIH%-~;@xdl>)hexU!YCjJ=|w=!
Otj8}&bA7+sCa!*sH*z%XlB~GY7^eTNQg2g_3Sd2e>c<xTlroz2<EuA~vpe;9tAGSh+0OULrkIN7!5y*8tOH?9(2GNI0
cS)1Q?r504Vwq!fH<++EOX3OnGK_l@q%^+*8UuU*)eASc_<8KUnp|{&M-(0wLTd&e??T>(MKwp7Q3DsY5GJ`Tg!4R<J{
q2ciVv+&Y)1gP3Chf%SaMmcr?%e*5aUSDKwUc=PH*#dv|_vp-IsfkwcO#$y=tEhZOYpVEH<2~!vSoi1rufUc22$UmeJy
%M*y6F)%SfHD!msTHgQNKfoY2JTFJ04Z*X~i?p@yW&WQJ1aEUJ<!Bj>QWTpBvFLui~bUU2~z#AxGXP53&ALA52L{Lag7
J{l^-PWy4cajCpP_iiboQ#Mv6e{KMq<iB6SwJnE9%ZfHuYgR4?glpW`!yiy53Aqju{*p4xu#IlJ_8ZnZEWRYh`m3kf)9
v$t^;s<*XcX2o!6Z{KEQwQaE%GhHP*S1oevv;*N1oi+3@oSzPqMh8pkz^<n`y^=M%^OT;O}o<*#qPyL5X09V)=yO+UsR
*+Tzw@Uz_a{|WwilFfle%c6@Ed!BDY_Y!_~^pn*=R=WZF2uTAJTd@;-8qSRi@&j>Q+#VHJ6#a0v_<X+Y7U|z6TiE%1*k
;a-5_i=^2{>fXQ#DhK1vV``l{jzMd3mAXWS21mD9H*47(O%uwpGCFDx{8T0;$7a-TW-dh#owU7hP>0XbJhmgr}p0vw@=
UIUl274Q);Bb7f!Eo@yM(0IUIyvZg|eTsN2kGhYH@+GI=bSA;=SuJqk$IrXc0_EQo+hinZItY|aI&Ffx`6@`1>WO4kIu
~8cqNjFqxHWWF??vGALn4wLyc!Evx!0&(j_I(^>^M~I>AWG#P${S>4%_-F<Dbz&+0I&n($z;tUKSr26iwj71HEMY@q5*
doQ4xV)D=pG}-#;AsG$?Lr{*VIQChse<K!<%%B#*FgJ+V&7+!>NPm$ptJ%U~-Z@f4e9DBRc-MY;-!Rp(-j;vR2}y{%`V
MMt_CcrI6Q#U4*f1N|x;Z%RQ;`7Nk})|GFbpc1;a#VZ)CJ740=a7Ws61d3|TnQjU|9Mc=WyT(Qm?LzL-bAJafuE1k%nu
bwcpy4VYOST6{K|3dKi>D4&bB!*rjzM(NUF0!h2MowX^HFCR&Eh3UEAO$CThignc<koO^w|~tL64jkS84VbEnRWLuXnI
UuE4yBJfq_YWxqB6(2Qq|*aDqV7S0;)emsccHrwqzLxj4#TdD~)M`<aa@a`pk2bI%7%gBg4zRRX4=^tS-hdtlg7D4^Qr
edm0ADbH}t+QhgSV&?VO6bO9-fF1E@Z_-JwI57phJFyEk$vb>X-0e4ZXQ9~mli^D6qdy_d`&R0Jm<G)U|c{V(DZwxuad
A%36btokB37geL$ijDVA|C{cXGpWKnYKGDn-py);U`FXA<&xT-lEa0j+Bh_%^slr1VnE2Zf4Ns54=p@mI)oURP?lYDD1
Tem`_!bfe*a(T(pWp0ptkvzHf&H(1%3Mc|QnUrEzRCmF5=~E0HLDoHc{sDUcd?fpkXyLvRI9xS4L}*$jd_dTQ?wMN@`%
>`M0#%1LqAz%l>)p9b7C^~#y<~+1K#`jaP06kRGzt0wSW>_=ALbI?tDyfxq$b)FDRLt;5C?90cZYO<`)Hs~vNJiKl19t
Y(goGGt)VE=fLv7+>)_(z`T4o~eA!L2`wJiiy^H+mUMZCDn1^E*lrCZjxm4z@*%YLr6LF?v6$fdW%jAScR3*pFPW|7%_
cU0-#r~NPSKReoTyE$ud2G(MCQ;B&l~Bv^j}b`Z)=*{@=aUeJsH|G?Jszg%C0tifj&m(?%sT8z6y^L+V(EJ>Qd(Xdr+T
k+jYn4}`-MzXvcPkN(`EI^gDapUX_G-uLY&3-MDnX3|94dbQGx6`xc1hpkhQEj3fTgB3k2>u1-%od#hNIpVw!l2lGSOD
F&Fmm$$VN?C_ul07Yz?&7kI8Hr7}U&qA6jzJ=q;Jq==Ddo$M2F3QB6!;+^LUgw?86UD1blxrRzEkmx*c{`^n>lMWRA{7
?VO!81iPVxnz`juV|<18bn{Z{Qzg7pdi=h&eI=>58m`ue7C5lqL}*?>cVl9Hd{Ob=ugg4ZVLQkFr?Q^w0nJFNWRx`5*r
eL7OY+RyODI{jy8$mF2W`?tbZzkcDQ$h>g^`CfePpX1tB(8xmU`yEyzm%g`2>acx*ox&)9rXoV*4a54?&U00Jq>_Ji=y
oS`0;<~ZFlMxkt@RXTdl~5*5Um8{9t)Y|1fo;G#O9#UQkNNQLM1z7J{K_)sRS(cUtX^IS*FgOcM~hs0BdJu-QWqh#!ZO
?+$-AQFNQf?k$$7t=P7Vj_IGLU5@ez*%<MsFwt!7XVt@-dem{_OE<jxs}y~-Tsf25N?+ngkjj^MO%KC=RN<a0!+alqK#
A6{NSTL`_G_9Qp{QZJIc?%xzGRIAE6fDfrXKAeP_A8(U(TS74YIJs4i$)w%B`1wPA=CN_tAE6Cbn*6Y~Pe*y!1)gWqOw
&0lK3Nv|6@VWS%+_pkY2~{`xom6GDriq6olBUS^DCbxT{-=-j+BJG7Fl(@<Q7*_?ku*CvWrL}3(%WYsNF`8#*~b!M{mi
*r-bu!d#wmbq?f&*e0ki9#zIj!Gv#|#$vKF3LLO--JmNfZX~wAy)eLibr$4DWE?XMQIzknK6ue;C=`0W_sWJ+tEm^*st
U#vu^-te@8zNYTgX_4~AWm}zLQ~<QHp<TdLnL&Et3aMpK!1jV%m8JL*hZqByhkP^NQ4<`N6}RgSQx}*rTJzX;8<3^vc^
h;Z;)c7{^>UrQLNa-`*mF4q)Lh+-yZi0DDdw||H6x7c#TY6O7eY>2rIBzm(`4JGaA`tfOz}lA7PV8%AxJ21S@(jr6&%f
UAs+~rl{nNZ=8XaT8WsF9>9l?s%S}foET3XkEs<Bf4unyh+6ur>0mR8KGNL?Jd?sY6~!4#k-%Ib(U=N@qT`xsj&7utuz
yv{a&*IkXA+~xuN}{mxbB}eakk?*Pcu3O858b7`HAaKbmvD)2lKc{pJ6M+m~J*5G6L0^=i_k*?pHzu(CoD69FfK=SH*H
3+<%E&@Nb~yASz(n((CWn@Y3m*W9kc8`-DA+ZhMNhlJm_A%Nx~)ZpUo<>7l!zp*4VyfIk384$Oz<5jTcv8La`|AQrjQL
R3t;gr%yi?2pT@Gy46T_%7Nkk(Y5Y8bf}UrR(TEVoWycum)+WV3C<!aB|zWmVK0dx_qS01q@%Qd4?dy^65U2{tA~NDpN
uHDW3u}`$iIIsscx)#_VPo7&_}EwuCq%)9z(j{j}GddXea34!w?%jQr6U)6k<?j1{>EU-e!A;wjohy8)37whM|<o{O4+
-;z#875W7Y;V9}f&8GxtpO|de>C;f<P>|a(-=tC`iGB?nN^ehk$zobV%j1ov1W$3%wT;_41{oQzgty+hVGqroh2-y>tm
ezjBF-tzAI%>U&SnoG=}LoFWPE+Q*>>E>LpEB1xQ&>ufoHb~)O;YrulhMwF{WqkY|x}p8T(2G9^YBhAG)qgL<ycps<Ky
U5r<Mlx80c7VWe)WBD939NNZC!i_zJpKe28XZL$oBkcFf2E_*}EN&a;TvyV1DqhMx$)1hpp&RZ(TM1+Ql`}|`tt7ki_<
e{gUlNySA4SoUf#VrBE*B&@|Z*|kVI{@UTbS<i{=ho}5>3Cqm42@xtARG=aWXC|!02D4+qZ^==S3JPEf$9n%XZ0y2K-J
m1v20%}3Hy8wg2NKQw*e^SNjh!b^!ZkoIv-pe4%o}kB-s@^gDZ``<iZ*%f>~QY%51kaVrivi1v?}QWp<rfQnIF&{HAt;
>@-;{fTbdc9fZ6B+|?VHZ|-4)<2t7p3KxTb)6C*29;*i#a=RV7xr>2y(+DX+XpsU-<|Pfb!8dQ@I@0NPYz~No^7ES*TB
GawczonKeBh|>`d1G8K}bPR^zoQHkz#rUf)AQ+LpL+w570-4Tpf=*9qA~IiYR9RYqW}rk?_KNj}s;Cj)^>R5??v+)s-Q
~PCfQUr!MI#fv~UK$g6`#-jgWz<K<Gk;(<(Fx;L6z4NBMs+N*9n>YJAKB_{5TE`(SYDd@N%AZSn@twfF}`3_+&o%G7O8
{Esi>UuO)u3;*LyxvM&opepBD#+TB$lG61rpeK#NqWr7{c2ryk{6Z)-l!=hXF=(X=2I+EIwe#9(@rxB9_Kc=dK*G_mWN
olXD_D(&jMf3;dzJ(b+d|GC;U>}r(9kE$5qsIo{~vPPB#hpBC|vk>`2%ZtMkl>5^^;+?C{_e4@s^rhrv8eR3EBoY!$%L
5UU<6-^@tWN7+bj3py#H4uwOv(`3IiR9GT0^-D!>c(;bU674qsg3znrW(P?^D6%=pbZhRpO3CYQ-wM_f(>R2ed+xeKH(
j)W$#D>DrS_*pOSwgMY0tGR(;TIeksO09FlpvXKE`JgQ8(Qbj&km^OQA;iZTcK%Ujsk(e1+Dk2>Dixrh&6a?(X7@FK1U
WOKGVK=*BeNgO-r;7F8A?Tpt%t#tw(6Y(igGE=I70N~e~ru1njA-Q1_{v|HseUEPO@{vZ`I)1(<0heI&bqXM7pQ##G8y
=Jh8jIVZ91*!2I&AM-1ZCwSxfK~Xne^sFr)Rakb%9|IkXr%l@xvWmtTW$oR?<`&H%nnKlAU!fsp*J*L2~nV+6MSL+1R>
@*!yBzu5E{Zi8WE0!>%&ky^$glK4y8T?*615B@^GkP7rImkv-rqVl<H4H{IskvE})Wn!KDj<{0S+2M6qG;sYRNhXM|eT
kiP`|xnPamJ}5pGYw@i37Rt8UpcbnuQ5=&)-}F4Hq>rg<H5JZ~RYglXxVpByN2&{*d#WH93T6s>q3nNt3vU*YWPnm7%Q
I+;ySzES?4K$B3~XN9_~m*#wRPq1=_YhlQRZ$!-5Xz}GJ$i{B)8iyxQr2Rq}(tXOAZFZ;3AWNe^0r$e?}Lt_)VV>aSpc
5O;qGR>{4Cvs5SvxNHevZsp;Mj_FDI)7RIx_-S*Vwd%AJ}Tc_$~f9!ehTf2{`HFiv%*nDBN=7>$#oj7iQ@;C<(p!6+|W
;whlsU0GgLJgUhVv~1~Y<w-vvr{~9hHmL%EyvnG#4NkaVX2}f!yIXd5Jd+8yQyfI`rMo?snX(y<eTXWS@C##%LI8oNX|
7VWm7|;#KY2@Ttj{#yH?i4(YW5<ltYl&#X2`^Tb#0s0q&@}g#std*nl_7nq4^uS}Rm=B|#z(dMvON$?6I4KvN7w18vfy
b~S=fKQ`i(ntqQK&srlRSIIsgMx`q{&U%h^E=D9!jboO+A=91u{z+p7nX+||H(;Jk&>Z<&q{Rcz0o6Ueno4}NYU%e|bT
VY@HDra+@~z+-n?|Fm+}YII^*;S$sIPtwdr}o;!i#un>89GxWcqh0oj5XL>k7tMMkh(P6UCvc!!JpiV|xKTk&O38q$NJ
xjYSS%?Id{v6rmciQyxl*`U>zOoEA?n_v}muXqrCScKS=$M!cg2;<aCPrj={fbbDAE7p{bLu7npB<rQR(M^Lx<WS~Iz%
{H2)+Zb;mW0PL92bHHU0vBnZyONAiXr2kJqHUNqY+31`3hqq}T!P>vlz8HGAE%FTk?pj2yp#H?9hFKqI(XCL<9?JXU?H
R>LYiv+K(3$K#pA9Bsrv2Jo8IX4o1i}!h-HisZcOr^7YqifFN`}xYkKY-yEe7k19Q1yvntG>sh%0QT(Y}mnr5CyU3Cx`
|AIO<vp0{IOVi5R8&N4tonS}@L^TZ~-m2~2oXd$n>%SKF(K^&rgw7jn10kwjqsuozoz7hLg8r3~AQF(-Lh9(;;NaQKIW
*l;>l5zTD;I$i1e-wkIjR&O&stD346pRQ4IufP1imxM>_CI(Z;XXzOH!Nap^HtQdr{FLkG?aVj{V3QJLxT|^RS02>cf<
$zLXGzCnHk*X3@nU*PaHz05kA3I2vae)(|ra$8uj7uf=n0;9?+lURAyD&#BRi!9>h-wTiS@t7&T=rZUoRja3oI@nVKH#
ao2(aL|Zja)#{tT#ti=Cs2%MbY*!q?oT=qS{%`NH@&-)A|ea%njN!Y3*FJQUVWde!ZCG+)z7irGd)r?n}p*T0|Px&a<y
s)o6jgmE+ybSF+RBcW5|}V+H4XZ)7Y%T2@tf@i^teSo%v@TrVV?eUiWnX|E{a`jj;m(20%j^7mkNo<nt?)7Ro{$&ZD>9
#M=6_Vc+%ySLjX7``y7AF0NKl#*3|3>?Yw@R_>^xLba_rn+SQGo|=Eyt<%Dz%D7M}YUx&Nu(8GVf(t{oe3}TnNfA!JLp
ubtNMv^v4p)}Hzh8dK2Cn8z#fgdpmU7$^=sMhaBQCqw{LsNCB|@*opJcd0PY&&TeYV+l{&cq4`Su+Hp-S|r#O@qQY%3+
E$HMJ=V`B<=7-Mj}g)3BN12uu?SE50&p8ok?{x{i^POAAJtWz1hyVq<cnEJu=cAYMF_o+7Lq65gwJ?x9pb;zlmu0Ftwm
9Duk0d!5Bs(M?`-tv0+{R>!JSXf{5&HeU5?nThaEE_`YiU~qMmrAa>*L>APt~kz0RGcmF?!|m(lKY&zBM6N-i*sofC2g
d66zGcq<Gxpx>OYp%OFBeTc?w=q>>z0rut<kADAN^Cy3T{v1fZ$_z{@=>ZHek12Dv?-R+_%gq8XIO;~mMdu&QQW>VTZh
7nO#Gw`54Su9_G{gf5&=E?vQSfS>!})bJtF5Eh|!N?zk-5YL_-mV0V4@Yu4Y2-`-4UP&ARuwv-?TpU2=JnUq}Tl(y}`}
VxAuid5VJhX1Q&|@^qYxJ^n%u=+39YG7Yue;aRqJw|U4deVF0fA{q<_hddn=8g%at=lP3rrPMjAM1;k(D{@<#>{qi>JN
VlP1-GqP!cbtezSHCa7^2n>h38bkaYkR)wz2L|4}C7^!S$NV(OLMPPk9xDGFR7tP2!FU81G@(v`<D7|;*+s=IJ59J$m$
UyrSgY$u8!B+8IXTI}?{Wq*GVlU<xSa!#8O6FTJm)D$1V;(R&uFe6=A(`D#cLdaQ1puZd4?2A#FHH4s#4Ehz^u~RKb~;
HjACm=EfPz3L)%B};Iyo|eLTMY5zC{7MZch57_;)P&S@IK}1)~l}dIZcGX?OHO?R2hux+<hBTy!15x`srB&g>?Dv)=$`
zx4gey)T5ML#3^I3QtL%kYBVFSSTHa*bu1jS~=tZvV4`~HZ;IlL02&vgOCA6crExAMNjmvXj(d#a_pV{l{N=vWX9WiT4
FG53mwo4HxcSWc-a@S-$li(DaHmzEDP!9=PE3aj6ZZZ!1EW^=&adpYkUM5nt09-T4(bs;T>ZHFl=3Y<j#Ob=jmPHmUvJ
*6<fSCti;oPU*HvD+o@x()If|JMVGt+rjtdA-V&tnF^ok@qc|KW-&*l{kfK?%2!DxD84Fr5BRB+}u`rtp*GJZHOy=N+$
2WVFF48lkl~(f#rh*{%L8iO*#kOA;`}$C#Nc|3F?|P`0=@K|OQc3IdebCdCV6gamfDN=qGW~H#p$<OtEq2Qw*y-!bV9_
cMRmIVGY>M|ryI!#KWP;zh7W^U`ma0Tmsk@v^I8dJPqZ#k`Fq-OHI!L{uiKdU99JWEB!k7hLI?;2nRhKe5+n#kbCA8Tm
I>b%Yp)H-2*ryMlIo>d5GgG2)p>bn7ySXK3Mu@i9x*d>9%qWN~&ab^qXm?Lx^+0}#7M~VwV8ir8Wa!W(;0X-V7qd<zrX
<Lid7|6NI8z|HAfdi;rzYkRh(@lM{!%dpVH~3E?`V4i$RiSz1K8W5g45<>6x$v!1IA)o+_>pp`H0Hr{Yz#Qxb<z{D`nV
Mk=^RE=Hf~LQKa4^E(xN6WYu66VT%nqa7Z;WoRX6y`PLC2j<%`T+7`a!O{()#HsWskw;?Q#VasL!vnWH_NSA+E`e&hzZ
YB3n1kxj-HHQ7q9M5v+;2Io8$mKI?L=)fWp!Ms=?KU+w?B6s{YM{tcC#eJvX4Rajw&f`>eEYWDM#_CVxPjhbfIEq!xZc
~oPX-6x-~DT09DOVYPYL3SCJ?WTBN5wxt+7^JBm#S=983UV*3&6nf(%#>(ekb$_+EDV=a<AqIOHzmpABw#Zyg~WGh*ov
ghll*uLRdb9{q}MfWPwjzN%+~4|N^hGbAo?Q}$%(-B4;{^(wA~Gn7=9tljEJ){5o@gTYFm+TjoP+-}n|u*%Tp_+wW^)z
Sf!gli%o!3zgDf(H)CWVt4xQ<A?wrVFe*Z#~(ee|~9?k2GPv^ggXJe7!@Z>G`kRpd?yJx#H9NR2AawI;<}Er#EShef14
LR)%MB>7U*3{uS5u&h^ciG6zkx-A9?LG#^;DNG4?Hrnl(-k=(ENdKE@O=&3LWlEq%y@fb+ZxTyqTAW<6C*+uf?Y#*1ay
y^C4|Lxni7h6=+UCYf3A#sOOy7yJ{gY`@2b~daWtxn}BrS0L2<l^>XHoTo>4M7_KBw#(2Ap#G=^H!<dNc&aKHooRz!}V
{<VXJKYh#miOfX=34cE7GcAG09fx0}ZmqB_;Utxu|o63%a`Tocc>GaZcF(i3oY$u&S`%Z|OhWh+6OfU(qoM$u?W^{Y~+
H|tijJ6_bSS0HH?hyX#r-asur`KaC?!CQ!5rCSgkdQJ~No<K^aqoa9Do2zlID<?&jF$Z|l+eLhr0}eEMUaK%Z^}SfxP}
<)bQHNXOdDrRFs^a;ByjA(R6Cic_^7Ds4<bC^Aj*>q~b%tr@Hv+$t6!S^Y1zpjO^v8|(8zv~XQ=y6ys7Stv%+?UTp0TL
a$nZyurP*eMVX!ReMaXju`cRlxrCdd-w8f68z|fJ0ac5AOdKNj3Nx0gHzU5d&Ms;gHOm8(^XtG4eP&}dg1eCbbiG9}rV
(y|&SvwvfqY*}dq3p}^T2quwgT;_B1G@=($Lm%Gb}P1Z%Wmj`=uyMSEoH@T5L@x%0D3hzuJXXh&V$b_2On6`a;V5Noh#
xf8dd+|U3;QtedFq4*4|adA}Ngb;6FR0j$a;a#M^teiJIn=J3ns|-UpS<`Uj9m)9O~`vN9$?b4z}8FTOp$F<qML5N0gK
WJsdXEuFaY=$;7xSCC0XZ`Sj^=!<G4&VVf<S7t!_15M9_>5_lWHyIFVh0PolgD{I~OFZr=RBg&1*g=#oEZ=PPt&#6h>s
8;etAB=s)A2su$cls8J-elVf%))5m+l9TbR<oTl&EYWAmKrq<B6r+3OmsBCu2<i(vZ?<qWZYP!$j)t=mLQqu9@fy752F
>Z8omGCy-=h`bpUoGughLE<yKwXcF@gwhq9_%`<N_;x9+;wX>+_m5iXQ)EE5t&)0bV&a__6&%#1x?W11*+}7yGy`KwM0
+aP6E)&-;sK)`6eU4oDz^5fvGu1D|nU*YvGVQ#6n?C{(8-Dt;bI<^lvOX>dgk`NJf!&uyj&o%uf*rx+r{YE<`SmwJmpr
M$2$R+020iikN;iF<PG73wS2nk+kLKx*x1oclf(SoJMIU)H=6LxjGfW-fANq1xKu=GjE}Fg$hn_fcy|liNhaX%t$Ef6b
k%uOqKF?P9-V90n&HY*kVR9%fP%B1Xd$TW_jQ`vFAHMH$2+HJ67644HCBvlRh3<A+<AkX7hTmpX7<ckG$@QDBqUbv)WS
C0G9#y)I4&C?^D5oVdz4v>)Gn_ew_5$bEFTZfrl@$w7^%w5=iV9+om-r($bX@6uUQ;F1?G@`%o`x7TAA55FhGL_%X8QA
k_-#b`G$N}kq?)KLU}IkC{QEyUG6@#1x-oQW<K7@Pr=y^R?97_WUE)_hY>;C-OpC5nzZXJ>2GTW_W3E#~`I4iv%Mkqa?
;lix-^&9fqG#2Z0(EB(+?KK+b;Tj^rF_buOAX$1eKPR>NQUFb&yUGz7>)L2<-34PWF;b!U3X{$%I$GdyG`^RFqvLWqf+
1D+7%!F+#ZbGmIV^W(zo6ICAs2SQmC)(G)Yqhvm~md24UjcSFTEHuUmj2sb1wi?oEEtvev0rr=mzKecbUH{Yfqw_S<c=
VKcQftHU0UusV3@x`%Y)1wR@7_e#=>SJo}pKW(CAs2gV9s6XCG>GIo~NAwvwIQraV&OP&#ad|Uic&>yQSf)a2ttpb+#=
fDgzQJl{TjBL>u>jE&{<!+S01-yn4WV)~9i^-)ZpZ-WwQshLj5tt}1_J)*tt^L;Qh*l8GPN$4YZ@X35Uar9heMSLKc=h
H;{MJ__K#Gx&ihN6jA_e0H!iZ_EygjQr)#`P2tu*lmE9zXK}e1fB}T96f(#|Q!;n!%cKM1aZ1JFIu&via*ETF<C{eeR0
4~+G5_4Sw6qGS+894}H-+3RIkcOTEXbmYYy#m}8q1i*;XP5{CXa_qsb_LrTmqN+d)VFdeVQS4Bz(tJa$aH33&ZJ(a7T>
Dh+U2Kj<GZ2^Df(24{#J}DlwwUhz0>4iP@39;5?G4b$%VjjJpGu!mGH_CWU;(0znTh+sbYuWLhy@i!O~T~W<sf=c`SaF
FIE*l_7%{d8bK2&+ce~5yrUcpcfwKie$fquY0D0AM>ay0(hwSs3SqOLUl%7D^jmmp&|M@sj(MRxy8A5|C-5i-tF?@Ogp
>ySmZc1P^6h(gtYm8;q9#MMtUwp0#!;kI9&bqsShQH+?FnsT#T(aQk>XlZ0=Y^Pg|BZ+%|Twseo7u=n08OL;`8-P86Xy
PN{mFf<S%W>@6n>|nIcW7j`2FSY{f=_O}13wXLXBy3sPkiD2_%;S9m!1EF(zk0qAQAnz~eZ-{T~BDv@`p>k4QG@K0R!d
iEI%xtvNM?9oxMRlg-e&r%G?3YKwPR&_(BDYhVe?oI`;^Q}W4In^A<wMD@;inMZckQL?vwuL%AmF@dY&_tU&{srKmFRp
KY4wL&~AUHf{y;BJ%9q;jUSj&fP2o*sR16`^Bk}#aVsPHV^{-W47I)co+$d<p2cZUPNKE_34y++HzdXr%%!jNNeR=;>c
7-^T|PY1w8lVO*{7^5)BXhaj&$Fnv3gaHSyvE(Kl+Qv86=VY9nAIX=!8V8j_?jT_ds$o<G2Jlm9@cPYa5!k^`MGN{5PK
E@2q%0YGPhCpXHxNwlS9MPawx*a@>KIFBQ#F$dHS3{*@E+jdz@d*n9l-|*R^s(gaOXu>jdDcCTS2_IkCjh7pEAHQeTDi
Z$ZB7c$^OTfnp0o5!h=xz3WY)%D*Hb=*r0#rRowyQcg8yv4@3W=a)*GTToDAv$ST8AHw9}_?x$8b;<Ac!l2+ps%CavSL
|J(gPTAnc@_}QJn6^Jr)iPp_%`-Hhf@>EUn(5SW&+j<(>u3#)#Bvs8(cgeR18BkAf<6{0*N}_(<k@vzwWFd(5w7`X<`C
(TnM3??9H(P+vT7%O#rB7$3E<FU)eZ$wmCy5N1uN)I{1bhXsguZICC+$h+hFo=T#4#|_cv7lN{<3haws?#<7IOU1r<vH
Q}j0-gn7htc5e`Fg7GM=?S*+97DUM3$)u$Z5$Ov<7*4QuI&?Tx4wyXu=t>XQz*GLip>`YWbWyx(h2c>xA(W;>y7J@cIe
7_?LqBN+!`uAn-jU}Np^L{9gDa<h={m%c9+Jf(1_>T94rOL@F5jC{9Dj6|!GD8G(N~94J=SBM?uXJl_2`=?XqNYk*O@f
64vPnvUFae}B^1ryD7)R0kxE-vv94mFbc=eP=RdI#Z<(w+==UAKN`d@w-TT6SCvPbA*V}h^00E@tIp9IPQ(w{xqFJ6UV
Oic0aiOx$4<HeA$fXQF1(`)_R|;(Pi>AO7<ww16$Ly4BsLnV&BblLC$ETd!l68*R;xGK55$=as4mA;Xlyotc$2t}lJ8D
1~h+3yQV9+>N|49f-zngOR+(TVR%|HR!h2~<xeJW7WFB`rp3gQt*<>WinT7D#NPBs9MF29a4pm;hG9*|ji%=^{uH&Tza
r6{F_RldkjhBa9_BTqowjUIpT=`IFo!D}dmr`I_Jr3<)C@|ol#wYY;tU0-!m$&zWHY$<+5bJ_I0i0b`=@YGmk!`KYQ+t
c6T^jT(*3-VvO#gnsdbvo<7;iK6#D9)L1XfpxC*+=hJcXxNf`Bnd_|F(bU`|qH1qDm*A?pDh77lZ4;0*Wu*F7D!ME}mP
(JLrH`t#h@wetUBbb)w7YZWeK!rK*!{K)I}xhwV0qUqkuJ-eq(p`<Pb-(3z);TCKb5yVrMbaUiq7U?6*Wtk%K+XVqHJQ
+$W84X!TVT*+FIsx?ECPNjS=y1sjZ<zHXTFXJ~{eyhh4FRI07y}{)mg5q~qZ(qNiVR4M~o9PLIgge01!0BJDw-^2HmCS
ftkPBu9Gdp+DW3t={C*J{Md+clyc#Kwg2lifa2Q9#`?vqvEAUW=5@#8zdAzb(~Sb88h9Uv6=Ek$QWMt}|^sS;x%if8nJ
CU-)Z@-cAIk4wP+?zPkHUrKl$c%*S)53jkLQ1xHGhK#<+@Kvw0c=QA!BtLY~CI$Ul;|<JIV1?>bY?2Pv;E3^#ew5RRBL
-0WgS8&16#VI#zf*yeqZx+A6KH{_397HR4v_j}A@g#b*U6$qvH`Te!VZpBln;#qDFA0`iIWwOgrtD=N>&}oX`IU*Hn9f
Tg_Z~)cKW?K*uevZ)^7s%(XSO%77AK>0=5F*vW|ke1@MAJdDUV-kv==pn-3ZUm5)BDPGH(o6G0;~v%|sJX!>MB__YS89
RcdBI&``cIP;jN2Eaw#H*oHjF_g!@9b}+^gMZ((?(y*kn_?`-NCZXtDASr3P|qeTkJE#9#k%oJqVtctcP&t_R0XuNrEB
5zpyEGtI0U{kP*c#AUtwvS`^X?fWlE#^9Iq8#KFd|Vx$ZF<ungh69#kibjbLg&kd+U9K@<f90!mm!v&}NfFd=VjnWu_0
EeF3Oq1u*cWF{nwK}ZC_v{C?MG1@2`OCMjMj$WwQGM#^Xhhe+34)3G@zhDSW01&f}NzrM@lH=_6dS6t!q7PR<>k0$oXC
R`ud*8Lx4&gc^qy<jTqIQ6Cu;-Iv7gQHn3uvc$4KQ?R6}kQY0Cr=Pe|v)Nvt%I=_YH1mA`+MgB>i!X-^&afmp@ZLi{sG
O>g6NGJe7~~0}}Ghe5!#GE&zKtpn}uC%M=lif<_~@&ObrgmM2IXK^=i07sz<DIQ?5qysmEYr-yefEh;-KD@&BaWHuFdX
7NMxl;8q$)@cO9n2{&JKO$U5#J;li-<UNbeeP(DB<mdz>%IQ#_)TSDJM3nP^etM>J#KJ?H+=w{bEH{5QGBO)^$5zLGqW
LOx=7em9U-papf<vxli+4*o+gTd?(pZDbUU3)(hY2hL=Ga;0pC%pHBJXZd%fP0P)DoXGYY$=O(s0n6f9s0<_|CfgZYF1
iM}}+e7$N1>vm*aTh~JQp~HN_z-fYTTXaRU;>L0f)0Q-nYyxtDAHRthebFeB(d;aMFU5=I4t@#$rYacQxmJvz>O3Y}52
y@CR?$povgGuyzYuzV_{W`NG~B<GvUO@mWwpc@5CqX(abh^pF(J7;l9AT5l}SSb>?w-Oqb@Mav2RHP$%^2T{D$}HO%Fu
e{(n?dmIw-HW$mY)bA5z|JzEaI@bR@lGjmf^wO1QwWRJ!gMulS8!r<WMNEocsu&(?XZ5>~UWXZg$4)S_7h~CUmWqT9d#
5YwmapduMV{@EUQvhGzTwkI_^X6`G8C}*}V{2JsYw}|ZmDb*ZO4z$W{Rm)uebk!#a&KdEGOya+_07%T1_<=8-rhyCnKf
2Cy=_F;j}}*~?~ae37Wh$d{tUXl*64bPZ8ssMCFs0X_@LyL>k2ybSm>~cw34FDAiEqg_0zgdRa}khoHedYTbDnX{!6qa
rh&F%QRhUZC0Fik@q&`7`7C!fNQOnanLl)*Ig?<ZNS&S9r&xzRKMJCAvRpRk*$C%fK{zA>>5z>&S3BQy+MOwBT`>$;`$
_>cjMTu=Gr}eCZk}p|NyOXkwb2Es4BkoGOB|qJ*nteCT`85(g4tbd>-@|DkBnO%YZc}iwyv^6>k_AV5(v_RE6tPExB>Z
Uz!7da<n*6Q^<Np!<tv%b<+DQQlkHRs042yDqAbHLd1)zfd>66a%vJ-aHl3+KpB>g?<^?|nqFTG(z0vjYqrbIDwV<9IP
x;!Oa+D)$`NXZ2%G2$eo_LQO4KDh`;P4w+4dPL~JACh$K6{t%KHCRK(snN}&?a0wxeV6wT|1Y$CH}%!bupUv<X^Hx)GC
IPM<Gd%^6I))0B^&53UyAvj2<`*2=FOVLUld`5XQney>QL*!cdx-f$hG^`Igkt<QNR$OJ`<Z$r6{=^5Rvr1|0sS>mpkL
3AtgG%;>MJ<v8lEwkJ$cz6kQk?VFt3AM#_5O}f<Q3|2=1o>JYEyeG{UWSi0grs_~?Sf4hPNlC-f46h8Aup1)=ipA9UwW
vWtxf-;o-Qht?DS@TrtD01F#7S<DlUS@A+NfA*PRX<QB>>Qyi=D0RTAQIGm7%}hW&sUY-QQHYcT^ASD$C`mu}$ii$91|
gEbIxh57oeYqjaz0<~iw|Y<dWiEwpb{suqOYp)~q_!q$5<GD01V2i;2xmP<83wup&H&}2!|a4-mCJBBa09869?MJnPa^
k57%YpRl^wrT05CP(?U+Qcc>mOT~Q!`lOYr3LzE2Gx$^xl-#hU|X}*r(T<r=2&ghtIEPU**2|N^_*&5b{n-Pdl{|sn8Y
-CI-zwoSVv8xL6UpLgK&z4Z<<!N_onrzkc6vV!@j5At7iOyVHU|eTB=l7#ABGqrPX2VXg2&e8~S_4P3bFk+}shBuOQQn
K_&|rip5X0kL^T9g%_VPoBa|af78O#)s#>2s0O10>5!UZ_APc#{^pHZ%xSaNQ69(J1obVK_Dagv<+YW`GBT0>{ISWi`6
%e9p5&M|LSRQQarej;Fq|`ng2p2rMQP;2lP_#hNT>c~M}P#-XD8fJ;xC&<5CrV}+q9Yurn1C$T*s~U)3e)+in<j&i`Ox
%5L#zz)6>7aUc~o8?`4LuIycA~Uaz-xeIMlB_;Yj9JaoEC@Cojo{}MxD{Rn`j;Fu6q=<jtCOckRtd+;bg@iWb*ZR$2jJ
r?Z#>tnn~BFD3+?M*L!M2cEDtYN;C$IH8by<w`yEH;IfhfVe4B-vEuR7s{;hf6Z$=#0s+4wtGY6ZSC^zT4RYI=N6lveV
$rpogeK_Im(3e?r53{~8iuv%T&02!%>BHR~)P`<^=ZM7AT3>g6%L;E&_@LLcAp6Ix@1EihC>NascJh%QFasyKB_C%3AC
-{#ADVeC~<lBtwU@y^=bGAdo*Ip1GrlC}=ih&|TN)3De72cC(Dxc
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
