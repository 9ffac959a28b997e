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
    """Return the viewer's module and its style sheet, which are packed at the end of this file."""
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
c-qB%*^=W(a^ODmD^Qqf7LW-tN#;>is06vwt(InX`WWl#(X1JZJp@TG6DlUb0l-XhNto$L&ueS8rWft&{(|16KbbFCKj
H+DRox@ARUb(pPLBu=zrw>Y&(=lhB&*~hS(lMl#&<znmU%kcmPrvEs-WBLrt2bIBz`nJwB}U&AzmcWBAaiqQg@ywahZJ
0O<)UtYnkO96&<hRha`B6SKDNgEuHUY|B%efE|kmDr0{f4zK?Boi=_OuO!IVAzeTz6W|OQJo`$HEC*?L@6FjX-0Jq)zm
__SoIEHe+&hvQht^MxDWM6pxL=>5?;)hM-t+J<J7u=_J_b|3^<MO`y5br3JU(&UQnZeHYMa86;$D3pkmC3G*hVKE=^__
<=em74xt9YJx7vuKr(4Ab|1xY-=kA~jCZM&h{h92L!fqRS3s}diF_;`npuiRJg_~&f~FO@&WiWAx8KV<0|dVI?AMG+0@
r@Knlcjf)<V8pLj#B*IgoW4A8O0h}-lwQ#3`yw}RT)%SS^}>;5;?jfcYAX7{*<M6>y#5H?(2wY5*dI-Qz;~$0z<87mRY
S^vbV?ZaCaSf&Jlo<#t+x-eBv(_#uf}A3_|h9i-iO8EvhvSg`Y>xSF>>hX`pZ3H;Z9-Rc)L!^ph*8mGKt1x_wUj#-C%H
bcG;T*WA|I}HlVlPiMM`lGU+Z;z#CqV-7vz3aev~EM&n%+Mg5UGgMMH&@TYKt{zM`cOz3w6vghqCuv@=dX1~vqd0M2|+
Pn1q>ch6zi+e8*2pJ4tVqtL)i1Ph1qTgspKY(5vPt1&5mw*3f*FPRzz^hf9yK>;gkIA~o@`$iM8q&{;2xfD&YPZY%CV{
=gc~RtMw5i;7+bvy~GtN*geUldDFKowiSGpkpZmZwq(rotSeYTDc*iz_zm#q^wDD!O+x<A5SH(1820$%<Wf845->^4~r
`%X+v_9P)Xw9=&~A;89tM-!|U8Z2KdNge8fFv}fH-IoVStlVkH;EkE?j79?c#0a2AIl&^y*UL=_-Le9t7E8!wx`6K?CT
<@d;(RYEDtv#)@`T6KT@T-k#_nJK@&CG$a6Ad()hbHM<e^}SM300BI1N6MSFAfRwkZN=u7HAW{PF;;33yh1HJMV;Z9`G
dEV}h8Ik2tR)Qt84;5-l<ZYF7H=3q7h!>zdJLKkhfIdjo1vWLX;#sQ9S0t6L*6_VkLfn$2c7wNoop3?H(Den^p$uvwdP
LymGr^*{c2DXWF=E1YyIB}=YnFDETR6#q%^%jluLgO3eLbJ`iL3g5gZZ^}KpOM5uazIqzlBb{v?7~bcHgACbA&J+HT*A
3YXP?pqET(8fkaUriXHSL7ksRZAd_h%4yf?a!lMwl(Sm8%e?t;qrG)<`>8<5FdB|W3uz)R2jK0hn|NPH1HrmFA&tR#D)
7pA^qV-klOjqt~0Q1ba5?gD#$1Y{%J1lS88e~7<o&eP&O2nSKNN%FV^;v5atV;6ZF2px;!kAP^f67Z;)%tv4iK&Op*+>
)nK{1MeC-0;~Jfg?P+P!4{R^bvSS=;BBUNzgZOUP33Ec)!Zxg}{gx;&s%;Y`NI3s54%sc~J&W_t^@VohV8riT|mT0+{J
y3+v*=!3+>NKAQ!7q9Isp7*PX8<Kl^0{{o8~k5q)7N7H4VJxFm7P)=|wkBSq=M+hK;5{M;M4(x9bDzFhw&|FXe`6Hr5^
Wf{l23c;sSA$!RU|*`23h)c5b`cP<AP}5ss0KCWY4&8(0aV83D&2-f*wqxmzycv`sKl9%V#BHg-v4C=LyOlEJDq>~SHw
>_M)(V0S<9;ymXLQOd4_D7H#fp<@x_O1k*uOJ2f;`QJcpu8HbtNiuLwxgs<@bdU=;(4r-Fh40EIA#0PS#=*_iSHnv5rY
0K-cfGkZ$j1q|0)qfiCBL#1V67(SpN=n96|U#9bq1Zsf$D_DWp2&f#Fs00wCK4Af7B3r<G_jr`AyqvC&0FJSh36HnC+^
**Y$(R}&qof8S<TBmOwz&5W)V1yv+X!_-##DxaH(^uQD+{OYXgmoqsq#-C^gS`y@f3G}Y_keq9x%U}0!@oxW*HI$gxYB
C$4A6T*C48?X>*VuI-;mOLm(fnj2QxckpmmW^<iS#r4;C%$4}sx^%t2n!%s1=wuRLIJl3jLnxQ3kNDvB5+mX1_0{fc8d
$_VeYAA|p!4Jm3D<n#y^oIqzCM@oVet>XVSv2YqlW0wli!l{4-a*EP{WQ-WHmFRxs`p3GJzgLX?KX6a(xfWWZi{X0F>2
9FFdn6A$$bvM_i0d2JD}!*G7GW65&r4oWQCMI!cBPIXYeukybsf7Y!YNLdI+!?()m5jl;{b&4vitH$4Qs=5kNv9>hv+S
0Vqdn7Sfx>jZrUTkSe{54@ptPcc4-6kmaiohmgqyf`g$*)bb9P6cX$n<x0Gh#YCQX3tVEX!6t)QSk&`G)h_KyK?=<QV+
XK@1?e0aIT9wBsi*ZJF6Z~CW+qS0`=s=0<65qO9ztP*g27(<8qnP{mVyyBH4v=3NdR%8XuDn{OVoIeN6}OFJ}$fzG`1J
C7^&EI$D^(b8Hi|v6;f-Fs1LLw;%Q0sT$YqvLjVFHpoJC7*iyq{I=6yZ4xf=#K>iSu=AKTqoW`Jq`p8KGyyys%T4jQ;3
OVO_K(Q3zex+*S1}eENyB6Uzq5{_<f>Qy>t$f8+S1V8zP?{3xYNRm69+2M`!9!XUpxy!D#YbAGfaI3SphPIwM9QoKP*G
h&GCd)sG?LM%r-j=rQbwXrH-My6ROiL>6+y8;uE851kU(GplrD=96&8uu_0Ejl!Chh%-=9=^0+*}w?!G+b{`hD%K)d8y
oKJg8*lPv50e{+Uog5eY^}OA-HbQGOKHw-qE0yK~DW}4HA{3kqq&2Klc+hP@ch<8;2*9FGfHN9Mh7@2wf!rB^fg*tze<
*%gnOXk;49pJ%8`qSPGolpJK|Cuo;%tFQuK>5C;H-)mtD%uB0f7oDkj3e@Kt6UJY9)vqw`6zf;_LwZ1SW{3Z+jyy&+1K
xX)Q__Ly-wrDKmo|VG35Km9AS>P>cL^8F|)($+@a%mzsMb0|NI9ejKy_8Oa8O1hs}FWcfJ6Z(uPb{u8Ls!)>G_pBGS8k
iY}3vpY+G00U7nq%hdF05_12@kFjhhI|{liKrtMYTIpWc8KZrj6eb*5!M<ZW`ST6Vku<W50JW`H>?c}63)pE18xONh>h
mcylO!<E)6l3L|E9RXqcYg$7?`26lj?|8Dec*4rvNzc@lq=QrHVAMYh}WRm!<a5;T@EqSX;oPS(<h(z^t^iC=p52{ITX
{n7$Z#bMO*&AP$_M0w}^R<bIRgQ9U8s~cfaKp{5UwA&u%$yp<A2pQZla7BC;VlIiWR=1mM<M}Nsg%}ynCr#~RoTu?@1;
p<_%s?nXZpRJpK!8OO4+{>Pq`0plu>zuus#-M-KpZ^8Kz8reo+=wqQ^tCe85|{W?9K;$EGZL56{pjTi78gg6|Bumya1J
%7ok!bH?C)W$AYMo(l&@#c9C0D>|~F0LeBCzPq03cq7VvXa`-YDtE5SYmQ-b`U2XGtC5|lcueQGb<mKD-5e09*_%OQ&+
?RdVFwXy!a%v1a)=Y*~r}X>y(av}h8BYn;5dAMQWX>L*(F8OssWu#plZPTQxgF1DP48qpr-LBgaL@5Tsixy$2U}CQy?Y
`kk_0Kk1B}L5XQeYs?zU_9q&U+PU+UvXQ!sxEcxJ$&wFgO<V1uRwNQ@zMAm7{|*`;MT#lOjd4WHZ`+9kN%DNImWK+P%j
&4rBIB+s)voC*<ZVP>^(En&Jt(54D#I9;tAk>mnu0CQY$7C*ZI@G_8x;!>t_kF&k={<nYk<JUiY>jv=*uvKP@7dHUBS=
agzNp3ZUIhwSplbKYimzsL0Qk>2>D}u`SNw2Vbau_I~inhCQHP*jGxpb|Ih11kdQ0yLtNl3|j(v%ZP5GzQbK$*yI>Gjp
RgMkHXWJuQ`s;Yp+lS-pE3``73Ex)Y~Fj=SFJ9XmH!6!%B5<=Gv_?$DMwv`2xha`^TD9fkP${GZV8cFO$Tmg>5z>cP9H
^V9pp_qwup{OC3c;sT)O`gp`xZ;IJv!-iWdJh7nrW&PQ9%xX2iw0^<n@~%a{4~0^e#VYroEr%wczNJ?t5g@#)|>33sjw
d(VV-fOAd}Y|51-NeA0Q<XNq3xtCxsJQ*NLH_6evZm=Yn=|jfs|~>3D(Us)@$0G4>r$$CC&Obc@X@Ej{<B4Blv3qO(|e
$|{dn^>HjybUt?`BY4%FB44CtN8{-?_!~HKfG71`CtE916RdKPI8=g8gSt}`y(c(K0T8Niv<Z;kDl{CsKQeyY0iSayi}
c%&R4t&WPtZ#MztlEp>K_5!s5szLm(Rw~x*{i0k!{1Y`p55o_?!2Dl0e9j_!LC~jFZ$3C&ra_NWjA5d_YktL^+_d!~ZK
MS*1${g&QZ?&67=uL>N$iPqc)9yjx|nc;!H`^nsW%>?|M|tN3BIh#frD1o+ph40a5$2&lKgt_Wcrc_5kZ9X#}O=&;jyx
=&XLqv<|PRtvdde*FG-Uw=n*<%i_%>)pnidammpU%h(ekAIq+jXr$nAAdFe>BEQh<m~8rqwoX#(>;!VazD^N>xq8`#f^
+tI^)&x!-pAUy*$vANtXQU)e0vxK=i77D1ya4d{~S>e0b_k&ZdET=NkHUwnaN`0Y7Yk2I0rKFCSJBP$H1&dWM)p!VIDh
m+q1li`~&MeaSAz=xQ)wQI<p#@?#kHCP-<11vCbD0;(2nc=6NNeKoo00)HqyEQFQ}KH7!64+}d-m{3C(wh$({Erjzt68
;&UfQk>SP-I5{x+%)bpj2{MtS7hM2N2;%$Ur?i8cuJEO}u8jirkk6lC#|5%Y$s64s5F13oJIA%7X!Hr3DjZ^mb0Y@Rm`
cpho~a1FP@*CRA!K+;5YJNCMLo>9LYyU*6#I`rNy`>75bpx!@9CK!UD}=0~ggv?%whByu~Qd%zngVP;qER2|`zKtxbLO
&0-G!Md$mk?y1moS}44@fjHrWhhjMqe=J11+st|I6aD5e^>*Vj@&J5==U2y)bH1SC=z#g3o=b9r+o(EyW7~x#SnYHmj&
+;_gn|y__ot`UOTTleSCm_;o%w+oNKIeAvzy60Iv@2{<God5qx`1zch|(7|H9;!Oy3S|GB{ToXg+be0%Bi{vIm8-pxKH
9nnJnbMUjw_x}n0d796GMvJ10411pMBKH!0_Vkn2L6*A#`-n*U3wFUi;FEA}JRlzs*TwB&!6NC0v%}}}UAN5sHr>I_@5
458_LR7{69wRqK~Hw391Cn(da7{Vu=DCd!O8Ao8c>oI5HNgb25cvR*;}NJY67XlU)B69&WRq}lLuXG9%u>qw1lUlg|mU
8@Hro$U=3wS?Q>;c)}AUH$N{VYj<Tjcj9fRI0yAF$W7_5`?^lFDRIc*fX*Kn29s4m&o+7q{1gvB;$t~(0jh3=~XtFkb%
Fw8cili4x6B~*gWb;P{B+O9eSv<WadEgH}eDgku^ZEVnV-TeZ59JLquojf+lN9Qr@(=6)c`{kD$cGVT&)@>WRgGF6jcC
B#MO?-p*a~ZO-}jHlJ`IYSn%`$Yx5@L0tj|$DDANa6xL&Zy$kZ8;E0?lNA<JM3A@LNGXGq-GmSwh%h*cNC2E{$z8V6I)
LTiq2Gw@ul;sysiDGk-DaJs1iYRYdx9ki@`{RoxNtu0x@Xx;e=XNEgcUL#Ocan5X80^;c2_}$g^k$4|*m!A83cyR+f;-
+aB6(t(2Lb76efE2WILbrVEU^Q3k0-FRxC)GufAa=ljTr?eZR`D!Zfwb}-OSu&tyo|?gvC5v@pg-u5!{R#2AL5l8-0<r
X*2oPoZz9g;ctY8y4FJ^R*&wz+XOxAr#=9R6p}5U<`@j&P9`9CiLiI6P#;3anf#0EZGH4hWk;ix03?+Ocbmp+<8`~nRp
VnAr%Iu-Jfyy{H27!en#-V_2Os1`dY79>S8(#UqbY|!SF&dc%K2|fzyLS5k+P<(3l9R9~rr>LWf#o^BMFZmk0)eLAA$=
8ubxMeImw7xKD(M3fm1((3!s+jleJF~OOP4;@MDC?f@_m_XD8-e{;eb1^l|ih{pW=LB6}3vy$&(NPK|_n0^f*-+=qLHr
V76+7NQIBun&Iw}XRAUZ`yzdG&7A?v!404Y>||1k-N4=j-)4^qbOc#<?DYri0q~J*M?nksRe-~lqeFzIWx@x9El@pki@
~7^cx!>GLmSZ#c#o^yxk?v6$yB{`jRZiFn;gx^ZUAT!_5)x^A=7-AOL(_I|B*;dye%{2Mra%k-E6r;I>3E2&?nKEm`_2
YMQP!F>YJ8O6lp-ND$7lHaq;x@)P1__X8GL(kb>St@pvZ{N_Z@yu?tEUF@!=W^Tuojq@ojXrXv*xX`0LAghphO<7S8c@
7{X~tiZ+onGjp9`YtXv^p`#~XB(3k(2q^1#rVevBywvgvrdXhghP~8t>g|5($o@eER^G1gB-IC`z(rb{wJ~YJr}7A502
-0x4On-t7rR#OkJ|XGll2Ns#6CyfRdz5hCKmsp4<`1w?Y1USp!jl>^r#j#;lOF%pQek0X+pmcawqM3DaUs6jjkpJjChx
d5|#|_VBa$w5(8oegj@KJd9o7nWB)&0-6>@3A5d^-9bZ=7zM3o`$U|Ak_xqW=lKD`YE-jV^gdZ_pppwDx(J=W{L}xW!-
T*5)BketJQ0nUXd9xVMCUia8Yuf~_@A=N%<xad9Fc%@MO4C9+EOS=lL%6D9k+E3(l60EW$aak-oKJZ87yl0mw)^h&2Ik
kkN=0DEhKbnlXLlg)g{-;YT7z?f9;Tvg=WK;jnt|p+T5vTvP<S$5?dX!IQ*CAXba4_HY_Mz04N-^LX&4WnTCt5tH>bsA
gB*sL23zcUEANuh>HGq(#$SPNE4?oj4I;B(6h*aZNNGU=fV_^`0(#Ufr8%q(lX}Rhi4zwFE0XDLw%pbi$ZxK$yCr%7ZJ
3=GTfiYv!doii0*^wdB2)Yjz{AtnH}o!5sw3t&G-_nW>65V`S3cJ7$?f)${9sHYYvM)(W#$lP708Y;Iwi+vjTYJGen_r
z}Vg&UtU042)&;6w9vj%FVdp!+Y~QktI{)o52!spn1q@iZ_{>LKrsF|xs{LUq}{&w=|gemv2oWQp$%7<{IIr9$9UKUo@
LWa(-|v185a39fFBXe#%yzG>9<9>Y->|0XfH@RmoPQwS3Xa=bogZ*DUEt9vg&&2Ev}^4S!^F=_mET+pf{sXyNw`?DH&I
f-qMLr3FqhLS`m^65Bq@f#ZfOB3j^!Cl<!of=OEq%;z&c{5$BORGfr(JXPDDF{fX_gY-lW-7*z;T@WN@Qvp}Sz$|#t&M
EP#I2ASqJKYsg7gkT+yuHzbmc%Cy5ng%Xvqx>8)M1ksX9g1@b=udNy8KA5d+ep+CcgO+(5@CkiQFKiN76x%yYQFgvIF^
wwt+4{(8>ASafBH>DBrA6DZXFkRRwYG|?|^#+6!`a~f8nJuyh0`}B>6r_gcfYZMK!J4j7DY|Al^RtMwn!ha%lTW!HS+M
;f2F!*KQN0Nh*2cYe%4!QX;0L2k;@JELze1CdO08V`_!OA8)+@qE<d@I@pY)k902r&!n)9r8r|L5|}L#jj1pwI<B#ER3
ojFeXClAlN%m7lNd!l?RcKVb^p9g@;%RameVoFm~aouPh5YZIzL%Dn8!u-1Y04&biL`25y;LwACE(DzY;2dW~W5wm^5C
oDu(0W;n&Co{{~tP;}W(lz5ZbXFP(lhroNE1PuP3twkK&TIo`Z5JW+k<cFeY)9=Zx@S_Ak9_yd3xz<g*Pabw7q(HihIV
v$QN#O0(*SSrhk{<!=mr{BLxmhpClyo{6481nl(+r)P<W3pa{4M<ZZi_GkPQ<%23{G;&E<s)@2p!rJ8D+Do?PxguQTU>
^yjD`49J_Tm>jU-T41&&IMnawaTbk<9332{cG-HEjNX|F!@BGE@5dYvK}`JyqVp*M3dmgFLO)q4eqCutMy21Gj8E+|TQ
E@}pTOE?@^^a~ooQPgRgPYKXIG1;ior=g0WAh%<_Nu@{<{R%jg+Me{1C$xr!w;N3fp5mfg8@F`|GBREPZ@qQR9-6%h$=
5es&sW<;Qc#*dn%}3K&E7%6jRvpB`08e}>9|ouY_tS%8!=r0&u$Z_`9Owm`#9Pd)6@4gXws;Rc^w0f?~Lh>TvsHb1kWR
t+3T!KA|axiE==q&QnytRTEbSOwW*uM=xo!U7&nWyd5%QLz)^9Jy`kl__$q_hM;o73Fmu4^NHkODEfz8np`qeF|7gtWn
a(Oj<jLlQh9X|WpFw<aO91gT2Tq<_-E6r8Kz__Nf&F@Jy#9uc2PVwW7#0D-@%Tb?3=|DO;gU7F0b04`{ml*7D}bEUr+5
IiqjzK3zETnn#T*2O6@qU9P>GXt+PvA*ttxdsxH=xOm!VEFD|QA~3Vq3aHIf9gwt$q`ZY#u6O3NB{NFIsoI<=%^MJ@SF
?gr6mx>x{9MG!j(xdq(S8<=nIVT9v4r}zmMgOJno;z=H>1{ra?9kaQMfpN<SDM4hA0z>8{4Yt8AZ{#|{;diVLhyv;3H_
^04)%EfC$aVO@QQh;m4*Wq#K~U83m^hJQdIf?Hnr|aF*P##4M~B=TPrMxID2<9pX8~ihl8TY=!hDYt1@4ZCJaH0VH}K_
kA;(NT^+cyG=^6oF<%*g;CQ;tU3#E9i1DU&UY1B6v%*#pa=|&elj0+NUln_!+sB2mgAu7HbSO^Eas_x>3^O|jFJp!_mq
~gw&kVXphMiPGRVy78bl*Bco0Pn$6f+wI{Ml%sCGCJRr;Lsk?OO+HRFlqxqcZP3QbYTCa1&@(0*6=9fQr?Fmrw6|Z?lL
Yff#WLj5>CZLprHGIeEnD~F?JM~742E%L;<;+8+KK2%KNmCSGr)HCbAFNG`0$0DTrkchDT*A>!Va75Sq?-sKdaaJ7uC@
8Y(PNF!d`*DR`enyb|p;|AM$G;bzxHLKm_YiF9M`xk|<BZ{Foq6Vo_^mj~{;Lg!kvUWsuKY?bnaL>sq3Flo2645J#Ql6
f0LBrs9st2x@+5?#5nZRtq2JhK$)a^GZ6N&XdZQjgs*jfTi8YBUX<MY>!jIbW%^GAm(Y3+bLS-Ch=u@)c%jyTSEw@l5M
@oQfvYCF61gTc~ns$?}r3nb<9S>P|UCuCn!ABq;~dA3aTq1#u7qb<5d?&-4bJ=Eh#rSVU%1Gs{A1JOMLqiQBEquobWh|
Mssk0D_z{K?r&C0v3&=XD63c>1xZ3Kxmz1i@n}KX$ho9Buey#rmesN61sq|**`-{dCu@2su4Pd@Q+4>BjNfm6i+^b-i$
-3Pk}M|28=u&ZR|p4h(IqsvID8KllVQYES3XQQZ2YR{1-nFrH?403qG|-r}KQ{GC#b3N4Ixv1&@_p5>w4n-%}YC4}SS}
5MSoGmG_%Cz=pcEc~ViGJ2%vp=tQQHNlV9=kt1ujUoeDP8W3!DG!|?FdgmgOkbj@^2LFueYPlIdBM}@;6_vK`f7k=raz
NIxO-PY5e2?jh4fa}hJr1-Zdb{n(d+Ow!5BO?(rJp*g`v%H0iNub{ahdOS*8G;~W)NSomk!#%cPrm;02afG)7qI^704m
;Qf!MZ?$xh^HFJvRv(PQwLFKR%sIgUDW@}VY(LN5!Lx`f{W!+dxnL1`>!=o^eA<g7XO-3)?QzAher;#rT3Z>LgB=E4(2
fdJAims(GZZxj<H|1zuX0gr<o8qQ?B9GVF>Iywhnl_nk`FLCg9tud%z!QD8vKURn!mAA^DUG?Ch1J`~KI_LSyfp52nGz
>JGRf9-w(}J4jia4Y{hh40DyA85ou&>>Tnw`E-mT=F_=cO9#E@*`w%?+|5N)C$!-EnG1HPcBl?dyKqS|tI*`FeH({b1n
+82`}#5F@5Q?3=$zsu;5jgeDT(EcGRNqAaF)@BdCA~A?nWO^du=ub!we7XvXG}71&;=&_BHDW(B6tC2c*F`ifA738We+
*D9doWGYm#`IhR}6yJe$|;;w~FbqtkS2i0^=wJ@8^jdw|xD+Zsy2AXYA{(Fw1rcUcAL7y=JE&Pu+Vhvru&<SVy2Z3$%*
nP}+2r)qxG}O$}Uv;8`f~kmoMR9+EQOE4gwnR5mjRlWKJErpG7T$c|wlgz_z{6MrOcN9EP9EF-FZd-bL_di^Hs4+g<1!
GJD0dC&_71KAgb*`YN(_fEZe+U<e%=idSjs6kUbJ#evP%T<=;o=07E5E%c0I@hx|PgX14%G;a3DomYV1Or4h1tVS}?cb
b>i9hSV4(?*m{%z_qy6lDhD=Au}Aj(A4%(=#}vzv3M*pjm!9oWqjyAG)50HNa$Nq`!gfSO@wgga>n$>$^ool#~78a#ia
O%A&Vc->I;(8Z?Dy}0a<i`tn=$9_bOy>Ne2dDz1h^`XmCUs5_kQ@_wkS-8-sbD#k*zzjSMj>cI<HMEPPvA}xmhIft)Tn
vJ}XG`7wIW>AQm;^Ib&61RAHBF&hS4Qfra3%)vHkhH2>=vOs9u->XoFO~&)`L3XkqToG-M^iU`;$(LCN%U$&6dlECx&H
P#W2}YgZ@=Y-MmZJ(U`i!>gU+*nHnit6Qc2qfq@>ZT&3~A*3vqIO9^=KiBBT`6tStNHk-tyWF_EH*c0Aj(c6nQ#hZX2g
q-t!_v#F1SaW<FnJQ0<eb(!~=6x8?&_V@m0@U0DnHSAowdFt*jATKc1?qs$a%4s%n=}dt#2+tq!D2s&#$qHL33yNkV-k
q#;sogZev_3RRmQcGQ8{<P78_gaF1Rpci>FC|w*{i<x2Um0i$rJF(Qs|}wENXJYzk`5l&q&rVRgs70NrC@sxQ0O{LsNC
Dfe!IKZ|gFo*3Hs=4`v`{P}FV_f0?gK$hrJiTyd0*jXi}rxNLWYa$PM(PHqo1)5CVKy)al@cb%p|MD;Y8{@LxZnD+>E>
jjp^htPm0L-pjhy1L`8y^N(x!Q*xD3d(s^LC!OY1L}^7qAwv4t~(r*R4yjn?Ua|l;hg12ZVs`Ib3zG`SycYAe^zdJX_#
(fcai0_c?h_5NbOO=hBb`bt8rxpnCv}`%W59|5VxcMu;l%6uhKRHbUDqHovfO(yc_gVS;Kh&_w{?<pEZrLKO>RuAWb=r
tk822IcX@LGT=`s@RV_vt_;9YIt}{wq4`)gBJGb4g}@Wt&n^8xf@P3Cm|_(5h*{}4c<@i%;{mdq$Z<|4I@Ed8b8och9l
Bh7M#z8rDNW~em}ee&#t>~&->~oShgu5<MM?fKQ_hdoH7L^0msk+Zo}^Nb<n}T`qFE0pMpR$q{Bb#NrjLcd+9k8^)E0r
pkf?463LuCf8_9nm^%?JjEueGvA8C3F*tuSnS=;~GEf2X@;<TIxG1klGB$qZ)d`+|PW=U{GLv#qyQAf)y(YLuOD4fKqr
fmabkTCU_c9EDBrfdXT+@4ZzU$0){!qM8hYYk2qZ|nKY82mh=6iqGf5W;P_M*=$MRy!fW4;UK;!aMbm2<rp>)fpxlBF3
HIY3%B0KnwrL8ouT?VkQk@CvWwym4QlX-W`3B7D>#kUM!-=#Gv#v=CrfkiJ3DxNbxGq-b|4))}%99$cdKMH&Fi8tG;9L
hW>}e7e^nugj3{ym4oS3Z0ovjC$Rhu-Coxee04ELeinqhEx4xTBPK}Yec}wh7mRd`m|E(IMONKd$^4>a7J{{LQ{^Mu6O
M`B`oL)feI&udj?e#ylx8F@8a@S7i+iSm6QZXKR=g2X+-p!;}M>}xJGxuc3UAC2))E&hR`~j5eb=inSq_E>LYgsB)Q0z
rCTB2n+7|)wkqYxem}rVtfpJRL26|fw}`G8g-jO94A1LH|6&-+j7D)hQogZ_^$<C;coF>^<0uw1q84xfHf<@@SAI{dx|
qzN_fGGYNadlYDJf!Z=L)8RAooH3yY_=!zb+y6p+uSa9m?MKP)$-LaB_ss)am=6Hc2^P@ecqSD05^@<A63DeCB)9hK;S
$SJ#o^brH#mKt6Tx-e}(o_nt`bJJ$ifh=zsiZ);(fKys;!_T(7v`8bs78%jgHqK@T`z67RzZ}H)PuRW-_*vV^won6nk9
1)q^5?!*U@@SE4{-zcEGiG{y#xNza6=_GRvzuFjW`t;qt()PXf*FM{#rZY236ak!tR9F<@#5363~ZQQ5NqOc33vj-^n+
O^4yGix=y{_1u{cv8sUY>ea;G}t4oE_7F#Wkw3&J>@!qz<5-T*SjF2<cQa{~*f^`{VaJ)rQ6#in#|)4lQ$mCyT^O#gA~
o8CXtRxaa;)o0DcmHOy1?H9Nd5Dg?F1Jiv|N>HII?6_o7ED|(X#UMD@roqlMxSeiNm7lQ+w(H+UusoXA>H*B+9BCt6Kc
(ZWDa&wlFSdsgj~WrJG3<Y4V}?Tk*We&FE}yj`ni%R|{Q_*eO^prvH>Z@EDp)~lN5rE;{Ob_a4sa=VeV>$n-n#wkKzor
G-h-m|7froiX)hJFwi?5*Pw_)@6ns-1ReLp4!rw%Lbsw*mmI!;<?Vn!~gWy=MkbgF~<!y6<PkdKSIGbQmHO#AkYX<!*m
SqMY%LK;63Gi{Mcsr1I!%dl!r4YSRX5n>Gi<2h^D%q9gsi6@j3I>CfKuN<N?z!EjXW)X7$;`*D4A-Qh^8~IAuLCa}K?f
c<-jCt;f*vpa;dIN>b_Yxs9s1{&=J=+dw>o^IdTR4>wfTgR_pjW0Bnk<U;nQ1C7UG>av={u-`>)2C`kK{B6K`<opWX1*
46e;h>FZ-pj>c#DCNjflKHf8DdU}g43hCXN@9y9=`<}dGFSzHWdD)+2h#TvMKZ(Amm@d*sXZNsL7fn|K`)}XAz1X43?T
Rbf?h>d~*za$47yYZv&MEdqnLKp1X;1*?>J&+yF5lsusO2hq3hx2Ill41Tq>eC~UO^>yIHe0oH3v<<a&Bis>kxA)&I3)
?TjX@N7qj8*EN_S=0K)-}WK9pSCOp{`nv5_y^-Lpb5jEUPrX04e{<5QDzph80awcHI+lMu76RLq^gVYk9qz=$us}i0f=
PE+Bp%dWB&=I%DK0V+z?VnvscCe*SZ&u6gcyTR71hN5&fu|RA4q;zmz-w?{W;>7^dQJ}`_miUNsBjX~=4zbliowe=`Z#
TRyGWJ=taY>NuZ$y8->=rDQx3m~BHS9!uS%cV%H;RrTHoi+W90R}&mYN<`{!FRO8y?w8K#}z1o)AjgwJIz=#Fr#zO2I^
&_J=B3R#MsWD7bpSVQb|#)VcRzaKF+=G!&KVKRi5K%6_!SE@Xlx|Nw!7CX8ELq{&Ioq;v=EODHYdAZ|!!#{|O;1-=z`@
hM$AY#Ep?jum^PABnQ2ME54DrN0BgG@vihJ>;&&udLlHVqbImJG}$%$==T8JMk@wk)%u3!*y>BR6yvzd>rn$n<J8IH>P
Hi_U}3Ee9Vk(Q?SpC!H(eIto>P@veQQW_{zTV#eN;1|T7e_uyYMri)*lY{c6;wt(v9q(3=t6W#~bX8j|GrJ21|xvaPp-
`tXK@5Q(0H@ZvhkFUp~&4466-O~9tkM4;8009_hUv1X&e$Wr>N}K^(M6Aq!_6Hi83Dbq4dA`koHcM>gundG*R9oP2Poi
p5{=kglb743K%MV?Ahf1&fh+6#{7@Uq5!bV0A*6!IYMXW1^AG&lwb)-T$VyHf83IQn)+8j>|<u)**9Dg#v@z0HCj25bo
Ydrj;?oK?|%~-)iU#PIpg=w>K?E`@%!lF;ArhvWX{b&KY??aQAkFa$BPHvtZKDCI<VPnlK>Uk}~_evE9zdZ95o`y567x
S|)kXiUh7E%3MPooq6axP#9M#g8LbYQu#9*9o#Ida7VpN$yJ*q<lUEg3Fa63XhfcmN_c{PZ`^paCjneAx~N%SKKDd*Om
m`CxkMvul<3PT6QAK0OxDEkmj>!esflMc+2QQ%oO6Q@1+!l}+gKi*4%5Vd$qQA;Rw=(HF+FiCuh03sXn<hd!GX($nLpi
<YnBu@^kx!K!)J!}vTKe(g`6agrlM5$SyTHkkFX6VeKr`!x_k=TKTGSByS2X5Mxf|F`$wf7j(0i0M)k08FkW!=&Pk;&x
l%L{RGuKMW`_?%Bg5*KfWHp)Ns?T`DDWRHd|xPUkU{E<|Kb@ArCVICBi`1<tQuec{SG69%HH&#Unr3B({T^+#^xxWb9L
rZULu6UMDD1u<$z=H>zn#YSn()VJ^O!+i8zK2}Xg1(938#JtM+_kVUo5-gs*F;r^f-XJ!o!f-_F9$JW9;#*Pm3k=9;&^
7yG6%-O%IGb|7ZwhB#acFQ6|Ggf3--^604vC1K*_Ybu&KbBZMM3I{<FO0*ltC9-zV7<jsPiKc3m(6HC8l9CI#kw2>6pk
0L?pBB&;*p*<D_<*=sRFCz3N7Vn!~j%SM|aijM<g}5(jcOz1Ib~;#xweukAEJQv+s6R7nm(2UoZ5>MB20fFZT-5})=aK
Brjg)T>ibB$htzc!mBX7Y+OEHkz=RTI$tde?(Xvy!G2dI`M*^H2-@g=*27Jn&qFj@hVacGjCL1j-+();l~sD3>}<&>#*
RSdCIuFo-sUD!VD~9(OP4Q1h+A-2+I$E>e-ffeOoR-G=)E|a(gGjD7qn3Zl<G@W#fj3z+L-b=tzqLHEAH^FRqGm7^(wk
ktkE^g1M$9VgRv>Tzx#+RQMrVX9o9oo@M_?RqMRJqRE)H%(LJ!AKqdh?RmDrt85??n_Zbrk{E>K7*S&MsxHV-vOA0zWk
i>+n8KF#k_MZ4J#=ltLIx3e*#_W}ZA&rNB|t$L!<LbQ5cZw-kqIg2IfB!W0;5a7O%a-X&V7c7K!A3zV{KP3ePbz>iAjA
eH~*<Ia{w1HniCV5c{`ALof>?rer=SWzDbs46;b%37X7u1E0khPJiXK8U{sXaf)ZGg+KGk0ay<Q*z?Jak3uLjpEk4-^j
LEXYa3T1`wqWV(PiatU&^(sf)e&3q<MV&@oeMOhvQ0zWDLcu*cpDtn?PvM?Pg`b;HL?ZDl!n-3R0x{|{knXnLBEA33*A
Lp;FuTEzq;QNf$C0juv$y|JP2vPZyCz4C*Hn;M=M(i5j7d2Wkg!gHBLf(@^~v!z~aRM?;|K%Dqi`G$_&@SiX<vb6u!Fn
GY5Gg|1o_?VA?&=iqE$UMTAn&DKQk@ia+xtK8A|+X$o~9JI4FKq7@Sbw)slNKUFRIEl3q%h&UW7U5er8r;H%2d!VlwXz
D`ceUFpi$wc0%t{Xr*fPcYduV<dqkc+4Q!W<n%`}A8P_9+D+w6Kf=gUUN6O~LKxTWd0cnr|EoiK*sDqAiN{P-fQgLSE_
{zy|90RJQLoK@)F_<Y$0`zO%mhEk^E#f#CR%^-cwxbOgxLVJsiE5y%jR7->;PFofa!qQbLm_p^eps1PReGGF~J*&mPm`
jC{d@fxp6<4wdph$0RKX@7EqFw!i?vFl-@iMT((7{dUGa5xj!$MZLgq0iA%47o|gR`K;cI1%XO2RcNt195W97bJ|K9mg
}k2y!wFUcX*1LNoei(1QNMXJgVnP?iY(CNI&c`v5xns4KEyYX)<xj<$3*RnxgpvmUDkZ`K`;9DDcEA!MMS6)=XP3ojx&
%nluag~{SBkv{Nz$^gssCF++Tt9?Z#`yUc&PJUVm4@=Dp4H9Xn?0@fIgZ`OkyZDKZTz4$5LI1+?`KK^T1i>k?iulM)(S
oG2sSyvivT;t(YMeq*_C<pzEAEy_8~j*2a1adL_9v<uM(nYEh6ZGG=Q2k#ojmUOJ*R#ZZ=jJx%%UjzThM0!Etp%-mkPx
iaxtGAyUuMpDmoP5ntx^vksj$e#Lt#-I)=xxJMk^sADSkBLyu)U6vb0K&*L?$pgZxO>6=WQL=LS$*Oh65DWb6zRswHC$
_R)aMLy(MWG)75=1>4KBmkzUj|v3(5!2ZPB5+d-h-hpt%;UHef%u(FT2jUI=o2>>&#rblbUa!IOrD5gXC6ON4fF&!9&2
~Ao-c|wpD;eBA%xPD2tRu~VJA-l^0p_fV0c?R-Z|o&B69JVVsPd3FI|UN5+5>y><So%GP6Fr?@cL?JbKIE|AWh*FAt}B
tj9dw4TZ<)$wxQPEbnQjGhu2SmiI8b&_#$!D4M@fcDo}Zm9nm4UCBbRx9+?seq<xwD&2I@%R7XX0{P>*_l5sX9F6xkyO
Wc1`5Ct`o)y^&mgOB07b^R74-!F#Jj(Dpgn7Jig}_$7x(Q5Cd{qi}%wEcd@{H5dk{OD1e9Fl!8RwWS{=^I#;l7_0P!n-
SN*7~stYdJolLn-LsP$Y23>rs^e-^^Z?`GUR_fQv7b5KC`k-kQ7mjx*4R}G)E1o4Q&Lh>zTB|nlgCmVoBm*2!WP&^fi4
alrG=KXU2TcO9AQj}D~tWN?|QB9W4$q^8DqsN~dS|%VZcnziS^tzy^Xd$;rE|YwumUOVF>&tGeERhDvmgHwNmrWlmux}
eg&y7_yjLl%cH}xS%pJfKIApfOXK01e1r?UwiKAPQt;+zK#Z6<&?|LFZ{xm*U$uliU0xBaE>zk|}LES-Y7YnAOU2G@fH
6kohuER$<4UKqtY=znI{xmsMmy}5=u@nyW6#aw44>*QNdF0Jyg-3G~PD1X_zjITr=b87&ddA6w4T3#<-FW=%oW`n^%^z
vZW!U$V-E$As(B5Z@J%Qsh|RxE4H(4=FP@5R^4H(37l)%-Gf!{v8sEXl$yKI;uG2Qd_1UcG(&c80|<)NHOM3=+tV$3Yj
Ki+=Y?WIQa$1G9sfon`!xuJ(c9;p1o*A7}xFb(gL~2gz|iPafU@4&lO|!O{c4=>Va?5BWJWG6HlUNtPHBQ9PqB1i2H!l
#ij4eOv+lcdwmp|5Ctn&m&Djb9l|=0$Km{Ysl#93}5z2i$_l&Lh?fwZBo#`G2T#51y-=9Vw-lb28S$n)T5YA95H~}A8g
b}h2T%m{GkM#9K|pco<IvcO;8=3szBLWh`d7Ob@F(TZUODDu!EBo<wN682*9~q;&crpAuVCO(zSHLaxQz=#0F#+S|Whh
>G$ejhxZiQy$Rq4zgARQC}`~oSPQ;Y9R&*m;025Fvc-@>O?HIGA2bLmAAQf8z%-{OhDJnYhoghh^ofS>a{*902Gm)1=y
WA?<_S*?fQ!0s=qy(Wl*hjvWT2sgf8Vw4@bLzlVl2nF0A=<d(iqOJ_*O^b1jTyQtZ~QniP%Wwc@j%=bKT>$Vn*-09@ry
dOO-@gGR46!$cwPbK(5Mowq3<JCKQb=^LR)da`1ZtvTd=}O5kwv1SC0-9<2f(FcCI$#C3dyI%+m&t8D)99R_#KJB;oje
&-IF03c=`)3Vc$CC1tB^}evWqR$&Z>k>_pC!ln=#oo0f8gm_zq<{_?Bnj{WHfCDx=~<6SNm0-B8e)J;8w36S019F(cyo
g8@^m4v>kaNX+R2y*boXI{UsVhpmxI~U;yCm@bMc6gF~y_!%z${)0sSfA0<ec;5IFs1E_bSs1{$$-{t5cCdWQZG)G<g~
p@>?F)34k-ovWMT@%~*)$+Hd%v;yTYneDlqS#lpgrntbI^*jP%WWi^_KcOxs6j@O_bX$F+*NBv^lQk0jaX|d>`mbXO*1
~q!=M#xgyqbI5;2Lk^066DJSbQSOPV?#!ltX7`LdwL8u*n`FuHm3I!l9GmW@?@$ik0o~M}1T~om|ijY>DIoqNO3<Bdaw
|r#A<+-h!IO>-`f-q`FNeJjN6(U<&5<Fav}6z5j{6Ic9jhY6t6fL|s!MLMGo~Vy@xTp_&c4qWEQFxrS*=8%Z_+xxi1P#
EiaZImu~u7Qj4`MRNx~hsjbEi~w9KMo@Jg(wzrX2E?Cu7AUgh^sm1N)c){KJI9!*zm&3dYDi_Y#265U@v?koIPobVxjY
eMHnf#VjRNc`%iN<bFc_|Hu<dkBa0!0Hd-bLVa%lfQD$fc81++5uQ_s0R!NZ;@2Vju#+Mt=aNvhhbjWae!V+_NhSf<1_
xH*y7>NKn?zFAtwS0Y&=&sG#(&j#_EIqFq!;+y2gMiWPzVK+9%Sv4)~_09DqsvU2Zi_7@3-Wr><8e0<~`>odAg5K7<K_
v!Ye0|cI_`Yjnb0W`f@A~Fua03MTS8tc`Y-WrVk60TK_M^cS>$~IQr=@b#Za;&ruNAspTGuEHq%;Jb*AgG3+;VN9Lyv_
HlSoTZR}Zqw;W<C8fY{<{Qs=CRHEmt~u=dYUX_y9@(tn*3Rfb%7FvSZ>vh!K)Y>*7gY&*a2#B(OWK#@9oxlgeUeWVgZ=
XAAdP=*oCzk+ZG2GSuzav^uV?zB6T(z;|Au=Z8~v|iM}QZvFO@Z#7(tS^N_4n;6!t5i;lVK%d?^D3ijvMznBRhX-OyV4
M>N<7bRKu8{3DSorT&Bea?CwSwK*L@-MZ)v?2uVlX#&k|XmZO1MEyS%uM^BlL^r87{a_`+blnVkYqZYW)YK0K?&%!_#n
gk8Jey;1e?v#+&DHK3lIPWi^1a+DEk`NWB(I@9gzo*4g61{Z%~aQKy^2GOV99lm#TpS{=bKHCRK$!0Gw&?a1bb{UN2yL
K*BOZ<%|doh~#+b>xnY83;DqX48vd39YYfY(tzg*wl`j4m(@2=FN~L3KU_5Qd(4e&L$ug`w0l1KWLF@HM5A$<Y|Xm%a4
95+yE;<;5#t4LJOB*G04f(r?2o>Cs;s%W=}5y(b2`DBr~R<n~RU-5=s}e@%MQ=PX7i!kbjfq%0>)6R3Rll<+7!6x!3LZ
B;^wFtola+ZrVsBj$+3<oJ~sK?1iNw65LZK?@0hCE%-?#B;()Zjh50Y#Q3IEHKZ>su&X<bmDSvs<Osr=m<sUueV1)1Ge
zo@4vCcr5g((M|QfAd|IsIrMYlu=DyUU!1CMGGqxQnw@M2`vtB37lhdmMu|j>*D0z}Q6gJmSm|9N;L5QPfqkCxpa4F})
6dn-;nrvhW4hCUt2BoDF|H(5@k@EKm4Hx6C>Z)b7X<m4tqfx%85OK=2VJXG-(0Tu_GytE>pxkdfS8{z2wR={dYHgl1v?
^<zE#<0Y(`aVYbL_h8wP{ZFD&7<c32F57j6T_5_tcGsY2lUkLAmgC%hK}Qv>X;axau`*diuR;MlTp;na<;tOocT(1&JI
=9Y&5uB}3Z_3v_$hqYkjqJI82BU2x;(PDs3kOWM$H0z(1asrIP>=%n!CQ}(c*W4*7pNS8uB$($N234Mdk3GePkb>w;b)
k$85!XAJgRtUo*<*V|_Tx3{_$Xor?cG-OJa#ByQM-u_CBbcZ=<N+AU7{efEn?Mm3@$l#erre`af7yW>0rc5PHnj1}rV)
f8yV^FbV1vyo^&Qu7?S6V@yKz}Jhv&&AffYhCYi)Y^m)DErE>L@yVYKH4Il=4AuCBO)kehsNZkmTqp8KC*<;Bmj2-a=+
GzF)G$0E1a&%=Zt;C<c>ZW7B=f$hIOB#Sh5JcEwj^pXc8mev6abDSbsEkkxQv5!Vf+A9u->PJALDeELiq!|Z7BIV><$T
1Ft?9&AEXb9iU>;auNNFdo8?`F_LEFqgafL%PIvAur{iLkHU_IiXZm7bbSo{~*Y9#$el5oh3h=qEnX9jF60enR_cU<v}
3VE7_^K*ybUT|RfNCbpym-ek9GRm>%j;%3$Qf8w8}a{
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
