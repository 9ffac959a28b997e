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
import importlib
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
C++, for example those of DistributedDataParallel; the functional collectives, which DTensor and
parallelize_module use; collectives inside of torch.compile; and the work of NCCL on a GPU,
because a call returns when this work has only been queued. Parts of one statement are one
event. Lambdas, comprehensions and class bodies have no events of their own.

programs that start their own processes: If a program calls torch.multiprocessing.spawn with
nprocs=N, record it with --nproc-per-node=N. torchrun starts the N ranks, and each rank runs the
whole program and calls the function of spawn with its rank. The lines before and after spawn
therefore run N times. A program that starts its ranks with multiprocessing.Process cannot be
recorded.
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
        self.noted_ddp = False
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
        self._replace_spawn()
        self._note_ddp()
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

    def _replace_spawn(self) -> None:
        """Let `torch.multiprocessing.spawn` call its function once, in this rank.

        torchrun has already started the processes, and each of them runs the whole program.
        """
        module = importlib.import_module("torch.multiprocessing.spawn")
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        original = module.spawn

        @functools.wraps(original)
        def spawn(fn, args=(), nprocs=1, join=True, *others: object, **options: object):
            if not join or nprocs != world:
                self.recorder.note(
                    f"the {nprocs} processes of torch.multiprocessing.spawn were not recorded: "
                    f"to record them, use --nproc-per-node={nprocs} and join=True"
                )
                return original(fn, args, nprocs, join, *others, **options)
            self.recorder.note(
                "torch.multiprocessing.spawn started no processes, because torchrun had "
                "started them, and each rank called the function"
            )
            # The program chooses its own address, and rank 0 must start a store there.
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            fn(rank, *args)
            return None

        module.spawn = self.torch.multiprocessing.spawn = spawn

    def _note_ddp(self) -> None:
        """Write a note if a recorded part uses DDP, because the trace lacks its collectives."""
        ddp, recorder = self.torch.nn.parallel.DistributedDataParallel, self.recorder
        is_compiling = self.torch.compiler.is_compiling
        original = ddp.forward

        @functools.wraps(original)
        def forward(*args: object, **kwargs: object) -> object:
            if not is_compiling() and recorder.active and not recorder.noted_ddp:
                recorder.noted_ddp = True
                recorder.note(
                    "DistributedDataParallel calls collectives from C++, "
                    "which are not in this trace"
                )
            return original(*args, **kwargs)

        ddp.forward = forward

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
    if writer.ends_in_hang(messages, collectives, limit):
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

    def ends_in_hang(
        self, messages: list[dict], collectives: list[dict], limit: float | None
    ) -> bool:
        """Return whether a rank waits at the end in a call that can never return.

        The time limit can end a program that still makes progress. In this case, a rank
        computes, or all ranks that a call needs have started their part of the call.
        """
        open_calls = [self.open_call(rank) for rank in range(len(self.ranks))]
        if limit is None:
            return any(open_calls)
        complete = {end for m in messages if m["send"] and m["receive"] for end in m.values()}
        for each in collectives:
            if "missing" not in each and "mismatch" not in each:
                complete.update(each["parts"].values())
        for rank, call in enumerate(open_calls):
            if call is None:
                if self.ranks[rank][-1:] and self.ranks[rank][-1][0] == "X":
                    continue  # this rank has ended, so it cannot complete any call
                return False
            if all((rank, id_) in complete for id_ in operation_ids(call)):
                return False
        return any(open_calls)

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
{notes}<div id="trace-viewer"></div>
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
        notes="".join(f"<p>{html.escape(note)}.</p>\n" for note in trace["notes"]),
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
c-p0X%a-FtcHpe}6)32h1!RIulKH4AC_#?YExX&TM<12iJw7a|36fwYx|jr;04tLwagJAB&y0`9o1X3bf@d`g`%m;Gb6
@cQNTwvaZB>Htyb*EZzT(D>X|~J@Cs`y9$+C#NBEAdaqFASsO_Ai$t_<4kcDl^dS>i|i-IPi{#Iq!tWz!ATX;0TlTqIv
`3)q0)m}hH`iVm0YLlS(97n@|1&7E&1e@doB8_KQIB=<~5zK?CT^Q8DprFo{R-=N%hwMv#V&j8d|C&gyHBzVdOb-0Tsc
`#pO**bWLpMr;U8LYF-a#luP#l=0BasHHN%ZOTz`hWB8o3GnB^trrC=UY$u<8n|6#<RXliXiz2KnL-(fLY+Ac08MXfvI
1nd66uWwP(sm{bY6rbI8SYHTdsyga|tP<syX|-@=r5s>){dT^22){t!m_*?Jvsy`|s&kZg0$A4!qvB7Rs!-XePpo`U=I
?jAsbu~Gtz*TbaX$=5*S(|DE4q9S<$Al}hPJ^bOf*U4%TPZRHA*u3q#ql>#BiKq8b-`lxOH*}lO&!=wS-s1P7z|TH@-r
?sf_Z58pd6U79(jQ{Qk?QhKS-ONCAG7r=kNWhdy-1dK#r<t>z(28w=emA4e!1h6e31euouJkAB{y(fzjWf|%u!|H!h`H
`Ed3yc%%XL?`~cn1AL*vw9gM%l-%yi*@hBUrhLi#6lrZd!bZd8jC^%8e&BG*F>#5?O)?~f^+#5vR``PZY^v_@VFl#U|Y
Ut_m^DS<iC$(9In`K%AdHVOsC>jpkzfM1QgWlQMWoHx&-LK?VkAD4Desw#eQG1>Os`GL@^&|Wkc1QkTFno%ls5@{c&<!
jG{>j~-J5qZA=JRWU*z=w)uv@=fWWQS{(=<=BrFZH3<@-&i6L((j5VCSyDm-}t%w22|@~7Kwr*}1wv3O6kO6FJTcrSM{
TlABF@YOu#_keHT%p>|6_34kS3xPg1l_?L_0NM}=^m3=tc$hH6+=W%+RvzM&Cv_E){QJMS{(kQQk}u-5t5zXrN~1P8|A
`__t#0x(|1MeP*;<uVb){6Z=@u?5t3y9kog#V2VTg9~gZ5%DkgpA_liIGUZE+8TWVhTb7NPrfwoKfhSZ|Wh{SN+hgL%B
j;m2R$A6G2~pjx`brQq7br_o^GJvEy^-C)LVyGiS6@B|C{#nTEJTo!4(@cd9P7WaMv8Ec>wvLe}|f_0b9y%)7H`hq*fc
9j5?R<q?YS#$?u_vMZfOLrU+Xle?fF*Sd+w#HJWU6hV2>Nj&P(}sN*V&dlEAzmw*tM}nUwoVw@_OkzGFm!+ThyUY_!r>
^07mJ9dp6Mff5>DU%edJVFcVv+d1khcW_0!M|U+$nafoI{DqcIiT94YGAMK^w_2DY)08c0Cs0wLsPk|WLR>}FuNB^RBU
qRl2}&f0nQka*rOz!8po3nwwbH*-8or-k#F7WYnZpE$@SU|Ml%R6{s9-Vidd6`UmxzWt+9bqJ3Q`q4%;d}CZ;X`Gi9e-
W_d_;_#7oixwQW(xHMD{OoPL<9-r5HP_e%p};SM__+Q;w1oNVQqU#6i1=kV>*L1l%|BkNY*-g%yo`pVEg?GsxlaI&c{)
ROk3LiDCI7wj8Aiw3Wb17W^(Bn<py4Q-u3xgvuk40*fCXw58!OsBmJN;*vwIVe~Or1of83LfQXJw0)mJ1S5v)rAWKErD
p|(`FovkFKikMwK}MV9e*nya$%jwP-#!3a0>Wq2<CZ*~;t!}s?uI8@1a9=vg>vvWNk0Pr3SAsXuE_T)UKh~GD&8)#cqT
MUehu1~tCrW5D#LlY&WqsjK3f2vm7-LVSg%gWfsM~LumoNlOaO7?vq{h;DuKoN5j9{nE??C8FR;jdPetf^FrKfo2gSJ@
!`7%c$r=a&WKaTe<I({F3*rnm!U>uI3yj|(0vsKBeb6BHF1LDUOJuD2M+u08R5=fbG!OvJIMhQL@*I1r=>RHYbERpcLb
&w=!mt7n6?EdnM|ovYfY9-I1_O&VmOB6TuejNj<eDu3s>;&pRb|epSb}Pq_j0I5JkJ&&=0+au`RRvX7zBuq!2%>aSo^p
L=4-&Tk<nC0WQ(XYNmRdC&XOk)tMK18RR9W3e+dz&N<ZrOTuW#?rJi>i32<p#6V7C6F=+FgCbRv%nvO6*<M>CKTV*Sd_
2qk$-+MdinW6s}uhV$4Nb+!3mN09w-l8?dd7j=aD?JB08oKH}#MwZ`%?U2HQ4s_lvRSf-iZxD(OwkUMmsK9<y_yFk7?)
g1rhO6TMMMRqW1yfmjU)od5;k)OSb^cl4*)5WqnRD8od8iV)Fjshyj^KD7{D6Xwy2CEAb>tQ%`9*-azigw#~=+Zk~QkD
Mi+H(0J!~VAijv_MGA<7&>cr58g)Q(0V)*BN3yCeYX)vWKroW!Lu_h<c*J%59nJx#@|3pco8^=SJH&=YAl5f{Si>=EC1
v=Mv7#J99e}UFXfIfg5cwq{qH_`vn@u~tjiY)IMfj(JheFenZ8Uyq0g3=%Sr!QtQelegd$JlNR15|Y%r+x30;*c%>5po
_VFM9EF)%qjKeUTUIcW$bK3PlE;WBx2-X*9p18kh<!@sDGtDg<T2Of%SGFoM`z+6sYNeF)kRYNlc)`kdqB|)MOaluO8T
3w`Q=@Rq;gJnoo9KjNQXU!k>=I;0ECk%RBxIS(G)}Gsx0wZK-3D6o;rM(_AR3%J%k1@zwvr2>T`FwMw-bcwD@-TZR!58
fd-v}TcZHCm4*QE$6Ll9&XK|oyt%e8I5+yVUoPG8BQDH*U#VI+urNQJE5pb!HSm}U<vG!`jluuMJzlD$A6noa2T1-7Wl
G@HVTc&SMG5R?ERN=WMtBvTp_V*&#wSkWelpo=?6CkD_<K-~sK7GlQ({HKjG98&rKxAJ+HTf*e?ZfR386rRjTfzqVYdm
?uTT4)Vfe~#Kjod8lAf=M4zW!Mt5z#;uIh&AYh3<`9w#Dyf!W3oumjHsU?&!f;5h(v}QwBhYADI}OZ%2hb4ib<aQ3S1H
tgH;BDpVjlEDsApS*t<Pm>;QJFhyw#FN5P~r&2&D*#q=I6HbN3=<C-skq(EVdy}&m80=9-{Edil(YN20yl>k~r(FSCNc
}iSeI%?m?xtIE&0nk#UvSs&sQx`H24G9-q5!lqm0J0hJtfXct3remnKY<X?vdSVh^r)DiEnt$v6QVbW(=uo7;Y_PpB)j
fGeO__|Nv|;hScaT)8cr-l2w&=&xVs8&t6GZ?8WDkO5vxIgN3#!LcOdbgY9P33r7*hgP=3vWhZKaO<sEP#{G??n4S7QG
JVKKw07B)du1J4%x=X+h1|6e`Wf7WHpRbD~R%-G}`I@#=Ak^Rm2oz9{0Cl1~M7>&}Z@n994{&E##rH>MN6#1O-F<N=f8
nQHpSHqRIB!+FuPzDTJpO4mO>&%Xm(ymmg6@Oi4#yBy5@`;QC~5>JV!+8jHN!fQ_e(VCnAxIrX4#XZyg;!erp>cZ{g!R
bHWEvc7v3KrSb^FtfrU7M%vLCWSvOyP3mgw?kyIlBrsj*B9i^BHx=5~3YXf|L0cfXWbX~$)KaGV62*Ft1RzZLPA|BmFq
K0G-KvscuV(Ht?fXlP;5n@_{Qif1u#8rySVq%zr)yo5spR6OF6_Hn&VLiDrUfRRf#=!%M6Iiv=a(|>+5s_&LNhm7dD8G
bu?bX5dZzGlwQKf~lLLGOA9quFn(hT&<61!kelVAuRYB@4w_}EQE9kImNY+|#0Os`G~BoOLhtpVaAh({roLM{$K#*47t
R`39YXH*Cqg*-xF4M*u8(I=QhRkRAwABf1||EBlx5>Sy<2^@S}^l2g{>m>d_vmr%{ILWG+)(6W-Gyqx{5o0WEK+3x<H@
pL>5Xm8oAJ8VhFC%HZQB@;#+W{4`$Ax4D$AwM#pfDyy;^^XZqBlad3Lr83l+aAci#z(&)_RfpRz?C*ddnb1lP=mfVWLr
nXMAsU_xsZt5zXCxe<0O~00`@v=JzNFm)a&quo~0)W*sl&I1K+aCp+JJ>&<eHg6bX`-X~8fsO|437lHe->slv3-=~}!1
IF6PARbWqef+VS@hBOO3D!`=8|DSJB_bov(IziR5L5#Qp_$y#!wC?YaE$*ZGq(A1Ei}?_^)bwUnnTSo;W`(xa+CEsTZd
y|&oes<#|&I51Svg-cGJbekt7$?CZfNT#oulKs|b8GE>t>qIN3Vye)HGgeevyAZV*p^2B~cM;RZ0j%UVB@golVQ6(en*
{8bXqczSSNF1Y8t>3GkBrB%9UgUDZacnTo(XBmnGLiEa@ik=3|^T=kvjH)$j1QRhvw^JNhS-bG8(j^uY)$y~zx;nIfPc
%nSJZ;p&)m~<WGfD0?OZT8SlP^^oaR+&be^5><K>kk3ayHSsW|QZYst$A`8dGsu+`vt93wvF`BuLNs15`0swA?KZI%ge
E+urFX?7lUi8qKyb`g1i_nWS90G{wSkiV1kiZxTzRMcIpMR+Q|oIjI9E?D!3{2!>LTnqwn^wF6m8PM0AH6M!3|5(Rb~r
VP+fmx^f5kdmdsSl)R+a{NqLXcE?@OqL+j>f+XP$!Y^&KwZiu(=FC?2-oec9!f>Evj(nJWwp+xAOP{UL+iS0A1>fo?lC
L~c^&Yi7e@p0%~l|QCN3QOa+FyJkGk;u7&?R{<!MLf4e~1pa7#(rouuKx^@yf@WW@X&g|6jPHX+vlwgxbRIvS6H;RN;2
m<3EZIuHzNO^&6CeQ`)okl-SRQ{*V1TmaPBzws4dmcW4WDM@>*m<NK!XoPH3ukO(OE42Ni{^Ecz4LjGtMnNV00P6$`a0
gs9Z}Yh&S{c+>HLWma@jra??XTX!QUc3~bNK%}0iBX0?|n?nhy;cG6nJ93S0ch5lvDU`u}>E1e2>;ZpoG(8RqSb}FSdK
Y_&v&%`@2Opi5Gh)mOh|lxKEe+GzS*@Fqy@BJdxfnv*jWKOoNYN5A{~q6(QZ8rvdowc8>?vdpfAzKi;Pc_!nk>zfF_HO
kvn}-~9HAuW1K<o7{czwDQKD>$>|_uU`4X??-2Y_wT#=Pln&Wf4>}^?OksWzK8#{_rveq_w>Kz$UlSPR>mun@oNA6{RF
aJ?r6$NAAVxe`}ecq`}dFS(b+g~?_5ib%r<B^&fyPPyg`(4?u&;-<N|{#qK+l>kc>dqVJh4vW$m-Y!lM!SO0Yvelu<;5
$(~3~F6^z~egeA?$S;b-Zg}zi(0w%$#)O4XIp_0q$a_Dl=7=ddbU!3pOmZ6t=6NK}JDvc=$A@T~Ch03hRRUBfE{pZr`D
&3Cp8J03@@7Dt61Ko?zKWL)VNm40+#%$p+kd%J?bDfBd3%Ay`eSu^gRL}Ro~+)^sTbY^>VU$d{!f7F!>+V|GKXCSu<~U
ddFc#@?{<OiWy7I45)9n0THRLHdF{OZ>YDy`A;GzJ;L}BK89p%#UVYVZE`NRV)uq$<+Zz}7$~yaywD?fh?Y_d2OdUqSN
XP@yd+7h3h{LTw;-oX2nREt(4P_3Oh%LZX$_cRxt=}i8Int+8`~4Eyj@%9G*>@|T65lL;pC@kr7RFJi`JRC2>mF_8qL0
UI$Se?ydsX2canE%KAWScz;5dABJ5ATqMWRa0G8mOJeTv*m__L)yYZx;Weg#V@0Gid*`vPH$$c!931>1nnq8X@woG+j#
&Wt?<g)`0*exIZ7$zP>Uu-siA61SANttQHVA%niEnQ9JTvgwQF8#^yysOn^%{KpKSM4u5b{5THSlLBU2L2s%FbAo?$^O
JZ@*mqBkbhUY4+cHf=1Lpw+fOEF|Vp%i{b-9MGs*KkFLeC}isYqhz#WV&<egSl6vtD?gSZL<E<8oYc*ZG(xj}f0k^2t-
cdn&JaVA5$G8$JDCcg%G1oEb!!Jjw_gYanSPm6zNLVQ}O&=^-Wm{kLCw$Q{UR1Dq^gPw#&hgF43i-NkCaeE0h<b?;MK)
B6l~9$CAhZcwBT$y%S;!LEwfm@wuaZmV?<RGqu*U0$Dimp7d=lF}}iYyScgN>?x4rYO)klQ1M$A**G~-C5EgD#CI$@3~
yVrBVS^^BdXHgEE0TUElz?8Lcxyj<z~%3Rp<f7XQ}U2^MM_ar>V8JNV%ScnnEH9^?fcw1p(Bc(6)@wV_*lY+*Im$U>_G
7?tiKPjI>1VCSOV-CD$xWC7ga9hSmMR2(SsGFkunyRW{C+}mu0%Ok#9-Cn2D&llNaHTkB~ak%AV)?a4phj>vffYs)(gx
bL%<5QuXAW~R4GqB7%XdEVsiEp7=Shw0%&fT*I%?$7i<(qj#{IoB94)K?ED=;<LbRtrsIB~Ql)`9e&HV-RlirXau;y0U
jnP(^XR{7ticnmED67secD0~ILG1!<3+U?|#ZjA=awFEcDUnAKPdNn2-!O{Yauc;F3L4{54(85IQgNnllaP)Xe3KGEjF
<#FqMJuJq6fGwYAh|}zgjlI;sYyuTww_VDNio@rEx=N<L1uXee@WfIHW4}1Z?ya>NQfZ#C<Tk74jSW-zyYaP5@C7(wpo
m#p$ozmQJ|b`YS0eQUD&8(gK)pY-{jGY4LG>DAk}4-PTNE8`}=G$1KO?k(k%T5dzDkIEdw&q$2(`8A^Axk?m&6hI}I5K
eGubS6hT@bSDIgf_&d{^ceaj^V5d_kmsI%(ibhD1B(v(_?&3szo;|t2xZ`xtEeNZkf+9>2IK%OZobO66rj!{Tc5M6Iz(
DiroY=$&c%d8MT!b#^VQx?*JYT`A!<s<W-F<Cs$^a=@fLN-K5)~fW4)}rC5$KM&!C+SgOw1fNAX?@JOjU!EAPS}^$nMk
GELplCy3&>kjWouC^jX1ybcqx@*r5kU=&sQq>Y}rJ*hN-OhitVGe@8qa-V_<OjW*EG&E|6?zR2F#dV?&4y9!hng7@Ns&
6(oH<okB{RYqq9v+QxnwRYSlS)9vbMW-<+kPF=f7uQ3cBYMsv*!#sIAz2BH=}X(FztH4@3t>Z;T0<_H2arf&GC2h=NPK
GZghwx|AAW_QVM}UtbZtEKTf%56O<<bZRkigl18jyxJ%zrD<PI%ry5y>Y7o2NxQdag(;t}URi|y~Yh;9<J@a^daG1ruR
2GR<cc=B+vNys!M3$(kRE~_o`ZU7}oNeeqNx^;4wqSR9z-ruSkNNCAj1u3gFgJff>jzU_%GvyHQ5%f8jLTgf~ifQ5j-P
ccojJZHJPUaJ9a7$qkjM$$02T+TM_B_OE-~;H`>ju2~0cq=BC9^d4To3j&D}bSM(@7qDQibsVKljNtiw9ND(U}=6y@=c
aF0LQY5@>FkqDTb%3RY$Xa-tKnaZI=tS9I_oDR+v@LDMG69ZvF;OgD7&N_OJdR0rx?EsrFi4a;V_fd2<h{ODwBu0p3FG
80$>nKv374FqlHJ3UvkG{?(R(9Pq0vUIlDhWf+qV#u7&K@nIMs@w5zK>`Y$AO7*b6QDo*<NxH+lPyZcRO;pKn4mKboFD
$-FD&8U&6*$n;eVTPA!JKi0y27O*>*mg1AzlzNEXK-k{wexs`G1*y9kyq;6DYq@oU8#{DowkzzcLzj!HRAFmkE9Jyv4k
BzroEpw>=mb&<I+`#g;^D3burXxWAdw;v#)YyAB#UgZQA3Yczif=Jvaixo6QNM=lhe(<7#;=&O^VD0fbPbw&`s3zc~T*
{++d_}gYILp+}(~W>W2F00V^mLKn$s7G(!!NWhx~MUz6RW|p;z*+kDD$c>_$b%+PEH~=0V5YD$rR5T@!ydi5jg{jP0y>
I+`V7EyZ~{~K67)<K5<&DH@B^p(>{B7arc1vdJiY@EVo<<#U!7@{NOnx*@^y0E)p_r<oY8{k~k;nd6#Cx%ys@pI#aZbT
>;_{PCw_ftcp&Mef(E6X#oD+{^bR<h25KJO>^y<^dimcu0-)nHL6bA*{^`w5Abl~!)@AZ3IM|oqg(Zvj+)Jj@89QV9+{
XOe=tktj)?Z;Axeiz*adn)(@c?bC4L#>{SttW2x4opxUlk)qFlBEqP?UOq^(Pslk+Qa-cY{cEK#LVr$JU_FTFKq!9Lk+
`K%<BeEMaTX*Lm<Atj?BmVTuppAyc`?KPs+l}i`_<;$4?ipzn0ILMa(({s?H0?R=b*Pio0h2trW)XZ{vOM60!ySt^;ua
IT2Suq^9S~El>s$7nFVzGQph_{cY$&5SvzCSwa`vd1(4yN~eAQ9FmPcvR};SJnbT*UkxGR%PnX&K7t2tZ^=)C3PTwJc3
ynp}$v1Zct;+cnsyqoOu;1=3}Ey#aZ^%9f>T$VRZmPZV7MNU_-XTm%R*A$Zj4qGU{1t_(Mx+9r2N@s7+Jc+(N@J<5eR-
v@EI(z|uL(ijy61G@}e5&{|2rlXWW8&8R^L>9%Rh0(6rBurD}@5VnOeve64=F>D)vZRY|jHY<O5-AL_Id#tFkBz)8C_#
r`pkh&-Ls`63#9EPFOcl@ZYKCs3k+P?faWTW=c@jX$wH{BhxaOZX$$HDPovrbl#2pe^LHUvEk4SxC5em;VSj(Xc(t3*_
IajTFKAy+m<|MZJ&D_)1%VRPi$qHD$dArY0Ao>+F9L5D~Qu_J(75o66J*2MClrv(Fo7;|}py<4vy|COn(R+NzR?iMP=G
l%Yc(DZl$$>>EhkM;J+IYV}gmI~bxEQqwAyrxFkIS#t^!HcEJl-sj<8U&X2Y<KDR`FfTNGs|kifzKH=_EVA3w6uLTq*^
@qWBEe63?7t=Tq1^i|?`(2<CXP{MT$mkmIigin0oG$bJDbAFezuD)%=seu6{VVR*c0-KHTCl+eEosxa(Y=<8PZI&gpZ$
N%Am)$H@`+rBPwZo`Ge|H(R=Msuw)X33sbM@g!Ft?QQE+(oYh_1+TOP=mG&B0#_iem1YH6U(J-dY|$qPcu7g_?CQXpMG
nSCO0I65K!BLA@qsHuF?m}VQm2(0=nbMy7~4(vcAclQs`n>U;PHJKIb?1&ned{q(tmoLA<;oHV|{D(6jN&opKLh-e#(n
W7;||>}D7+I_W3;FsMT(0aUbl(r*q}m5y|hevrQ&6A|<U4~A+rqgS0*KvRUH5Rt=}3xLb03V1GR%YH)~)hbIQ&Kq@3<R
7pU9H<Ngr56^1sFX4H9qb+7x?E)K7Z@WqbpS9*Q37qfZG)%By)Fr3)8%xrnI$=;`2!1W2_*z?LzIIx>e~0L_)G?LD5Pf
^^qsyM5_L+n2tdAHaRjZSj6xP0O{k=O9|n(%t#ycCqjMr^X*_6^z08Uv5=R-^AB!D#>L&p9JtDt;u0ZGM{>WT8+^kWxj
Vw%+Xc|WvPV--8unu@UVvH{oyhEC)%MBHzBF;j^eF^oUF|5<Dt|R7=r<xNxy!;G*0(-@s0qoTtH@Tu2su)y%o?AbeQjS
<$VORu&{r-h?Y}3>l^#Izhoawo4b?#AM@+lyR_M1OitgAJ;ALCfKb+bpqVa|J3`#pAWf~B;2R|;{-k2g}JvbJiJ*=%ZL
(hBAhcE~!C>^jy{vL=-LOYH#ZG@Z?07a@c#1iS*<)f<>(?qPt#I;YSr7rl_v%!)M**dDiAXLk+FOgw|`<SUP^Ns+f>kN
8rKJAuv7?}3WAqPd!svwYK#vP2eXF(LpNdX6|I4qQhZtS{8L_nr;ZqFL%XJ_Yq~*eOFtEvY!DpcM`v&`0~?iNRzKgkm&
aNAB9haY3F=9-khbW!v7K<OV=Rlyi%oDoqR{tw3;^p#6{t8z=D<5baWFCmuNbQ+IT|Bd{+!$&K0rA5zo@@t!(fuR(E;&
*R(Xj)_vSfPSm{)B4)B@^;rZYWRwu+-SjXzMW%TaUpaF2|Tn{RN~>3eAhM?pUblD`1f+BU>S^+d$CGUUV%6UT4H5{OLO
*NoMj1nxT@R9?J-?f5K>@WKa(qD0bX({g=?XHK+_yxJLm=?aMLa}NRZ?<)W&qx9$Q|A(T-j6W;_{uYl^2MF4SE&3S!`w
!Cl7X6>wZd-LNW|O67DTm_sE9`d~+aU9mddoG6f!XNjYnpLo*btQ}@)r20@zW2*qxb1kw@t(ggxOOru9xv}a2x`T4Eo#
-Ur28!l^fDpqepHlG>HJkhw^eMZ8!I-@>QGb<m3ly$WGJe=G3G|HVvB7Gn*#ol0U6<%7P3Hg%{@5?|1ra{JwMac}Q6za
HUQi<W6JsD3<_3I2%lPdgVrQGeQGTO#DYPnlnLQ@!UjpCve1-I?2pM4q<Ipmy*D|@rIF$Gc0wnKdWjjPM*+rLz{k~FQp
e(aTLo`%!#Mf9GD6{3AObZb@GdGH1vIB^rFcrWm?!#+q-&xp##{_m(1syRaj1}La+PaFU15^KR|LUkvLp)FVn2<IyAP&
v}x#)6Povydvz*WAudOM{BkRz3v^HE8Gi(o}WQQ!p}AmjwK<~hUr$X2{9LOL1}4u$K(SUmMz`hq2T8SB%bXQGBq7GCc6
RUAW~vcS>!fQ(4lkw|$Mmo}#Z3aXZ$$*E9Pm^DluP;e^zVxhta6l{I@tcZa8lKIE>={c03(XHne$~K#EajWjBaR4BFEB
Bz1b{?wLR2W3YIW1%1TB8cl?{zwz!A&T#CaF#2ZK7iCD9|a&jxr}3e=CfEad~ro**#MpZ`gEj<2Ug37YQ6N+e;R=(0V{
s%GJ}@R^7j*+wP*b+fx?l?(M(`tjP1+H=8fGjM3{v{um5}=fSwR$SCB$jT09gp0^29!aSUillHdmKNt`i8fj7*1fI@mb
hVaZMp@4P7!j)G`;P&ko^$=Lc>bHXQdPSX#mOM)W)wlLqLO>OYfkZ9Fss=_xmF@`(Df9SGh^83)yoUk&Sm<Jz4_WKRKF
EKaU3}E1BH>AqAXGR=4`IPhu>`^CchMu{}|mzphfcK;E+Fvn`N6hER9`9pyH5bgc>>u;!Q=f)!s8~dlxeq5_Kj!WG>@v
E(vmAPd<$(l~Y5JU|wn5%^<&!u9d-hFs%1C<`|52vDOXStH<oyg<Ga>9;qB~mVp|!b&{}I)J`XISgb%rb_+;!LiaJ!SM
A=LO;6JkMILR!q&7Q(RX=uQXvSZoWxdwOz*Q0vh+o-~4%X4R14B=!#xYA@S!<7d|D=J14n%b1OMiC^m;*nothnbXNYv4
K<t{OC;Ocpj_|_N$5}AdxR2=aATJ4Nny<w|2<X!g1NMF?LcSJd6qKuepY0KJeaQxR9ox?M#>k8uAh(|6ei2@#q8{jFwA
38?n8u&$0;2(WN)v`eh!rESPHx~gL@NF<6XlVM<H@9cexcK;ThhblFB4$9utRtaI*kHWZdckYIY>g{7>gm!q+B&WRKDo
r(v~p|w;JBQp8Wj4j<;9sjC3tNd8}g33!Fu}Mc99Vi6K)x3MhXq$VFc~nveLGO@5aDKU7iFB4;5g0E`vF6dMzy5#|PrC
kL~r|blCR>1q+yOv4V(g=nv%eu6?uSMMO1kuikV9uiu2-UN2ZA7%<8t_c~#(r@Z<x^cgMPxp(N3+HBH-0pnkIZ*MNBA>
Ul+*}&rCxTz5u`xQs~^*rjWh4A>Qny!~D7F6x+O;9OE4Pp!q#3v0QD6moY=3M6atou5+i&v4R74^Uaq?ipZ--LB)a@h&
HS4vn&L1?4N^~|)~bV9(xbHZJYUoabVufmQ%bZ(IG?B*O`@Ef><5xa>7ID~*k5a0kg_#GhADxl7|4e<~SA^Du-!ZXTjd
C*+Hdj&E`rSlGSUN#U%Fya{+{L`h#Lcrniq$*h#ThDE^Xo_9b%CKOYyE!Kr>HPA#gL0A<BA-Zlq;d%Kxfd5LasWT0G=y
GCZslG8r6bH&1T~i<$n8ivpW_XVU6G-uGA=Kb;>mgPimXrcffI3V&bu%T#+!r=v)H7-!j(Bmqxt0d<GG}{X75~{7-=IK
%Dy!Y@aI_hq8Dtvs)ppBQ-c@1Q83ZfDk5&JrmaAk%E(p_jbczjf(hDOZxOit9w)#g_W5o~Jz^l9!%`&dHU$Bg47;ONj2
2nEyphf4BDJ!zq2&dZq|p0S+W_v;Wi+Jju=+W+d#1;SCZK3IVPK$#O0K^Cs_vmjhdNxaS&?(QDb#FYBe%equ+u)F(c2F
3SiJ{TWD0_v`t%stscZkt!?b>9&}qL8;lFEQ(WVO@!3J<68Xb;`TH?c8l@>{%7U$8g&WLFe5tg@|fXjA9=iPSi4A+!9q
9OUJhAIStlz7I^o`TtS6b+?BOO*&zmkNeaAVCRfA@8@VtnjEZuA(%yc?vez*zD<o3q!Vijp*`QH2w+=D$rv2B^&LuJX)
l%dc#hDL8)7Bg3I<bf3)yRiRr80&nTfQXwO$?o2S;F&o)~HE~aeHA?0ag3(M+QrZCISA;D#WFe>QGQBjO$ZlF3)`K?~q
^K~azfmy)8_=mszGnuwd+9Advm%+Qc$L$znKOEn#vc>i;)And|YkIi@{4ZUHJn!h<8B7!34-i^VM9PW4d-CiJtyj{&fO
Ud3@`J94Q&7mB15#`mIcj(P5CXd0ch$b;JAblxI5Tl^Hp7c=)2&JFa`Kk14r&t{=hEy6(Iat#t|`E{@3g7CM!U*><$@y
7PM#6V1T%0Q{NoxMhDAZdW=@&4tBs&&Zcw>`xd0qIuik~cTgMY9k7r-PU$LrYwaQ(DtuK{^`?qvZU|j<=3KLxhq+Gfvc
@KZ?`s1>+&*^5y-6Ec@GXTcp=?jNXonR{)6Ml4qZFf`#abaYsd;y#?@}9b_rw*+8w%giv^o{bT4sk$8Iiqp`M)iKf-~R
cPHfFBy#-Il@EBIqTGj1*b+UrQ-VFbl&E8WoW!aj%^`~5L{<G`|9!MX%?Ci)I?!1sz>@y9~FGLvLaNG3OD*X_6G-Hwh9
xXL5GJ&B{PqFL*Z?-|kWBgFvqhSR5DO5v<|N)$91MjF!=13obe?&HOL6!GeD38<^q!JBSdl-5>T23Ukn69VHC%K=E$8Q
hb9OGCWqonz~zvMdSRoq)nR;xl|4s;@n2QlOQcpc}NhOhGANghChCxq91r>3OGp?O$N^Gp|nj{owf607=Zq#GA<oTmo^
xRnM{SGtV9dSyBXFT9VNMGCP%PvFOmEqxYC4;C&*O#$*L>vgi|e7))1Re)UESh7Vo#_IpzdMhBqxyKnsJwLV#LFZNsNb
0W3?oMlV45ilq+9%ad5Fq{!4nS;h>XdIoApot(wU!Ccbnh9tH*dGg)-J9SQUi5wAzCvp+vo04V7ArtO;7IDW@m=4F?F?
MwOH`@MJu$Y~Sv2DTJ>n!6DJS1)Vws;Z2dFZlaE?+wC|WF>hL@L0%I{u@kbikuhDOtSR$(|)7DU8FcLvn|Nfm_^Bg+8&
pf*}pK3(or)>FEf$TxT?|IDrpGS>~rT$jGDu1;g$Eh=bTRQ#CcDP4B40*7V&2-|2jjX7a3Fn36ABLk8ZJ{*I$1QOwg7n
QG3!WO)uiD;=wYjv-*ad}O)-Y2|4;+bXx9oY|kW>AyHm<W*lX<XczVr;p_vXFj$PO)Ff9LWKz;QJTX@Jr|kFaVMf`p_<
$?+JYwpU_uL)f~7Jd;}w#qahRUYz(>$uo|T-bi2rS{K^3s4&L(bQ8ok&5JwlXL*^c!IH5llVb*XIk^zCBE;1U{eoy7BH
LnFIb0)D!?>}-@fdwsBKaPZH4lYcfii1NJOy&rvhj)IJcG)3@LW_C@lS4rJAbel@!Bf`~&AWlp8d+&<QITy2m3=IQ(<4
fMtLuZ_ueks0PXN`jh{!(7f#O>D&2c|0t8uHVs!V`li7vZkzlGK{C<f?5Q%OBPqUm3nGm2#%son>}q3N?T*mgqd#FIpy
TlXv&{n03_c{&cc4s|UR=vzPCgIgxD!~%MAW31c(=*Z1JxcZSpGIPW?4p=O~P|M_dKu-c_*Y@_A;|(G?c=hQjhd61of{
vF9(tcMEO9YFX_SG#*Se73ipa**3(cIY^i-^D&mKP-Cc=o(}3R|ob#6+ns1MVT1wBle)VyH3ap{!{e_v*qZ@`)>VY{k;
L=)1xArwXPBa^F~(=^+DKu!8Xibk45vpWc50@$!n9Rg2#L@f%DOcpiqdJvbC2M^1$AEPy#-3oJXMY&+-OOa4B`M(7oVK
23%3t<yfqX7=mt#N^jPmxFOt1Q2^8qm`f)lkXT^9^z9Fe*XkY@Uf52H)b$OU_sGH`*E{5=~ExRAxd1ChpC-v00#DWLm&
<?Lf8V8ZuJ6m9`9hS7T53gVEPWoGYpc{RD6HQH6tay53^%?aH<nIiJfURWlJI=e~bf$33t^8m-)5OiGWxWnJt-D`~H!b
<JEwiN?;SNs$v+~1T%OtT-7IX$qo_}mrYYkRuD8H)s-?9$DX>k5o{5?4AvkgP<t%lPFTHWC4*wFbWqUM10>`E8qJc31%
}IxD7Z7ZKh;81jrUCr^t(4l*eS40(NinI?Aflxtkv=r>c4&4Y$AKT?cG4{FsQAN1>9RtU7u`pOuoC<fpH_WE(r*TFOGq
DrM(pSIL8`l-A5|4$I20p5NJJz;&Eu;LSeo_Bre-sU?|AcIZQg_pY?=np4bec>R?el&Z~fHqWJWR1Kqsx*|X5I2LN>)-
Wenki>_kLmTZzzpF6>}uA!}Z+X7=y9F3!hm72{L_=o$&;2!AFo!Qc0v#EkcN|3x`!6Pxeg&o#ncYr)>g?jR&2mk!i9uA
q4IF!%Ww;jUGo>cOc93cJdy-8xOh<jCu#@dJ~pZ8<Gy138p!k{XObV(Lcr$@o1e|E!rGq}b9TFtts;<)y$adn450s<3y
ANMzCkZi6fA-Z*?cS{byf{~m$DvXoJPM3B(DU$SVDnX=3i9wUkEd6MCkzyxqA8ks&sH@)ce(Bs!`W2^#vA7A?cOY=z-(
F1mx07}Mm_vm4K|m#1X7tKY4T!s~i&d3PtP+oE3@rn^!09XF2bN#@N~aY|Z^u5g03A{zl`@3c2a;5X<)*rSjm`BB4<P)
yX{T{OAwb;OJS=fPaI_yF2c%0XUFxRFFVTTzt>2We)H;fb5}0fq8Q8K);<1jgiGl)n^l+kPHSi|wYIe(u+w}^hZ~$!}2
-q92fk9l3$8Z_n&XRfFx7PUh9Ss%JuD;hS9&cYNg2m@%dA@Y|SdRHne=q6a79TfEY)is7a?$+s@hu3t)#F-fgO6k{P)F
6l4DRluw=z<GO7jfU&Tr7+R^DLax6M!|szQQlcI6uRS4SQWIrR5Bh*WDK2V>cKv%~<6mTVHpK_ESD>S+oElB+1^EmM}E
q?-sJ(p6^vn9!uRknxP9<D`nLrb)vw!;wTCjNFevXj`qscO4+pE-LZ0(?K%rVT?M;zC5orMcFh)3~1N0o3J;kZl!0pV%
tsahAxnx92vKzxm4I5F9E*HqL+Zf)AvXt>OC|4e5gy)ufpQBu8?cc=F;I2s=G^B-9+l`!2j6={PJLj+}^Rh-mjR~{s5v
~R@o92tbWTV%@MR{dKj4%RMx#D<4eOfR1zm{=`@)^eWb43fQ&?XUz~S?ZeS{KB4D6QM2~J};rRw3lW?i&W)0-aAdI!}d
WBVp#0z6kRF6n~jrzKJv9|uc6sO}&=7DvKynS{{v0n53`!;FXgMlkigYVYygT9Zs#t2IK2!!scQ6LG5FH2u>@s89_`<1
Ps3Vd%K(b5s{>#_2WhQ3FF_hE^eB|&g-dB=WJjf}xm*yqB8z+9W00o5xT=;$QS9*ZfD?^scBI|Q79Z1hu~vsM*oU|15R
{}zb-3?efc<Lt??!|g1Bo{}3p-G{J-Vu~S{`AJ${kLQYVK`nDbhxj&H4O?nYubDBMd9=n%Eut0k9qZt7?n1_CirR7fu`
`VF1z2^kvRH3mhjd0S?^*+T^%0@VwnAdd2XBQzDHFWF5>Y?Rro<xQKq3Q<k>c6Wi81yCOqjKs*x|E$|K9T`VzK}Jz3(}
#{yy}_tbdwr{KH2RSen51gb;$GYYqruni$e~P#vuI?<cZ)@CDuayk_!Z96iCnL!=2Q8<og+-i}^dC<DE6`1q@S1JQb#g
Md!OyIu#90!d4{v!<N-6vI2sklusJpJReNa48QfR3u$1PRqM<d@uVp?Z0f^UZh5Q;MXdDiH=$<Z3xkr8EUStLDipw9UR
;q;{uj}&3Y-;ggFlDVUeZFfh!+;Sl!163_Lim`ed<b%JM1J_n~e{T<kyp4l*=ArN-t(!!_Q$<2m39FF}q}2cLU0lfgd2
@(#6t6JUf1l_b&Oh(hv1$@-=z|KvkE^?I{@Q+R3o15vP-KA1S*r~UjJEw#M5i+KZnWfwpBk=@W*Dk?x(loqO~q*sEi*J
Y#OpYn_w@qvKS4;UB*bZIvA$^^BR@tJP5?k7*E%`3Ub17fqAK}vC;OIO`9G+1O_HRgMTxGrAm58TKR1rHa=OX*!?NdDn
3|KuFi{PbN!D>k!+tg6BiK453G8v5~Rd>NY_#%2YT)JTPI_HvibzyFIPNw6YSEYzvT5Rqgm9V#wjg*O+J^zC<m@FjH5V
z*^AH)0wnYeEMM{TH4hJvL$U`2hswW62hUK2tSOxD81YHICcUPc6}jpEN?p?9aEsygcXUU%3Xq2-~MWgLduR8-=L2)2u
pNsdnGuF_w1maYE{z=T3|x1`4(GPyt9U{9ApMmVfQ{n1PjEFyY<rIoC?^2Uw;Ca;O8Hl=eL?dDxoa7d?;mnvga{ju4Qv
60_w*y(%rj?WzYx0ysXUh@n-O?ihiNJ<It4Afy?1Erz}f*L)?L{gnx4@aIjuh;+LGQjMfRO9xMf=iCL&fRr~c0pW=&W?
-2L4YY<Vl-UZm!INMIlu@1ux5W$;75K;8t0w9ty$~MQB#tl1R9|JS$aLCxSQYRBKGb2!d=&9x*trPmBTKthYee_(DN2*
^Lt7@1qFhx1Z^*H%XJu9?gC{hSp-{g}uQ6GTkX=|(bABYRrl|E2%o!L_pe6}~L<=QR&zHp=4Go1kSMQkY_f=y5kS#Nd)
jOwoJyQERqc3Sa$EDrZx_^tWF-_6s%LR((+FjXF2<>)c28g|bS9Pg{lHGp9*eyN2Vgg^>D;8iIkf3V|6f&f#TdV+<YFb
IRF2M<EKQ@efjrPxZ7g(JEo&%!x>FpW?_n~;~Ge`sh#%+JJ?N`<<3<^|dk>l#cw6QgB02Xn%11qh4&7V3wc+kKKBf(!^
Ci9|<C}^j?GcntW)<O0<Vp<0eBTyWYq5HSA+vTFOjyRgk_!=4BEo(c!ht0mm-?LC*5QpDPb@WcUlQG*GGKNcw(b{UMdg
cAW(2YV~eTwo)5C7mxHToHuT2&G-uo`@X4(&T8b6mrEYo<Z7Q3-!dDHi(CZ@>{)b6jj#44e;`bCm$Ag+T#p2u};Ac#a?
{mSgn91g?ajLl*wQEcyw5u@=bB)yL^5H8{SmRilq>?vZ<#^5P*MIk53i?yMi=w7PzS<4*si+k4}N9nYDc=9Uy3KjF=Hb
Vs^4)c~HbwJ{tk3~;9IF?AafIQt-nEVUF$+j_uCIYjV@rLOWqqTB1ptVC=5hVeb~IH0aLp0O%RhE82Te9m+c%dqCjudn
$ba+9rP#F~iMuwq-88mI^AusJkJnj|v&#IqURS8SLNE|FJc!G|PS;c$!0IGbhi)P#!W#s?cOsHj|RCQXKW$kesw#uOBS
^>^t*0?Y16e?Es-n97s3>kMOlFDegA-513QBTz|=2qU#fBNhT~){E%i!Hfo^Rv*pC^`jY#o(&)xMYh(#+1}w?c`8v3n%
n@|@yp<{(=n%~bkTwVu*XGDPr#PPKT!wgd|Sb9ex*X)TgB!3lDt_YuCqCttxP{ZWznFRTPoQAf_6X^N5w*3pNe<=V?e~
4JUIe|b<c#}7pGRaSAN!@QR_kgqqBD&v$Z_fM4+Ov)2kVZr8j;~S-L-mm)hp|{1t|FV;isu?Pl;`h+f%~tSGVv5XN}V;
YBK25=&-x;#%#uxoC@%RIp*4tQ<P^euZJf{IAe4nTzyqI!b+SPyy9OyU6bD7Ks&GQyiE$lD@Am`%|=e6>;%Yz{VX%wZd
qqWkflFNN{x61bsqlxe9?5?941caT*&=0()>!@WUAgL;M|wM#OivIel8J7r#xm>gPjJ#MaMvQP3}m%oRoaet?PY_=2GV
RZ7BeO&359a`g&8z%QWC;dH!C;$SEin`D*}-?1XkjgVc#IQq;t*^ZCi^gOQHH)i66ClPg!ekCHadVD4r(qj|+16po2hr
pQwi6LpJJ9uf{gkO+Am*0|uZ}oi-j(Le(F|0lh5<G<Zc@cG|+4X~|m1<6ZTsj3+leWWH+p0Ne>5JtowBPaw0Os)2`!;1
cR3SGpw!wbSZ|XcB2@?t)qM(F!twsz52Ec997WP#<yk95t?<03Wbip0H@&_1yz<x0U3b^Xd?+x3<itI-~GY>hCuM^@qZ
};CUi|lXH<k2%B4LBtCEUNAq^i>EE`_=71-U&n$%=@(Hvm)16WpD7=?SCVp;GbDH8!y<2zNMY}{R@4GQs@*bgR^yf2U4
kZ@Rv~l#$om06@RCmL8?4Rp+><s{peRiT4WMfn)j2WB9drRk<L<SD2(vAy+frX_Jpnum^xIy{98P6d=u1*{avNl-}!nM
DiHC$ImQ3PTdNG-FF}gktP^QRVE)aF78!e?ciCkTxe#7GKX@goy1cTttVfT^DvFAvgQFJMta*^ygMq2;n+RhV%t4h<XV
gRa7};+t4b3-uI#x%){__|Dxi&f@N`IjDkA_1lOaR5uP){3p^oRjRe5S|uI5?IHl7%VO!+rYGdZrI(FGlw_M8`bL7pMp
NM&^bIz66Z%#A}`c`#pt7RL`54Tlu3?uflT+<l5EXw<0VZ=!1U0fFA`UhcA8=kaTZ)AxPfniClc5r+4LaFXgEqdCkN{T
r)B1I&_c3cwBYH^uQc?I^uu5OY|v4bHc~Fz6!)we|Hg2iHF7|9Bte8Fn`c!h|flVM3B#uwR-LWRf;>hcmY#+w@$XQQX#
*IKxfTzxC#rZ-dUjY{ll0U(ANY+9=4>0)g=p#UDv1Unx-`BtQ1bH?#UQf_spRd-M~cHLhCsprD9V9^kObQ@}TS&!Si?U
q1hk)^3P#Cu$hJ=UatxB4vq&91NgB)werud%n*ceIx*)cQy6OovDs1RoZ|D<4kJ8HGi7pgM9REZ4`#diHZ8qzcz}MB9}
9?x$ksvkv}fRDjjJA<1z4H9dCajPh^y$Mej~~c#TmmAPq;zbxk!;Tc0oGGZ!9oGWrLprY*ZYWJR^fPpj-IKr=aL={>>z
ZLa<Jd;kPsX#l6?{ND$*@+X&50m4_5rE8%AjI8u=D3|S`;A07P7yKlb68w)^fb<A;~+!FKR^X+fMZf7em%J5Wqow1B+$
}MIN=mlSo{&nUFp7S0lg>GSJBK1RVlCEvAM@-Vfk|3i=FO@7w!!W-zo5$XatlVjhP7P5S#8xn%IdKu1X_o9{*8fYp_~`
5!t=1}Z*w<+luab4(5Um18*B`u3=JR>reA2z@zU|I^|5GTPs?zE5L$z#o*1PV_p!n?VY@S?m@!TrjLhtNqovYdP+nZ~s
6JN&jNz8Q?s?K_|NUG(5O81i2Q2w%W8DB{s)5-wo(VyBVuII1kZ*d@#Uau#;JXC9;S+H6QdP?R9Tkq=f&6U)ORV}2f)$
*PAdj1B>zrLDYCT|2b*y^Fvy;?od<k15Wp#$7wdXEWDdZ@{)+S;VkyX?i#+WhM6>$ekZ4c|*y>-mI)d4`Q);}_lbm1I2
3T8P~(%xul$hjg(GoP3)X$wO<C!Y6Q?7VN)t4lTf_@e;Iy{II)D9zJcbOx)s(7T!&icG0Q`TA<T`YGnhF=M2yXXb;{@N
tbt_Ga;jF3zAfcA(6H-dK1(g5w?8@o$SK`wod!nX?HKB@q3;v;2_o<94{BB`mbL@M%QF$xCjC03zPu<XruWa`nM(}H1m
ZOs`Ir;TUdiapahQolsTunI56?Ol^&_6h4jrzDNc^&<{H<a1)e6TzIt-<Y?00+FV}gkbv#QquyqJ+4wjwW%tFyp)(Q{O
C6JS}fJKFclS`z|We1yB#j_bL5kTy8J9V%_Wp|_nB?u~=F6zjaTTqDRFD-`j!~(RFZ3-3%I;t<uYKfP;U8Gl=i5Qxf%o
c}IrrDB)@PR|99RsE;TXYH*I@5$_0tSM{snD4(5-5-VwjS3pATj>?Y2yw*Z?Gvra8~{$?f81>$%ECv(X6sOMG+<ho&;*
d_S43RUGn!We!#%#sVQj7Td_xRBR1<_ne4be`zwWpkFv-&*BxGUc`5C6uR2+57FXy`_I>yZk|p2^5YHl>Y!>kv6Y`@i^
Hh=g>)<Pjs%?6{b7xJ+IswTY<g!WukdA3z@KbQ+r)aI10FCICn=G>FhfnbVrFDyUQV0^?650f)CLhwGbtFp$-tBaLQR$
nkM9{iI*5nZ=E$-e=8)}De9Z+l#%Q_ZG1RMnT(qbD{R~;1CYym3F$zDTzcA$#w{(l19(b8s5(A_$n2`0b6?My@h6M^nO
K#>BvaQWFiS}g~|daF-)F;RZu`vvl8o*v|c3kML21Clx2`C1WI5mSyL@bnqtwm3oDpa)H>u5R*=z!h-{=ZowybXY4Bl*
43UPLt$5{+Qx=a@J`CM9OZ@okbRA>6%{`!iU%JB7{sL+7Ux}*+MmgE{7+Fd_WlwSVV<_yfG_F3ev&K3RmwDSHJ#`aj6P
Aw0L|-Cga7_;|7;L@NXFe$SA&Zjx^ABdWciUm!81wJCnl+C1k7)6%n9U8*1N4aW5X9FM74g;g_s+JFT_QA#91n8Y254-
|nw9PDk)NjXy&8<K^}d<!sX?6EbTqW@au}Lc`hUP4E3@;83DmtA~=@<2^8<7R`Q$Qb&u~jRDU*sAN$i&A^YAJ2G48QOZ
y7%uwr&8J{=mKpR6670Jx*0AFUQp)z&RdPtu<^x^ujh$n%jOiuUu7lB50{}5Ds#Ny`?w^j`?td@8c!;ozoKf)#zCAmBh
lUB4ZNxuUOD2la5UEm?OZ%GO1lHd}S!y6ADR_}KIvm&)1Sr?H*?}?6ceSkk5TQ<N)y=sGI{-(%kr#8;m9*s4O3i+|+!Q
Rb*JZK1#hGAHF_;(bB;y<x7lj{EPzy7b|K3|bcx2J0VKT~_ignncb79O{?ztNE&4I}kEL1a<#sw&j$NiTjgMTPWDe3RT
%vDazm6g~84bDULEZ(rYBU!p?xW<I-&FYB$bo$hFB@-APcwYQ+~c5YC;0~lW)v<9*fs`E#ile}ts*Ecu48(;#Tyq(9Bi
8WRv?nn302a8+RH|>Y#RS`4`{KzhPt#{ESwtZ}`SR&YKg{C4=S+tp%Qwu@#D_f~sX9-FNFyn6X!wJtTVpU-~sWbGXGLv
nx_5CE(j!CbrFxB~9X-UO9Tlk<Ptv02(r^^M7B{};dIv){k>7~<FEb<NP#@1G~hjnn;P#s7YizD^~g#JH3_=KCa=tLr~
>|pA&Jy9Bn;$DCxl>%rVs)42FiA&)9ebow+xVP<VL%*mDUR&P@X3%pyp*-eODFq8zF9k`JB5PV{8=9v&|FuRy*1r$63R
4Y!TOEAp5~tZNs0+O-&30F~nfX@Y0a7|`egdJ|Ydu?RAnGhfe$r`<e5;LevYToFAUgSdyk6t(zqHg_er2TI%#(&+?Qc`
#9?#V^_>3}#KvZjY+c&yC?6PM@KRH~HmAxV;7T5AgUQv2qyK8#lU3M_I_?f{?vZrIxUcEc~-7<Z4E<gRzK0q<Bdx3!-L
)DYZU@hOZbE#Y6XUVIJaeP<*oF$@G@kuNc6ZI&su4@JG*ylOaIRP_zBpyM4=ZF#2c@7|qQ+ayfj?W82X=a8__BiDB!Q>
bWVfQw(ucXAKwY+$@{Rj^K)OC?oK%+P^OJ?-f&>>wV0TzPV12Ng@8dy9zIheIN0H(HK48<Uys%N)$dUEfy_<Z-6w)kTv
z60@BDW^&r7W)oa^R)P_Iusr9dE=r8JeKZzRh6MtW5k}Zm>R#9ct~YYgEqBWJZO<jSckZ(31<gP=mwdPB|Z=zv&>j0q<
!owOdeLn_LST$s^ZTy=~$3J16KDphsp-_u&Oe2o*MgL;_|RgTb`IWVHcwsm~YGqII3fF(mC059|UY@->OtC2)TVRpg&_
bKNuOIj>d!br3K5Snjl-OMI<<8YSeHr2t)gg5LUcSKt&4lf%y8M1yX#s!c-;O_OYe6Pl#-#l2fiN3pBQe7vX+vTN(3LW
x|xD^Q2Xa?3La5TC9O;!Fp`2XCSnBvnpxpWZUd$nYf*5U3Rm#r*#pp@`PkL`Z}R~A2Af0M#Uxnv}Np=B@qXAbsSad?V|
!w+y_oE^9|_g+~e5FR*1`0=LiLPu6vlqA_WCbr2;w}!bBGd9LBTbhc3qtSvoaS8{j_?eSOr@J<=CmPk_FLe8~Z1jnT<&
nc^Nj<f%8SZ?p3-4%V)+9d68aI0US&7Lif!pz!P`p5Gj)m}&}JHL@O^%42v>*GZpc#z$;Vq@ZibpliuIe8uLNGI-jQd6
3610f0`Ni|Lv2b$M-Uv}}!Z=j_CBz`-fuK|K)-e#Y@FHSwcUWZ5)WDmb|+79bU)TK#19(D0f1j*Ip-yYr4cKp?2KO|ec
^2~0HF%V9bJz3y;W_{>lD@_Lrs1)5?o;DIgj5-WR6CYy>)1Z4Q+Cr?<_u2i2Ukzwe9)z4a$Lu+xJ)Y8lxQo)L4_xfiq9
Xe>?axKzT3**$|0P*_Bb>|npB^lDLsU3lxIDS0Vn_@L)itdxe>L)RmBa-odeMn|$?0ENduIbPp<RX^uz%na5b*}A)R3b
QXoWVIq2``HtrZbCU-gJ@&)!)vz)4Z;_(~y<Da^PnlD>B!$jo_Vw!%VxpEdk5fYyEUp>QxR|CGFs>)v*p)CB-^xt)8@9
SU>T%o!z68I0Yo8%KoGGkphRWQ{D7BxD{c{`Nw;w<#ey<_uCHq@nxRv!}lYSzbr#OT_<?>3JMAORI3%ae%pTgRxgT~Z`
vAiN`^3e>imcxQaf3@dX7U@S-0)!aAR+mgA>04o^4T#x?E2I27_Z<cadN$INE5m*;{Sl4L^CVIK#rg8(I&U!%4gz+Lw7
oPIZNzwO&6b$kkboI62^kfDK+hJ2!;I-i%^rKoJ-HD%EDhwG^Kx@plUJA&}3r7(bGuOT`=Msy1<}bxNlk%2VZ7vlM7p+
BDP!J2L$Qw&qg7Xy--xfNrGmvN+{XA+w`^v^`v&B@hN}M3xEV$m8liW<WpisH#%1L#9x}dnMLUkEV380FINVS~Qe(`Kk
U>YP<)oQzY14)ejgidsPNjSEi_Utu@;noK|)ax0M7<ju0f@IQU&`R|z0BXyP?90zL{w4vqGHyrGn8EBD=+{h@uSDpowi
I_>M@waJ`FLg$ByGnBobo~IL6SDL0G!6W~nw(Z30^H{Uh0lh{l%h$o#Q`r8&1Q%NjSmE-IV11=Jh;ToyBC=QRCvV=ox%
Pj8_I_Mv@3n7|2l)35{fpmqpOcDJq*Dj<m{Q9=TR-CcfwGzwaE>X@Cwd8&#XX82i<x)rE0KVQ0}EKMNEa)hT8Q`TxLUn
V@1oUJ*rc%7ZbCTgp)bJcebRZx5v6SWe{9nrDg
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
