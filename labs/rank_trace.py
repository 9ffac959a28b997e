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
        self.any_source: dict[int, object] = {}  # receive from any rank → its group
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
            if name == "irecv" and operation["peer"] is None:
                group = self._group(arguments.arguments.get("group"))
                self.any_source[self.recorder.operations + 1] = group  # the next operation
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
            error, peer = None, None
            try:
                result = original(work, *args, **kwargs)
                self._complete(ids)
                if (group := self.any_source.pop(ids[0], None)) is not None:
                    peer = self.dist.get_global_rank(group, work._source_rank())
                return result
            except BaseException as raised:
                error = raised
                raise
            finally:
                self.recorder.end("D", call, error, peer)
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
            members = list(range(world)) if ranks is None else sorted(ranks)
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
c-p0X-FD+ha^_y^DNyJd79fEXN&Qq6S|GQ3-1dy8f97=cc=j9?dkB({gei*P5Ku`n$#Z-)*SqWE_08<<zJm8^FYGtzC)
xNSG7||9RCkX(?h=^4k&%%Rk&%&+vuv3cPO?bul4TKjMSK&)MX^q&_eGLNn_bZ9bkb#>&J#ZxY>sAJ{4Sm+(L9^oqf%$
KPU0f@LYhDe{?T=|_PFS18Q&$r$9Qp{jI(R!o9Q2uS<#_#>om!|vM1k1o1Hu<KGSJlS=B${+<3K0mUFL!=xCi3_v<CYb
F>rSHrI<RTL*XXV{n%)gLQVlobRHq;^I~T|HnLAM%-*P`1^O?eBH^Z!{tqS{p6|6q#Tu^!K`nRB1k?G#6dhO2nUkXiRb
e#kosks7s)bNdu16_|9<sd7A>Q}h~WKfy^f!}rQi9GJmsE0Rz+ru_-++>i|iqI3~tk#TWX&G=L7=YLsIbQ>lTxI7O#?d
R3wi@G<e5gd-&mZ*2!uS&l2x+)VdnD<I|fUiD$Rbz}vVjH*{On&!=wSUg3LD;B$b_8+^WUU(x5E?lbza^GB#S)?NNFOP
AE+L$;ph(SZMS7RmCaxV`ER<tK`GuIq=Bmm5jR7b$_#4ca|l<pz%H@0@r!cXXM!@F;sXQT<@9=g~S|exPpnkLqU78&1B
(Z>lN4c$`gDL(ZUdP8fB^rnMWIbs%bae>Y9m237LYLe~4wy<z0NpKs1~{>e+9uttc{Lr<5VKVc0#8oD3dFViB((|=6H(
P-rUUHZ8j^pB6vy5nHvex-i(`PXmMuU>aN?p&utwK5-%g9sm^-q;@wM~_hy^@i@0`k~ptpWF?4V@=kC(61R}&wD&Yw|=
L{e!EU)X`W_F@67ji@9(?axchPg$Y}UGO(~B=h>It{{&>~v_RoiEG~Of6Q~7J>crP~!U;LAy@HHm$TcWsct|R^%4fv0m
8HRmQR^~jK1!_aFlb0KvCgY?r<}S^fv~m}(JXKed$$$K->u<L%k@+HCyLuk-?~-Mnt@WDaKQAJh+{L2RDxOveF&4>-A~
$0W<F;CE;nEaJhG_|_^=G!@xr?$P0`9*2r730gRNNA`*r27*{W@DFZcwc6lhFN+{&j=vc#+eOzr`PSca%J?vNbJ!h2ZQ
#L$o<cuRRR`8ryDduwIm4`HDj7Pzx(_hZFbZh7))0Boy#Q!i0xIwHVY0s7H-pmE@Py#|fQc=ct+dMuFF%<rgCH{_ZYbY
rbig-(9v&WK5mq;LUL4{_s!##~p{GaS$&SQCcK-xv)k4WI_NMe8?Kq9a~%j0NOKPpc}p1P-_aFg})n5xafUDQO_=V@9*
@$?rln@l^?pq|D>6up_z@{3=MZDMdxMFR!cJHojkisJZ}_Wgk$3B_-lv^KP(z6F+NXch4YXWw@z`JIFJ>DWFSg63siX{
%0QdInMdD#BjWa<vj@`HsDXBZ`Bsg~MB^87soCb<s5{lXG@BV-q==+K<V2{XGVFt<s0*1~Y}Nq%T@o)HJ%uxy?LVY*no
QM(k}xW3ojv3xM+>m+_61iN%G&6B9ET9vYKA|ma;IFzXEddXZBV8Nx%8NG11~-4`SNYVHH&F<%vI@wBwO~tKSUU)g~<Y
UIK&@YUh3~pu?njAQIHL>2+#`=e~7;Z=V|_qG^Hq8CF{5#SrHA)X9uE|G_ZO8dm=QN3HmfL?*mCH;`UZOX~{Dw{*Y_rZ
g{Xo5>OvqDo1~l^dpJ1(8Wk{&Cplzx}Z*0@zWxU=ZYd;sGq|Qvh`%Us?O*-UFSvcaGNbi_Nt;>lEtw}$w{`)?`dAVIG7
S4$H&v4$2<hZ1`#)4HLkw6^<SXKcFRThdpNmXXLnkdIi;lI;;euG0?Ob7me4zg);H-mXhaf9p{#)X4rI|h`1-I(v0Xly
!7U+e&5s??7r1sFFtcC~oJnW~H4-#?y6J!_qq$w#Muo8(6w<%~r9YU&sShn?QIIO~c}7Evmzp}AfB!eorye8yOJG%|*G
w!E?@-GO-Lx!jz+I7xciB8yM8%r)G^2lQNY!5Dfg!v+V9jqQ#S{dKm_$4mR2+afgv|tag^LO)oR7$4H1-1;UecJ^HR?A
}c)2ukQ^4EoN)?@kPb7$q696GRY<AXes7PlY80Y{iEm)8~OGF(P!S$Nf5OzomxzALAA`lZO<!-n7r%bQw1K<(b8q4@Q*
Z0dALpDN_;}H}|8nKk=tnTw$Z^HnTeWQ)AY{)`wsALtILa(AbyTj2qMAD8IRdX3%Mn0N|X1)t)fna#M2|-Hz?~Tp(6xv
Xwga#FnPxXewh~`MffF_>n9VD18N$E3acfeX5RkVs*(li$qZb|a2Ng!jUg)MhDg}N8aH6d+hw>Qr!bM+9D(41Eqq|YB|
ZdZ!V<OZxKFQo{?2osQB3KI`B6QtJue5oYQh@_Gxe(0Gf*s)=Ahx~_FbR~<iG8AD@vi^L;g{<GSxuKOi%kEa#!@H*UkF
@D}0U%l}>K1ydDbs2x2I2|PGG>HA)1{Vk8`3a%P*gkM=7J&%(clpObb!2&(}$q7lb(Q&<dYtu&svTUXXOxRv8A(H#+2#
_U5D0?%;&hn>y#j25X<xtw?QPya~Sfkl6HpOP(a$1(|DKUd3-}#Ng1;KsT41W(?H2eC|^h321y~q?s2ZBOI=Lmsb7K1B
0N}SgoSxMPgU(OttqB!4;UQ~cTh}vXys^_bY_XxySSL$Vt<`HIPa3etBvb=L7bNgTfCCi;ul2zo;4Lhu&G60omE1F6Gi
vSd2)@d{&uT+>fFY;m(t$w1y4q**5!6v)};&(8dHVdA8FDj-VzB~(h`>iC)WsoK?rza)ifTNVF?Fa5SGIOS`leF3Tf^>
sx=yeBkX+k8jwi`OlFoD!d)mihXF+?rv06%i3L<hTh&@j(;x+@#q4!Q%zWn?0lrw!rUZJMB3CO#D0TzQA`kA;Jg1E$F=
l-7L<OuN?JQ0N4Jv{uivZ$kmioKLWqA<8VYk$vvk2y}=j(!@s+uxozF{L3Kx<G20FBs60PQsou_4mrT<^?U6VfHB_&!*
*hV*)o-rN@Z+66xC26%0J1uRw<LUo2{4d73!RVK&z({k2oRmlHnIND$oVI`Gu0e)#Hp4o#W6GIK_e4X~rv^OuY#?vmU6
)Q1;7DEC03G{jhEW!xX_(SzqHcQKINo@In67EVND%qmsM=7#N3(QNZxhDy}Ai~o6xhY~zN=ab}>20XMcD7#=?|AgE`2m
ewv9+xOBoXr@35e2H-Jz71T~vs)BTgAnk+D=MGD{XA1=V@N>joTbRzE8uuYxy&GBs#ksrI^nS^5CAY)W-C((NeyY)MHF
`xxn$)UsX;3^Da^6&da51(j87aD!QQrwK7(Voa8fM@yH$Cl)dq>q*HVyU|U=9f=CvYN6Qy(yNG}1SToe8iLM9*$Gh!f}
4Ph7h%1v;EoE<xeywqJSI#HM<9)(gj$V0W4+X&Nn0*8XiIwzX1DQ@=n`7Aa4t)ij*9_fX1Y#dqkz893TUgPe`@90D3R7
AM?7h2CfI@;ae9Ygx2dn36o!n($bWfWxZ)t{`gUDqhvK}G-chp1la1klt4cS@tO5NuTeVuA<Y}z2prj1xm;@%im4?jPZ
>8H+w(|U=N(#$3!6&2kW4un|>4G@qhUJ9XiMeezydhl|+@I)xmQa4Xi_{FLGN$UTX#nadC??)~v-C{afSa=Bn~w&dyrV
mxHib!%IHowCFO6*tT+d()FY%oA?J^12kkLezItdrmTJ^@pM{R<61FX=q3sRUfVcVl_=}S#wySLpQ-T*Nb(yY{VU!^7!
4W;=lb_}3-ZJhwLb+$vwUdoF&675Sf7{!h}-akv0FL_FMvmOX!K}_SvaAcCkA*{~Eti8Bj#|w4Zgn!F}lkdIt{c?+~!<
GiIO&-(2&)-i^1NUXmwGLRmPbD=b#$zWFm2&!R{IQzxpfVm3)KGxTGw2x}PWgh`T$Ln}N45x;d8=*KWnJ=7qD;Uc!LDr
^IIt2Ew6u52yi9XaW38dlILoYXrpe9y(%maAY|+<746sJz-_yFVU@3_~^H)s_A$MR%BLKF;3I0vyVl9^DV9b$rCxoChr
<xP)TMAjZ$$Fiw!->)s=XTZ+CY8_~(#9~ShSSBuQAsY*2ub|8WXZQ1(2^kiE-rMs^f-NT-u?RTzWd_auiPM>64~l(^}`
K_fR?p>RFb<J5st=3yFE;rUF6S3rf~2Mi=<X-qX&{Uk0WgwhK166AERbY@&i*MgW7Ig8YOL&_Xj5%abxD@pS1SZ)CSXc
X<?UYvj0`((q&mJoTNy=3At5wS8j=UHHo@n>*}l)=e((dhUy=cxGZ_4g>f-oq{|TI0$P6KUAZo4aB5g3ORMb3M1C^=nK
*Ib;LFkWp3rpz89>Bs8+*5mQ=J2Imd~XtdZS);AaWAz0xZ?#TsD@Xro;1T&rql;Y7!l~R+ZH{n~~xx^b3==Yg_p>K~2h
)@p8jMB-*ejYtpnr%978o+M}Pa@P*2TiY#!@3oPz*7dR-U5fM4aWW(WtJqQ9YPnC9~(r`jO<|!Rp8^j#y{BoxFtyH0%2
VuqYM)5cpO<}}{WiO&m1Qcnvr%kE;kuroZ9IOqiGbnZn(8vAyoWJx75cwpa^6|&6Gtoj5unGA>B{2jva{m@4ee8W5+Ib
PzcF?GE7k?m9pgF!F?IZ8VVI_=Eday<$ShnupfAj6%yd!cUApypg=Ltz?-lsV+#^$iH2`3Mt8?8_}^W>WTTR6!gy>_7J
ImzQJSrrcRro|I4c|Lf!S!C0A;ZU*kjwL@4KdtOVd^erP4vv`#{^cSgYG(06^;YPLsmReM#Oo&qr_c_cK06P$=^_!@c}
kPTTvPFP-~8r_uX*Wzo7{Zyxbh~R>$=-luU`41@5jf(_wRe#Pe$Lrf4>|bZ(VN~zNi1|Y)9X_@A?0hWB-_nTN$s)j91(
D@28aYa>FRo;{LP60tgM<t?Tc6DuQC~-_J+y-#>K5$CJRlaV@h%b`QgPPJiS`fD}RJwzykF#4Jd^?OG}$YfR7?rF4h4{
pgN|>1*jRf-A~c)Oyx`*w01W72Ho~{gb@G?#m5NzaP1;#-|;UJ%xutF!;z>JLSEfS96plI&?oIPe^i)0Ov`h{C7MBm7E
}A`@-sIioFA^1}TeroqV-O3(tK|>MXAj7$#_CT;;2HDRdRNFE^~rxr3J*-9De7?XFHyY%tL$HE89C5M}jt!oA4aAhH&c
@fd&uu=>7lLuJ;&?R^sQN|go7)@ka->z`emcxRX0W0nl3lKBftDC@yMTd6t8i>E~rx$X8Xkqnivvv=;q9H$k;S)l-@^M
I@1B<E<P&L;!+t9H+M?YwUH@In8hj|(I?7w$Nqa^`%Ji%Q|IF8D83xu8m~rKp@=2Cu&AI%mJS{OZi<{==n9+;^RQNZNA
j?Dk%9QQ>OzIaX{90+V39Wu|tepmx$ZrY@ZmOQr%lmw7miVW&>9U26X}fiZ<YRkhzOsqx6YCsy-rMN8<L<?r&u9bC~+3
QZ7G+N-#Yt(*>U_6Io%Fm82)TdWS(VStdnqk@z0)zvIr&xl#5QuB<4<;)%<_l*8L@t-w~nhL)nT2la)<YtyGV2gNr7CZ
(|ft;5MPyu_2P*GsU9)l)o=Mmp0kDVg>+w_shu}1{pJaOVvHBk+iGWe^Ssc}Ha<}b!KI^WSywf6w~xRrpiTmfMCXa?+2
1M^f_e_WGrg1@HuX}o4iy=7;=8XkD+<)lN<aRh8Yg*uVr57dAuv?uj^U2$T_W=#<FU8bgrstmWQ2?>`4G0OY(!u!OcI^
Uh_NMu$vmLJpPArdP^AUjK80eRj3v$Dh7G?@#ZvlMEpps4NIDh3hArh0fNA;Z{LalFm)>383L`7Vjqv)kXsw5QHJ$UnA
_=A7!Y`r=~8OB4th!B!^rv?S~aS5jVe+~{z~W9`i2A|`D}S(1CczuoqDJkrYSHY2{mURi88j(W7KzN6{t2CIzilM%al8
G{j6nAr1}$JsngQ^b8yz{!*eFIYkIkOi@^wQ?9)lna9AN)<QQ;OsLrKb1qyF5ss8qipF>wZNS%fCg#Wm=h?+u<h)=ASx
-_m)~w_0f?U>>BMt?OF!HI2i`pJVP3#`6tYI=5e4uH3Ekpj8`a!WVO%97w@nv$0#cwMxUk{07x6S%kf?lzQtplqM@GcM
7ukaw^!i=)rd($0yLjOSm-6$PX2lJVr+KWPP(0iSz;Zk*kOp<eS-_L5avT&%o3t4eh_LT-cN&G|QCB7>up33pVdeDBvh
+dfbi~l23`J$;pzB*}AgrILRP2S>U2_9F>ui@qCaWt01>J~^Hx1PU9#PJfM@)Nac|`p2{%)n3l6IN>`K{JX=Gh6pRsJ_
A{2-M1j{TVx6b9}l*hI;&+sPx-8e>6fDQcU14W_HO?S!cgr4=-01;Iq8>GNHYtT;u8ltzHjw`nDlg0+5#*YirzN+~`xQ
W^>E7ow)EgQ{$8iouzmWJ`<{J5pQDz|{s5oN3P%_wytNEB8q?d`EwIKZ&+M_WC!@Xf#C3b$skWEU%h%Mtf{S*z@$GYcD
yHE-o>*1u+HQlDR>3d3}|AOsF5qx)J9>k}pK)Y;6gSuwVnAPGbryh35z#05vc@ON+r~7s#3=1)f*99|-d>%YH!{&vglL
x&&v@oNEn3u?r{num`~wisYbqq2E=|zhfR2-xnEV8qB|;n_XXn!O(O_H-T<mVNfx6$y6>zW`@}!0_}-ZpQ2cWr>74O51
ogzPPV=|C9cvv%|G7gjS+p)PS>T)0}GNIyNW9Q0{1)oW*>E&gE(N1u5czELzR~|Uz_;)ooB!bT=b98)h<N1m|*HJy=%_
4&=&BYD$iHr9|1^6c`CD{oo$36nq#TOoR~GOiGuVI-jHXjWLY`5T9|btrGRpzHUUGLMa<UE;00?%o!fLiCo%fM`r%h(2
U^m^Yii>Fdr9zDnn0Q!Uu|9N0yHBUoRM{l<Oaurrs%4&fF#$FTC&ePxZouJ*){i0itH?BltaB&y2gpw!G0;TELq?T<Zx
MYO5z4ol6QPzS3$f^Zdfu_LH-9_17yx#Q=n@LD{N+}jzYBnr-#s8WwbXWv{;DZDrFOQak@MVGIEI{9n5Evb$3F#fsm``
{+_llyejYFHLXH;2-6DS84Y;v|5Y+iW6$-7-^g|?bS}HeozMGfc$kpH$LTf>Se3pTFmjDlNTCD}A0V8sXgN8tSS%GckS
Y$2Hgl)Q9GGMwKb_<;nced#KOZK<Wp(1%)$(939XB|#`k?<OiShu;4%gvRBsEA>VN-Ovv_R-M-x)N_(;PRZsGo=1Wa&I
*_uL`+iz)N^n)L5wVfvl?hGco@{P5@h&Y=GA=l?0ir%zxXT<qnhNn}p~=ZAm#i^yuYWB>3^|GOL+KwH|fyxbq|I?iX;q
%ROOtf*p)Y-&wsw5XH7`4wpp49gevp9Z~jc14a#fb?Jp1<i~Puu{e{q+8yZXkj|d9uLx=wNTo<U7+P|aCDF$!AyxB4Nn
!3;|Cz*;7AkbckwD`$e=H|!2vFCn=Dq;7Smd3Z}fu~6&hCCjgYj0c%3H|8rH0iNK*+GzQb2!_Z5FFy+c!;T9y(@`$^G5
Q`%F8>W3KRsdcpzEKdViLZGZR`s)(fNb4)IR9E*7q7iM-(3K-=ij!UZJ2peY%@J(`^s0xE@0Tx61GjRF=p29IwA*j4+H
I$E{POhX4*6y+C-FQtxG>lCazYS}ad}7a2lmQQc;iEL<(dklq$fQ_M~UqG4}45&o5li=5%4ehq7Klf9J;FADgpm)`|_0
9LiZ(J)4X(#dy(dKceZ%0Th)#r;&|Z6NiNm=aFw=N3WCvx@s<8e$F0`s_wVy#PYl)m5cX(gzC>-Gk2}!?d=wZ}e0Gj6>
l9!~;71Izg)S+rUG+Fu?1r#hbc3{gMp!vH_vLnsb|jbmbsBY#*f{N_SLI>4FJ@jj*GW|Y{$&+vwE)eClVQ5$U+LKAgp(
6{ns|cM&5eNb)v-8io<ZeES*{MIC$u*RXw^p6{7W8fO9ZQtMy{l{d*iAzytVgTK`@EMCY-d}a}X0(-c1CxC{LS)WwQR&
cVB%O0WAB}oh`qk?+4@Kfj@Lk)Oq`MOMJo_=3(*5-Y$U)TZepy0&`$MT88SJg&->V)RgGC)Z|&iQkN+M1vHb5cH`y?N;
GvKbZu8z-;>z4^0nDnt%e3QS6MgwrXre6ySQYEeE?IwHh4fK-C*h5B*i=4-Q&I_ZcnPqZ@y2PgbFm)9nEs*JRI6(_--T
gNt?ZL4zEV7i}LqQ`CthtwpvVmnk!!VP1^K?_kwZ+s*CRUE}hUWE^31FK<4RlJbzNE--=B5Y>jqpTxVak-f1qbSu#>-P
<#?q%`uG}rQ%?BWH~(Ite&+`zCVGZGO7Egd)gBV&a*Y2@Qj$+sQlRV$Gl||{R*ce^X!2Z1YeylmmXNXZr<~8wu4p6)BV
l0XZBAqTTs+ISRSLB&!98?4YeG`1ub6w`MVYUAdx=ezF@W(i(A-LS2I`ksCr>}AN$npNDPNvIEvanKDZA<faD}T7;_+g
-7>68Ux030ZXqtl9i~fNR`n<4S8M+JH_3H;zkoE7WEj_eyUteeO)RuqVm^L|pGXs>0$3v%(axRPZ6@=Z#4>)>7e6YxdZ
m+Sr_#HyJJ}h*4q$lZQ4-W%BNa~WjfG)D$5bi>dkX}(Be;x=&0<9gQ1KaH^?d6F&x{uL;=61`JA{;={FRvF)v;b_mE^O
3kd<_!?R>n-ae50YU-^qY5jxrRH8BZl`^xkJZ~RKuN$>5z<eu0t40~aphK4bgau_&b(S{Gb!hT6oXilm#7Kj3M-}E->L
lmWc6X3QvK%1l#)6&On8pNmye%prlw7&~Bw!SJhfl_+VB)dQS`G5TI=YMvI3E>2toxV#?)7fn*pE7ykG2>ery6u)>IJu
~URnvkGzG$s&834TC6&3h4S;)><oa@-_w@yq)LQGOX9P;vm{(4}v;u6COOhs2>aaiHk6LFSEjEY-U-A$M&ys(=Q$k<PU
=dh$nK4{>gH9v{+99nM?5AsHKpcMv*YZ$>uPiOS1`-=Fb7NWd}ae19+5E~)Sg&n{@QtptI>7j-&in{RiIf2?|RWWM!c&
KV9(Ah-$<5Il8Vlv;Od2yfAzPKe>(<r5_eUPC(DtPOym$cgK3eEItY^XfrLyKscE)>;<*a4WM$DMs=PtI;=6A5;0fZv$
gS5bEda|h-7RsZZd;b@YviG@qrm(FmyZp}sHx+)QyR2jC;US>rSDQ_m*dr@4j>MVt6l$Z)nRQ=$9T@U=RbrbV`jqSa~M
0N0yhL+R(ml;h3PC-iB65^ahs+qceRG};uom|{k(NPSUb!~UAJo0pN%BZe>hCe}p!1^Es!X7v~ZI;Y2sQx^$ehR}Ji&7
@AC=j;W7ph~MwbqzO_F(R?NZl&(Au4^2-(s$-G#2Zb?d*@qL9E~Gp_F4M{qyY>9UKr|?f$tTUG}e!G|#L}8)vp!hMbI2
v7|+^j#PG??m5{oO!=kPfa)}z&uJk6#5N$W0C)a|uq-_cF|HF1b#vMeC9RyYqdoB_?bgH|(YTQ-o<;G*7$S=^Sdx|vRS
izLL)TH47DnZXd7vG9t>YV0*XJ-Mj(B;PKrI!I98$Faig6WCNA$wJNPUOZJaX4%>>5aB_Ho{Gab~vyE~348tkG(wrW7o
Ywj?U*9WjHFB)LH4>uZmWow|RihP&j8QGtDJP+hd%bDPGF7FY3cO$~~xa>Xt0Xz5KNv0{Bc+}umIFJf93V%3c>e9J92>
xvkk(S{5jtS*%}Ks&jDoh#4RUER0z<wnCYoM;bAox-l9J4_d8j+ka`O-yrf8J%Z|czUZ#2D{EgT?taF+PccAu44wcFSt
`82zwdEbbyxNT%sW7^;nWZlG|{XHn`5ja>9%@;-EMebjSrnK}cNad!y_M<?n)<Ov-EEq>8?*xD$qx^F3+_2%$&_9R+s9
D#9gELC&5kj`pe&w5ii_!qZsyp_@jl1lDscif?m?37yNxU`NSV_dwlIIkl+xEZzo+@xVYR8!#{MNT#UOlE1X~vpX10#9
0;lZIy0;B2{)mA$HgWgE2EUnhlLT;-%8{4lezCVj<v9{N1=bsp3;Zi)-^TJwo^gr7UnN9~dH<jc|6k<yg8(gScsX;%Gl
wyA(_zUuF-<`j;fcJzo>PF2eTY;Uu(932K>AV{#O7ND2-#p&*r2tu3L@eqA^mY`5C9Y~n!_Lt11zr<SbaQP_!{+~@90q
?bjuyoof+0^=*uWaOa4n<*Ji1wPw(d$P6`p+!140kN|xw27!VRzQzx>pH>^&BDL`n~qhZQKpY9c~uh?VOrUHS<0Gpvlf
T0c2hQMD=mmS>C{|~feM7yvZKIg_yUQEa)5ga)^L^I3OmLW$Ya7-q&^MC)89K^QH-9oNgW>s6*bbbXmq=+(i<Grf|48{
nY0y*HwKekMfwp#H6)<Cv(%r6(}x_63tyrwSek;Ejy@|Q;>T>fvORM4wPQHtTv6FpD=x0|^-u|eWUjpLRWklSwVIlW*u
ZGiC(JkY2Lt#Y3@<~aNAj+S-9dEtAq_eQ9MV?u($xxH4QH1pXT4+X@rI^@OaBNLE?EyDgfB&tf`Ndm>{gExdw>2l$BNL
Ka~o%o>0d6ImO;!k_FJtNQl?a%lvXkvDJe(;lOp3#{vNu3@*^96rQ3;d{(u6twKw?8a4L5n5cR5d^#MVzp1t`{x%f~9&
#GB>I0y?XG~<Y}HACDYP=mSq(rS4+d<kC*qBT~%2(y1T#<!NKFm`n88|zN}dIaD4l$b6076_>kJKws{poSNxHUETNpoc
6|ai4d<Uw)~MH74-Pp>8?!fW$olsqQ)=fw`jL*b?=P3B|;RysYeEjf0V#FDSzpIK40;Hjv4>R|(4XfZZFR!*fHCqQhP3
@I(29>RMaihogFb6Nye~7i(XN{e2?7SXe=Ia|n=Do{ZctYNstZG37u9x(is1f@_zUtgN1h4h$>N%+cmadYuD=`cbOP)Z
}ZN3e*}Ix>`FTRV-Vw&j5_Th}ohWN0zyG*O~bKLCXmr@R<0YBxjqT*>g<Gid(@!qP+&H_xD)@S5L^4qfcoZVv~>2kpsE
UUhdZ_H`>i|y~+L%nTzp*uG;hpM+Ti*yI|woH~G7aT?&M-O$FtFh%+Od!~q_alindGBt9LN8u((J@DIMWma=@XmXo>-5
736<2o0^$1WTAllj7sc4FcH$3-j#GKF~U&wIs``AH4Q=?MWpr1;<%{1>-!BqgY(oR*@R^TmS^mv`g<<j+WVDf=CT$$ZK
|A^-Q3IB4hET<YZt(C^d*P6kevgO4|m$%Mw2B@*r3^fuNOWEHu?)26Y(#ZS~)D#aRd%1)*7)HI%jI_v}n>9K^1Rh-+S*
zv&KNzX^N&ey~UoP^?Vucf)>PcY`o*JYy%`zRPH<#gj$ie&M~nJmrS`@<P)+%{j)*jqte71CCwndE8qY@c6o#sh2DkT<
z^;P$|a^BB~9@$Uunb0lmu;h2!Ji>)<9{MTSlALA-5Y#Qtn}_9m<|lCy5uJJ%{gO4=GDx5UatH$1zP&QD63JH9-j?tJ)
{E~AaycmT8k0~=s064Q@pW)*O|(uTU;5K{69>wd?a+4iWpLGOIn>xS@%hLep_YDk#lyewH4PoCRuGuB+}x6pS-nmb`-=
j8073x%gt2On7v<br_i#EXkIJ7OPm8o*Q~pOi~Krvtci22aW{h<4zq&vE5rQ)F-s#*}d>!NQ|gWCLF6k_aT6^k}@L!wZ
frm9;>$B<mQBF(;T3tT9%(>0M;4i#Qsog;=_$pP=$-KX~%08y^3J8$9iggQ=-j(N=3U?fp<$8Davo5!03;n8GxA1>m+@
V4zGK$UT;Nz(X7ebFl6XhlQAqdgFEs!zpfKWY^b9|CFtRk@aGegHy2C-`}LmXvE#2`U%=SHsgbVCmKx!80w*tYr=Q4%l
Q6wtkpvCD-tMZe!vv-wre(~RI=RKxtxI8!gB8Vhe%9;HO#YUHS5pBf8jAQY@U!mgXkZ7NE>vA-OlTf{=2BwFKsv&CJir
QYyb<~q8vi&v`7_dOCJB~j)gHXcX`_lq-=M5((Ck(K?B^OAjsD>bfNa8URR^}V=#XjM<Z3Ft&0S@PYuL4PytYQ=5L=?S
>bVIOuLS~{TSS%vH9bv6sBzTHRk(u(c~*wSExmn8p~*~v@U`9yD!DC*PN;4WswqLjJg5tnY7;oXPpcAXyZ$3`>Wtj>V~
qXhIX<#zJF~0>G=N1w=bRrx<rplJe^R9$4ZIGz8*fiw<(CPqbOV>r0U$!amMCupnKQ(?S9zzHFi(Vg9cl|<cGif3tP?(
S~h6Y!DVm-x!E!@@x#g0DqB3=WX9+X->;V&T7o;*VGl*VEJx_%+k~1O6_NI*@E$#zrx@DsPif|9*8QMYhW{wkvZuYJWj
3i@Py_^gCGos-Ar}=DIRHa(aXiOuz1dTl+>_)dx$kH!c#_LlRE(GL7{C{c#(ksh`G43AD%U8PVG9aga+Ek_^{}{<GP`r
2>Dq<Mmm8Y*9k#KE<9<@Tp?R~8r&J!tU`jBfs*%y!HAd_;m4*jbeB5ANPAoT6d_|FS`TFK9{ka)T%J^Ko)0tZy9k@g2+
2|2XuBOY6EaOpNo5kReC}HO-w!I&VEh}P8{3~U>A76Cdp7hKW;%t>iayOFMM?B4I{I$I=uFNJOrpj3For{a0jeo}`L|c
BFl0rCO8w@%zHkgr@o={Q$6sZ9hlhDsN-zyKtB|I^5aXOBk3~MLql!Z_#9ozs3S3|O>e(cqGr+>mN2Bj|1RyEsw!$F=(
mT$FUF<jpco+k6GZZl;F8yF1?Ci!<~_Sl|1`UCZgI~0KZ)BZ_+yR8?0YR{hhLGO+1bkR$BLaw@#NK>=NV5aWEmI05fMO
K%Ty8)j9VB4F*zk~qOh@(#5s9UwY%itC6!@hA}!G0+`)V)jRs6YjYHR?OMH+-a4sv$eu4)!HB4s}b|vwG~l4y*Jr9Fb$
|$r~ZU7;j4X2e;8a_xV<-w%YO4HMy+H`Nwu`68x7W_|JS_-w8(FZ7yitWc!%rDc=vVV#H;G2yL`l<xW;2kIT)&tEdFYi
q?(bE`bWNB-odGcHN+N&WLEAsnNE3=f<eHW*g%pE?szKvw;cHh?RnU9AXks_NQ@iRTdMADaum%$%&5QrozQ-xAgss3;N
YnyDShNsqHLN2GqLPkD171`bk=w>O*&mw<xmf!rkHMdP4emTp0bf*9#Eopn4ty99YgHdLxUlfP5i16uwB>J}q|Myb8=k
#-rM9Ip3P{dW^YgthCJ^v67>p6@Ny8o0cZ?GET&vxgW_A)^`6+sNM>7nU(UKo)cCWXrC0n3qN@5S!!V~&|4hY;k3EPQy
05Ulmc4RuCv|qY2&F?fcYN@D%$$8u~K5ewec-sH!KroyH{GZmwBWs4o9Q1cz5{J4WB%f;I}UV`JozCyOQdT^lUs1YkqK
}Cpnzw`qp-)Ua@={2EHw}9i$?H1F^#c4UhW5e*3X&T|bO$83}*ai9W98Ga&mQ<wp)}$}^`)AmW#rlcReM%Ws^=JI9VUj
MSl^&le_?*R$*~;pLbPdWzhXpuOyzU-4in0T_cRM=Hm(*z1fr!-OWC6s&muy!JyYt{cS6zRrlS2s?f-ZO6fcm7Ef@93%
s{CA9_|{oI|D_dG~#qAmVURdE2`ptNuDy8*URL1PX0#Mi6<euL?;OVUDUo}b|HkAxk_m`A)oB<!X{$)xWrpz(|KPaGqj
x+lFe`947-{Aj^|hi!Rm83)=D)%AvAcCz5Bx|jk5iM^JwscpyXkt7###NsZ`kx&sikx-%k5V)}5pt6Iw)tU~t6Tf6kQd
tISTs#N}aijtid-Ja(1D9_112|oGQL8QWdwoLS9&e^m^4<oIAi3pGSw;gtwsW994AQYu_W;0x`QVCtR;xK+QN)Hak<GT
AW}?GaW36hPR7p`2G{|O=!DA^#eP)nyFwc?M41Z)w3=Qivl`=U9c<fz8ME<3IR1RoLwI?cGhwQvWq2?GOUFe`@giK7tl
|}Wi9F77DBv;%aumb(kXi$$B(rR&IgWhF>6eVe?_JfrW{$ha<iE4SQ4BozNwIEfm`j^x@4e&`Vf2^y=p3l}K;kdnvpma
;K-0BsGFPcC+FWuhc9KjlE-B~BJ2P*-60JTA=a$ze0yNwsu6%KLM>7AUhOqbC1lz-g667F?i9Vq`b6g2}q52PlPr&kiT
<&`gSCp>!qRM(M3!J4ZyWuwcikDWR4pfz11V-<CmgA_!2(Gh7ds6-oU{E?m!{Q<7RnXL`BS|eA7N;DDj0=JB9M?WNd9e
qd~gnIOY&Hlm{GsdH*I`mJ@?D4T3LL${n{EFkTS+nXC<L56~R(F-cS5<AS^{Mk^nGUMc{QTmqDH1(aiu4&qaONLh%90H
(?8Ry+of2}`c5xQ@-h9q|#M-$4Ho1a_QF^nK7##>z)YWl{l%8{D2TWpR@3ImliMKJZ9?a8^&g0!;nK#8s=)HaW_Vf{U5
!dp41SIYNHjI~>ny<FMbFQX?%8C3$9d6rR_}~y%r_;gJblnhDi9jN0UK!$G!pHP#XQ^z7UE7eJM-6dXI7hUfy32+w&-V
@Ce%)ZPFNH{jxxZV2wz&q@I&Ty8HtDh|2jLR2Hm`hGJ2qgKT}@QB2|{d{reK084P&&oYc!JkRi)pXcB<KJFYeSU@MeNm
JwqV=W=C?GR=tjgtIwZjkED%toi5%#;tjoH!fj2Ot4Xe_kfO_27g(<5$#qUN(0n^UM}Vs@!^(mxFS8KoNNa+3lMVv__M
v!oFtNA)->6I7&m1k1wp%?)<VNJU@D#gO6F=bQHhQZDD(_q#Bkkl8KB4MqG<kRo+odWf*nn5AY=2dI31(AX%ByWt!Hn2
_*4~{`O<#v-t%%i93873hrliM^m?4pcYzD1#Bo~>w)rMp->X^R#(zL?aC2h+hp+v-P6uu~}2kJzPpFZ^r(<Gf**$vuOV
Zjr7-jl9b<D*R~o@N5R<u%A>F4j_<Tp5<sWPnmp|04Gz@&9%^@m+_chYRaM?WB!ugoqHw*=HxUrZ}6&iEwg#y9t}wm{$
6BE4DGyZs?R*VZ+F+&8pv^G~>Y^GZXS$LZ5eM{bwdY&PaI<bU?cHx!eR(E9d94i32t3oWc~V+;*#M0J`))JIJ2D+gtfp
Hv??}w3hwvNwLkUi@vgM-=18S{g;<|N=U@2%WBgVpYaM@58SRBurbW6@{?ZB3(5+TNYt$G+2@N*I1pf}RAP2^zb0O;DN
h1jF%@uaMRQ$ER!#YRI~d}rg#!JG*w-*q=m&J`4~$7VZbT2Q>*<~2D~?8+58ij!z%U%TDt7YCI=<5uE7JU^O>?Zk*TFb
U1$({lS6sZ~op|N(w7=rnhoAb&1K9tECAQxT+}^br`vnE&99-C!!n};6_J-k7FUr6bNe!gwDFD1_#>MSWYHBe4_@_Rht
t-fQQ4|Ag(_jTgk=msuE)nkSEC!#Gk7O$Lfen>)ih-6Fb!D!eE2;{XyA$d%S?Be~>T1vEmBTJkX$_m(gr)bLm@2fh<u%
7;M8uHh$M6uGjEHV;c2RF=N2P`{cC7(J0igF?N7K0FE4M-@$^_R=BJQWvQgKiuh{;d_w0L%SWrW=zoLP%aJT-Uk-+La1
T=w6;_dTaQ*oOW@cI#y~{{HhAqMhM6EkMvX?L-r06Qka^0j&4$r)mP}i@Nn?($tHB{Md#Jkr7gc|3#b|IJ@vm8N0yDox
Dh)UPrNBtYN5A<ppozRFUec`m=D(ovK3$Mv+;FdgG60Fn<ZZC{dskN0?ju+uT2@KRi3!ySgO>tbK>|CT$s1Ijjd^R(%d
#^&w}xRx{PNlFODXcV2T3=_<b?fjoHr0cL7|OHHgT;~F>M1POA_B*?)$@G7B&4e`ZQFDDO&>M`ViV^MIeA(HjyJ)EH>5
Dh=qZ0=3UPdPT!Z%CWBjNyE5xvb?;`PMT(BwTr~kT<sKv0r2k@ejZ48(I@q=5Si5G0N`}+ZX*tf6TL`Boi~_A2c?EglV
<R`~<a@@nX21{euV6uHSs+&)oH6^L5Hr>z%8w`dLI^-cgpTeV83D^@nccxN=VdQ{|=n5;G<L@Rxtq8TD<jz7A+zdN!b8
*KSiZkp+6=i7>BU<7sYwnOnBoysg%BXV3J``Hz2fR1(cdl^RWIBSEq{Wn#)j;=i9O()24YUF8S^Zi&xbEjtp1rsjpuPz
EnN%|>i4<;#-~+PhKgC<Eb8>IOl{p41*!+AE(F<D*X13O`T&d?O;Ab9v=SYRJP+1O7AY)ZQ!7)QS~n)saf|P2EGR8pdO
q+`r&Y8HGwP^!!r=+$)Il>g!YTYr91TD!mXky4^~ymE;dmrUr9p;-Zu{B0!6Zk;n+tMwXYHVswFMMqE@+U-_g^CEkj;h
(JK6)p#)beW(Z5xht>E%fPaHEO>(yR^11^Rtr&FglCodow$O_Gfp@<!5tR<Dh22(#V%f1u?7BgA1@-)u;^6gMR`tF55n
(pN$Ozl4fI@k7DP$;5>Gg|Mg~V^vDvDH7{&PQxEO*f8^_wy;i{O^-iQ8i&5bJNi>e!@Et`3&%P^HIHx<p#*kG$_U?3-C
qT7!ndB{6gs{XisLmqK?Som1KWHOB}*fNPUf2;|RlIyEUui%(71ig_O7Xu+;LD3>7i<3-hoy@7XX!P_c(jJzYM@{hvQ;
vM0%7Gsd2UcYaGA+?ua&DRs{b<W}Ta__)*)p^A4CkPt0U1-*GIl)IlOx;7rdSWI@P^DRTj4%BZB6a2>?WDLKn8*0hp*}
?6DPZaNLGaE@|B2{;#LbD+Ym=x+pw@@Q(s&qxOCfEJ$4z;S++pSkf*%3PI@F_OXwvA>wsSf(tz*l*S^5SAW%E#xHJUX7
cMx;o+SdRm(L~^<_Ip9u6wp_`-(sJy7xGO6$e7TzD%x*UBsbB&Gm@+liIhi<&#C_-XjYfNo3^y19Jm)z1c)WP3CfijBR
kv?}!(y@p~R>8j={Isfj_#*DvNzCHKSRBF<bb)y%y=9Jx^_^UtA5`F$n4)?=R1sa0jo2G!^zl)(SO2Bn7m-VS4<Vio2T
ivamI5eZE?W}7Ah_#m9?1ez^GG^~+4Pn;HWid0cf2owoY37}IJ{veBg(qGgfGOj*k$f-f|y!utesA6GKPG;u$KAi8!$$
`47zL&#+?>OZ4Pr8*iIkKZ+%R}rcr6F)L7ecdcFewf+=pW&Xvx6|RH0HU!z|=cZLB#iR*dESd#jOZi+V?~bjZKvoD*U_
&I17f1GaloYr?g3xBt|<={rZ|dE7?W~t?8ggRy?Y*#@>Svf-X5Gi05-$I5g)=2!|4RMHYNWk`>Qrk(GXYnR-J)N0*a>r
59Y*dQ;*^ddbXH<r(ce*59Rf2~Dx5y7VQ4f_m>_wayR{eNlN+3x{+ZHcCT@z$&U0o80c#3;mjgY0*ETR27(19@pS2vht
RO5aSUsi6UD+X`|meV9e8r!XaHZpmvDXgR^eeKAq-U7YYb_bo`tIEpvHJgM-mmC|X{g&^J(<LZ0)3+dB5NZykqM=S5zu
IN|_WI^8~RT^D626^mqjuF&(FAdBzw<R^fJt0}(qfP?BsAd&Y6>YXZJ`D{f{V@)O62y~EpMBmpj?rAtbt1ziMI-uggfQ
%an>Vzn$yNI*&<9vMjMYtfE&2<E*U<1!^iA#t;FzFJvsy~M-Yr4GoC7+dj3wyXYpm4OqxkNwwt;9mayYG@dE7ptOBv1P
1T~fr>&v;SrFBPdOisT)FGMwWJ0h2aEDlFA(K?^R|j}Zj&@CP5O$Lk~xM#=z_%u{CLRy?+`D{tuzL=1^-{!JGW5d*z?)
Aeib8}jN?{i^uP`u&z*gb1f9^dGeh-wM2gCP5>uO$V-`m)GxAWXo^)W?c303JG!vArn^Lz6kC@^LB>54D9;B%t|d!hA4
yIrdL?oApW*)kDB^oIS=g@DgpvJJoFySZa30FHW3eCyOl?1o{xPQGg-*P4kcNtpsuwjp~PgRmD=3CibuEW<of%_9rAK=
$FKY$NYFk_q5`hIFncK${UZAj;L2wu*mDcCFS7mD%Od-SG<mRtbV`u!c~o0TaJ2|IsHD29Cnw&A7KnZT7+yH)YN%Q<a_
0Qs+Gxu^wr&=lDtA+JvA{nyml)N8m)QBPiX+~*;uWP>kJjv}*jB=kFZ)T^7Y(~ibz5Jbx{lO`xDS?XKU38@wj7n;)PR0
;3D>Yo--6#t>Mu#{yI&^?SE}f*=RAiZnSoOEaMN6h`Rv7gQl7-Ye^}9C6=UGqCB|TvmvqDwt~Tjc4xwQpB>icm+u;`@)
b}i2(hRv{-}J`kTr4Ik?@R4$OJ^R9Dsju8;OmzOJbr^ff;78$HAz2<Cx4M*J%DFEk*;35BQA;1{3Uxpo&-J%^fPzkBjb
_6FOMP$c+H(~yRC<tuirYB8t@U@Zfn=l4;RH9a6Ir}Z45q`hY94>J@zq^XZLtZdX;~?anu=f<l+drf9~|oT!%%qdRN2+
MPWZz`ge6F{AwHAE%9IfEa+)(gRbncKi&+~HIuz(7jbwyD*eb|X1*oFQtKg}gP>hfex0oKD-O`8Z}{E^;rM2qJgF%R<(
UIM0#=8XG}HR^1U|jrj~79GO-ay;Ju|G%WpLDVVVy4+mc_A+<G5ONU&`S58|2i`4}bZWupXVuv=Xn^Oiz1ecFdi;(52_
>S+tH^xFD+6cX)ftH0o#~O$&#gLe@CqObPhMnYa2iUf101<Yl)<IMW}C?br2pgD!m5o`F}k74--rBuCVH%J6@B(mNRKd
!&DR67xX3kEA8b@90R*@ZeVd%`~T)Sddzk9VtHuOR?B%z-TXrIuOw0<-3Cr?)*+B-AfPktrRI)^QWl1X?c?c*v{_ikK2
nbE-w^FupG-1gZ9E=uK)XY-+YaW5F{o{P;in>D#F9(Prp`%D_dpPc9+V_hP$Y?<3r|<-|+S1CEx1=2c-?A;9r(=eC|-%
<f|p(gOapSl$0vfO(jdExxVp`Vq7-8yI8%D866s{Y8cHR^f(_F^CXByrY7XSbc&D8=BV9Xg^qYIt>RU(4jkrC1o8TV_s
RA3b>Mu`JMX>iUHks0R65nA)8&V1+1|W=(VtWC`P=z*av{ZYt9Tn;;nh0l^NY8a7gQ%ci?64#)LG~{>-$AgEl-TOpS-5
>XWg^-T=g-l44^&B=CxYa7uT<^-(n!se!s7JxvSQKd8}HCdP=SVTmSs*&AF-->ssKa)$-l=;`$BBzdoOxC2tgL#3Mqdc
fNXL<na>^p+mxBc8i2ZGt^{WZEf1^pY>yE?fU%f>$g+1hF4G42A`C0ouM%_e%kAttBkvO8)V)_X8St6OBYXplRxD}a@W
33>67G4o0evJO)b!<Z_*_JME~ople<rkM3ZexMw>Kw-65=Nw4ZajRBd+z;yEVrA*O}fFr=@B&XkRlZA#K5M$8kB`2}Bh
%+&TFbg~Z%T0@-+r_(!Ajo%8kNZ437Xf7A%`mbM8Mz72;a4`Y!7pd;@(SaeG`nQl0miR)2D!%U1HfqQ#Y>xR<IOqF6g!
ul-j8yIC_*-_9K#q~&hSsPBK@(M9Jvw=|NardqH+k)KJWuaw=`h*sO}qGfg=%ZD)^w0AiLImsO)5>C3Y+4bb<xBsp3ix
T2x6z#t%Duj@^f`f0N?qwqS`LUbI-t5;9Jz`G`9d&yL;7Q$nPdlJK22!eTJw|_a#|v<-Tth>DQ1JQ}ZgbEzyG+v8o}wh
DfzzBC2JZPpCs@mI%^lATZ;E&h;Xp^7yy?u#Sn|@$aWcH~73nQ)(^924AH$Pp!c-O&mtE%JLKjwU7iEZ9$(tJvy+U{;@
5w`<=c<K}S8G+Bhq5Nh%d&$93$lG{rtBdbqsk3W2D{&tCVd$PzoUUMXx6r@y3n5@`{iE#m3@B3>gQZ){mm#k*SvFE#46
6@irqStq2|lkQh3K<YCuA$i>mKdFwHsOch`efSg)B(2-B#zMS%PfZXI(+_FUZpc#O>~*`psC31KA8K9GX7WHh80-4eBf
WN{4()(IR9%Z%63G!aNQ<YiI?3^rNRzfY2YU?>UcXA*{(pkHVN<gabhA$9ig4dxp)>nHB1wchDpF7vt~{K_lj9)xwf<D
^7^+{0(yu<t#{(td)FJwj=v+?kdaW6RQe+zGb@mL~TO43}3^%NCp?Wm|6Yyvl+xcbwkwhr4dcDXVLPvIOis+E6B-u2%j
X$QCV#zv8f^gA02>u>Z+Y<zp#s8+9CEly;&61MceU{x9f1NC<Ol?~(nt;Q_i<u`4E`5^HY7nG}_|6H~m+$mJAI;Oq;0~
Or4YIIECamgEF`50^PzO$mb=8b7esji=Cznk-?X_YdXo-~<=GdVG4yZNGN6s5F@rq~1%clou)n%K)gDhOkOI(N^25j_a
xBfG5Xoaoahraf3OERR**bkvwv_(>s;FT{NS)9d)>Be#m*h(9jHp4T=W3#c4@4Y_0MO>UBnKyUvQ)D|=!3!j{VhmOLE`
9XiS@mHNPXoi4oZiJR0<%8+{m$`B!_Vby?HVmvEy=`(p_n>;L?~)Ta<->Gt#~Q(4v>hZDApc#fm34N(h1Tf!=)sStkug
d>BznRtgfx-vIlxH%c$#I?2%m8)&%f2S8dQD-ZWS3*2Wpzqp^lj;aIk!*uUIU6iXgvU>H@N;~j^gaxmDGNOgbsU;o!}p
RdTq+C#PfUs-!3Onq$gA{n>E65uZnQ%ijrF(*}d)xFj0X+M55!%p>0e3@KUsn_Y`97(gWImxQ+dtYB(oMET-=6Ze>pVe
Cvvt46r>dC!IYj0^M+`YuUk6?Vg*V-(*!#=;UIh9v!@8a^Ze@SxVlegFLbZU(i@}O}YeXxXeebIh+evbls!H=w>*Jc%+
q3x!%VrgKnHJK`f%3|jt&)NXduPmirU5aRpzZ`c*-V=C!hgMasle!L&R500L>)}t@^9i@Mw?}nRxwCZOjjafAQZ-+6<O
VI4pDb<1GZ7ZF?%Gd!S)mRP1T{ZhEE-G-fb*|laZ1#+`OqV;tX1x`Gu1l_E!v12Dg|I7s)1!NA|((yK(`{y>}}_w<WyV
+7v?vL2KZ%}P`yi2DMeFOFGWd}B5R&g8=A+uaJELkmcS3S3Nr(KN1ue45{CsW?F;(nM!>GHY~{M)9{D+ZkuX<w4t;#1e
)0j1`qngmu$^iF;ve~Kyk27=pIQ4-c}Jt(%%cHNFV(WfEe^fSn1v?xfvDE*buLYPS}=JHsTS1JeUz_kltU@5<+JLccW|
9v*^?}zy}`xL3~rh|HtBlx?(n-^_SrrA^hf)kZGqhj4YY|C4^D$MeHYG|X-VD@uTDnuvi&(z#I54_CTM(Sl;;<<0yq<T
j&u&d4DY)J0(g$waGmD>LL|k*6W5FvfwII5pV>(?={@9>6e7-D<+@TO&aCOh&H4r!{;Bh#S|N460ZZlRFRba<>#w#ZN~
XZ>bkDBd^x*Pn%gJohcJRl{Z+ptB-hFD_RT*R0(q@!p-J#kfK5zI_>WQ_vJ+ErKx-k~9D5l46^b_7-=s}mY+cIdSM~KF
MUQ?y^1j!`?i6!h=7Fjl@1G+i-3X{84@pMQ_RvWv&-u^-jSlwUlZw=7Hsw$KPHTL<!*?ygldK=+@5sPaezqA`HlV+TB4
>mm@b=cY1m8u0Pcc6^h&)Bs0M#iLL=%90E!E&Y%WGkT{f+oA5fkQwT*$-LBHt7IVyxo0fPmlK&%BpO4Zkl@gpvT?<O3H
<09Y%Y&Pxe>Z)Aul_SDfHV&re@0=T@I)ZVnokjfJwREt_Q9OlZ|}s&&Pe+(z~yUgZgEY5a9y2i;)nEgMyS=Z6hqO$J2Z
;JlfD>g|VV?iIIzQ_TGmbbV6MG~X4LbKY&>E6;ULXe?6Ngy~cwl6{!iTiy}sYd$7vJ{IZjH)SqgOLKcTtPtyENvswyaM
G9B`!=<`!t>`Wi$CQ^q=~TjGUT%|u)#pXyI3QTdzLmK7d4vpQHM>0dwCK;o;HxVGU;-@DQ_%tmO+m1F6~=|n-9+R>M4o
*GY&twi62Fgwede|>a${Gs-H{l8v;|`abbV5`{~;4#zp;%08gb8PGNE;%n>ErU<7#orFV8QPi_LU`UJ+n)*D$^yk-+d#
YRAiaPnigX&$;<z4=*~-Zzuh`4gjHpLJ9?@<kI&6_YuMIm=)!zD}5zMY?Ju?l@F3Tr{}o{=&DEEM5t<bDjgoZcV*u{#>
HyHd(BG5=U-OGXLvcGEZa2vpD}{H@O4%)ebev=i_zN=YuW2wUaUtq<ONq4#m}}dd6jo6m`~DKh0B3RSxx3+TPioV;$<L
6zgoSdKz?U{lsrOyU(XZ8c3un0_O*60!JKcFZ*54I*lR!c<Z#C-Ua`D+oeBZg*3=qty4B>>O*J<HRVvDoGAi{aOwx<C{
?~-S`KV=r=kEmFVZ_Wlf}#8(2=QPD|#@tR$*qzo)WEBE6p0W&Nr6P>=b9Nf8F7Lb+mcjO!3lZ{J>5Dx^SbHfpI73*|o$
Q=ljSdY3YuC0w-^%Dyjw7u4sY0S$V#_HvH(<d14Dm9*j}&o<E>C-#dBK0-ujfnUy>EE}m8iu@O@1YkLwrk-|<+z_wbv7
nht;ZRNICgQjz)D^^@Vx}A&W+H8JcQTn0c^-!`ZL;U${o#5P>c8s0{*ZFzp?OWk1&|uhepkq7s`7+jQwYTkaaQBC=N{a
iS{X-N+v>1q<<~OW{N_CP}KdxDdr`{)T-n_Z6^_udiyQ=v&pIi4km&qOd`-cC;cm0IAvc>Aw0d3NS#arV?&Wa(e42y5l
xexRbE{j`m`^DV5@HKOm;m`!uE3$_*RSR)vMyl28^iSJ8O--7L?Iv){(|8PccrVd?=Gc07^#1_?E?)r
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
