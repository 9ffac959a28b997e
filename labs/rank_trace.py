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
            if isinstance(ranks, Iterator):
                return None  # sorted() would empty it, and the program needs it
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
c-p0X%a-HFb>OV|6)1Fx1!M-9B=b>K=ma@xscp&XhfY_^8Xp#01e3^2sF(yrfR#y;JjW}qXU50ljb=N);91SW{*(Taxv
zKtB(qw!?5+gkc_ZS+eZ`F%H~G9My>ym7r1LTk%H&QZWx32It1>O(%}%x3?QC9T(=?3xn;R<qkWABfn%}IjPWxt=CT03
1w}1_VjoW+~P|@K$c}UgAWVT92`K|Zu<d5l1*@kk<EG+`tQ5a&I?IJCIuG0crHEd9BvRI_^X<z|rEYoteoD)2|26ebeC
WX44<@r)QBv0xgo2zBMnooD}*GYNLWxPKY`8=kU<Nn{g`}Ui50e#NzvfFha{c$-c1>;%XrKL(g0?;bCDPa~kshv!xUt;
Q4Sy86*bQ#z(Qa_#E!5ngNQw{$60wID9e=*CT#&<9!fv&Pze4oejxIctZ{(QMi*1<e%e@NFw5RRnC%`ACX#KA0oR8Q(Y
ySoRFV62n?;|(xLJ%t8{;wD+7)3{8Z0El-q(g1&i?Pa={B{yksHf&z^{n6Q-N|T%WxF2l%rXTrD=;w1^`PcY8EAg|BpL
h8A%6|o)e_G}6V;2sw;z)P-$2^-ukB|9sTEu<&)1IaCyYl|JH{hRGB=G$(8o%6dN-@g-l#Xh3L&;U1AMU(lKJ|2&qzoW
?H<o@7L#FXEnSX$8=#O;M?+(V_;cuwPzyy>HRU^uPbV?X@My9npKop#)`RZYkF3nW&PiL~;e-RAg;Qe%Sz6(!ZhA?X|F
?#6P{EIbioF~0mhO2p2sv`UQbQBMV{$FQb_^Nkua^4xKq5rk~>d~*?$ggf^G-}^wfa<&)PyHA_hTTy(7!04{IPMPo33L
OCfqx2Lbw_$Hz<ho~5C_528Fm}C%lx;?^d>8^d>)*K;qLva(@8onHwf8oywiB{1eiNpBjiul-A?afAY%!hXqD`*ofo{^
$ZXM10wUD&Slk1?eR~_z-?&eIWL*gKv8_ybum;eEP@tC^oyNn2Ar?NY8n^P0ECQ*kk>ub1#SgbzACP>OEPcHS1ydTm$@
xzlb82;yXT|sFyvUcjtgb7inoYm-VOc%;sq2*KLjgl{n;*1igMoalV4d`KU98J{AS9dlYBr1fZ}NHSt8%$YBmaB&*H^d
6tbiYXg@1g#7=UWo9G8M?51&SZLGaXU0(FBKzwV~3i@_5t?3YgqXmDO;$t(yX!C2h;DP$~xR>+Fvj~doZb{o8?jWHD5D
c6e>sI;CfpUI*>82c|bl(_T95rL+s5E|3-S8Ho5RodmwlSTdZmdmtZA4ZtCdU!~dn&z5)_>eDChPFNLzZneuAOGS1_@i
hzQps!<)6_G4q));L9AJo?3hRy>@__*QGrN8Uy5Y+Wv?lP(!rf?0MOO!k25!++xYGk$xkwEpAo76_ax>|HW;Sj!Fx(v%
o!X+!CTC9DMgEWm!BF7{N1=n0m=M}Io@O_t_n4LUUU{E-$R=P~acXo!I61)(GO!h#r2xLegHyE+j|=+2Mh$#pTw!UPml
l5!u)Fc$-k>{ao}0}z>I+u5_zH*!62?AYf=!r7u-_bj{UJ@}0FZ;V?Hi&v8r>eVDXgJ1B^*Ywmic30ax??mZeLK9!H{!
4jv{2*()LFwcSdDGnyXAG1Y|Ok%T6d)1=(pg<Zr{SiA`h2R24pev*nNUgT~-8NB#XdVtRE>1dIV9IyMOi9?@Sz_1=Lj7
3Yg|nUug7;=cK8BU=R-ZCd;uFbgIhJ`I2S0Bi{epHq)p3QS5kpc;iA9c>Y~(MKQ3!QV9d2>dJZaUg{z--~2fLMMx4J<F
4+&@A~iXk)HkUSFyVZ?k1ls>l0$27FeEQb}UHCZzy2K3%~Q1c{me;wC2()g>x{#riQd;505@)cVh`$aYIb=zB1}UFHv(
b9t7nQE`$r5CX`c1mea!4+t!XGuQ|x7zQjbevb%naOm|xgWNk`o1x8-v6>${KqREfg(A{G0C?lb3~9)79O$MMRL16Zwv
7tmHWLWLQX(pt#7T(q%B%#T<BJ>ymKZGc{_S6JvunvUp955tr8TR{oKv#|-7@dx$c*?lpMjVg2e9XFKB%Emh>vOp5+1C
5QmWe}VA{xPDkQSSRGK8JU(cuMlZaLLZ<{Ir1*gA+2vnsXcS5cuG@epVyNwjMG_DC}GPM}Ac}~;mc3VwHn4od|Bh4-H1
<3mHy(;d54fV{>e@vEHGMS}CwAt-o)?~d!Yf6eDyPH>fRvQ|+?moiVK*r4pKDJR21RnBfI*ZFCPKr#?29%dYq0C+_6bZ
&VE+x}GONuh4g3>WiP?ts$0b~iAxdW`ga1<&)iu7P+$7m-&6f89<Oo3ptvl<Lw4QyLfMiCG|pN(M_I2nbdm%3w+250FK
^;fHldN=^wel(C!#Pc!(L_+8eqY{l;(OiHE#qyD?s?VB%uLuZ6vSNr$jS!ExPPoB2;8dQ{_U&qZLxUY+Ln9FD8$7Jxn6
;8!^pde+H-<U@UxU$JupS`_cZi7IQABJu-Sjq&>O~ymp9&rdO;6YH_@x6V0)S;%B+y8ODSjBpYLHMd7{oB!jK~P6VPg3
ruHY#v>@lPd2$-0Gk#&j#&L7x1y)c5pA(xg`QT&sI)xFQtNAF#V>N5b!c_I9Zy1D+@K;+<Y$&RBXx2w(NG|EKqM<Kt87
^Y^kzG?thn^z9BHk`D`&YZK4B1QmE1R^ZG({uB9p8@sRV0RG;Hp`MQXjz(HQxNGRAGxl2OhAa5@{ipRVJ6(7HbRTpNXk
6H%n-K}>*GTzhx5c^rs38g-kGhG-XR-vHxqo()(EW(63~9gEQOtmyfOq?M$-gTH?Uk=qYe(kAJ89Q_LVH02Y<j~g%u)-
Ar*3dgH8;5;3j`qpuI@*gL(Q9(B}mL(QHDuFR(>jrr8v3#Cwqh5J3cxqlCI{Ksco_@%l4xf(vaD3c9$NOrnBb6m_f0Ji
?9#_)i-rIHL3c?&i}jw}i>3-JMI!P=2x_RlJr+@es7g8M65twTVChq%;JZZWfr<H)7Nx#SIZ@(1{q7ok6~bv?vlXO3{q
ypCZzu+@?e*Lnhh?HkcF<%mL*})1fXVdGbpUqK0ab7l^jCJgG`sS_y}D$BP}n9u<jT;N)nSbf%rohoro@N284pg4(!lX
FyD#u)|?s*L(?^BXE|0&^dF^uf0eCt>SnE;=*l4j9ofv-zP<og`fn`Qe>kxjcU8Kbs+=MkZ{2lnN4pDpqw$!N@l0Bq~z
N269|fyRTi;fM#W@o29q2ek-kBqmO1nHXIjr9nRfT;^O7S-W{nBJUBo%Z;lxse@H<lzcUQ@6RcjGKBO-7u;x;JrIJRR$
)%3W-svv~fYJ(zpM4}u*N8RJbq!fXIVG4~93fmY+`A4%0oD|*&8x)QU^^ieF^E+U1_(=$`vxE;jj?vx<L!|OlS42xgf*
Cyq1j1m@v1(o(qs{jDy6~xMG7f}>YE>XK;3)(OhEEKvh)`+Q8>8Nhv%9!6tP+MJODk??+1-7)FWlj$Tc0-B*Enz09aUX
y*iHDS*|f<?v7X;Fo0W|;7|M#eiFQ@>)*&*($v}^zI{OHBXfLv}MeEFhEs2myGdqR-D2-ss!2~74kK`|F^7HS2IfhDPA
Q49m3+3!M!(7l@3WF=Fd6~@skF-Q@N;nH*&?*Iy8Oys03-C%rjO$pGmiz%IFmPEcecc&wc~(^-Olwfe5Q>brN|`(Sj&=
^@?e-J|vZegIjDyOQnc0%@(sp-t0v=}^L6eQq5@OwoNJ?`^La72r`4zP5YGv5|b<7eaD!@=y2<Zlw+n=OBC4jU!(iUt|
k{;nhFGr5D0d^BpM=XkhJO|D8F}*q|kU+SEwFZb_DNs=?g$y5nOlDENE%g9}r&I_Vg*?JY14o6LY3+k)PDKX+ZG-3`{_
o~KnFA`a;(>!t%05lRWSJ%(Xf~usi0X7U*GB1$(H?iP=nJ$kBJnu7gOvAMesl+-Cek+;KcG!<zl){uMwQl@wiOj~$Axq
Q$AwLWpkAhB>Y3tn{x?D;3?Q+rm(Wa$mK*xjHd>Va)+Pl}k#{OX129@cVWLsUXMAsUx7*|T6V2UryC(pOtO)Cx6~NYg<
UHEgL+6FY5WiX`GdVoNf9*NY55aOZ-=a*rg@(83QwB=@`^lN|Uv~Y_EteHr5F4Oq5n?``Wud&66_KAH8bfB}-zUhdAMx
`MhzlO7VL@}Kb_){&`x3DcCuvpeNNCg}zy=D>j7K3j(HQ?tr)(nTT4>YZ>SI`dtbm$hLUu0X<fhAIzKq7gM5k^R4jT9l
Kni^pKxt;4B>A9N0S%pU7JvH+mJv8*QtEW>aI*H^{ra!J|MI)9eU(gr2<dG3;VYQnd95Ew!s&sj7#VZsFVkeo(}VMJ#y
xLs$6FpOEz?;W)Ppj>Lj$Ql&5_Xy)!V5mep);)Vwa^duGWkfOvM=Aj`3J+9K)kcAGygit|MrJReNavo`{YndBz5at3A(
4Z<5}v=KfxBreC@=;tn#AaIc(Emcosc<!mB&%_h$)RUMc{3~J-D_{z@;2i<+aBuFp#1JpKHw8G!*b<X;rG1b#g*nUeuH
JWXEM!?lry^?a-+!l+*8782<ZWDJ_<8l|*t|*yn3po^Q)2}bq0r4?j4&i1(hnS&#nv$pr=R35x%Gt%NlxOn@)l0yy(GC
>^BT$gpgtCl9pGPjo+LVQ+W@92{Swo`%?qQ#-LC_b}rCc%zV@;1Xg-a76si?Q$z;~)FmiY~cO1wYOYVSLz&IeH?;>E(#
V;l)A3R{){lBD$T%hRSNJU+uSY3K}!g~lp@CS&L|uKAAe;)U%3KmpY?8L8m}b=HJMMmcE^3~NmerHVOnh-9559XZP)zX
I(spj`#5YXS2F_MzZImG)S352O#g+{j1Gq7D7O!lMGzbvzJ{Vdr|-D5$R=VESQR?|`iqZ9e8ii-aDwp%vDO{`+sg`{g@
WA>cW{RDeOJpnsAqy-kQ4k)*J_0j5}NwT!R@MHc>>ZPQtHyG7$6P{NyZQEq9c&(>SmcUu%Jw|BFAlFYVHEPFuFaGTAyz
`<t8!(^Il@c?@}&*!ro5C}fXE!10JSA<Jjo(5pJ>n)ydZ|Pin`*@$t;9r>i?K(?mQ;n?OfBTy+zai!QyY%kMr$sOheBa
-`di5$C{xCWjyno-_em4B!{rmaoWa|fm=so<ey&eAGzo-ArN8t$+cQRhtj91(D?<bJ;azj(L3*jdwy?;L)zJLGN9-WMp
f9E@jVZK5;a{+(IKn}8ucV9ltVjmb(8Fw71hlB(&CR5=ysb4>z%>o)xs3kk%;4u{@izE5Ouycd|8Eh^fzbF&?(b*3}|J
6ts6Ba^6o{!%l@BOrzBbMjL|B$XR$!{Q-r?L3@1OgPFHli(?#IFo>2~di-EY@omi&<6%{`<Mln*p^%*aFwZBAI)HL9zd
GgOKn1{>zPSpN`;m*JoI)Kh}pm*h&ND$?5Hsdf`o=&oct*{|Kld>`DhHdp1@A37!{mkWGPbu4m|tHXPa$MCE_o>bAPxY
wz{fm-M#_3Erg#pFTR*@ByQG^>xQP|JBvk=U(S;uYBMu%lt#y;xk~s`wB}kbr`9UkO!pI(EmLVhiiev%ceLp*%W9N${a
q?P=ISE2g*LQexIW1NS{*ecXMbv_E)fH-z|Vjd^`VLk^22>7)Pn+djhhrf3TIaKAz4Y4?r;Pb%lGxJ>MgMFntFF$I+|n
n{0VAOLeJf4x{pJo?`zT{;cWG62=ULU%^refOa*_zChSwIt5TqYOVO_nt@W}s{uuEX52AoobjIU`xISO{wjNd<?e=%xT
eH)HBkl(8T3`n)N=rnO<y$M*!d2IstxPpZe{@``iy|#$6>&pG%)K5dQ(l96Z~tMpCn7dzI*b!tIY%3p=lx-I1eaWp0bq
~%c7~L%QZq>WxNCsdOo2~MG`}&r!h$KGoU-G<t+HjL9@^w@5VLno{w4j81u0uA5<ycQ$@{TlMeq_vI*7ZkTK*rJBYS<>
|$)JfuxaiUh+nS!I76`fRy}q-+dJzcOXLyaI$21bN|}}^sxec9|Iq&0rTB%yVQM1ZQb1G!1Ks{6?avcJ)}!>#0R@7W|?
ZtKm1nf9;iBZ**m{H4bHDRCnT<)G1vYXB<y^%bgQyNUrxdhwLn(On7eVLLDYohC_nJIhEJtPUn{~!J`bRb@^5B10B*)8
jgVu^4yzIt(zeCF&31x?TF2ae;QtnW_zF)gX~=`3#B;fbgp~kRiLf^E%a1Lr=3B97kpiPKT@)!U7j!}CKzirt@>kz~{Z
;H==L=j1@#*UJI-Pzo%O9)BSDlW>O{CNQJYPN}vuXjXb_;7|91n6nD%uFfL<cY@a*$}(u!lw8-p0fU`_c%XYPkkbW8%`
1w@qhLhzNb+!qJ*I$I*XWJuIYs?u_U`*lgbAftwII<$sgmA+*Ss<ZCOS82}Ce%uLN~r-)5!G#suaOFjMusgRJLF)cZk7
HC34WME5a<amb`BjN^B97cenZ*{{E82a)tSxzfOE2YR*EQbyth{lIxQmJgUlQt5pbzrq<QXjUW+B;e^h#>FaFDV7sCP*
UYH=SDwB(%Rn6l%py2aRh;uVClT30oe33znmJ=!5J;1f?Jw8MFgr6!smN6#Vb;H~I5o10L=bNc9<OX2~R-nQeTZ&!#|%
&DNM^A7Ni`s<Sab#QAvVEpwzM*~1;^;>#>)aZ^B(>4W&F-r&*#Inw+Bq}i$2i_>L-^f$YKa%q(<prnHoMl!4Z?LJP#7x
|N~#vQMNPC-}|^$p>1K<E!w<a}Rxv8C+ruw&Qj1_oMG=ftHgz}kF;a}oKZR>9ob>43HU8fG2V1hVe#YiqMpNSG92sYXi
FUuZkv2V#dZ9dm<fvs3;%q*R`-h+>6`iKIFTqF{=K>^_@L)43m^BkfM3k->NnCM!6Q&5;1B4f=0H{t^wGKDx?BUF6Jkz
E&IY_eA28RheVkXw!`R{Pq?JFmfw4#vn)Fu9WUV@LoKyIa8dN!q6?h$mtAVnm^9D)`r`R<*aJI=uHCp;LLQv#m$g!5k0
3d?EP|<lIVlR@wscHpBZw&g|Hz^tsxi90|*!iS&-BVl7`wm;qeRSM_A!c*pglyQyUNb<}jK{6PTuVRc*a@3Y%fcO{4ED
y+a#{DY>ZN1?M`9k#)DDc*Ob7V*5KTVwwb{dVRb>%(Z2ofwTf9o+KP?5;ASc67A^6%Nk3&ub?F9Tv10xw@mLc6k@8w`&
(TD2`wG5B4u@EkSsyfQAi7ToE!l@f_es1=u9eAu}wUn^ZHScF&F5@(R^YJ{!Ul~BX;2b9<&^yJrBte_yD@~`ifUyk@Ed
@I?a;64`5%jJ{Ngco%A6j%@)t@i;zsMc<}TboteVYiv+E3aYIE*V7O_9f)DU3SeXTgeO|(5Ea6&Q(ZhqG!YgwREtM#Dc
<EDmv!b(6GW#aBI#Azgc_aaCST@@Q{6BEwM=xJ;6*}FJnZO#zywNOZA!vKwo4J~11zw$kZXWN`xwp<&)E{=2K<4c&$o2
D5cRT(KNI;SI<3Ij)0`$j!{GVKUvPL17O1<115_HDO`|%(C%n}aXtNHOC{<j?$LN<3LAggBX+TPD^fxrPUBwFJT$=WC!
)%z95T?EUQ@Sld<dbMH>{z5WN;3<<-ppH!wj9jW{kF}UM$)AoQsI!w=U1ToIK9A!J$|Qg@Mz&$X9V$e0gTLP=i-O=n0n
=AUh{Sz5TR>BUWY+Q*suvX$7mg4CYfqL%T0wEgjl2*`7B7->gyk4mLM0w9)~6EDS#I;u1;8?2Ra|Vex+u;yj^sWD6`F+
iY?k679Q|PHE&!&1F{gmUrLe5H-{=C`&>9LV%e}v&^N&ryq=}zihR2Th@5oFBISz_-FQ^{ky`R5414+_7uJcYl^IEMp*
R7V<K6!a|_kj6k`=<%$3fApVZ0-fj4<1R9#pn;@{vgvv4nyKyiF1;jc4;=WfqzQVOv}YkvrLOVl70MF6lj3--S*`fRK&
jQ9A<^_UV4!gb#J3&T4`AywX;(Jb)xWu>%(={YzipD52I`SnT?vwvmf3UCjpt4y>I}?;)xzW&ZKmpg#BE1bl)^X<ba7^
VMFk1Sf7KD3)&FNju?xBGwdaJ|9Bdng~RU1GEJC?n1=66Gk2%GvM85riD+}_sH}A!s_gV4<U2LmJ)On4EbcVOG96^s_C
Pr#yDuN3WRg$6oHETO0yCs!H0IK;Y!p($>8Z1m3c?Gy_n|0X&K*!jSMC8L-#g4sL3vY-PcF_F=YihHOB3rA;`EmByc7?
6$1<=$KFOxZXxwT|ar&vUK4ii2HO;|2yCzfc@Q42Bq#q8vQ#sw<Zh<a2qdd;-$!l2o)1*xJJ7SoX0cjq|2@61E>EZ+rM
vVYZvZ36>R01^Np6iVq(n(Sqy8@B6y<CA1;$+LxHDp)0GB3(Y0Hj!bLM{SafHq3p>Y_MKyG0v+0=?(%(()ZyPVjOiUbU
1vcwq=KdZl;gLZ`K43<ho)x|alkuS<a`gPf(c%uEDT{9+jGnoYtqO*pT@12X@Z6m&jp(<OIw*N)K??{wn6MBb{8;li<1
5(Fja01fmys<W>E>@=CzL>p7ZS-qNJ+Gu3#?qnU$@Q9zJUh?M0(=e|2r&YRK^K9o!JZtfXgjP^~<cA~DnOJVaa}idp=u
WoTV#o+|>p_TTI=DHB*MEB(m>ca0S*>IR9FM)t&ru5dB{Uo*C2Ugq`MU-D06}3$U7`JG#BMv5B;sv={DtFAiazQ?ww!j
*UC;Gq!Mij7NCC`6`}mud(N6p&B8*QhB;}}02&v0Te_VdCq`$vRZ<Eywc@-z4iSf6~e39HGjI^TDqO2%f9-a9@g?ISov
AM^3bDu4Wm|Ru+<g;m=yfBMCxegz4hkFMJ3y_D(pQAPvg!cN$4Q#&I_xS?!3A_#eE4F=z=+Zz5T;m>@T|iVt+(EQph)3
4{a7cR;fpe|^k>pGps0|uC?0e|z+Vnc`fBeV);YZc%)9%~8DRJt;g~k8Lw}<U$G}bmap$hsyOV_V;-Ex~d>+RIWl{QiF
ckMX90tkMz3ef@tIJ$7>9-SM4Cs#IvOi;bS5ZXig+b#sU;%pEG51oT$O+ts7qk}rJ9>uhVB@siB9KOU|j@$)i^_d;H&;
yduh<`Q&$zZjr{uYNkEf^B^7%4PPsb}(><5{he9i<%P?#JW<z0TE8uR{E)^9rbm@Dd_#7~lbL5H*j$N97!a8uD|iOh3A
9z-F!Upm2|wAm!$XAi0GFDJo^Hi+ea9IyaddJV*CvYHAN)l)wbqdfOJiT%2-mWbttf=vzpJOurj*fh6wi(0Ty*VZ{kl*
2P608ZPBphebXib|x-{9mR>L#W9pRd!CnREbcC@`xRNN_f81h>qTMxRDq7q!;!s^xLTs>8(V6kV{II0I4gdU!^Ghsi8a
npXb)+o&f+UrKumy&hY|?HphTzPTvjaNKsP6Ldifds1Wt&k44lv%H+h~}@}sIhPo1Akl198>42yuU-M)~HUE)<$Ht<@e
_J-%W)wxI6CZupB#_|1Nv93|uKE)bvujP-Hl%Mu4wp;Ar2<>k5E;O=|->%T4y;Y;kX44>((IV%tE0(cj3#QXAWB1CYQ`
j2_LkmHx^nURMrjgqiAmFDIy5+1FahhF|#vTXZcI%v@VQ6<?5gP9(P0`l~D7ai$qBuHsL&|Yx&96}hJAohD?E#fd2z{t
kG|<k@?#$^Y_XJ82w#Ay3_(3`<9v1>#1?bPsY&A^_DinqT9RtR&H7?3NVU>}^b>oB6mmND_4RN$~By+JyD7ff$^klj^;
5j+)J#hg)(+BfgHo1%XYwCm)q{L&d5#tY6@t{GwB0yk#55!f300Lf4=J?oO+PE~x?#U%Jz{7Ue9hLkPsEGEyF%x7+c5J
j0PLqu~B)OE6_|}Q>`E(Qat|U-*j79FvEx94Q=j4jYCf>WpyFw^yvco{zUTe|%8*mwYAKY9+*Z%nCdJtb%luI;(#B|lj
xm82>91(bkZI$>wJH9(yh*RjU?sWKaqhT40wg0nD(H@C723lfmR?G_aot)+=yWr~E*6lG}s1V}i+@+KIa0+j1?S!|Y^1
*nD?Vz8Ez|A+83=*V;3$?YVwa1Q!WV~UY!6{D$UjgIkNJ@QikAgCUJ9U?Hc?}#_(bvUxOjirK;mn~Q1bwh0<yNdtx7@X
2$jSA^)81J;Y2qUQvoz9u=%%q%0PDFH+3DBLgwCbOAgAF(_W<2NIoVEhE6fFo=7E3^Q!t;q@e(zg{1=opw}Zi$-A7S5m
UIUcuCinNaAPc(88c&p)zGsCM31}Pp({6?Y%uuaaA&Tt@PV|$oM?+8!4!dr5{c|$U>fFMd@0QO3nOCZtJ2est!^naS$v
g0rpsS|q!NT0>2(pJ_JeWc923+sxyCq>coG66?`CaiMoHX9Cynj4QedDB#s@=ARC2_}*=Q;G{7$BY2%Vi9&EnZ{#Zs6G
U~a6H@zU9M4z}RIhnrPFM~rdf#OtWGt|J7&)c@PRdOCCx&yzX$q>T)SgL6PW#8_6l1?!FOZo^8r6yD4`FDolyT{KLJqn
sQe(L7OjquO!bCQM_7yu;mv^<e;k{@#Ux8fNY4b6|#F!yyM5x7#XWp{JYj3=$ys(UvLF2**2@y#d+OYtA%ONGVJaCJ!j
W7Jjj0WThgu=lr~kf##Ay$@OnT(O<lm4oUs!h;$7Vo6V%W)_3WQz=sQj8cV;|>2wBHk%+dW(~|Rx4gjP<ppZY>&}_ZAF
d)bI)#-WnMElcW)9Na0;N>!s7GT!qEc>BVfU4{kPh(g0{)X<|i{9-HJvQCDQ5sk?=Q(UPUvL>KoQd!-7z)FJadDAR#D5
!~yhg!lef2^F0T{cQyMu*Cgr4n7xg<u!ctGgoh<jWV7&NER)m#i{wRel)*d+oR(W+`Zq6i%%hm2y#)%0wOSKKMG3}!W(
D8EWf5W4BY5@AyMyXqAOXP``p#h8O0Kg)FQf&oQy;NTGy!0HCM{w}oVf(<@+ZzBcxg;@T_=(++ek{<~N8$v|fwV4;vG?
>^|988Vyz{Fp?s%Xu|bB9gvV(UWk%d~=QUc5IYL7WB1Jrd<-YA6;o+gVpP$S<X9ZMPl_>-~*6`lDN{b;V}uG5eL_{;1n
ZDu=5(rHAbtD6D3+Ly7_xOX-+$ii8|=T_auC?Y-Fy%r$&X)7<;xdS@e8^>a&xX8a8r*lUdpd@Z|xpp?()P#+yjFye)79
J9>rxAr&;j~Z;~T*SoO3^#{>+4BL*%X^-JR3GbC?j;kitR5?gUr*JV6d3tc@m*cx*Id1=Yxd?{{)gCH`t5f_@#Y)Ah`E
j?Zd?|}f1Q&L0HeC8Abyp2@}iR{)S|c`9`iY(b7-!CUnH;nAw*Q&H7KTlv%Tb=F9J5;i)BQuLPt~0rt!G^_;P~*XK^B?
K%tzIp>x<^yw`f_b+~JdE7$Gm0y)}IE)*YN;>}#SfxdU%&QqN~qO)gcJsVQIf{qOZ^~eS~ysN$gUgpHHgsUmT@Ss6Flc
2r3tF&$4yRz_6mq)?Evjy0mb9D>s*@(678GyL{V|%?f9rpV{X#nP1Y|dhL`aL<&8^5sIGNzi>7jHU)*KeY3ucu}yhN`m
3y-w8YnaDfn?n#jpf_;D3X7keC1X{sT<0z>Ljr4+}3I_qT-NN3(GwRLG&rLd;QMI>Ms#1;`#6Ta2Jq8|(lGMFAm03OMz
E*e1A~ux4F>M%WFdUq}iR!fDyc2aVv>cFuTt!nE*h#qRM1Xat91&?c=w3t}0p`?V-O1G{bRRZwtzz~?RS3Nz;1!OI<Ld
#|EEM&_ZHOBx#%nqyhJQkttpJ+qcP~J)(EWCx-(3Uo0OP668|WY-!cCEucqo-F%XQ$lS~Rgf>PT3y%{`ow&~tiz*+Id_
NOw;p)=@cx_cTb#7P*g~P#OX*CD(F|fYK4%3j&zS5zuaso-gpi$EM8j`~w%2O7Xlr1!dkR8o-G-EvH?W0qb%?r%tTkv$
SN7yl5(U>UbJyn%Vo8Cq~+chq5<mIHy?etf$sNRaFU3sjai#NKH%)0Hs#m)n9BC<Q0f52?n#8ppo_(q1kS6#5S?dcUS5
G2=R<Ho(#LA>jeH8w7OAO<+ryYZnCs*ct1-;=tXNZ@4IXs52+Wde~QhWn8BdoB_2)~hVH0U$u*Z<_4V|4Ut?0M1v$yvL
d_;Nat%xdJM9y?yzLObG&@X3tRUE_&w%lnx(-hQOzU?Bo%ZVp{<|c0Yr6;$YydZ=(c!45B|e|kX|WV)aUT8ZjF{pO*?8
MgT(&bh?Y4U-xRl%x4Jp($bRiIm#KV62q^9dpJd_eGT|((DH4Gyqp$&;o-LDsU8Bk@snIny@p418(n?9X!VaS%R5#5Q4
$6uov16tgD#ilYNTb3ED-ms%Ev~}x^I&WX{M+?97-MWSP6H40}+SA3!>Z$dolhs;-iz(|<NO>B$g0DWlDebazU~!osRF
<cn4umxImF__2w|Y@8G@V>1yMTl7kAMDWGAJF@{>KrQ!7IIotq0>U8ecE++4?RwR$%m0dbt7o-}xSS@X>WNm?pkwAbY-
ywO>H+#M+wdW3!Us8LShmQK-5$d_gID4ydhTTBuzCL<s28-$nb9uL8>A;mjoE$rSIy-K=eLmy_3gqtF<(IG1Kmh#QFxb
lm~QeP;~ZHA1!PSMDtmjpP||3?2jD!#}<?A~+O8EY*}*yYUDb;R+Qcm<zzc)9Mw;yJa$g@_0rj+!L!BMyfqP*!)pxxPM
LNdFOVZRetD>Am!5i$$R*7*B|e8?s?wSdQc=c%N&3Sc>1E@Q%9|3W5SQFT6ae~m6TR4DrUeD<KU^=dg{Qcue+^v$6Pdj
>JX=cloKkaFgExb{tizsj0tgp7YPHPS?UjpX560rxa&xwUJS)t+t|?ZygmpL+wCDM-@q{)!MZ3n6Wt0qY<$I<_o;xf%n
ZpvP=uV5%l6yTZpQ=|Tof^1s>D%O(X6%4?yO+<ks^r(!<#2{LqV~5N;EV%1}ih#KcBm)`($=Iih1?81k}~*5ZtU=l-AZ
;23Uki69N+w%K=FBN#0X<O+!5Eonq@dZ4wf?I|1c$#1WNnsG)Ij$$(aNR9E3C8U;Sb@DLhZVCR}`8)T=Q_GNg6)lY&t?
GM%Au>q3Uk%@zn6|4ke#Z^zS?~}kC23bV}Us{sU0y29ew`I`_#YFY7OTha?E}zK?;AGJ!@-UdLzWnNq7>p3Q>}|KU7>o
`;?|0vX)$4(><Uta)^yftMdYolPq!BPExE^K6VlbRBCfVb?XJ{OqO`y7;p@YrMlb#7^1=t@8klicw3h)2E@n502m06b$
6N?p~AaEpo3Hh$?M2H5i@fE5^_P!Y#(j1!cfKG0bi<Fb^MzL5=nFCb+PzXms9+V~)LZkC@Ey#B-M2<f{-$hnydsZjd*9
SzDMYjjk<w>oC6(cR5eoz~&i;(X8YO^QZaO8`<lz-yZ2AS&$WUlit)HkZJ?-mtwE<AqBii|GJI041-evEB2o7OZi7+Bf
*I<_D=LC7&4i;}=Uyr_H~6Sm+5O+-siTC00u9%xyTk@g91q6D^CWkUF&KMiWd7%Bm>KTpbQTa4|@SQgSxPs0uQ5=v;X?
H0a&b_u_Po&W<N8KDpDvi+RUm+=Xm$8^nsKfz;z{1%OpfM;XSVSv?W9iiJr#uHYKopA7u?~k?zVBk2qryVi(00jvhtq8
M*qlk<F1a+Cyu(n$&=d5`xaG5trM0)?kVF4C&eD64zrad{Z@hkRDJusPrsP5k#)>>qT7z!=w1xyYB9fI(E8LFqQBbs-W
)(%-YY*CSQ2UU42h0`M{eXARSR<F7L^p615yd)P&2_V<PZw?3ISb$qyU1b6kOLW#XdkeHKK`}sIn@Z~G0cHN&9xlv_So
b~{4sD;E!MYPsCxIk}+<M@^7>-6!&EIp#b*O8pK;I@-8E%=_5epPc6Jvc0Psd{J+0iG?sqE3(m>m)5K>_2X-aheyK`h6
dA>HQ?e`{92@t#1|?+QYRKylT+xMs=9ajXNhK$kk2Gj~JL<{!hdf@GXbpO;HvYjspY6zW`Y4{Fj%)R@FiYm!45(>2i5g
;3-V7yj4@t##J-)%d3hqzH1~T8Zfy1XrMf@pIg1gZK1$6o{1<%%ocMdQjM4V!-n-q;0{W899<7eCG=0gsrIT`myeucF+
0y6dR#882U67*7wf17u(sdx08?;30*G6RS`hk4UE=-RzkjIbc2XbGWhirD8WZJ;=hVf14{}w+E1FzNuT-%EivNCJWS)l
0x+;g90IY25yB3rbgQS(54?l5T3o-|gX!BN%P>e%Px198-;R{{J<LwUA6BmU$N`$ulq-RV+%Z-R6YixCKJ#gz4~ke486
%lThlk?qRs(cuK~1=+4r$~PO7&#9X-H&}-4Q5Eo1v1d7#ISotc8ju_NjXv!xk~i;0$sCwZ{_ugw<+RE+_;`2L)U+Kte8
{%`Aa9VEF9zfjg7?(=Ei+P~p@-zk79njRLzA{j?GapY2)9QXS8n{@b_BCbHG*-WBu?gIWt&z`ga<4ap?OWV?H*tec_Z?
=K*}I0WK_@nYm78E2?<kEF;QD+fSApv@eLzoLZ;h4>1QIB$1>ksveY2<wo4(i5_IWHX40gGJ3aFBI2AvFR1Zy?GU~BVy
nV0P1?YGe{H`9mSa~*(5u2b_CnHhPL`;42)rMFsve0YBpcsAMO`}gP@Cc?n;5prj8*gq3{mHlEm;BZdi=X9`dmD=_!yN
!qaniIAliR$UfuH_3*ZPQp;6x2=o{4P1kf>m1NYOsaW=7zq+{3??P1-LAoRZ=@TGz9-dtB-c*-3K&M$BRU6;Ebzb!fV4
2~tLjcL2e~9;80Qls;!G5ShDAC6%yPNaTKgNCP=%7y`Qk}cer$_+2s)U>(-3Bc|)9j<;(utk;eKa-k-3-^ibmv`9`W2^
zv3LU5B=(cJKAZHfC(HgzihKPBbU36XN7oohYc_o>K~$y^p=u1Z0VZJfl`#U>--TM86(euQJ(mFW(cqN{uI?P*Q6Uzc9
3L2$=Nk%MH{&$+r~-&MtA{!60b&zK0!VMvdec>vN1~U>(mX-osBjcZMcHf<9oVrz;!%yYe}b}i@F1dQAqXbzYIZ9~+Vu
*gTmU^F2-x4Qfq`ER$9)-JPt)6?@2utF=-4`}U44H!eBHT5g{#fY@_d=}v7FkWuD+uKS9}gJb*%>9%H{Oq$F3mUR*zY!
4L(XeLw(c)K)Ab)-^xh&@y!!VJH0}eR(Z9JUqeIvrwR$G)D;)*uMfO4vhReo7p&Gn4#u+OYK}1)9eG5_;T}DQ8W^es(y
A!pEnAkMq}vG~##Ltj*#`-%?;#x>Rpc|X-wzpyB=BJDe+1&%YNes?0crM8VYg(PEO;29j&jaVYpqZ=4G+WF_1xNJZtC{
jx~@^wt$v0i<G?^2^`yevc+T<V7UcpQsvfC5y=Uf|PiASpbtt^n1+oU(O(upybvtR3nuxX?_&>KmxZB$j*LQ4;4=c8_-
-G;?SN1>!jo&g3bC@lf9>!h`m2)}CI=!%glw^i$Iud43AE_%}kp;+Xgww9-DqDdQ0p(;OdLj9^o(lE|uen(*fnHe*ahB
VxunvoOX03(##iDOe8P|{6)*mzCbi8>yaBh9KPp&DxYtet-CUtr+@Ff87-7<MFw;z`nX33my&<!&R89^~+=_@JUk&fv;
#5L5>?(I8UChUDZK>opa_ekMB%u#(L2=;F9xX-SUrI!kaT$m7;Ym?WWek%h#k_6gAf#mV2D=O~BiPMmce(H<Yx&jRhOQ
MM10@<EHWX@t;Fgaehn?=x5a)YOPAJ#~$ECe&ZTFdM4Tv0A)1Z(IJpHHh{OYL<wJ7znN&X}o1G*P}|MOzM4$ns1#f)2l
jhM~X!tM*nF>kZs6&geK@Yrw2NBJ{4Uk=SvTTVNo{6z_z@)K9Z1QAhZa(m?Jvxe<vm8U;+4vzyp6bNBvz5Kxrj@csKR@
LK(C6pmTRwB3aJFD0<}fbR_<1P9j~5W+Sw?2ZnA_5S@tRu8_Q+mP2x9+jha7kG#?A-hH;JYKM&Cl+?ftQ@`%Yo1AT-s2
#kGjUiq(WXGOlJ1--r#{81PBUcopmx@nAk&-6YYG)v)``gS?i8QYzRvnDo7ZQVRT20>%U__66^j=_G^UoCo0~=T7h?x|
7qYm3V?}cwleM9Zqk1T0>2l!92cJauF=7G_E~vh0Y@2eNf6W!6YmyK9&p(w64N$4Eee`gN*V%Xu_zsCGkm}&WadtA;xm
TX57H||sgwRP6LXIdTzol%hd-6{{k<$-6n`ejT){ze-dFg|R1Ae;C!_iX9!@QU`;D>neli%TuoTZ`yltpQgo=SR1*m;0
99{#b&xsebEDE)weVE`7;mGsJ}TFdy7w_f+7$Itd5-NQk!*@qyb*v~s(U){4<WFJ1}t9rODK^6}D*b|QiT%;hQr;{Q1$
3Op*&ZtKpmg{{^7zG1aRS_k8z|Lqj%=^^%cs9MA&1xnoiW=YC<=%P!{x6;+!HQI|(4-zhM3SjYJh@n|;|ofL?&CiNg%q
%CVpq+LnFh+5(CI<{MW9KKOV~nw%RswFve}@|R85QkmZXW^#_gH+mFPH68lf}v=i6XjUhoUCT!SBt?bDw@yY|?PMpWEs
P93gPdsE~wk#_O%Lh7F9PAni63cd7D0Z1?WTYb2ee{J!F8KS%|nDB15oa-co11wVmIWmDscGdV{JamFz6g%2$LfSMrLO
`-gjFltxs<a5Vs~H#x;P})chC*SwV+A^P0q0kLkY?az75cJV^ObD&S2m8ppH|5%Hth;XHIfD`?Y%Bua2GTKQr^Z+!{b!
C)7%+_6&mOaStzq!>P!agz9(qh4z9~7C@S!eZ|*q}^^#r)4_p$*p)RTqw^n32V<D^xc#2PMSTY~Q{9bk;g1Q@hS+5aY#
;2%C*2!$1#+q_f3A`o8vYwS$r3{|XScXFVGQGxRJwo<R$?PGKJb<FtOE70(MS+?m5D_huL^EFwceFGV=3GBZvfWmR{X;
&_9airh=k-YK>x_O!>p9-JeJ%Uf_yW@n`g8d}@qD){R|=usj?4hDckrq%wNSF(j~TnA$5%|?%X`fNT#FHO?SMj-Gkq}>
z|u`?>DDJWLG8zek+0GIIqd?gv%quI)IL2!qv75ck3$BDAi!AdkFLSWxh_Fb>Kt-heH?7;%o~73TyD?S>fW5EPWK)$aA
HaD*H`Inxr-^Xr@7oPU5nO120CI|doheC7|GE8TiWe%ci4m_O{aX{3on7Sz2CuRU*hj+q%nwNbY>>RCtaSHt}PkErN!u
KwN$h6;b7>;5wAXl0;M;6@O2vVbWE)(2^d%nJ|d6y9g{h(;k+-?pxLOz$flJ3H7qf%EzCU*AEsC*z~aE_^=tS|>!ewX;
3bx0Y{UevgpfiO{=qEz34f{2aqR&*N>zuKv1;RStvhlVQeHLWV+1x1%B}CcoK`n%a4hPdbgORMaAQ34W8IR1<0mxvo^B
bJ#~Q#>vo?lkonU+mxnI<6NHFca9J0hxcx@X5(l|NrDWs|LLL%OqXstwA!-n-E3pmKGIFYgDN`_2RK>Wu{5yy@e$ggks
X>yxwM8cXx*l+?w*&3+!nNT@2N}43H@+8wK-Xm<-uq|;==ITS5E^xSIZXL&Rc}+qGTjS%37gSX436tW&J>>e1aN`E#|K
<1DLki0tNPpDI*$?++xzN!r^@A4SM#{t(twpLiD7RY9;=NZe8jxCj38OGCVK72AfGU*v(!@G@hqDvtL^<8^6|@uX)On|
4&p_##1OwoXgx-^YJ&k|j4$ktrg3<i+guX$F3-%THq)2pUd%{|oaDJbnL7}j8vIPVUeLD7tgRUVJ?}mqfNLEF901D@p2
t6=Pt#YsYxIv@Vg#bn;=sad;d9VqkW3tl=8JcG|{*tnElMSzz-Qt^87)_0hyf&Je#RGgLUQP0{%pXA7;$4Q<ohlDqOz(
6IoHiG2agq)>Y?8G*rrDt|Y?%KAx)pPg{#8fo=M5^L+h~{h-Q6s8f?bLm635dI&0TqlIj=(?9*dy3;n-Ceo^%&ejuH`#
j*p;EXsytJuGGfP0u-mQ;Uush21O&Ba&*Gqa;!ppXq(e-%H`}g>01AMNXx|enaoQ1CGof7m|qdF;TB&oRG=$Ku&tXJP=
G?e1)%t~6FOo}mT97fVv<Rx8F3mXAlwM~F^r?njFAoX=nK!|x_)CPUbqlZ2kBShGV2#*)R3N>;2+R(vpEFTt0btSqtCz
uhc<eFM4tSP+;gk1d~gs-<bzT5kr4F|nMX$S?P5PvH%_WO-tp;NQ%~9kBW~;FprtS8)5v|%Ljlauu}5omyP=MOi6I5HT
Yf0#`OuV5a32LF)@n6`Cy;z@qqeZGlHvU_z5OBf2SgYA(W`KP4-UESW<UX7-@d(K!&jMq0yO)a19>bVp7VD9^}NjgHcK
A~a9Mf^%sq{(dj?$!BE)`u$B%ac5e56|EFSpD6;s(8d>Z@Th$w_7&i%tPc7bmh*ZlCzTy+#W#oFF<ncRWc>74B46c=$=
eSRg}=(mk3&r;}7@I5{H)sPmM1n%skNKz3=w5>>|qcjvo_`=<x(h~bIR|iZT>R;hC9x1+2^<sZlDfV}v*@YTJy!lPxH1
TdJgZB%NTUX0e+7Xz4J*7p)Ug-IBSwt>`m%#U)eyT37>@DZ%qg@q6MYh3F3vA9jNbSMERu64dE)1)nOXySQp?r+o7nX+
hoBb85qhRlMj7eM@ofV!x&?`v8p>tuMqFLw%4gz}0fI~3Ti+UV`MhBL{6z4TQ^Xa_32ecPs{9B@9U)xjq)xD9uAA-;OV
u0`3+5dJ+fe`hZW%hpj=s-+3$9sSrv>N<kgrnqqFs~T!OMm3H#ZUc_a!v09$xA)4j}P_qF1+r!JQyTzn)rxoHm+NTZh=
_8sm_>QjYEG${I7S8o}p+j_;}aXq3`OCDdI8k&^mOZ@%kR-4;qc|@d%IziraLlAALY2;*PFOz*OEX)3vNr#4jVzVX~Z_
!h-787U%$fKY9i9H35-_O{GzF$<(2X^K{wLmPVzNLU7gn5fwXZK?S-xiC{SZQWbj7mLGS}CJFWYjd*D7$3OpbR1g1U`c
9Th!nHk%Kdw2y8K~F#*|ivg_)Ul4WNn~0FNnXMM&Jxzq4pTXabhWxV+c~_y?*!FH@9Euslq*kn|vy4Afi_X{l=bwm$j;
TU=(0p^6W6jWgtFcPVcSoJ{127M<C$_T?Zje#Mq5!FTXLvz?2Ps(XUZ)LJF+Z*??~0Cm(F0oA|er0t&%8K}Oil`4{(I*
A+o<o33NDBvsx+WIcpmEZ`_T*4YD8em)KOn|I%SgZB%7zM8P#K&vI*#24#diz&`kSF|mu^2p*Yt|_pXIiQDl1NzsyP4V
dVKq++XLaS#Oag%h-f}LE_7M295OnRwgNgBS6O0#+B>Bq_))cDvCr9o^3V~P{spqXY_PG<eTw9Aj)rqOCGB9Hx*7Re%A
DvziWK)U=8e0F<#tGv&;7u~nr+c5kbN@u!sHvdp9+nx3<ds8SreLKBPFS&T(6mOwdb+yjL^z!Z1CDcjIliNwcb!NKGay
3h<<$*5u($`S_ymOvhNFO(q0nlSVwNYH&zP^2n1DW)CJ?Z74S_>_G)mqR~dW*32F3#UvNUcQILRwla-$^cS-(dOI7dPk
W8-WeBdgOI47Ed&J^hQJE0l&Dp$Al*{)O1>HZPMwT_Y!FB_Tug9w-am)A3Ir^`Gkbq92>*N&${gk$#|Hy5W8EL*}6?0v
e{aB#kwfdht?{CPv9{v*ninAv;d>VOUoW|!0s}A_`JbVaEmiqc$ZMx1-gZLpVxtEy9Of937`+q9=uVK&F>;_LUz^`B<T
`EB5f!1w5LBJZ2J&-`G*;7o%W^I?w(8I_dHv`IGi~+Tu$lwuU|t(*Jc>F2m$B|#D4y0qeUM2cP1sW^Mw_v^R>!aSc5{7
D9?P#oYNf|nE2kpj8qgs`erp0C&%z_gKN+NPZLyMJb6Vv%chc7n7r09nPw~4I)pZR%g&x-k?18$jR)Br$VpbhqQb(-rB
Cm?gH0@w>6DfTAojYQI@po6Ez*J#1eH!_b>u4?C`8wn79)D)0NTk{B})Pw-4|!I#Jk-s(yPrx0?kWiivuXrY)M1-up!h
=08{2II@pT5o0Mk)27>0O$h)1TP#*tnJuVYKV*K~>#vOiMVN-(OtnN$N;q@|;2djajS>#2AB1{B42^5F*=Zzz~<nLSj0
)W@kQ_z+tUk~C&V%NVi*-3r&7a9#8Ws$EgJG|=hLfY$Ib+Xv>t<j%s`0y8GNx&B%o@Fvw&5|W16bD=8sUn5f!`Bma+w^
Sb#+i_13bH!LWt9RT57WNjC*bT)(Ni%28Zj$3ndLVhKF0@<mMz{%5lDP<XcM5Ce8|eyfh-w#x6}DqrEjteLF*b>(?_7R
xO+cu=pDj!K$Sr(>o_D4a1h|j%5_v-bx>LJ87M7BdyO#ue-+!q{{*_DZOxsayJa>NOn!sgnTP}?0^NUrA|-U;^K*N&S{
??!)}QiHqWr>#1mx2`ImiiT9v~D41M|AKOHEuwOgV_aH_s5a*%9IfJs4VbaaDW-u8323JIfy<kM%G?IZPJjG)eE1j~T8
fXB|gCr0nk8Ib>m)E%|{Td~gjfGsq;O<uH;bCUi6CMR;_`dz5jHMN}xr8@sZkAnmQJaP=N>^~?Vlm#Uyci^qp#GMU{3+
~7O}{w;$5871^ikp_ld4{_@7(i6CSZ?Zq3gpAdpA_DYkL+yJR?#09NMGr@L{7$uLr?nJ1ge{R+Lu5bV+xWG{=~R7V@J9
%LGG9NUoNe1=LgviH)XoJ<XgC|aoBQw?IJ79&>Y*g}cn^%IMYA8F)X`#gW5Kg;8adR+Fz|!r4$M||kn$5eQ+&KPVSHZc
GinSWRHjq61AHQ-hRW1M>mhpz&@Jo3ESV@nnY`}h&y+#-a355BoZ>GfZmk+(I4$uiMiE;xKEWn6B{|;{lNPiuNxuUOD9
dF)UEo1?=tv3KoZu3c!y6BuP49O9vm&)1Sr?JR?1_$dxraX;S2n<RwQ7TA{-()lr#8;S9gQ=L3i)y6!QR!LJZK4$fniv
A@OKnN;u5j3lj{HYzy7c1KVOlIwa04zKU;gqgnr}_79O{=ztJ}z4I}kEL1a<#sw&j$NiTVGg9_=J<SM<YVz1XOD01h)<
~XaS-oC!NJV%A>&F%C&Ij^_Imbrti$<uh1*4~1`+qpvZ4q$w}*BZ!1sLmg3PV%blU0z-Fu7C-A_VzZJOq{VIaX+|^J~-
UEzG*)^uZo~q;1j#(wb@1I*!H2l;)r0cHJXY<<<MqkPAvp6tZb!joh4`;z>d4k&kH=Sh*gE{w9e4e%1pM&*7uWCJ0`uZ
!c^ybJ4Y(sxWWe|8MP@Z0#i<Tj^rGQ=zKu9rDsZ8iO4sw8(VAL9@fEWLv<jV%?{WT5c>ZB;S+AwqBDr1vV*D9_C#wSnt
K6~R0^Pds0NmqCoX~a?sY3n;@-9|E&ZZ0c-?#>m_d*5MDm1Br4%e=y%Z!>iY#fRU1*-_{MQ))S^qxND%=?G+xn=(lsL|
IL0#xw7`D5>&CE9o_mI+~i-Se2*Lt?tK=kR2{G{_6`PLidXgAdYKy-@xWVyuMf9|Na{1!*OnI{9k-ru&yJ)Wc+@EK+Hf
vDE*wy#Wm*k#X*ezLzJ3wK3OEUx8~yrT8KcGvdAyKHZ8$uonS<WGmBy?S@}yJh?AoPYkwK0q;Wdx3!-Le-<o;4I&zcWz
qZ=g6yzad=n%B}+uD;zL*{CYn)RT-FNUvCng;a|CAeIy`^?&k-Z4^Bh1JSMvD69iA74(#{N><#D*{y~(i{!Y*ufUrC8`
XL<2{`T-pNsp}%GfJSj(mh9*+p+mYI0xSfz2V$}}OJMQj)?n9a51879u@r;6sGi;0+0nhz;uGCN+Ty27e0$=rR!+4vEc
P9;<{9x@cPKjK^TtIHcpTmLqAEk{#)v&*F+F}G@sP@*2W@M&c+eu5unuui6VCRS&=oQvM|>bY=9saLNc-4Vls+uV^)b0
yRK>s0q~kyW4LIFj?JFDD!=lR2d1~B)iSzwBZF%0|h+T|oV7@gg;HVDGN#|(OeGssreWy~jAmsMNfc}i#d~algItCBg=
MF6AdV*ZB7LnkPsnNi}APn92Iau*J0u?FHd*bVZ5lHdP2wRnG+lQ9kJt1<HN=~_SEYR2<-fjETwzB50%7kf4=TWN`*(<
xZOR)y(1?#c7o`Ept&8nnrl3lZ-W8(Izb;*mcGOe>@QKTfx(bo~}`+%X?HY#rS$1P)rEQvU{i^Hf=Zyyzi@?Lr6G_;`W
bB{wSTOlqNodXo)x$a>a%M27aoeJo%4-;J$@EFeyAG#bqWa-pQZGito^vzLA_ds8G1p)dR@<j%aHAY9fWr}<7kf+|Pxu
DL&*ju~GcDS<JVIQ!%T0};@y~5L<cz$!BVrD38)yR5qDi7g3-4K1286U7ck%Dd{gRUd<@U59c%HVNR=3X90?gyQ?5Ysc
|oASok=-3+R8rhNKfW1?~y?P=V`~}Ci)Wj#J$gyd#RB&`v96%~Ywff2IzTq<qJs<6DZs#3$fIv`dn_`(RQkZD8m&0@dd
fnl$@QI!7`Q<ddQ-)$N;K~(wiIu%3lTF1Y0y2F1lP9cdSE^5w$S`zg>MvTAeQR-@)Y8oCQ^AU5_wp}ZI&{#&<(g%S7RH
sw0pf*`%g)b2M>3>cQ#%4Xa{PFxH_dA76y2w@#ZO``2PEVF`jAeu#0&1}T+^dJ$VD9Afq7mA`dmAVsDwIjoWVH<2``Ht
wljxgUUkw3-QUK#)4Z;_(~y<Da^UA4D>B!0jo_WV!%VllD*?;dYyEUp>QxR|C2jAl)pHJ6CB->wt)8@<IY05Yo86<6I1
MDG%KoF*ij>D!rmlJ&+=?*f;^V#7^17Gw`)vpQgfh?W;rju}UzVY`S*CdS3JM8&QR@}CeA|Be)+~yhZ`vAiN`^3e?tMZ
KshzA{JjWrctlRZ;xN^74-ihBH&vqzAU9P9df9ep|ouwGhjW!x>_EuYX!%v<o&TugBiq=EsaFQ&C?)9CKS6!iJt=G>9a
&^`tP7b&sV1w7s&MjeaH>21YP{c*QO1&9zEyd?a{GF6J1PXZ;lSguNsdyt@)Fy7R%;=Oud#W62mI4Gzo0hs@N46j3YAz
Lw_FiNU=ti2%%VQ1|GCLYb*Tdym0%6fcWSK~gJTCrY2J}6TswxHBX9_jE*J2&@XiKLv;5bEQL_=AZpXxuQ$Ghh`MS|@`
{ebbjS7l&zWr}(?TC>~1ab*W_TT9U72to3Vhu`ITkpfbKCSEfm;3H1t(CF^RD@v)ha^J1lAKK@-V#PzO)4n`ho6LzMbb
hEfL%I9uc{*`%VQ4B6Jn|oEyH30zk2PQH(QBl#e8ZbPh20-aaIr<j3Ridl>nqhkg!{CL$X>ahy?OKIGW-eJ`(d5E*S<<
0;NLg&FMij3PAXQBP94xgN-g_reZu<#Wi=z<98#W-^b*a>dlWxr)8I1HA^{Hv7O-BCu2Mj?2yfPLwR)Z2S*xqDNn^3wg
mBh<Ux4HLr1Oj;%C7PM0e(X#eg
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
