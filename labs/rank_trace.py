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
nDPOdjK+Qd!%J#2yGq^#4A)yDR|UL%sbyjqKA<4#3J3_y!@e{WfFhlJB%lM_X~6;nNI>ei2yWM~hfpaX$bG^JEP`wTOS
y-G{K?Df`Uvm{+ZyxuJGYzVj366flj9LeZZKjl(^+ludv8ww=)SRyP&Z^uZ76sZHif;iu<8y+;}DZd+En#rd>;8|!lG~
)!Un<Nl@ovz`ac?*?}=%{DjFKBi1|=&IE-M8cnsLYbG;)9rb`g|)U-QDS{+f;o?DPK7slKI=UD?o#+7EW+@Tcco@cIZ(
n_<vd1kHEQw&UVZZ!y>pJ=YstTVYo(vxd0f^38k$k)uoL!1dxLnU1b&NBk8B#|HGOf1+jVRMJ{2S~J)MYA$wW}r!bKB7
X#Z_p-S=gzW+6{@YS>irS4oEHd0vkBdz+^Whnn}UFNjI=Z}jG^gL^0_@o7&IuT9Z+*Yk%idc5dZ1m<b{+zL|kk27<^1_
^<esp?TGA54*@n?I=iQt5<Owpp)n-&IquLt1xN@)oj#&A03~S+L;9t0XV?uHq*5>ALz3t59q4X6WcgDFUdT=Z!7EYtYI
u803JG?PawT5MVj@rc3S460!777Um{;>e)ehmBAiCy&u>+tEf=CaI90`-m)YJM97qfd*Xp<-BeNuRpaosL}@<L&QR>EH
V8qnV}mVyyBH4v<`N&s=9XtSIrx2Rhm4x*>deVltK=!P$7F;cNF4+mWrG7!-SE2MrTQ6Fea#M6@MxhyETf&c_UKnp9Dv
7v^=6m$Wz9G;MhK++MD<{nSAoW`Jmn$J-Kyyys%T4jQ;3_0gCpje7<zf?7G0~OqsU5juUQGsg_c`bpMm%d`)iv=hpD7O
i8HBuO3_b6H9!9$wophyB?#!p(PfFz{SphPG^MaqB#P*Gh&20kLSG?L-4tHtOnQs$`V8$i-3s`KLcilA5^SKtj0NFXo)
%CUKfs*yzOYG=mo;4ZO>?<3Kc;NC9MyZho;&cIKz0oo<s;(Xd$!d@%b4fv<o)X8zaTh5wIYa=v<qdkryv{Gp<ka8;ACq
lu=Kw85pg$FGfv~)ddga9mLkvJ1bh7@2wf!rB^fg*tze<=R4+O+%u7?>XjHZMdYO&~cxN--Pc!Cd3d26*`bP)thds)(^
D8rKq#;IIOjxPA*%Wb2_CggA0ThOQ1y5|B~gg;@HgJLK}LPlcG)pp+358FQ5)Gq@6_V0BvXswoH6)-Q_4v*t}rnHV(fS
#yVEK<-Xp%U%nvk!(juYD-8$0RTt(4YVwG13?Tu+(b%FdI4nxLEPi2yVC^7F_0)j+Jj9D-~%xkjpd?b$i=anh&p0ny4l
2L2bgY83?vXrVXYzJ8Hhb0mO>W(0I75Og|(qU!a&(!z^z~jvF&`CUM)6*fUJdPLtqYO_wf=C5Cvx@R)+W-7XzAt={kv(
%=tpfoXw{EDdlM;HyW!M(dvjPCo644=^cXIL^D161R0Ex{?Y<a#X;2d&AP($M0u@VBU$9hUQxW2)s3)Zpvar8noW=M<g
5{IgbeN&cqD!cp_l|-tJ_t!^8ALCLTrualcx4DUZ?SN0i<wGtU)MWZrcs-K)gkQ4+{=^CBH8tu>zuus#?|!Kpc3)K!op
>o+=wqQ^tCe`5onT?9K;0Fews86{k~_u_<)R6|BrlJO@>s7XfuJSV%2~P*EvJ@6GwBEHLT3VtUFTMGGdH^PpS!5{uaG9
S)~;9>PLcm8!TaBxAs#G`~kB0dZa$BoNvveF6C{rQI5_z$Gb(pgSI^%$((Op5WIc`r%|DXT~4HkxCkeXlPcJ?8RmsFT{
xs{;Llse)86v<pH$?KmRa258RhM*EqZQDdp4{2#c8v$Vut<@uQvbBr={7tRecJXDCs4c!U*HmPlhp9+@nfm#d<d^LC_j
GM@KSj9XeU@GOXp&D`ES(LG5im0bo#<1DknnI?CerF&GI$(}FG6-fFpe*@dWfJNhgq@NN8Lh3+aM38LLBAnpA$(-%N+#
H&1xZMd%P?|%{3H8l|jND|s&eq{X$c1w=tAT3?(;b2em_x(qV&RA+7f=H@`kb@)+YMkRfDjiKGM#&z?wt3({ktE({^46
Uh^K(9GF$v`1HhYQr5};xmLr&>aict%Nu@8UsfQ~0@r<+fs%*pb6L!xU21=-+&C*<rl}1r6UFu@tB*g?gNj2)0T8|{eW
X^61xFkX5qzR!g=Qs2kYieU)0_*(gGDIC4FnL^R6o<iyVQHdZDKgA~Xa`T6xNz{xkw%ixbpswiL~Sc0F^^N6R#KKvrIo
=97B-R?jQ9e~k%1jf(6oqE96~b_@j_8UF7wdEva5AA1F4V~A1%MGX$;>Bw3=wNdby`T0X`b&HK{`{UGjO9Z~TH?!+19o
i12dH^H!=Zq&Ym<MH69SKfpZWOhG2EIiAns2}yv|NF?2H5+0_GX<f&LYL%n-yPOI7#WluS4WJVk5&_2=zed=1Kpl@GDA
37Qi?s0EgE|vHmP5zY@*rBCK<g80rs{k&Pv-<>XM!x8njMZN-{9ZCkpn!c?>gC1+0bB>^TeSNbYRw*pw2MX%nJv{n*c=
vg@z;dN5+pk;EN7rkzyW_jtErs33>_OFSYGF#2*3Os5szLhmQ}@EF>pUk#58K{KxNq_?!2Dl0eLn0OffC%#-vbC&ra_N
ESqo2S8CN?>Y127XDi}$s)aVP!4mF?JQXpNQeRTcSKJJ$h$>0jTa6SOCN|a!_ES-v4|h0^Vq?IUx0tP$Y941n}B*N?1~
W9k!QB+orCAX4xI-(Pxt8}VKm*P$zm=y%#Yvy?(6S}uKbYPeZ5_I6VG+s!>d=X{LxS2v*Cviy~AgtpFVt8j?WIRHw-_(
|8)+dpWF}hf6K9d2E~nxS32X>;lqb1WWC(elu5Sy#bSXI8X$U=J`}-XA3n@SA3i*F#%Ghjy>ksiLAF6tcMgBpNDp$Fb6
-3xBA`Sdes&FsjszM+A1>V?^&7jRVfvC~j?f!p%u+XrC*<le>W-1pd<HZI_yTG{Zg~FF$bB_F?*NY|JS>DJ7(V@mybp6
bN7#l#7q$>4xebJ~6$uv>Pe8?IdZ=BHw3wo3585!7#d>o4eE?~b1PwG0M1#pqzKWNOSCRX2PqLOfc)6GD)0tLzbB@IZ6
M1%mtu$bwjNV$*3vU@fYepH505}1w@B1cHYA@Vxl88tG(-i5{v&O!>{>4?xySVP25$`$Y5}!kYu8ek5tNJ7_c8er(+wF
V68z^CBm+nNJauq;CP)JSZ0ad}ejT@2fq;s61bYAi?A`xXMREpDE_u2)rfTjcb6t(`a1Tr1D8`#kASAeMBFaMAy?%)RG
nnF(d6a;p+ww3b%_I@u5-Xre04#4qkyXU-iUblPr0sn)KD@<^%u+F*Yd{6_tI@|n@hM!09?G^o{aa_SjUVjRHK9K#71-
|QC{O0=G3#a>Ep#tpP>|@dvE%ZJGKg)gppWvUR>lx5!QFNYR&$DghUcjFn{aIH*mb(G_h)7Wlw!to7X8~?JAU7G;#qD9
iBI$>-#qZX(Q)GXeZei#5V4FERO5E9r0&vKnFFR9?1vV{xl{jzMd3mnjWRE%xD9H*47=F|Pww1u_EK)}`fz;t&)%-MG6
Fs;mC&S7-&=T@74^Kw}X9Gpy7N7lK4P^rEab;iDo+unx16X|=WkrP;x^6fDX1)N%v{^5_&j^F4T<N=$a^l;1_G6knMQp
SQSkY#Zn^&DaErokuXC{5lLMpAHtQ$&eAc`DxSb;uTn4#>-c)(Bcz#o42=6w>cXZOF4L6piplsCvSoKvb#QmBgt0AL5m
lga2tZk{lE1{V<CeAM!ANCWQ7<01yZR+!OyzJECMXi(hL>^=j!P0nd#HjjEikv_n}b%Rw##@UFx-INgxSq2+3iKm!6L*
mA!D6(ZltU3=?DDLsr*qeG58lHqFhUan>H`wD5aHxI?zoastru+ufK_k%Dk5CCc|B@w))}1YIX1F6|aDk$Vb7q?Y5J&g
Mzg=x3iFXlq>AAm$A8vqN05lE5yg>U}NalABkb-tj=oXJ{tmbN6V3mOAq`Jrx#10sci&n1oBAzA-kXGJfDYv8(qtVFC7
uk~=^!i=$>0D;(hj`%z*ZlJq*2oPoZ!8WLc|zIk4*=BTSs}JSXOxAr#=9R+&$!KIbI%Z=F7K9dLiPDy#>diof#0EZq-o
efk;iw~6eUb)I&;wVjcpNDkC`lsYW7gyKxrI!gTO)(<3K<+BJ);FHHIgL4X@mU+Ea8B84k^pDytdgfV_DCZC@BN$&XqT
Q}ETn!1A2mpn-7#fk2b*kiH7SIw3^5%RC+qmGl9LinLfH;pBJ8E)+${>rJ1>BKJ}#`MyY2l;X<faKLTY${^ORpW^l0Dr
%LYBQqfaf`%5=>2azu&`)wb!fe$FkqRHRHNzuloh@>W?DO=|HFpLu2RDEsu#-tCb_07Ce49Nc&=F+av125#2f#<N9|aB
ER{;)Jjt&u;mI*%)wm|jFEe88C;H?F!4sAp~;61K(=OUd0B~$g%B@zHhZq{h=b^}0@uonPJ3Yq4^T*7Y~^dE`T#G4{RZ
iII1(9Lddkq&SlHS|ezCgxMnXi-{t==!EL6h#`4tBPV3o}WKGJ$0TgI@$W}97sX;Jb%2C3MG8z(Z~g*ix@&KlzC$|15(
k6IMeBmgEY-$azZ1r$#MOihwt8d3ar4z{+SS4w;5bqZs;$4sLwVgF`z#-p%&vGA&|(eq0BPL#}N)uTD6ipJo-~hxUx`=
a}9FLI_yal<@{%{^gS0T4cC)Xy<1)53ERnjAybzu@c83&S#?0-22hf;$*?ORUMF`%@@<g+tE_>jK=vJ6dt+9}T4s+zw1
6%Sp}WdJ?}TYFCW@-)CLZE+c^YKQg*|*SpO)1vd3gg~G(1I~<MF4E$^x1eMG3R*$?l*bNsNNV$vzRMprk@A-g$n2uo~6
u6}?XuE2!iGiOxgk=fC`SI#BreFaOiQqfazqqHTyyJ)PeGYoP3};XleQGQ))vb3_8t6;TO)(w0I|nnaMi<G76$NWVnul
(APCdVeL4GFa5)=YRZX&2E1F$Nxjn<`TN4$+>*L?2z|qIcc=qFB}rG&}<m9ky_P6yF1lPw#jTmVyj~ohyP!%(H6Mo+OV
K>M<RF73Qf-QWE##pt|EijgP=ZiORLB>mV1&E$Ax2(Azr|Av4oL=0uhQIY)*&Ph1jp{_+*U5veH~HOGs0xFN`zda@I*C
!!`h4gx_Y0r<(ZhSPcm;N=OTvXCK6USiU?DT<a{&Is43Mx8K~f+fL`~<@wzM<|{^?#PeLug-iu)cuq%{BrE=jTu;Qj(S
fq?#KcKSTRoZ%J=yu6=!np?I|WE^aQ-=;c?Nv)fum4O0QmQZm*>zHcCY6(&9yh!i!`r#Z^d)js`Pf?LwAo)F`?$io3z;
!5R5*KZ{%k>ZZ^+<`jDS_Yz6j*XzUfXL9Ff5nICq6=kqjGbZ(4ahUtC@;70_rF<o3*dZtk>8|9R)+6~h71x!ur(&rl?(
s`PdsWj>~$o%W2H~KW$XG1D`zNDf6{W1zQn+Vc~lF>LyztXW!39Xj7R<z3Ewn9Mp;#?T5ih*^w%J<XK7RZ5tIQx)Dz<J
~vj#C@S8RqnMZ)`h&8>-DJMqPt6!En-U&k>`jGD@%wQNEKdLHPO2kKcY1Az0?IGuc*0KMlrb1ApkW#L4sF;5x1`%+pMU
+&uyp6<hue8RkHNv<$_O2SB8m(G-wcOMoObiW_@@0Ge<|x-QeD99TNUcBw?KH^BUid}-JfTcSoF5~{3US447k7jH6hfs
@)TN{@ToO?OH0o>V!!qK6mu#Pu)V2jS9!&A1k*)uiFjECYPNCyx-5;!+N6P${F)cPV_27%`ho!bM3auYK+Qv{3rUgj5P
X&y+<=x=qHI?08I!kdNRULqO%yXQc_7kw`<gQ1EyQ>sUHCmLl2PqSBZOgQAlkJ4ZFrNZGNhVL1BX88%5|bb|nornv5(H
_3X(bDpi~L}f&{2j$1EKUSR|Egj6`JbQx8l3=>tmdFcaXP%EIE4ZTx6+lT;Qg}?tvse|wd2;^+GSt6;mczJ!jZHuQu!0
}$UOA$^P)ZoH&(uv<QeSd6dSQ6u`q1r&%}8Bzmoyz<@O}sYk^_ICdBlw&TSmje*N8<fwGbEM4q>S*EBfQ|t2O=oo8&g$
ERbDsGTK#szs^?iUCfxQ*CBq2cc9lm0o*?sVA6xoS(5o(V%R;ZgaIqMk_rIthtg%(CAC_t5dcGYfF%+4D~LnMy)hH>hj
{%_$Q<Md5TMkujFcX{0{OA{0%7%h<3`I2HvZzrYy~oO3Q+!rEwtiLO&g@>SRav$yOAayVt{yxiUuD2i<}HPplAXCfwpf
{FX)|aWwm;52P(H^!Z7TGeHa>!Q8Q|sBjSDdA@|!?z@g^rgp4Kv)MKm5sE=$a_3HpPl}c${5F|_<c1aK;8~nBj@p-=l6
<w-6fZVKEYR&?S?Ed_h|MBx*{+A0R2@lH230nJG&hAtG<i%qr9d!{8?~EHB7mCWWyl5+^K2ph(JDrDvKH>r=d=p7nlVm
?Ma)qs;R)bNC3$X86e$urKi7@-Vki27wR>U|hT0UVPi9|`nx@tKg67j-ph9M(Q2wG8%p=5-nq7`2VeI`tEsgHz@=_Waq
GV#Pq3c*M&ZuF}A3TUZhx3r~kb^#+%(ePZ<oBf9H9JCe-8p2Uj*|bjy&^}3)QM*S&6+=N0kA+1lMS2<`{m~9!PebXps*
xN<$!#5jjMAonx7xbK+<Nz5!rpW_TWsb@PHFzoKw-iQfx{sx3=)k^x28N|lRhY;NW2yBdv!M{>Xv98fPCNfS*{|EL>Uu
VsHAx%3s1U@wTN6-B%-p*!<O00tVklE&6*y6>|0eOFodH(VrZeN7G!b*@W;kI#m#z+Ox8eH5f!7R<uv~)gQY-oxVFWt0
l_2DOjUNWFpC%|75Dj%MzgNz*Of<}Y)&Zi;%E2^gbUmsAY7OOCr3w3Dg*mx%lOIUbIbx8!y-U99A1cyO+s5CBH5FD!-E
^JR{*)EPtir}%N(_3drA-f6o15>oIPp&*6Lp#4%o{Hrq=FXDkLVS^hi?A$^uemv#AhE2^&k;F6&5SS9bs<E7Hlo<Zck1
rt>*$DFm^NkXyiAzJdAX9)>us7DZz@?}wbG7q4-|7P;LDI|OW39L6(nA4o)G&<KMAli{bvrFG~!!li$t&s78I9y``VNY
(Z6)YWzPoL)r`vHWB}1Vd2Nsj@i8WkLo*KAw6+?pg;`L5@ux!bc9mbOKF9q>qg;T1no7;Dt!ei2{#DM5;K6uNV39dZ1&
b9$z`3F6r7(U|z2i7m|;hj!_H7E9-cj3k6!?6|8SCNyQR~vb;yF?r)nH7LALe;?fj;^KCHW78M=ag#;d&Ypeh@C0|v}g
|ll}btiqfm#_>c(#2AykoRbb%LNi8E^|Ou%T!$b6asyYzJcPNjM&V^O-FHCF~I9|rQkuR+Ry|C^Ndd0CBU=|H3lTP39h
!;btZ<VWwd8+!8y+Y-_PTDhzohGl3bAdGPujQyabM`$h&+c)0v#E8FRb@fjQVwU{<u}nG*%%a&Fjh$SLmAT;2?Yc^b<;
WYgFxfTbXoJs3XDv8<0$l-MV9;z}I`4qZ(Z{nAijiGqn=N@B#@H{z9OHu*1Td=hSUG$w>1+pS19=ANsRy#8kJ0W~qTLw
LF8u1j=xM_aNO2f<b<zhpddGH5bw!iHhurc^p?!k8{hxA}&j_I*aw1*OE1PO@exG>3eXJtga}fLVLKL~B`ud=!V1(3z*
Vx5=7gKv<cjuy}_Qn1RAA2uOL)N&_jbkBcYFhl8{@tEdRY5Vlb1RFY*>1~ajf`_!FsPhMopyGRlwBx`z_6qn<uE1H~G@
R`2ZleMweG#1ezhM8p{HJ(QsVJ+;|Wt<&Yg@64Q8L>r9nV_${c>#-t($AX9s&uvGh9D$Qv-wW%ptJzeBN8QgL(^6y6bW
6xaY0T{W}Y*=&ThoIBK)Hf;YheX48@b*rB6etPJuD{8jL&~Z0thUq(Cn|av5p&B5{9GTAU21q*`#{iX;9+ls=>oRQSc5
-{AUe9{Qq)fXI@$%5=CmmU+?V;s(k#n{ja?FG6zYA9c<9sFHH`sMM4=LncKf3gPOa)IY$J>fv>03WlWckS~FZyCdPJNI
TM0uH9+y5d7l0b<sPMj!xKqaP2qn+93%RD4?=vgq8rRQm(cWQ}zCif+R@2+nl&a_0RVzb@VQ|1kL6PE~BL(A!ZCmg1^D
QxX3u<zo#ydd_t$UZYP|Ohz_RiPBiA<eR09Mx1gg&Rm?aPeS{>G>Wzg!-(P7qJsG!yF8092vM;k7-*54ay~(s3JNA_sr
+VFi?mlv`5_zu!1ccHz?hT0H#cAcJz6|7$c_}t|2Z_p8;%sArZXM7q-MQz0KZvSjhxsp6R79G?oe`p_NQBpxf~vez_>e
(Zz>v5z^&v|bZ+?*=PT|Rg4TW-QC=z&BYX1<(FGSbU@ID+>`<rkaM6+1?n$7MLcI3ewRJC;Ar0L_4&7yMTk^?0UWQ4bX
1SIqeVr!Jq6X1cOCz3*%gh}pm1fhDU$}2Vb4i5t=jSO8W8G(?ME$Pr0t-TnmL^h6D>K<BW;`=9!B6P~5B25Bot%K&st0
^n)c@C)V@pX0Ly7n=d-=JevZTBH-j*@-@zP_y$FzW)h+OBumpCWY+e9#qIER$u#Q$wv)-dvNv%jjI65nENzE@>)BICn|
@Z4bXBS&vN(^hFZjpL}T%CH`RSByk-ap&GL5E6R{6EWkXP6pt_W?6L}Inmw3DSQoI3ct`bv*M8ZaSP>W~qJXkXTn5IWE
Z$xg(Fu+`0(i1P_wMO!G|jdNMkl}~y?Q@IPXz}kGR?>Y+YA&(g;w#{gf?txbzp;gT>+OMI0+>lKinnRLsG1FN_e);8H9
tlYPA2R%T6^YbHG9fBZjc@{E-~2l_S+{5mEJ<%QxNO>o;Mq-wzfEhS}1|{chOr%f2x98Ler{J9Z#!Hv9St(FSlp4Vvod
fr}-(U1ZtX^Qfyf0^^@k=X&;L$zq{fd3zmLg{c#a_JXLUV8ko-z3Y~k__N;Y;4WT8ii*%-y=hxS#cX)-Calt#i*DGvlo
CV=5}lr7Jvmq1@Zy>wXldj;yKX_BenYNYv}dn)1Un$80~{F#y#usb1=InzBfQ^3NN$m!ct)9R51JhGE{DBth~Ba2v?PQ
dVETA~maL1N=eFB4hc2pOvi}Y@*&@NHb<ypjaHQqOEeVdQFhbe#;-XE?xo0XJK^8T3!tq<>A+VPOt}ahtOGyh)CWQrn<
s;*yjOK#J&htR?L{nBq73`0rk=T6N0l9?@ocDvBXKOfqiyA%ekAtbIW(lm7nx+DzD<hLoOCN(O5lqqMd4o_M4hlPU&Va
8mR3rZ32{7Xj1xc8WdgFGC7E$!W&u(vp9Ljox;`wZBL(fvB+TW$iXhhv%^%k~!rbddEn`ks;V4w#pS8129!?k|qQUYH2
<RjBRMQp9B%qB5QwPjQQ6M~j{@fcC5GylxPv_W^+?Ys`*zbm`GwznX_0BA(x!tqdxe10s`B2lQ#dGxD0Hs}jcg}2>+D|
E-LUZ;PCi>t7FG~WjE-8dSF%57ORkZsG(#(@anLCxRqR$1XuWn3s3pLrW>u(A2}oC`y?_!<XzDJq(Li>450k!bre8Z3>
gJAU~M+t}(eCA%w9Sjtg1z*_+AH^D{cia*-;CFS&0@MjU&)e}Q&t<E;v_Mgu-JKwx66vz@iDzR%piLF&)ax6j5HYTRfW
dRHWI(GxvSzk_I>oTa(?I%C~^ZzE3)=5hPXarOSui@5PDkgq7xmjh4-Cd?k%;=)^au55WbRD{%LbsS;#!6S;eFC~By&A
l&XKs15{QfyCE-b7c^mM3-LhMCQ{0uWj<+d0?K=;EgJ6C*bOsqK0N?e@H@fy`^r;~e}ydwy;MU8W576omjc?{573dVgW
t>=F#?fZ5_Q+WzrQtUEemoP|&FmlsvZn~L=1`VL90Km&VENzK8CWiBFO{}Kx*6|d|<MESVi&#~0Na>)$78I-D!3`Prja
y?{+o8K-luNhi?%~hfV4`D1ks2~L{3`HXmuF573s)6Edt{h%0@F-|euEtB)UvgGD&i?~9(IG|Eq!*?dE4r#8?@OfkBm!
e^chd{3cYL}vlJ!9$It@q>(13x(8hmtuz>tN1*vR6Rub$<SxH7-+Jd6~Ii?0wjH43ck(xf4=E%92i$~MglOolCqP!byR
!@xp6I8g1O`LgEI_bBl)j(BdqAO~*wdl9gq}*u9Ah5m})r%LsgO==_mtkZ(ah(}wlzw+++xBeh55zC(kb(Bk`>noU!A9
|2d$#ijy*I3rVlVobT6D*ek!IUqCT=Y106oTzt8&0{K$d@0P*ZgB0KnwrL8ouT-N)W_@Cq+1zHwinsZh|&hjfk=pdipm
d6V*vPP4S2P?{F2Z%~S_+N_?HB#)&?Lw>@uYE%?SS%Fz26_S2XJMBxKZv9Cc8{I52ZWL0XGqVZc?AO5AFMQv+!ikWysk
CwB=rPSxy5eAjGRp=LHq>lt4U|J=^R2L(NCRhtm&U*<fru5vYrz+yx<T)frlox$#@_B-DvRWrY=c`*NesH}Km`=UO@s;
;-rI-lcX4r}i?PiU%R+jqB?FO(h-Zfbe1Cogzd$Kh_y{sI@tgs)&K6+8JH`lL*sA)_odS){v)jTg@gR8;Z1MiT6i<7-0
HXnz9w>XMYhuVcx~~~Boh&l+=^(9=VJtEl#o<8t#)?<NqD|v@^h@m8SkMUn!XY@dkz2=3I5Nm%G6!EhzN9C0k*+4Kw3?
SN6$H5tGToIQY<pF)uLmWH%x_cnu8Yc_DuI(DG{JVy2W3zS2J^oM*g!=k`yvN1YvVTuq%f?G?VdJ7FY`!N9F9i1cz3w#
hC5Fr`0cBJe~5;KDq$;#7vphQ@lhM?_<)@18#+j}qJB37Jxxrjg~gZyHl3@v*vk9W?QPe%Wfqz26CF|~^4yq?Ys>?XPn
@vm<Dm&rI3teQ+4T)UGeoq-*3A%r!IZ*d<NTW2gm(7?RuAN-c>cU_0~@9r#F`FW0G_}w{b1UTg9!;TdY&lI0L~PME=Z^
^-HE<(0iqG;&c9TQK^O;UU_9F10P>Io<q-CEVBxfWc4ylKX24i%iW}FROCM3W)w^I;fm`2n6qBb1GL~d@)?8dEAd1wRz
@>m_Ael~>MVMlPiUDNDqLgxyAm1vO%h5Iswx${Jc$2F9j4j36-c1C{quH_^z%*VXZKQkrEd8@kM*#-9C<3Vw(Hg`4XO3
sMm~ah_2<GxJIiiWLb<k=gfo78$8}zPgC^b-Ip_5p_%~>^Ps%<zc4BozNHj#4Q^sk|J7~oFeD6aRm=aa#K_jm6q(2huk
gS7zhMIDHj+R=#(&Bj=5FOAR~D#ryunALO&mn99>eZ07}1mBBJuXRCOghPHq{#pNq_tp{8F(VfKN?244^D^L?$fI9zFo
#z@Up@Cs@S(25dxpd%Zpxf2wHr!h5nm>i0IGuOl1W{j3LAm>U@%w-R6G2`JvW>54XiRUIsV9%0rFHVw7}KD%-{#dD}xV
?u4cGPp`(<)Kc)+;Ja0YGq2IbN$48nl$FG>!3}5X~Vc-6h8<a#VAy+)VPh}zAt^<3)pWmbv_SMt;SX#G(3;*nz_iu1z?
p$A+B{@v1>Fdf|rT$d3K{6pjH@QI<l=N=NHzhHsNmoWR5iIt?46Q<f#<dksg+ysoXXojovwc`B^SX=Jy|-`Qo^Mf6cMa
D!gv1?8=n7}WY1c2Eo9VzhznzGqP}3b7$;Hk2bZ|3W*Ti1|kbw1ALmW)#P*-R-!hY2?jjwrB6Ul*c*eY8+<;Q<HByinH
zhBj$k694#+s(rgQJrew)+bd(3g_20*Te(#wR#M}&=YWW$vZ)0tH7;>tpsfX+EN1=MXf2-x1~;R+Of0SUfiixAZZqe07
1YGNew<;v2SqUh2k%>Er<?Xr;E?TkW%TWz&w-sYMkqeNs(oYdkr`9<TeK!sCN^W5xJ^+(b`b@jsu_$x5o3X(kHg!`MtO
x{i$Ond6D|lCr#uX{8o&TAKyE}wAOWiFTy2!+;mRS7Gm{`8^6|sayu2WltAm^@3)obGxqu(7pjYf)`awld?`(332OQ>M
5o1ZwR{4Z*qC4~L!gg<B&?Pg>6lz(;_4G7vzbBl<!fc1vNfjjmVrbJug6r9TMxvk3O&&1*>tqXr0&`_YVc%{Lw37gC9Q
QLpQH=E;b}%Deq(n|ZWNWOvx|rrUy=I=e4*V=eAfZi;-ZFIIjkWQ7KWFi?2A^VDaxk7Vl1k@*@Q`dR4aY671P#cHgrzZ
v1a6k>g3l5(fCw~S`H2`-`A3S|5MAs$7i$}GNe`elK7k2IDa(_IZ?ApMpQBDhLoimbm4zytS-MiA`3TnY@yZ7$;%JCX?
a&#q~nhuA7?h<;IbmvNqtMcO&Q*{u639C@`xUbHeiyVc0*1EJh~?WzzxX2qew@q7xV(V5@)~;5i8TDi!^8mCrlUIe70E
w%aGX2;dThKsJ6i4u0++k{Jt5T?cDHQmv1_KhdQ`?KeYPX6Q|?t+@W!Cx^s3zkx28whYke{7^)Dx7=l$=W<cJAHck3B3
d}(J&&JsQr6KjvVD@o|N1N2$(RB+mTs_ejD(rJ%+H72VPauhRI>u#P%y={Ig#g|6p-Id~*xCRmH_x0}3*#IT+{~h$mm-
3^RHpFJwXe|SfH{wtpSgj|%8S4H%;E6p0t6Q@#5dywL>(|RtOghreGXmm!Dlx{Gxp1zx+TMhPI>d+<PSi^2G2kD2@Oyw
<55>2EGsz)?9UzKI9GZi*!N95(K#H7S2qK?@=X<nm@Gdx=zPc_An09Cbp?rkvhiO&R;nJ&M2}Yq5k3V-k8A3~0r7++rV
jBRdNDGjug75r4RMD<mwZL7i%G`Ir1;RSKGY>|lRVP-^em?J`WERQ_5B(Mp>rrLlq*KBY?{|`M*rpg_uq9mwrzSV3IHZ
ol3`LY07SE?a3ZMmhHv6Zj5~R_<@)uPb<`~#GLxlb9V=Z&#e{tfrJoiZ1oXPyGn_ew_8jNeFF$wXr5*!O)ytxMi3c&rO
Z}l6Ij(TWuP8S1evfgVQ9+D)n7O$CL$Og>Gxh8%zDY|@(y{_Yijv#{CgzpSzx|UVl3?-djiFL&_Xe>!6<#S~|J_{d65o
2*CC5O!23@mXPog6X;SJ1>IncutB|rNho*=2d|6)D<A&$3*p4l--s;(!vEk!}<ik}1#(lUcC><PN-lMkN^#d9S1?4y{5
;c#DC@3AtG6^KYy=79+)x5r7%Cee4mWcsNa71|fqwk|#7=3vaW43PLO5%V5|AXi*Vs2G)<CTMEFEQu<~LFk7wtiTD%(H
LMz?Z6Jly@{8EE1h~(DvHF?#~rWGpX8!Juh~S4I#Wx%I_&hx&z2z7LvMBZ(){n0pck)<3&MZi#EVEZ%)C)OnoQ~9&Eq5
b3>_Rj^P6+eJY`&7&lsL^VFm?SFlntZMS|Oym)qsr*Lt=kUf&dR5KZA9S6!eW!YH~SRIaC^lx5?Fcv+$HR`yVf0~Ki?<
j2NEIebt7XptyW>4LeYCSm}we39UAu&MAvw#*Ff@0?`+NL8!6zof~SG|W@%Vm-LQ2NGu43h!EiP;7Q(Hc4U-l4C@P;j5
}3L&@$SVw4eGzG4bn+)Em4S{a~g6BaVt$ZJ~wmuy>#xh??;${4nc9E7m1)k7wvpy$YZ1A6d60&a@Xd?~<Zm<R-D2RqhQ
4$}ddLQk30*Sd!>F=h_nB1Us$$TP36Qm+$(Z&mL&^Vc`YZBa%P)~-SSTBaUKF(#gV)8t?ftIC2BSd!X_g}`z={g}X&@D
3GZvAiu_s|LnoS%tU|{Kd9l>Fn2>C^e`bi*NHqTk&Jh1@(pz8f@7VC~hYn<zVn54%hjME@ey_X6#IUfL5f`#GIr;*evM
R#fb*}2A*Mb=4p;&o=Ye8UPA;RJ<7pq4ehNVqyfKSD8ruk^&Na#*-D70$Pf)9REVx|6vCOuTap46&*ykyL|J_CetJ}7x
E5A~Xknu8)fKWC$P4Qq(}x76-4m_&d|y>Wo(7!~L!2)7-9hmVI9kFfNQdkgFRzPMOcdCx7c#E3YSC{%s)!oLVXo=c5=X
UW1Zms@ea%2q7b@?2oCHrM@=kT#0NMfk3og1{^F)XoU<DB7=qQS_-w-jaDY&eKWgPHXUJ9xUT1t<9%E*|$aReo%nj=Iv
C{9U{SqB;GLSIogP{*gTJ--f`c#|i;037rT_RYtExgQ3C<Nj7V6>yT7lBdI1K5Qe9p=mLKu8d3z!}+TUPqXbWiiD-&Nz
ID&;&;jJaNwU0Nf8@A<3(Zo5<xnmh=csvPbm>bn&tRS64+=W2wO11m~0{-(b)Czqz~Ul;ZRnF+@u0s`TEA7h`RLyIqBO
0mN@_y62{Pu&m3T6P?-ilzh2HmGpcgXfd0divBn=LO9b_lw=~tI3msKjUX6mS8O*FY+R|B9P3J<*YTz)u`gk~SO!epEc
|k!ldKX8HpGS7gGdgSwDcY3q@aHoRSf(#gzXVzBD>^{<A))5vvw3(dYu*}>NJC}+TN@kn&pg{X@m%=3SpJUwxpkv~V%`
x1$H*$;-q(e0lg_Y4ob%GgIYFy&3Psr$HKMGz{3mVjBk{ozTXfscR5gs)BmE5x$f*6r8qIX_@agxQ`c=GwMiMcLqUdiy
p8>RBZb47yiZ$e7KKYroY&$CYH{qIpVh)iW={dxgGdUe&722KnmhBHs6TqQIvK@-fEWT&)5?0V1`zQJ)Qzwx_>j8t(w8
7-j$clS{=Q1*~tw#}UIWVM)f%rM7gbXf$DeAG9K!0L7J6i;9ih*v8?S*+9I3*B&$K!@N(xj)$F#Kr6IpuJu#<{KDV&WR
;b8t9RF2J2Gir339?y@0-(v*mc1$b6QJ_~fcfV6_aP5yZ2h;xd_#bb*8rPI4`9b!rM>3p7m1dkYpGPCv)=uYT?5Om(b|
N0j}Po7P6S&w<V8wg+7qsNrcEbnO_IALlX6!$Q@&_#$!D4M@fcDo}Zm9nm4UCBb}uGB2ge`F)xB3-r73q6FD0{P>r`?>
#4T)pb8w(sx&0!YnM$b)((pXdzZX`U@$S>6$Gp|Vf+AQ805!403nUB@d|2yE56wZIg`Yk|09c2YK!C$65B%uuZ3GgofO
I8|-%(_v_Y`+k~3O~f53U5v!Bj={x_8juE}#;Fb%G=2r-B!s2k$+&y&p(>=VK>^uC`kKRC7NDeG);z8Z;t@yj<!j_hek
9*gHUN<>zlzsD@l;$)AhY7o`ODpJg&u24QBn=Fo_Z;xiY&b*zeL=P9zP{_n}D?7)s(`s^qfLehTJB3aPpB_(#E2$FT1g
_L>eetlAqCB);&aH--d`zja4*^&0zFR^%k+uGJ{x<|I{fSoqeO-UWE=H&8|RkUIz|sCV+VT(fjQ7_BL=n>s|KV_HKRu9
h6RG=@ismt88!Hzv|DS`26ksHo4;Bxlz20?r?UU%lXyY>no@eU&Oc5nCmQLo%IHkORGF=w|?>(%3pLZ;!DxT%o;#@mdz
`*Zm(`%-@e6xO#A)5=;gt#h2h}rTF_H+i?H=CFWy{=TCuD(MU#$Iz8hcNzQOXZFJ~9Y8v)yW3iI2$1WJIDM-h-i2k6}F
9uu}|sL9-JZQAW$^kZo4_VVrPw^M8lBZIHid_ux)hK*t4=e^FQ$at8Ozi1mX+qdyUy4VFyz5~AZ(B7o*887oTY|Zo*T7
XgCrAq(^{?}V45AOiQ5HHREGk_kofsWuCuFjNf1Z_x?B}POu&*)(|cT9-%F?6zz3)mi=E2q=D5b)gdL?od(y!vv1tpEB
oWb|}~FMFl6r7w^$`J;m-E9l=CZ>XmNE7()9N!wV1U#f7_r<hJ0F@W0Zuhd9|UO?acJ`PTf;wK7?paq^LsJ_}dzzNd1$
jen;dmYcy4eScSh@%zdGv!do$7{L7=@KYLTEKdx%eG)d&P5lSSb=CmO9T)*y>1ok@SdLZr~~-HuN0LA3|e~v)`D+QMZw
$vc+Qf(Y%!#;z-{4r2n~Wph;kEyX--WHjfl)PN4lfw6Aj@jF;F`O)LFLa@FjF+2~Q1xi>h(x+%6I*kN>ujzlIL}`>t_^
pV!zFV|kmS1dFu#1yr*M%j0z6x8&^jg7NI*?p*`4FIfT2aM>zwx=`^S+8lq@>B}kTh}WNL=RVd5VNGdVo#U0n%O|nw*H
>Le0~Rry*L{1k*hVJz0~rC~FG#9@KtL#qc)D4{YfQ*%Tjr@EMa;n$Y-HO4jr4@96ObW6ZnX-4s74!w-|)bnP)9A)bdk+
IzQb1l)@|NNA-<dnO#l$nk7?1a$r9u2b-SNiUD1O%(7MFH<Ozr<?%sC|xkI=P$#9|5HK-k+9PIhD*oF2YEBWnIuOSA7w
UOKZcVIVO)Hf&SZk^5r;=aM{Ohf_`fuujI@SWb!art=^S{w%hHOf!%T8;RHv1P@lej<hw&K<xX4l?2NZr73w2uY+CUuV
w{x5WwKMsUX<>4hTJFD}4Vk*~|^{1JGdlBFFMrUlYrGTV~d)8syWOmT@h>of{tIK-3SACayja&K+^H+q#w;X7I-!F>C~
e6M~T$FY{S&0euc;o`;2;|7;L@M19t5G8!4h2+b3`iLL(%Shl3oT&*ilSo1=d#JdW{mM`WPKx`ge!eJfy2CHVsdn0HK|
-)4l0JxHhkUoL(l{L<?bX5ynjJ59Pbe1aHkk$)b1~O*!GaXdMt^qiKLdx9xY~UbxJ+dXC5Se23Jso)*>6x5#f)pq)y!5
}OSB1|IX=4;Gy0;{W=)ea2hNnt>pS=*9Gt3P-0Vs*f~x(HZattgAX~-LKoKUVclCLo_J@DmIR+R0YiV1%f=fnAyzpTd-
xeo^6CV?jiz6v%MO&FvI6#`BSbNk3Mve9jnIK&fT!Q29UcK&uklXwB3d;g7dx%eJ8+DzlBb4i!k^sIoQ5iI|H%V2ym2t
-AXpCW46w4F```1U}V3me-#5>qkd?k`4@@y^S^|T+qnW0YiCcaLtZ8UMj`FU+~oK?{fUteEcpicAVc773GR9j<nT5W6M
?G~%Gx1ck2uTet+7+)W?Cf*FMZBFFb?Ok18_pgCKfA;n^o=%OiBH^t?*pCKRtnQAF&x`!1S$_guUn_LIz_#m<(hzlCOM
DQLi$OP;akLRc-@@5mm0U~FT93QKac7@bcx)LqsWRKdn#m4@l>S936q7|$+o<xS(hxTHro=%>c0LQEHR2*YfYpv?OqGF
1wRdvsVjX%58RY47v8YkL5zb#hO9W48lU+NP#6Wl2nMx5}@(@4=s{k5PDqyJ@;SzYeP`1KU<89|kD~MDEZ`JJu4p6x9P
y{QtO08+Z%&xXo7H5D*2C<Ko3Nr;;N7}AciPLNfr0f2rVpA*JlYE`v2)7)%D3A-AfHb&^pJZ|u-x8ruwqq9n;*j6R>ox
Au3q!l(+mzL2whBPG4|NTC16_@o7yK9qyLPX0t?J_o<dsP^pq?I2`O2Jf6fG<H#K5H<)amJ-c#j+nE`DZk_+Vd+#8mAL
f46m?-HUgh>;r^rvlkd>9WI_+24nfIoD0<wKR0MEM*W`rYnF&w#en@NH>puxUR4U<4Vvdr=LF2?wNrxt&yf<U^Bh1J&F
A#O)z1q<sb>bZ`!eTyUPqIoF@&$p>3t<iTo}uXm+5M7_?NDWXa$7knpx7LzcQBNsK3gd&_((3$g|rwJ-I)`%d>S_)u*g
jM>3yO;-m;DY#L;+QZlFPQ0Q9E+s}mXVd#jLnoF3C5d+0ya{NmAAURzQTGwv#poNscg7alXP&(oy*T_i>Rt{}grkhhDF
21h-s&uh46<=dBw1s~3>&+O@fYJT6)x9HoSlKL>r^d9iUmVxzi0HW|Y(Z25^R@cDOzP*Pd$Q>P2)oYStYjC2+<~wJKVt
ws8X2LE!h_C*0n3G)AXCIdB&aj5DL5E}ks0ck+!V$qpdzjD8Pymg^6IK&zO7q&q1;ivsY!9lm0@JX_VC8RuQW>^&7j<I
JXdmk`fPwU`c!Lk(nhNceYPyDl1*!yQO~jKva6{%*^79UCnToP*9k?m#$>7+4b$8!?gOWo`?_gqkgr=0izHljYxX_;y{
yMC7-o@z3M5lu5szUaH&}<Uqy99Y-umA?Zc1It<K~X2yoF5H8kr1W=s^RjeQY{9Dm;JAfc8r)|8)yb*IAzBQ8ji5(jgV
c>>2EyeAH{TnA4W9qdbln3hG-fESHq8$}7W@VRs^*`(xv0{rS*QJ;5<egusqq;_i?wVAN}jn2qN?lG2EeM?Ww{A(i^qo
eL5`pPX<*iNB~DK^U^baNTOwSkF@5aUIw0r)#zw7gfVLzL5zlgm&7>^z<&S=E+^4_A<k0&keGM*JO^c^nH+flTXb}{m|
+D!86=F|0TA?>Zt%t!7(AS=<ih>OqQLQy?!L1_-6cR>$*u&j|IE`{E*Dk*zpW%d)-YQkfKUw4&iU`+V(dfV`b%#hnZKN
EN(+~v$2n7OfoKxsj3H2qABY<N~9efOF71Qlt?j-rR;-@bK@ueHnaP5&>?}uRDos`96WH?Kk>TXMT~<n<d64G+v#1=@3
&p}!*)G2nX7e5MnZXhii}E}_>0s2fZrtY19b|>Uue<|OcBEpI-M8k13EIr%i`2&pV-`TFeWEgt7I;Tlx2l9i#Ox;h8gM
{j|+dDUE4U7BZgW%l#^iLv#`*oEL?j)u1>;xW-WFX`6;3Yd&j?kI@eT{ul!aeFH#VmZ?BF1$m={Y86OQs302SA)-R6^%
>)zwe>ElXs{
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
