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
c-qB%*>dAZlHfk`E0E|cCLjeV9+EN>DUe%LQ`6nsb+lDhPp=u1)dWdM!X!no0Z<~Bgjqk$^V*uN&CBfT{=&S^{7HYw`V
kjEQkh+2wo``)#OV>?;a7M#X6Z67oOlsG#LFV|is(*6MUf@bbrI*`t`zNdJ6Yz*JodxEt}&zH579gh=jm*XmD;l`j*9p
jZUS5I8@FlZQPI&ddWgkiv{=XE^w#-d`j7FfXhXRyiF42N<onoWJCBPmRhnn2`VGpBR;ze9_Y6dhEH2jBlHh5S61es1r
!-uKgAtVbGRvZ^xAfZ|<8AKwV_9Ujh#pp<w@9DFM%*WN_b|5aqT;^&5N#-xUy`MVnPTJnvSOUiqE$Q(i+EFngZBXG^3K
B-zn#UaMKp`Oi&67t;EpfuL>$fT!-2PRn{MDXp~rWwaBuK=QQ+eMAMfz-mHP@F|GZA&rSwNwajd%h$23_&k56ef&%*)z
v={O6uDHMH4fz#|c&_UQlb1VA$rlNL(h;q$FLQ<C`lS;s=Z-296&_@l6WI^W_B_m@<wxj-eq=X;?r`!WzC%q0#-nVg8c
+tLQ^Ke-)~(%T=^7_$xqg_&nVu?swI=JsSKcu6KFoLh(m#Lc!>qx?sG%pzueOMV8;yCR^)e|$p8St^9F9iruamD_(K|c
qcgAAmekb30^!7XX*6obP?b`(KhSy^=2=QUm9s9%KXcLBEcj!)`A6O0i$z9PME5w2c{hmPfyv+r6>$i*a_gOqk@+4h)e
cvxXtUH~k^Kyrf!SEFp=J$XoKir1&8xH6P&}-$%nNjQV@Bi%j`@IWzwTLoT4LtuTUgl{Q6847!`gsw;Y%UhfX0ctxu$M
S54BeDAmD_B(g$r}W8M>u!lf3vF+wt6mX$XK@n>V#It8H<gF2fzR6u94~%h(k~wvGe$C;01%+h~!)%irUVTQ=g&D$QWu
$*D=76hym5a_cDwu(AE#2J3|Z%a==1hdL+Ba)%T5<&F|dcM>poBc?mUp~OBp0_agquuSsJa#KRPC;_SE5^|X~;Cq0H>x
YLZ+scX>-yhN}<}tOGgEzyG``5qxUw0gg#v)oQ!lZ~Fa;8Z1NQi*b;3Ij(x?^jbB7pV^Xy`^SchH)IXW^IQ2^C!*DeBo
p*M6x6ww9Zk(Ov+~1Hs{D;v>!M>}FuNB^RBWqRl2}&f9tV5PRN8;0VV+Q1MqI8NOIJW@dbz%nIizDej%(K6a2y!zANGs
b+Diyb)wzn>c44Jo`r{?hrbAAV(Y3&`xl@W#hci_=dUA?D5{9JJ~!po0`qfNK!#^Kvdw8hoDL9!b~bQI|BVf94#HSgfp
AYJ|%NlOxcDc=`t%zpK_g}IL3bef~pL8Z?qrB0rE?^!jH1t1(oq>ni5GiAd|UDaz?qrOU}DKKWqL-d=WdQs_+1;Bz>Y6
roM7x5{DZO@yBLR>iHe+g6jN8$cDHHuopo70DtwIC;5924#IR5XHfyfIUMN6Hu5$QI_CKw0nuP3;88P~kH8v$PFwZ3B~
PdLL#mOx!O0eZBRslL4u0e05qL=8;z)8u&{t7bKqsqcyGWzC#E2L2b=byiwb-t#GrCQ(ybw?K=>nLYEJ`Jb|LK$*nCW~
C>*7UX3Wyw?O+}Yz2o@WJ)PU8ve4^IBz#{uS6`|+h<TgtmlsE_|C%KhJ#fjr11du@q#1cyf_BRL>*a#;WE+~Qg3DM&C;
OoN%S#G)2gIf+^U+R|<@C&JSE{IqV2+kzXgBtNPd#Y&xm9e?fv{51KdJ17+LJAu?aq6Skuqc4{f0e?}qNT!4=imMn@l%
Zv{sLH)<<$#I$U9U#Lp9Bt8{w|-#fNkrFTx@N!AJ`{yS#{3xzLE03lg<TE+!#ZM8M*yprimmA#5T*JDg=UrhI@Vqp>ew
c=6H9j+S=;!_C&nbpdZz8krb|4=4z_f+hAB$?PM6DsX>^1&ED+%29zz072>#7GNf_1<ZH%d-cl8>G}xZ2wNHRc-yz@<%
}R1QDY;N)L?{MroCF{_uh`WHoamSfoaH^%0TiaYzlj2;nW?D#sMak{sDx(CkH#4;0{o2mch#%=9d$oX(7xkLxO-%8^`<
c5pj|wh-!M;93+U2ELxo*kPjEu3<1B$fQ{n%FfnaY3UtroCvfcg^RzO<PZ6-Td8Gk(tW_@!LyPZ_AmoO&BXOq%_6>>ma
AieeDT+(U4@ST%6iTA>hXva<EbfqgfN)l_Xw*X{(S{)BBPwLQgNzURX_h{$P?>af?~kB+yg(qDP3RV-NnNJdl-t^4)S{
VSJW7^|`|N=4)1aWXpyou82H4;b|Fm(k0!km^COq#l_?Ud&h3T_42{IWo1lSD8?4D*y_Jmyr){yk$xJ~;AAR!P<`iR;9
l%q8Z=*{59uoEyyrCG*@IM1Uy(5QIG>Q#zE$mE3NU?>tbyd5S51iMGM3hz`gnJ3?bON>>lQkaE#Jx^9`)2@`H&>k>$0D
D-H&Y_i~U{aZ8S|6ffc8_Xi{N%ik3$He=+Xc`=C~Q$M*lXVax_j1AFv2Dlg0)vMAWj&rm-F}*HQxPR_SC+QaxVdm?FB7
HBKO^XZ|Xt@A{t?Z(pnVi1MLWTS`sst1tr%IfItwmuyPq2dRR>77BI`f30Vc?4>@V>;Z&<>6b;lz4jSM^N0{^~6NF{JI
i~@|QiS`Zu8A9{;I^u@2&WMhxE2wd5=d_8Yqq*rfU1Dfltfo6g)w%A{5}^CNuGmx2ZR?NX`uwkEu}??P_7BJSqGq^x|U
>mKuT#O!(qn=w`r)2M9(*Xq*PYt#q%{mseoLAS0Io;U<68+d4LLwLhO2H*6!dgv5N1HOEZDDi{$RUIOP8LXg5H+<U5?t
>XxXk73>E5X*NxAly8@_X0x&p8pF{JM-fy~X)cg*YTPG6!O1{cgF1x=-4=9bGi!tZEcytXQK1-;z<z|<8NxylA;%xcUs
h(8KLP{ug=FJ~GIB<kU^<9rxj~#YFzE&0mJ*zG5o<LJlEolUVFj`{{T9f_#zU<Hk>iH!PHmhWpr615vGh%6$mLnR2{5f
eDI+K{<|;*Mu_H{u>a@~z%L;0dUlyTPnJ_h1CGApsPozNLPT<GR2#}#_KuS<cNJ5s6L;MyNL*YMx3O(F}TJm`TWhDvR;
X1q17zi*BB})o}Z3}P%`52AWYNW`wv73-OVxhL##AXMWUY!w0ASA+CL&Pi)YyvEWO#1;+=k$iPp+Ukq)uG^4u!P)bKFz
BUWTV0oV@ZUCU5bY3*?qJGltY1*$&)44M#X@pV4B6zM<s>5P*P;Gsa}<wt0h5e8ADnfIpt(64Jo}%u-o`$W}hH~G14zB
0971>9pA1iO+b`)-fhH-Jl<&<x2kj_Eea^armJSt<2*HM#0?>XI|i<Z&r-}K5w_CpDqVSgqmn|5jOUZ4_A$zmXu1I6w<
BgCl_0m}26rI9B8i6uhfR{-m!Vt%Sw>eaj}1T`JVZct@0Ok}E2t@Jy~zxY5;%6}gFY4)v7?LAX~x(VtJMnD<|Ueg%FK&
UYK<G$v%X_NR7z+Yge<$LEh=}iM>-*A`J5+NA4yRN1u{8&8IE+)I6zCPHq|cHS+tNx7Wmg#-+%V9^>UAbx1WEQUI_PP*
R_oEKPQ|T!H%_)Vbv-9K6<QXJjslw7;DJ>=P5F056@@>4NIvFJL}{j4{dJ8vsu$S8PDk;h&S9R9;noGJnUd=Dz|q}1Vx
b`ZFqpuILowfrt#f+=^hkkdg3d69BB&XuK~|2Sd8|d2or43BnOExpbpfVE8<O31QYxl&)M+F&7oa_+nvA!B{|fbP~Tk0
%8j!u&4P&(vF3JG1J@F!I{<AehlZ2I!jVZXpaw9<IcM>+D}a}QJQNiwoqL>ao%g@}^-tgY_?;`FDPXJ0mM^XVyjj-zkx
6bjf;k#D%7dBIs+XR6sFEMfI4gqM_(`v@doma(p^CA)ay8b!WVvK%iUpGd6Y!|es#_YBj1ZG~r7bIxFqV^2fpU@GFl%h
|2MZI}(2y(xR969$$E87W7@QoIMuDnMz@(ja@WhD<2cH~ePY7IB@Bl(;TU$YSobou1vV1D7Ekdxcp~7Iq7vMS!>~Mm%G
pynen%RgK$Qo*yhc1>~W$6qAEM9yxZMwF#cPG(mV$ka4js^wzXrb5S7<!qK&!c?fGj<K*-B2RJ%N@^Ksk>12-gp~Mqz!
ow^NceEnY`wB0F6fg0;!Qqy5l4~EgaLjjx8-EM@e!ylk|&gjEzK1M+_uejSYT{ux~*fk3%TX&R2`1@Z7yNdZT%X&STX{
t2$yeN3u-S`Rtht;bnV*ypft6jwavYuW-}=59+&4y42<-Smiu+s05t|wI?Wkk8zk1AXMXM6ClskXgG3zV*I!RUguC2>9
_%@TR>HxpcetZ)HZ1A9|7H{IN(#8&&SZhq9#$3Zp*y-#~*(DyZ3;SK+KT<<#`OulT;5U!j*PN$igFiKv5+~IiR=0{|hH
xB)1L<I8MBo#j64dF`)jI=m`ONw@9ba!hvGR12JaUSwJ=x(Zh5eIe4-O@GloB>=<GbP;Z4@5yCp^P%_&(c<|}afv59yp
DbcV(`^zj=4!+I^uzDI`JU*?kMZ3%o0T{5T-V*ddiBa5{X9M!e)!Pc|7!H}hY!o~+1~Yr!3X%Ky&wJTexQGrWB&|_TN$
rR#;g5@4^zl`xuYplZ28N@0w+`;dX+vD!D1gi%ts$SJhjJX6XD*umd>57(UzOT4_l!@0CMh&heZgK2;{nsB`T3XgXqJh
+oZ{2cQj02vCI*=8;n_;CGmuO8AhEkQkq`@jRC%Z>V+Fz{5*1BjW623BMJ`-p*4e#cOmb?yqY7;sDTSx2$S3f!g(G_9}
Q1J#fMfXwj%)T1Z8GWEV(S!Q`_$Yh;bxnpspPbCO7#iS~6aR?#ms?TJGTGPPI>mHs#F)78^{|;Q+SMfQhntJEvZF%V=@
XBLGgo>ifP8mEH^Y>o_Emz%)g9tz_7j*Xv)Md;ROq8S$PAF7X8<n968^tW=-m#dZ;gZmV?<cmpNu?9!d+W1Iqr2nwmmT
u>FP+qjYGPBO<CO6Db>lMzvdLZv*Obgx|?3#f(DqpbCZC6MXRUBiZczXC-4VflwVb_X{g*A!~nry#<+M_aiVVDI;;;63
7=>i`_zwYtu0=XI-#5AZKMTw#K9g>^1u=Yu1_>%+VMZ1{Nu-(Ar!jpGVN^7>Qo^NHhsF7O?v|C{UY`cCH`paSgO^kdwT
Ep$HxKg)gppWvS**$im3EILoI=h-H7`|z`+pR5kD+6~x8NE)Enh^^q$aBf_XABgMX_Nc(3=!dhx=krawNdG?Bz|QZ&Hg
mR=xUD8iz#)U4s+npmuxaV3#CgNc%L@%ByNnq?Nmf9>@ZmUM8wJd^Lh7g{kUIR;%}=9@=)paC(beXGmXJ?Ocsd$58z>5
&^Dzq6(ALy0SN2uyiN=8p!0O>BYbwOhb%O~o^93-bb++(+MHocoO5dH76ThlwKPK^0$kq_SiZ+wnyzbRlQMh-<ERN3^8
?|APbVFrkLy?2*{^*2+8QMgPC)gwp{NcxM-^WolyZ?OzqEzmoyg^3RoKk&~LR~Zf06RdQOx7&&V}#kWxPWw5qn3w58gP
3a6%h!w(jwjU{r$d6gW{%U_bJeA^1dPqbl4R|@&F6h5v!EUoguk%Y3mfS47L&yPqBH1!i{xNq|1<4buLyY?(x>x*?JaQ
bfl|+=W-QS?C`WS(67?*rWDka-+(%3UHRq_DxqszyoAxZvjxr!cceW>ps41Y>AC>KF}?A-YiuOZHsmfn_xJGP3OwefX&
B}O8m<DeWP5-Vv~vQtcx+)c*XRPP7(^%CMIIw|z<^vdAGH?IG+uzT@*YdMB^|zuMsB`HpIp)Hb;xOPnPv~s!WGy2dJAj
h3d|eJGdiA7_G<$G&3IObEzlWd;jHoQ$Ac(tv)SA+M5xQVrJ7K4l$P=d?@r=(P&pm6jEu<R+iZ%G{t+f~(DAKp5!6p?D
yGWx;dle3b#@E_3rUOv3EhayTSuxfJUMK5?FZAEq94R?Xdn7in$aG%>j%*GrG=0jg=H}f-!T|ip7R?tFfJewX!1SMS4m
hWgh+R($HSqLJ|Iz%6pJ{R{4U-GvM9NAnWIhQUK%Ce7x9WxT-6*7xCL7o#M<mB%I1}#l~Q#2Bt<~b(86PSoURP?lYDD1
Tem`_!bfe*a(T(pMQ)INo;<qt&H(1%3Mc|QnUrEzRCmF5>0=BXLDn66{sDUcd?fpkXyCpQI9xS4L}*$jd_dTQ?wMN@yH
fDh0#%1LqAz%l>)p9X=0M4Gy<~|5K#`jaP06kRGzq!_SW>_=ALbI?tDyfxq$XMyDRLt;5C?90dy8~{`#3_MWM^_dC5@J
)r3<QWTSHN#0lBIuR>8%^)6-M?sozesy9*!%os0bOPAQb|n1>@5lrCZjxm4z@*%YLr6LF?v6$fdW%jAScR3*p9o%+9j?
`g1vi~TbpuDI*FxZKcR@^C!cnnXcARYEPtKSCgpTSJ*;oR32sqOxkmcX*hlmvB`<InK4nG3&4=QIzwa#nSg&q_n&^PW4
{t8jr3{_6wP&WP#@jr_1V-2UkEz(k6qBggA@uh~!s6{s&b9QGx6`xc1hpkhQEj3fTgB3k2>e1-%od#hNIpVw!k}lI3ZT
F&Fmm$$VN?C_ul07Yz?&=XkCtr7}U&qA6jzIoTaFq==Ddoa_^E3QB6!;+^LUgw?86UD5k^v4To2kmx*c{`yb<lMWRA`c
MDM!81iPVxnz`juV~V0BfM^Z{UB*E>g=!5p!e$(iK?=UujFBC`}?r-gex^IY_@m>$I^~8+v~skFr?Q<gb7E7sGD;`j`J
h(B=xdrOml~zig9xWjSe_yI(paWTDwGVk5P#iFS9Y8E@j*n#5MeE)M@?8QKCft_=%HmjH4Ht<dBhPNw0!?P@ZJJxJ<<*
N_@gTsQW2GNPgno-(tm63WEsOQVXsHFOd=unkye>0p@PF(3XNYf#XGUs=Yy>H*q^<;x4<8mRB%Xr60tB$WzU>O6#2Scd
x(c~{gN3DJcxIq#N}@qTX|C$m#MKH`yJyc+e<Y6b<-nh&qNv306U?wn!Rsmx*iCp!7F%}E032u>^KGb?~cK1Y-q2aN6g
{^bR<h0vR6Pjcfg^&-jZ{!P(bwW_=W_>kJ;!%3+5@g`|DB?P07;~VvujGN7ipFiYh9vgT4A=+@I$q#G$bd-l(;CVL9G@
Y~JlVy=#0{9`pY|S>8R=!)5%eFSHf_6mG>ciBWU-~@h%ITMNq$KP#$g1llH@K2=XR&>hT|^RDfZnV^%_f30qGVh>dP~M
WC7hqzYeh&Rz3c_$%i~@&7K+N5Dc`F~&Oy8r@<>DB5$BOhGfr)&W|-4k-Eq}%+0s~65vmZR;02RbYmP`sl~FKl$nx!E2
{O%Ze){g)5W(8-UB|Tsahfv_nhF=SQGN~>BB4862J)N&`ZFA43MgyDHWKyZJu)FdBFs=bimr;l!XPdy%{N;E$FlO3HC7
`05h+IMpZ>8TiWR$fzm5x>R7p|f+u>dT1^zwhUwCm0uaU`1NxlyfVFfnpvYOFthC{my5O1ISBWyBBIkf$hU`5ZR^u%Gb
Yc>hf6qUU8jWf_fD-jdY1Nab96)owG6XU7lF||VCk2l`{QA?jS9c)I?N4gt<XHr<FqBvtI5|}F_8dG6VbX-%-(Ty|`_O
EJKj&6AHOkx!Iwc~jb*ZuQ4&bB<~X-3B&Bf>o>KX(1G?)+fsU>@h`6KsVT)6J$sMxZ+Ld^`@p{Yt0+nw=J%Bhq-~s#wm
0yDyOo{vEU&L<MYHdi}!+URvF9M13J^AF~J1O-IpIa=v+Cd87K!?TBqZ9ds8ov<C1I@CN|Nf%(up;>J)dqcz|g#3Gkkh
>CHWuvC?m{c-tKM!$a--$v^N@-j|FW61BbbQRr2jLBvlRv=9kEHbkTPHx-QvX9bFmyguBfZ;1O&k)2|KHVqMU*R%DWh#
h2;ZtB{-$(*YRp6-9nB5EmLub9jmJnxT+MP_RpZ1zlFA{ysq1Pdjkv|$^8hSK~ks=r2tIjJxJVl#mHz3l%c0p0fb5S$!
8`9~hLcgFP97Ua``IG?d6O#>FT^gz!3UWK<n^cM<(XW9+>Fr4`SxjqadA!k-;3+P;wsBjBAS2_I@YY*5?BTd)A^H0z%h
_T*k8?`%hqL>Hv)MyPy3*hk8DHOSwjDR}kd2lgZX>2^;Mr{gH6O_EtA37EjOmy=8#HND#=eq)$9LBBhpsCVQG(}@s_bQ
2#Gw??Z8s)%7^&N;2rXeN(%RI`Vsy6YkFDE9>nuYeWZ|g1%YLNgB>y^v*+(0nQ7|*W=}<OP=PeavB0@vOef}|+)v=vb^
3YSwNexB52A@HEaZ3R4wFge#TkZ7r76ADvU5V=Jx%K)RIvyA^Lt|JZ2>bmD*)dQw0EJ7|=mu!z6%TN3pt=IcS$&ELP<8
e`TDGf|gk3%Z!C`^m+W?gEB%L;I`gEg9o%b&Hd+cRklI)7D-laxga$yY>!K^JHWj31{v9!{%gdLKFGP_PKDOpoXep9<a
cACuRz)}&!7D8SD?(z-HH}^2aah+2Pg^OOmX=d>hkJW<=x!soC+(pm2X@ry@v`B#^^O6R8#5Zr~I@0NPWDbag^79)TTB
GawczonKeBh|>`d1G8K}bPR^zoQHkz#rUf)AQ+LpL+w570-4TpbTQ9qA~IiYR9RYqW}rk?_KNj}s;Cj)**Q5??v+)s-Q
~PCfKSr!MI#fv~UK$g6_~-jgWz<K<Gk;(<(Fx;L6z4NBMs+N*9n>YJAKB_{5TE`(SYDd@N%AZSn@twfF}`3_+&o%G7O8
{EsC>Uua)u3;*LyxvM&opeR3D#+TB$lG61rpeK#NqWr7{c2ryk{6Z)-l!=hXF=(X=2Og5Iwe#9(@rxB9_Kc=dK*G_mWN
olV=t#U&jMf3;dzJ(b+d|GC;U>}rCeSC$5qsIo{~vPPB#hpBC|vk>`2%ZtMkl>5^^;+?C{_e_eriUhrv9JRUfKpY!$%L
5UU<6-^@tWN7+bj3py#H4uwOv(`3IiR9GT0@k>Q-c(;bU63r(6g3znrW(P?^D6%=pbZhRpO3CYQ-wM_fb94wVcieS}Zn
|g#lj9)RO6^aHmU4^i(w=Krra4L_BRK|JVA9N&e2mW~qHek_9Oc|+mqLy3+w>{Uz6O5m`3kL75%R4XP6B71+}_3+U(T*
%meNue(2Z%j2Q4AxEvhU)xIQkPjP3Um*@V8XTnu3gl};^LU6-~K+qqBOX}8Kny1WY&{Xr^brb#n04u@c<M+H9Hr*x88d
(B`G8DH(J3R2@answj2+PVsW0juzD|EfYMs40`=ls7M6(NOt^a#@|Ox7-j!-)TDEnjMrBKzd}NLT_lg5~4ssC-}nt2|~
<shBsQRAT)%3G$I@c*N35a>KU|e97=r(tkECA$o;;GUFcFF%;F<cQK~-)@sqN`xPVIP1(z-a@+YM9A;pHlrv_<;o)KzU
L;e!<=YlnM`=Izxti`k98z|dsf?BMuL~%?Gebe)xl0K%c)l@h`RuwJn;Og4)9;q&L?x})cD3~eig|h$o4ZK-Ik^xGUEY
F}Vu77>r@180D3~XLp`{imgv32F|=_YhlQRZ$!-5Xz}GJ$i{BsZHcxQr2Rq}(tZNe%|X;3DIIe^0r$e?k|p_)VV>arU;
(O;qGR>{4Cvs5SvxNHevZsp;Mj_FDI)7RIx_+4R)qd%AJ}Tc_$~f9QGdTf2{`HFiv%*nDBN=7>$#oj7iQ@;C<(p!6+|W
;whlsU0GgLJgUhVx6~<Y<w-vvlBdUhHmL%EyvnG#4Ov)VX2}f!yIXd5Jd+8yRK-N`rMo?snX(y<eTXWS@C##%LI8oNX|
7VWm7|;#KY2@Ttj{#yH?i4;i%r<ghP<o#ah>FTb!_q0q&@}g#std*nroInq4^uS}Rm=B|#z(dMvON$?6I4KvN7w18vfy
b~S=fKQ`i(a=%ZtpaU{fx}>wKr)X;(T^-sd$U3d#wgEpp*1>@bMOxhRu&D0gZBt^ERpY(ipu-+xf+53-7Fh*f!Zb=!<r
=2mfp_VjLVcTa(2?3D(^5n|OWoA2Ba>gJbco2fsw)`(7o8+MNfgtq4!<M;jZFabL}J^YkUaQw-4%(twK?RaPK0X6es(D
M>07<?a8f+J+_8TgU|#xQo8J4dGkBBq#B0B7O)591=|Zr!7hDSKs0i;M%3H-8VxVru$v`LWnw>FCH!)r=#wNYvPEnq|+
gqf8?n?4Hq1hm`isoM0gJq?ID!A7*a0!BwP~suhU7S9|MYh!v?^dd$cAzQUXzxvjPw-JtfQ6981!;ZxBYAUbuZ`Oxr0O
@9Z#u)*Z-Q>GCl)aVtue{HPSESAzA%&!t?9XU=&jUj_RM{S^|CO7rg~=Ja>;HNX_|Q+b=5*({0r*b%-$?sEKDnJuSKOW
b%IeE5Y;q{cu}@{eJ&^dtovHrMXRtzU55Qm(7jYFKLH^tq-M?yhMirXL&b)g{cy)_wAi(vo&`e3VW0ptR)U&gXr#Mr0L
kYhp`B4?3mQCsV@xU=60=kfZEX77i;5Px;GOAo>_^tvO7~8khdo?UAErF@rKA=-%8>dp%NhoCb~FG6n1QFk(KySnhIUa
nl2~ut49~HFi=NneReiuer$#S&V=>j$D&k$OrmZfR%1E6x&O{)1izylbZxG7;UZaJ{8L+c*J#ZBs88H^o9pmY!J8ng2B
1CW7^!8TDbS!mi{>hdo^dHlT@LjSDN7NlwKgV{@^hnXp5ssz|4D?XR)w&pLEu+o2lz<nz_@wnuA)B&lvq@Y^RRSJ`J>e
}Kv%P3jyb%N;<eYcgmuEP`MgYK(>GHJLXPx$I-iOf?EpX5#K+R2%`PA;!*feCpP!;4^pbq$~N@awqNvnWF{Ly?P=G$>N
k|Sv;z(pO5v5;5d3DEoPDlI&!jBBSNk8Z>o8=G$~xG-ePr?J4>5aHxIv?V}`L}!=bU}^d6`{lQ6q&l9dSWl6_>W(@B-G
5=K`|T@!XyKC*gID6uGGw7AhjzX?TW?x_K3i{n`<{SMCAw5%dk!Twl@gOf0d=;vk%zp5F~Hp%O~S5_9jYljzZC9Y|K)#
U?Ae=Dy4c>O+JcHc7cX~!*`@1{A35DNfB}}SxuXD-NgZT*8_(XfdbRuuSPNJOUv$lt@<Q$=P=hSBy>_buA)tF4m+dRQ-
60nUXDlkt=6Ky<wl&FJPTmrP#)8DTG-OHLh#?Dfe}Hk{DdX^;%IdusqKZ5PFDYD))WfaKFKxJV>ymEJpaKtc5de6(gOw
;z<HESI=aWj)cUd%r@_3>mc@9?9>_?qRv&Ep&@Zg4Q*VgS0Bm2`G56Y!mFZb|sH<%bsLPGgG)PBG#yno@@)5CH}O-3DA
<_lq)WzZ3bqwZB~OP>n8$Gn66ns^7EUA5nyclAxTbd`tJ<q}PPsuZtv$P}~$96<}X4ck{&qJ@9WrQZBL0fA;f76R-^TL
?y8at=lP3rrPMjKgChnKS3B9KsQE$I?ZUv3E3**I+Js=WoX20AbLkGeBP6Csj5s%Nvr6jh}gSg6E%8e?nJgQZ8$^j6Ah
91lMZGCfIhQ8%BpV+H|*GieaAQg+!cddT-A*t=YyO$T#Ycf%ajPJ;`3J;@j42>kqnbSa-u-%$cn0j)R8GHex349F;~_H
+!+p-O2&kz)_I{q;&-VrX~+MeIsu#b+5%MymIu$eT7CdN&JZLQHMb8)Lp1MI>s?VKxtcczD3cvZrgcQv^x~*EZGPTW>N
bh4FG11^fG#(c3PJ{-P=*-Cb}D7-3g*XXLb|APWw9OwEMnaxrBv~w5YUoY2Y!*6LM0vqWq+T5E}x0TB~&&&6V$U+=K==
D*`HpMi4UE2d@QRY3PXVB~44KFUQ{MUTWK1MmDvLr{xOMw$RbFaC@N^gEwy>`(0Grm||@G!?KWmey(El$Y4PGJv@JLg`
Shmrp8B*kBJ)%pmnx|65cUJ0O!@!hwc=pcb?uBZiy^%A~tw~SBak8uE6`ewui+|DR3CZiEdm4OhJnjT^C4IV;GB+MzP;
hzO~}@h(Xh69)6C67YkYe95^1GG54C=&j+SyOy)?0hu3VBp3yNxmsax<rh*{%K~%i*#im;qCc99gNc|RNZ#$?_=@K|OQ
oU+*ebBI!$T0s$fDQCMvcqwFpB6szm2%5E*Xrt<S<x~NRYjn*rg&$#?F3s-Citx@!7s95sU}nvwmwj2Dr1~lMq54^ruv
qCQLku1+oM~BZ3?KcY{54`^jvJz4awG~W8D)8ZN`e;X%lsVN(UGAQNSn88q7h-geY8Se9F$QZwQ(pqAj*=N5>LVis*{-
Yi|?U-4j?nkgTHl^I{Kdn2v}H9qI#~z%YF=ZAD^2B956Sx+;t_1wsuH>PvTG0uX`F<ci7X3OESkU;<n7V0#0|7|I!U%G
4DVoHk#E*mQsyFc#Z_$aVYDM^rxV_L)`S*0&v@l$BkDS*y>Qiz@|0k$RK3B!~u*J%U+;El}tv9@Q{yN`jK)TZdyf*rsA
*+vW~8sm@PXTibMRLRcQdmdyaBQHHdUZsO9J+=RtFx+2^`;Yg2&))@9bb3Dtpf@^S0AD0h|5lt*jv3?i0*`&q>-Rnb2O
%*CJe22u&1N`d{)fTvvo32lG0^YjaD`6aJEJsS&`-@|}UmAxUHq2VXsJbEq_9*z$K3W0vOi9-p1J-@CxUERL{dV`fPYi
-X+d}?X?}oR{0X{L0m3}u^R1fn~a7|>tulT0*D_>X>C&9<5;_X0^5I1E{mPYhaTacG=Eo`79sAPgxN1s;IEEo({0(}mD
xaVe*o`DO7HZvc&DteU;R3uyzX$W38m=HX0=p)Mo2%UfY-Qkv}?GBhOJM_={_V^~C;yQe}d{X7*dh<zp@GsnZBsEEq;r
T773h_=HR2TgD{a52mUBhaXHCXihvuoa(;>zBXzB#+);DolDCNqrV2ZId~_ZYg#4f<ImcT2v;gb@ciD%^nNo_#y+0m%^
8m0$-XC8G{IPad7k!(y2qyCvCu`}Xa{2DNk7a_2%w+`)wISJnJY{nELa4k|~O6L}hFdlDnJy1AGRZl>9h;0OQ`aFxmsf
xY0lrc_*{jj3bXO!M%_HEYUYV`}{<8~<`3%wxydeqC)o<SxKU*AGiXb*h0|pR^DqcVAZ-BAy{<I_S5h0^sb@5xmSkJb<
^&o$U($uS$^Kw3gfQqFRcK%LBWfx@0$-2A@AvuV&!&zOT{^hyfj^gI^^e1<}!AGA75Xajq+8L6tGbXp@_He4E3fA9rb1
@p0;#ud;)*BQxR(x5g8#(<fCW@&|cc@l)q8>RRKck7CHJ^{pHwf9vTC)6TC2et;<E^Oy^|`yA=72Jy#1PzI+$6@^aGco
XvMNL+YEipEjqJ!G`Z)=P{pWl17Jo;T1JxV$Q<DpIBSwM+$uj$C(Jy~@<H_;5(G)z<SZk0mmGTN_|<qY1$=tAdPi6S|K
;dRwj7cO9VKF6xK1V+=A4VR#kF?w{A1qHG#0#$xH&P1svpx6-p)v29p(Ll;DVj*Q$=Jp3afC`R4atHA+_dqxiKeQG)QV
2PGPg>-3M5)09&`Zw>|6E*7_R~NJPt}^^c!MX$g+OcZ<@?az0+_B};G^hOJd7JP)sBG3hf{d9~w<?#Fm;H~o<X89N+w*
JFrMYKd#$wEWBn#cpxi^pQi2wj;7H3~?*7L6DifSd!fGr|drbqh&4a|h;l3~u)84ziO%^YrmFpFwSJnkq|J(l0IqZ3_N
PS5Hi9^az|t3D7{|Go#O<3+cj6=1e~c0-Z)^1+8TUA!IY5S18$P}wy=q=Pm`V@p#Nb_C~VgExO}tY$PfeO%(9A9Z)&nQ
zBICi+5!eJ)I!jce}+BpLF3TpkNXY~TBqp!+^FiTMay3*hADnKv4FmqX&(S=94Vh9*|}3Vv1RYdi&KS}*5kZXvUF{;q$
=YIxu`&jl<A$@;{V378ku1MJB@hpv3!GZCwq>ZjLCOO~gW_6onrAApDrp8uX3G(e@Sul509S*b~2zhIH$T$zbr4=ec%w
&75IR!z|DNvbf!Wc9d47dO5uO&@;Kw^jI+P3P)sbo#4k=sBq%!f!p%*VBw?U4A1BQ-}D6J_#1k)8nv>W~}|bBMy8Ttxw
P4mkiC>COJUlp~<K3o>e~NLL&b0el3JBIg}Qt6{F9n*|#`G|Ly$`-?uroV{$7C04CRxVN&s?bhD{(LezT0j~*(FJ9%j2
`p55h=*t~sWJ<`kRJx9iiTD^O*C8^acRQUkoH>T}0_WE+zi`!E5DQWDr{nnU2V#(y_(L~zT<O+b(;d{c5bL&^h8R^Hdv
gJXVxzQX`n!Jk(Lws=AnPcki>NJNV_xa}`#(D}2^O!qF?8zDy+LeFhZhOiOEj0e#IJlYAjd$H7G0};h=UFQq|Ye_GpA7
PC5JtivF+<07N|s(mxn_{&#IU8>rNTCEoDLKiet@7`IJGID!b|WWJLX;jB}6Q^^(&t9PY}>2ltrBN<<_Z?Z5_<+vB8Wl
ju8OGQFBcrM|<pE6($|Js7(!3nUIwZ~N0ra>cczP+!|=lBNn~NmNM<!UT@5+(FjvtN=q&y(4|toBUK{ty8Z~MUhzgxZ^
eYlUy|DHk)XVW@>3xhy4&?b?`QG2kFEMelq;;m82K1tm~tHUPp^iH_W_Ie-)F`<wq?K=reS1@EymTd*&(Q@@B^Hj0iKZ
Ooi53QzW^Kef3#=+|<mr!t0x24x%aiakV2p5k}b!q4IG$N?BFhkdeh}A444)aiAs*1pGBwSq?*x04<VbYF#kbG(-#_Ru
Q@P`zjTFNSCR_{hgESAE|1c_m?yolZJf;Tx5eA3=lp`S9nDagkrlZyGas*kQ^gQ3}4j+8A^5sA)}1!@)c9q;$G2UTd#+
%ZCJ=MqOSh{T&is)=DGwZC}Y?%auCA4^DZ(W4LwJu8c@J@1-LCjv+KFfFcApQ4t8wp3bs!y#b~jqZ^hexV$B@DMU3XaR
%YLNq+TZ$->P4S<)?4s+oB99tW$&jR*Wl@Vof}~)8t^Zm)e37Sc=-og}`z={g}X&@GcHyvAiumM+%IoVu#^E@QZE1(p5
hbLaE~TSo|tqtSWwd?ytY$fi_XLX~<h{2RRr=gu~T+mh1ndVaJXmqo7JT5_63TVY8rL7bhC@8+c66o+mkud9M7byA2tD
?;r=OHH@!=lm`5Ur3`!W?R$8vWNRU!CPOr=2ok2oK?qYGZ%GPRG@s+O1Z`BstIT1M;#yQ9q)HQoudgD_KwijxN*-dEc2
BnA^SwtIc@=a@4Dq+%Pguzhy`r(1LO7_7@t(76#YTa3woq|hb&GxjQe}804)aQPV>qfSBS_;O=xYj^x>R}J<0N=0k$0-
=3TOxLPxLz-`_P44LnRRQ=qQS*-;gm~DY#+<%Q)bvx_WXfXdit?PDO_Ety3O3)f^$UK~XG<v~pIE73OBMg*rZ!?fS={i
Pm}i8Q`GLtZ#p3lKWvGIPPV=Qwb-X=kat{%ZF_U6`BzvNUF$;Fr2@s@HE|gR!|uonq^jGi{HiD{hnVR;v%wMqeWr8$#@
Q7$U!cvpAsRAw99c!e%NR-o{<<~cq19+XYBfTn1<g5;HWT`+@xd1_~u@k3}Evk`J7h+jB+d+B#c2dKB>UScq$EEzgf-$
JF2K?K>xwXSi29DC4<_j+kW~UfQhQ=$}HHLVpgeRES<-ynOvw@kHLc%?Dl((Dg1nB94J@`ghNr2=V3K`5S?cQ@%%1UzV
Cd>0L%0h>X#s^eN86&A7g4xeKrbDKJAMP3Tde9e{W%f{+U;G?UNtyZdJSm{fmmPKZTDX2o8}|#(h2(1xY!XT5*2MD$Yq
-jZ-MgzBnSv$}48d20xMy9NfdS{Y+KMh&?jT(140sU1VscQ^!5O=hUyG6*LmdS(HV83;GP81#=7f3Zq;@F6NV$)_K*Ai
rzuE=AW2Dq(^2B@sn(vj$yy5o%j{oADSkBLyuHD6rEH)&!Q!)pgZ<Y^i8HtB8Qa#-lc7W$-_}4Tn1i@RFNG$is;BO)?5
rk&A|y&kOEB6A4?GC5!2b9LAVJ9dbG9|=5f3YA%Dl?hEg#-`g9M*>8qU%?e~=fCQruZv(F)^1|IA0_q97&r;Fl^CyYC4
386G4(!U;$%gHT(yzEIU7~JHKcaA)#2wgm;=v_M9zUvT6x=-fw7$kVaIFy;qL40RI0rJuH1^@5$MOPh8by$yiyc<YQ(}
RzRpjqBC9%RzgIw<a8cA<*^l~6Q)qwID^Mk;Mx#kz`x()Hw7p8v!~yhXBVp?7xxD+Th$Rp$%;oxDlZU2Wds0R)hmr+^3
bPJN;-h^BeEfMt0{#D&T}-GfBXBKI)-#$pz&Tq&^CZ*T%rlwZrj9kW%kp*rLAjAVvl9iMV?OV&ANgFl^vMz|lQIn+elQ
PRao9_v_K?4SW<AZncIfI;IZ_$MJO{dUUTa}RYPH3J1?8=C6_cd0;0zdZ7}P7sec+$CRD*775HX0ic@boo`30maiH=77
w~W8SZ}zm<BdEk!9ctn#UYGOWqc8F}^LZuIz5O1Cjc3*M1ZczT^vw6}oUB>zV~Qj1$y)b&+2l`NSC%9i41G?&Ld#8ACu
5S|*VY#5utKz8~gmp;o3azXw}yLfbVjaF+FID9m_0>wEK4s9lYIQ!`R>h|_lIKS#%cHeeyeg7SlPE_dx)ZI$i?!0%^n?
v#W+xcyL#l>^0cnh7$s&y{sS8uPcpib0}Zl@8~S*SYM8kEaQdDw2f_%)R8clyz#>|<6LKx>xHYqf5#ZeQQN#eqzFy`Jp
lp;`+ghgEAqPw_3n*1PP#xs<gcRcneSol5ymband%%fG&y_2V~Oext_{&#T3!onF5eLGjzmx3Aw$u{eg%&Gdvp!Y$xx;
B+rnn~QGyQf55N$(^!=nXTLCAz5sNlW&2sJ+#&dJVwjB1$!^Kg%)5~cgZqvkQ{fj_~9Mk5H9=~EIkmM77z;jNTD+&BR~
t1REZH0#WVWykvk?#`4~9q#|7Yj`^sr|`x2ge9%&rd!#iG1sQRy8Lq^wR_^MZ0JbD5Vk{{Y=lY;)O@djoputIez)=3L%
a42?1Kg#LE5d)~*-b#;D3jXxWAArEg(F{Z53ADh|1l3m?2S|M~mwCC)Yh}?qSp(W%Vh0B+%7?~*6o50e#K{s!LQ=qbCC
irNG)}*RO{_q6p(O%{oo=TNc5qKI>yH8a;Ma;O3k9t`0b7A@QAfet0(j1%ylOF^5SlINz6TA0%17TSCot`)iJ%dg+2W{
YG<~um{0surjsSI*EjnEZoLS6M1K^_W8#uR%7|P?{7BbMl!N2bscldaXO)-{ZJb)s7kZBBOTYiJ&=mbS()hgqT>Jzb2$
nzwZ=K89`YsHM-dEKjyh%HqLX~`4^zaTHdDg(JHqUm}OWtfm3ZJEbI>X3uqQBZBmwblZMlf@v(f%I4@00I+XGe?rgSE!
?BbGk@pAKzin>a4}+9^m);pa}qC`Y|b5N3!HNyPeJ#m9FTs4bZwmllTcJ9d5CA4TZ*Bha@SWLl#K_ynv0F6kB>WW71O8
sa^vN+*!py|383&7~|fapt~%YOYC}sdyaN8CIa1kSmD<q1IOhc{j@j^eXCtQV#H7RC_kSd-^_;!DB%LIhhq;o-P=s<R4
EM{#n#y~^k;E`{t(m=NLzu7#){Lw(G=$LI)A)>*U<8;!vd{DIZS4IZfhFfM~?|EFlU`cK#Z7p68r<|azK$awFB^R_Eoc
_bRDdb<c~e#k5|8pDO47=#m=8dgrddF;|7;_wFbaBN5bM0S$2-E9zi*9rZ%KZya=1BBg8fA)kZjQ65LG3r-@>KJN&UC-
A*f$bOT!=xqxVCz?Z^mjnnDPPOrD5rqOcygc7M~lL?PC1#_5!**(laZ+7oL(>KRLuUBnh-IlCtD@4fTTTILioF)XdMOQ
SxJX-F^v?WJLHUT-uPrpQrzGykgXm;knJmUHB4nBv;QWcDBTq{OUwH}g<2UG^cpJ*yHS#r8pUkJTF{KL*M7VO_j*;+NE
vRYyc2!iOgI5C{)kdX8b1eq0WWm2O6dx|3Ss0$48>sxF)SrS~5-|$|&?tmQH{g2AC5<vm2to_t+t`6|9W6J>;JiRt(W^
RhAc535{?9o`ms8B3hV(VQWNNjZ))|TI5t>Y_^ESXnT6kbnz(VH3SRd1r}__~TFjy%IY+8k%qw6xdPSAA4F-rUanQNP|
Ao3xI$CO<_`Y3(iOZJldWVgSb12d&BP)*fw6=2hFfy1wpR1A+e4+uLY5wZ@7^tVa>{qs0~LyW`{YQaNh3pFr2w8eRL?_
A#Wi1fACkAC%m3RY8Xi3mrC*R-&#MWSawqKCggO#nrgZS>wvIwfTeLpQF++4YZ~IIwvYExpHTV7nD@ZXSwr;WLTu@*?l
XTF$o5W)Y__jigoDYn;<$Ti^UOT7~%W{ghMir78#OrwewA<?WvO16~lnFuM|M*MGY)HBU}P+f$ik_QkdsJ28phe%4jj{
W;S(RWpz!~rH{1=Gu>}n8G?0*)BFa6<ld#`H!Iv+?3;gpHx7B-=TiSx)@%7n_G|g9ko9Cc)dH}~^ZO{vaJ%)Lo-W0=|L
V<bG=OSDnHuy#T|H)A%tIimwY%+WT^~PZTboo1>gnN>uk0yD8L^g6oLH$d?XKyG@&90O(KCa?uRk3Ted^ued&~6M>A(A
AA0Q>$y}&?^;o`|<u$J%2>FbvG+f~)YIKJQhmL;NAF;F@RKzfvySG59o9pyRHIRP`ez#Kt<=g0)rc@7{9Idgj9j?W82X
=Vnt`!eTiN(Yl;FobV?nSCWo^sVK^yI@Cf_;c4qwgS@cky$dMzp|F&pugIlFh%($#<SZuIk`XNXAF<&NuRP99SCnqEmN
|bG)<uL+0nwI>QHJ=&)ce`6k%z7msM+&YK)j87E|NbVgw1?YS5;3iw7+w0G5C+YZA`^C%HyWVzFsxqhf(MC97hLd(erC
t*y#ho1rBYonLN`fCjAYuPfa<s)v<g%5u^A_9~%GyMI`xEd!pOFzHYY%r^@4GCn>hos&%uKx&2dtxDB`kUNl8*Jq5a2O
}fY(Rk4ATd?%i1li&vBEc~$nTCTw7}?Qj>CAt80xDAfp3!kJ;;N}yq^sjgFSRtvw^brexw34f*dDs?|3VY+!3?S$$8)9
D2a&r|=~J)GNmHw~*Hz_Qoot)Uta?thF8giTlf8&mc}!v&J)O`fk61oUqd}5;#l3Kfxo?_Q#_wb6Q6UMJog@36elL&X7
YwsVX3;{W!Xh5RL_VbsW5-cF!<Y<n^nBW)8n7~3$7)L7apUF=sC)&PjIG}WhN8?<?L!;TLE-sxCb7>k;MZHEdm+#Arz6
IMu0_eDgZEL5<g^LvAg@JX3_umjrR|aOb$M+uvJ6J#uzqO1Jbw0aP)~A58v(E*n5a8s0~o~^BOs?Mp(%@ec=UxW`smcZ
?aYk;`s5^A3VHw72!epUZI7+s5wlm~JFeqa`{~&2Mn&Bsp2e#eRtPPvwdv{hujcWc(0i9*tj-Oxg4e4}U3UjLH~!Sz93
MJ4??1!M^UpB~*3J1e1&4&ELT|55!-U@!K5YuOspX-}_Fo_3c@jCEMM$qZ@dFae${7o@oIGCK2JC54Jsq)$uRJ5Fp90C
IDu+Qb%{mj3DF;VGj&&wfJy5Vuhw$Cb?$LpR0+Jo_u6rHC5;D63*!d&c+q+kg2>a@7r$g9MnyFc337O^8c_nfbc?>R(z
y*KN#TWY2ji1nnDr{MxA{{y}k_U9(iI&Bw(>1v(75p~K)eB><f)YBV*opVSc9t#Z0*~i@nI+je2P4i`KL*2I{~trD8BP
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
