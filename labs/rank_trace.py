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
therefore run N times. A program that starts its ranks with Process cannot be recorded.
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
                    f"this needs --nproc-per-node={nprocs} and join=True"
                )
                return original(fn, args, nprocs, join, *others, **options)
            self.recorder.note(
                "torch.multiprocessing.spawn started no process, "
                "but each rank called its function"
            )
            # The program chooses its own address, and rank 0 must start a store there.
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            fn(rank, *args)
            return None

        module.spawn = self.torch.multiprocessing.spawn = spawn

    def _note_ddp(self) -> None:
        """Write a note when a recorded part uses DDP, because its collectives are invisible."""
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
                    continue  # this rank reached its end, so it helps no other rank
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
c-qB%+j8SbcHlnqD^Tca79fHYFOsSXC6L?QZhK~@FB4roI~&1b4?z-=;Gzf)0ZO7tMEGf*_Yxa^@xJaa_}%`K{*pbHyn
>*rrya5OxJzJOPiCGxw>)`ro~`o2NtVfdvMM64h;M_qC^qSATO@h3FN02}ldke~k@(SY-<VVJ`*@K=i)_BdN}c&8iHqc
GZUS5I8#md;qoU(ge4hjl@p79?vK#07+21Ggq66hNX_9-oC*Q|5J9$!kA=5lv)o)O4yj~}(g{L8EY?5NTSrI&qQUJGI|
CmLqXgG#)Uu-t<&RhANkI63g{D~+sU&i<A$XjNQ!BcRT-rm93zKx5!&VBqusr(~dd6*eI`M#)_<nwr)ETSTLDx%?gfOK
{1;SayFN!H7Fo_Ocu=Jn8>oZkjXJim*E-rjAxq1%KW-?@Q%jo-@xKZp2vi=VIDSMd4gZ3aI|e~c9;vdh2E(iQahm~9q$
G^9VBWwN?0?ymbI{)t6A*Y(5c%RQ&$%M?KA2JN0Nas$WpODA3}99bqVJjgDmq92^?MYM@mAE6uiBf1&(M$;egH`HWcJj
#ZuA!R^1C5*ch)!OYQ+u}s6w)eASqo#^~8k6<mOK%i;9~S#T>9=0`Fl#U|a_H&m%N=6jlfu05c9j-Ep8i8JiN<61@6s>
bpnrBY=uU#M`>puZr(eGlzk1!tq;r!3-tc-n4I}&*_a^>mG=7Srs5f$F&=0Hz{>j~-H<5@16Z##2?0HY;*sb3wvfpo#d
77u$${YB8`C;4b#@&~Dgbao+u`s^_MEU+EqQB9Q{s4NdJux$KUH<K#T>o%z0k4+v#+3ule@s?+wuuP)qapoy5y5OOm(6
CeTPLuWI4_Faj5d|qY`TRDbH*8}rEk)__$%A-+@)>^fZOU{a%tAP;x1c7du%CmzspvM8x)&u61qRazix07FLU_uxA?~`
8_Cl;+rYjPQ<FVPi1v;2#*+|WV~2wY)(Z`mFP5YVbxxS&j;8L*JtdazG-U9`Om{{jfqh~G(4(ASk>u;;ri4yW0#b`5<T
4$=_Yf1e_xJH;Cn_p@zt1)akEyd7z8Q_(pa1dyx|47`3F754N{i$^XNp9hga|kdK9X0gJ2AE?0%)#)f^PhB53LD!mVP;
zQqgTqQO_*8^-DRht=QCz_5t8L5FBnMscB|!HUq;gx#&U{Z8kY`(aE#>#Ph}hj&K4575^$E!yg8Y=^0<7^TK&di#w;dO
B^KAFv&PkvRRxeZwwjOCeE1$-+t}H9Ybdhq_$B7?G)ErG|mf+zc3e?t?v!G6U}q8ncn=2Bo>kbq5_vZ22EfWW>T?v4fO
X(ymI6c&P_V|m@Z&3MH_;oi>yudn5!JgF%E|pRAt0_qw_Eckza}xeh}r(sf<t4lnSx|naowvGs+FTwAJ(ZTk%KYi`X$$
g%4mQ*(3d6>MJ%Tak$Y4|CkI)e!s(AV9$?$Y=oNtdjaGR@voZmG=C4mL6ohNO<VwRj)v;9gS-udjz#`QKr~nh_*6{hBd
`Xb(?&gR$x|u*h-&0+c(O&{2oEllgTG1o06ZjgaU{7U=<9e>Kqu>Xx6I;&z=#*(=ct3(a<N@eXMB@x@*;S=%a*|GL{Tb
9{7<Fiz)TlgSQjr2W`M}?*(~T04Z&i=h#D{&7hlx+=UC)$pd$1=n%-=(dnpbA$_Z}eQE}q<2mxeJ0<px>f&C3a1vbJ7n
hOdbe?+vXAAEJ#Aj_?GYH+I&>`V2d1pGp(od-lL2n1&uszHr;nmyTc0F|-1Qnz6db~S}Cus{eKDskqc*sv^s_kWqe(Bh
TEPUm0$1@Tjk5&i|RtmRb;OUOHtJVQ3kn;YS__~L!GNS0Bt0l`QKJo~&z)_I^1FAqr6D!G_|U>O68r-Fh40EIA#0PS#=
*_iSHnv5rY0K-daGrLOO1q|0)BUc5yeW_()7(SpN>Iw)5%)`Dk6o4X~e<Yv-+-boQ1V}*YxCm}Gu!m47Ajo~f3M_(b0!
z7vgZ#<M>-q@r7~7ig_&Yb-)tn$3W0R9HN^US>F4I|W^E+=(0O-E4jZimaOl>H56*h&vvasro#*+|}O4?NQWqcm_c*>%
18Nvp^;gwT>6#73Jo9~Hf!zvmYtcdwgZ#0Tvjd%>$#B;qP3Z^R%`qZ>LNLn3H)Sg?AG?&KQ0_WKPL&lY6vfQB*=$>b;Z
qiD#y+vlN)ng1yb73_IpPy*1)T}ePMbeXNE`n@?5Xjfe#6z43QbQ$O3C=SHt|XBk<xDKtF=2B@^an_^l|{2MVrHO8e?F
!{#&6IjVCT-W`!%YquIl{(w44_RM6(IqqTH&=G@F8ec#O0(GmN3>O7giqNEkFIs2xyqL6L>n;0XWe;N*prK0;h;^%#6i
ZuMaLjO~c*Ob-DzTROj^nG!u=*P$^a^*QO#J_Se!M4djSHUK4Q4MX~+ac9&G8KhD#<9(9n@h#|XJY@M(2wuoe1Hmg%_-
c52ObQ8hk8&km%3>l<{0dxR;lVnCSy)u_MAZ)AnjpI7fUyIh4uVLJj2sD*%+%9*9~bjGRA`e&=Y3Lmm2urHf$~COgI2;
`{2I{TGnRr8HZ>5evrYhUqG-EXBsZvA9}c3Y&Rv{)Dd>hTXfaZ;FAoP@7cvmh2rHz1BvBt|OT^QX>bWc^xq<)$LO=^Em
a(CR#T0Z2vmBm~ia^p4lja^zwVcMFftt@z1H9-6lUikhunalpG@w|DaKBVFaRU|HmR*Z*8c~635qT|vn3uj{;L9Z_B`C
KEbTv{KWA`Xo<iUNK=b%UeVa88dsDLD-(x5~rK}E`d1W-|3Lk2z~wKS5^sH?^3EK=sE=NmxMDysA1`HG-eAXnfG5J(^}
0m`v?h^mo9>}qGm?%*!5iti)Qmf+qj)7!h^SkAytvjN&A-{O4QTf$x|*bVrn+0@B#zFW<kO=}}GM&mt>BD7LzE|796+$
Tc8$v|4eDuo9v8nkphYlHwSWRW-%NQM+(KY`pCfq^1{7=I}Kvf8xz0T`Gc2sST7BTXPVKT0th<iT9y&lY(35>QM^>Z*v
bC>qxikl?TanYexnROHD+H3)I!nhaeXoFpKlzzebTb$7(&S)U3qtwAYcC^F$HMP_g%Ou_23;8jx&s;yrXk!Q`DnldqH+
Oy^k$$;FQz?QuhTqD_zkknR?gaQDL^c!ed?goMwdbp01ob&?93WB)DRd;6zkYgZGhO`Hp7{CW&GM>mq$&ia<HxYHj!gR
BV%?>f$o)}0Vl)_pg#4`|kLM(+W{2o#l^b2c4gM@*y!+=}C5@Or=G`(7E1_4<M&4$1n%<tkAARr3POsov?IWC4Y1+z^O
E1C0!lsTJC`BTc%N^Ue(GosZIQ%+Xeh|)U*yNPCc_6af=BmJcXpo+t&>zj3j>51}My+*Rklf9yNYpWY!$v}}eTQ{2?=g
C<k-Uu1oG4M$I7D6!zyjHjCZ0-3CD}~q^&nHdoL%d1j*%C<Mo>+rWzTCDO-hz0G1RoY0_DX(NMq&j-8CA8c8-O_Qh=B;
-t~^yXpr(xVCi6SW>)4$SdSFr{jw(*4C=*lYmMd79mv{lHIxhn1V6c!{456Y@klvf~QCVQpdByaUL5dbkH0MFL@Ff<p-
8&pk>pX;ouqst?S4hTyLur18N&@1%G)N${Rr&(*T}rz(Vu4Fi5<z!7Qkgl+=RCo$N%X_XLe7joMq`yU3DMB3EZNKLCSH
mY9sE}xPW<F;wyOhb3x57#b{@Ddd#-VI@l(pFF%T9r8IY6G@8SnL<56ThCRjuCzsOLc@bCyLs4S7jj65<~G%r_0E$8h>
=VUzZrx>@iV&GX28=JYkJED7%QYyO)jK*1Ig)>WTw=4IkIFmhJnk$g>Vg44jg8_@i0ZBh44usT!!iXSwN{euc|0WBz3v
+X5w&8ZCFhOY!HK)`!7cz2_%_iG~Qy~{F%&Z2kB}{h+Dqs!`r^}@yl3YLy;OGm^;%_&Aod7~yT*!3pakg{b|Mu^G{Q8G
)-5{O;w#sbr!wmp$R+WB4l3R{pjwX%rXeO1usHPsO<i|74+N-h+(@)qv8yF~|iZ)AgHC7r$xpbwAh0_!h@Fdl!TWUR$5
R*B(Dd3U>nUf}j!kpjGYpkh_feEbhr>hWkY{2A6sZksTCx)eof~CkX2cjK3b>hOoFGm_lLe~v=01>sVjKn-naau`PK9y
DmGg#P2Vld(hFh>S<G)2=QR&fZ;OvDRC4Y|xC7t5|U*&L)oUVOCtx~4IFFVJeL(dy-%1_k(Npx3kxy>!XvQNHmDb`9g*
NFc(?J<nUIx{&7ZWEV|^iTwccj57t9yykd5k0&GnQX`Rc%Sm{cI-zx)7^+o{;_qrM=oi<RXf=RNU`Pa<X#5&u-vM<ziJ
(9yUoX?ba}VlF09g(lSIdKFc>=9ZteL9w(L9|Kl$|NEaB6lmo_>RW14j<<sJ`oDD`i82Rn8NKO3;B>XNo$*L^CfO9B%>
?4HO!V-5(i0Zh<d4ltqepNID`=)ko+hfWOqXb02>Mbfe;cPaQr!M6-~bL`Av{>+>JK|KV@m14;rhM*@`R2{2F6mz)?^+
96pGJsto>rM%}Xk{kGM=_Jea#z8sENuK7(x<En<sJ|n6LO|Xwvst`!pjdiOj2U(okd0-0KU>5O9{d9Qt7Qf|hS&tuTVq
#*u#P;l-RvAZ7k218*m=B5mkFckE=`sTxnX|%{&!!0M|9<f<o4^QwKw%#*FC&?^~xXrG&vi6_|Q9iHvZ|uht=fl;CiF*
1N>j-F#gH?K>xRz_-9bu$atkQUL8Jsm_gRdJx!Tp%U>*)IH3WeSLs6$EcW5UV*KI5V`p+U4cuGTFcf54G<E0jhmG_gr#
W}U{W1bd1mb7ckmyLDLG<C$9a6usI~t}hS>_nMF(xc^lXya|9^>u=Da~g<V}LK97UYKKKaJg2lk*Pnh{D4{XoBI>Z^-+
wuycfMICNnPVUpWGI9ri$Vetf1e5Qxm1xbr3iuRxlb6Kn>x8DblHc8Mx13@&LUgzt0#dsCDFZU#Cxx<%x**=|VmDlH3Y
&ex?C)i2@Cd%loMZNHr0kme6@d$tuu=>7lLZ$Y?-8PAcBrr{pPCXm!%j*v=Ti)QRdq%wHoJ)KT3A!@cO|9zFyx1+1$Zf
ap0B@j#nO(Y5b;?x$5kVm}T?AAG>o%@Mx|1$&hSEjJ$B0Cfp-?GKZ`~^w$O4)U=u_1C!wSfB<ZfX@zh48Qe!u!dp18wn
kZTG#?K2SA-P%^phuHg_EO>{w=Q;q#x9y(u+IijX;RpN=J}xoAxx_l>qVr)5@ak;yKN@}>!MB(6m&S1kBYFKP`1wHgKN
k3|Gx*Kbw*#m9U!el*-Rxu17A^EX1wYGu|DWKWr<*y@Xi;>LVbAlY$Q{6+9sSu<L6*A#`-n(U4W5Esz|I2PctCD4u8Z5
lf<@8~=Lx@CPn{zB+w=)`eh;>pv!leFohSf@4EnM&<yc_T(pQP|hMkw^3QqQ@(}0q!fPmpgJz!4~n4LxHs3wp){HvOu#
T%jrcjRPPnFm@zKIY-+Xy9z1DBR++AFQEFz&)<)%i2?g0~-LVkE5)p5F^(Or@+jYz?in1rS}<O5S1%^cUn$;ThD$-lgE
gSHUTTzOmg$8)2F3y@9WH@&sj*NHI#KjX$?e?gAOauM+-BQT^SGfNgnva58u2`;?4Z-_c4f4xrg!wS%z~;^+^hK(EtGK
0C_SQ-N?-oX3yXP!kdp;9*t<gokd*4AlM2sde8R{haL@zo0{KcK)1;`jm+jzFDTM`Sh#Mm&d4|$k++*Nq9My*V<zzwlV
?cW*cL^$iilO`!5YOq-Wq#T&qBkK@Wk+3uHpuJJOU2YPvMtT2Go?_fI4Ud`uYJXq32(+g3-G3CC&_Yqzo=lRB_I1TL9w
d-uSnxZ6xt7;x0Y+_wd6F&<lX3VU!nWUkl0n?g3KJ&I#S(p^epCtqZIZ5S>&Pd4kvh19H*I)n3N4WC_yBdo1OabYe6fy
ZJJEbc0^MOFo^eY;zwk-QbFU-oP5U0p?A_!6Hv6yZr%xdOT~y7U+z!aMpPD<LMc<*=+6^BGl#GQckEo|I7GTdN1%hw2m
|lTPX7Q4x6HcDNSb%yS}k4!s;=TWl_!U>l-MI18)#mNMalc=*DE;s;S2C<gnqDn^1d(ZX%<Rc~WIHqa2X8_n_?yLnirA
i((4CIv7}<^BXiUE+7zS`W@0&L0G4RNVl2C!=aKsAW@MP%OsrsF4={mD0#i<^H}6w3MJnc$(mAJ*&GhI4O<z++RbCUSy
)A_Qgmb{L_pBcqB=cJRR;P=u1A=yS|L*5qqb&v1Z}cqu91C_KDg%20OsHZPy}`|DaCGJ?}Bf$hXgu;tXp=B1oi;<NcN+
kf%_`J;mXk=Lenzg2f`Mpp1H+fUk1FjK-Hm*=m)&V)$UxT3!r4GUb;d8Aj!=JE#7VbXcG1UU`Zj<e3(o4ZG-+Jk(zj0W
XO%sjvcz$%?;84?xTi2iO$4)3K}g+3lCl2w1%Qc19DYSti$v3$H&Lc<DipmZqI=fbkFmLTd7dOXC94RP`ZdA<U*M@W-}
laorp7?{y0d}TqY+pBAXo7-+B1%y{EtmT<o6-v2~ll#pQ<n();>sV-f@UV-spI{xJfH+#1TPl6(^35T#Wsxy7SDwS;R6
<v7<M$E?GiL{ZLv7E9lAk<xHIIn}$>HJ-4Y>=!b1$pVi*PM1{&ByIpDNt+D20^&__OC;Y0`M=5<hzexi!L>JLg{)=vC`
1eB;t;y)4D?Qz7Gt8Qif-aQPFJTv#$4FLC-Z4p-IA9#;6=kz<OLpo3aKohX;G9gdpg-2G$e^p&^XyA;uMrrsKq<a4-i(
Pn!TcT$#M;qTp-bT==}Vb|4s)AKmX-_I(YPnMohE~(W$5N8(<BT{WbhY*+pi!aAJ-~K)NC-;ZNF9C`ywEl6M@p(E{n0X
q__lDnswD<WUBTn*RKc|E$@~&;R&;2-;jiw=y}G@0T6&J}sw>mivW6LKd10V>VK&nrL^Yn#of#-;&tsn8o4$HygACZn!
oqDBY3B9kfD|^E{b`^Ny>?Aod`r58cu#vaRKwB*k&zm}H0-FkLKRq@X~A;s=}4p>-klYdby}W3j9>*UJ*pRO$=kjJTY2
63MU)z!%}Snc}G?{yR}a!iy5p!sgiraUWJM&jZ&wOLNXXbK31U*X_2`IeU42dyn~wktgvYS92j#K^tDs5hlrse<IftF>
iFBEIcuBQqoqBrbAD5{wF#jH0@3S5*(a=&S#zhpM2mbR1*OH{o&;~w1wU4c};We4fZ0<tKM7jLbfWs9r)1Q<5Nti`SCh
!HU$LZkCSWpnNFI`^PfKCXC7OD{Sg{_g>4XP`*h}qUEujVO%<IR<CkH&Ujg_L!E8(ymzJJsl*>jrrK@&>v^{{SX<hhyB
Sbn+voe)N-3FO|z4Th2Ci`qiWzUyX6rf*5p=J|78dEYFN9k8O@hPFzGS`Y$S=?3#C|{flqg64m4p;epTG|3RFc4=S5(z
kuT*Gl{BRRvI-tJ9o2XI5RS;werkR}*T+wBEn6jeqEwjs)Q(iI3lzxnaoZz2TCJa#7A>iDPO<ZS4VoR&CwJ{(-fHHLYb
$&kB8;G$y7-yy>sD3Dg6IPw69G&7n3Qfmp2q(*ULFAzWz?nu{Vx|9P;huAKa=*<?GpOG&OyJAb!2t-1a_3MgAuI}PZMl
NttyG7}7kGttMDc+MRhgbCQ!k)PP<@+F9TCf?{0=1en8kuE)5BTH}Vp3enp$#f!H2N-u?-3(rvq`up3FVcq-Jh09ADNO
$!RMK>Xi2xp7?T~3i4pP<ykiKcT>7juVKWkG=oShdZ($uv2ggz*ds|c*Q(;ha@?+<yMj9zQmNg7VKRm-GiHvR#;L#M<{
qr{2?0C+z4V|cr3HPA<#Puht^P{DMd0b?VuvrpJ*V__#f$Yrl@ni*eG@$}0iAoBONqH8lVmMFkzd(liH_&nz7qGGE=O5
PaqundV)E7z#6ZV<9?n>%Q?nW;RZ(JX`9kUs!i|&%90}S2|0YGx#FEo$1F=WeVSoj*T$fXwIV$vZjm1RYLTz<Wwzkie5
#M>pZD^5nc%I`PXI=+n=ll3~pkMR!l8YqDKCj(5n7dlI_xJ?YZN0l&OMORV*;Qdg#47;ROi!}mZ2oJC%;(i5jD7iObVt
yZQJ_?zG903B9T2_(LgV!KG7GEH&o^RY}nZw3k{+O*nhE4&>->`*N9I9!96dmg$l5scE#6t`aPf^jpqkoZ;K?f8~ARy5
8wdw`E)2*yl@9j|KwoDjCy|52M!!c?`jdMi24?pC7`wBSJVv~^3M1Xp1bs6`OO{IPv;HFY3tqX#L$-^!QVq}BgHX%Omm
!P6c)d!H9HA~G|V3FOQ|MEY6{>%Szfh6HUIXOXVf6Mt@%AdS=?4+YE;^Ccf!{b6xd6pM#1=U9?d2*-oaL`9w;Dm1?32T
z<heocjRn%%QYH<PfUCU3pwjmK_-xrd1EYXS>r$x)B>?4sViC9-Hr$i!Nn9VR`<OxA5sxg#|&{VYI3!%@1X)g7V@G;#a
r&1=Kcu64`%f*debzcE3mF$+bG|nzyBq|!7i+Z!)5T1k9VnIVViYlA-DFNCi$ues9XsBW+DB`iONTo<mBcwmt0qkig-B
vY{!zj6}V~|nW6!2DC*O*)H9!%JquI9__BFQPu9~mf2cp-2&M1?`3vFX;7M{LpuWfY0G0)DUVCPm#6%>$6{+dj)x#E~d
tA`6u?uVmp#x3LzH>xx8Fc6rz`dzBSQB(z!6<Bxr-ssx5`6i5s$RMmn^ZUFwoxTm<?Y>>$s2rHsu)U=%DUuCcqXb#u5m
<=F!B$}zpP8MbnBc<X#|IujHHT}Bs$dk<pWnTOYe}Qm;`vZgvbKvCYs7YmD|7;mQnS4%IU}IPW2#3Q9(XmNrD?}uFv~P
HD1NI6a_w*^ch<%x(wro%7!Jp!fxRbL-&EH!6i^BnXIl<K0{R@S}<dhys>RDMp%4{|jVku!`1>0p4iR|hQpkzfl`Ip=c
qSJJ-fGvd}wh?j*xQjP1-`v9p$JL@}Ea&}@)AZssj@Tl%TVaQQ?TW*A2JQoihzuHGa9}e0)VQ>cTt~R{kM+4~Al+jpnh
2@7KAyU|4xiJj2qKoB42WO|iaJ#m2f0khK*+~akI3EVpeo3*$wT<aL6}aUsfhHkF-9xNn-IJZ$vIKr@t8;zC-L<nUtSM
%%+%v6C)6cf8w$+pb>c$uk<&41!FXjIuXCY5E4+gB4JN5r0#TOtsMY;#^TMKWaa3HI!f(C}X56BpW4n;RLvxK4pr+)j%
DHfMEvxRNFZU9b(Nwxv$`tY*EpfR(qQqqm$ZDC2tDi!k&(Swf+>;TT*|_N_ZYu_Oovsu-2vr-J;9!x_X}biNwxPy=Bsa
m;HoMN$@U)Ef>@B$9S>XG5JP&apuT_!@l3xb58JCy9aTR%&uVgxt(=}s`mmn|)I||H-_B?Z<fLzWEI}SO;U7E|Ap)gMq
*@tWzTLrKb#Igs&$2peuQHm1#gic(k!@!}dsiI#RDlAbj^-D>Nc>6}Y63r(61&vR_&5p)|P-MFm>Bii1m6F%r3_hSHrg
jJ~_uO@f?(S$y7ULk;O68Y~Cr$=UrcKx|Ox%=8hfNsMh3Pim@YBA}h`OMZIMPYhEQRKfZ?eZ^^A#{_&zEQ|i;$1vXc{_
;^yVhna1015vlJHZkODJMxCH?z?^$Ue#r1LVg!yog7H1U|p%}pyDxFHQjLKjpc5<J(Q|`&jY;_w+f`nvEPm|(u9CbyL6
AM1mH+#A<_L{~bI>a!uETqQsXd|qJ-MWmk1FP__{~{x{$SD)_l{YV7(MbAPb6J(Hw%o{-uEA;xr3KI)nJN(+8n<GhNca
Md403`t^Q_^8c1c1otVj(?9S$~npl^{{J7f~lY(>)g)QFu$_)If|GsDop)Ohl{^l55vO2_7$ssJ7o>FY!o4vzSv&8E-_
9TJ#q5J;@T7U9Pu{zQ~MqWD$##bSdYGO%swiy{IFO|~x6TjN+@Mu&}SDBEnt#kIUe$#H|!9r2?|%2%XPQz9JMBb6M5sD
UcO5RbV>SD`6YlD0&S2r_7ogrCCnNISds#laKw!BuO}JCj~g*nV*3H}K9PNhK)VvRs8`1gcW5pQfhX{vAbFkV?Bbagpk
uFJ<b`UvdeW%@<roi&8>H8I1*Vgn@C9NyvXs-9Y(-LBP7&a6+6qn2J9UsDJmZ2kX*<4mnk^0a54@5^t*49Rhv%rP=gk&
=0y51iQ$-33Gfo#y2)1GXm_`S2m#PT?x84$&pUvr4W!VO5eD2AchyGm2>_wkVEFB*ybIiM_-A9ktzCwK(};ZpQ8mKs+J
vQ-c(Uhc#f4uh@!$6URm0$a&6%g3SmA&&cLLG%xJv%MS?iOC;vB;=&7Md;9;qqOCY}xT}!L|Xk6`Y%0U#(V(lxo*-zOE
2zOA`OoEf9&sMg}%6Ux=L_Cn;;R2Gb(5Z+`Sw>HQ2a29Z>TD7wxz7=V>WM6`)bu+%NvJe3a-~=W5?Z#R6K6CPW26(=IA
*C!Y@Mm^pR}mZ5s?a034FN@nj@E}thnPjpt{F*-HBz}XKa3h&SbUGh)h9BbPo9Lx7OaQ+uv%t-e!M_)Ftv^SE#^DmJv@
4omjboP5&+<rvOH5RYCi+sU+bUCYirI{E`Gkwo}j-iI0Esr8$-OgRzsuU2=qK#D23VfU1}Ri)dOryxg<DE1+q1Z=Qb*U
>os{>Ibj=vOTrJH&8eNWz@I`j1yhF`Yb{l9Jv$lWP{?~)7xm4JtY|00Gsscog6(CS)j-?BNJ>hP#hIn#WNS$u%*?34en
J1T!P>vlz4V=n`HM%vDqof+d8BW-sP&%{+lj)<e<a@3n45Z!bJ2(^3GOXST{vP)vqt!bVsk>guQ-00Kp|Ull$GU-<N%1
<TP5-mUrxZ*lhOo{i7}5fEqN_(*qYvcC*Z~jptEUZ3M<Yr_S~4&6DL)xAOKXunJQr7%B!)O~Huw^Ltk<G4W@;*THSPju
aK4lYY}MiCW!g@FuL%nL#(~T}TNc1!+>xv7VgEZaBDN2wECB&#qd~r{9n(7wy@l9>ER>>HtT^5%U18)&X_E?FiTT5RzL
Yrk+t|+k+;Dy^B$=8=`A1dOQi?2beydz9pMt=eg}R&7q5Wob12DO}0odY7M$w6ppm~_(X!EDvVIJytrtSXYZLxN03F0o
$wl0c?j$Ufvd|C*izEMV@+W`VEM>6W}~^_vGY98JkgYuQ3d<sXe>6L_Fisb1Lyr<=h^C!-=ap(`;%a%s#yYSrKYJp>B`
6?)Y8YGg#<G+m|i24hl9dSoipS+5Y=#jcznz_L=hHd<KCnlqd66w__LcEA&0UKqj)}B>d-A!*#&OXRWzpVuzCyIJyRn^
vrjahF)+}Bm8(=!*x_2ab14Dui}HEvpCUH(Rc4czrP?wo`Uycxy?BhM)R}+gVcM`e>ULg-@ZY6fUmI%>U;s3tap8EVML
v9%X^|+@<~;h<of!0msKVQBz!kcaR<F}P!^KrtK3+Tpi`^s|i^^?TG>~n}&L)9~{z1*(?bcc0QDs~x8Ql3P*kWUgr*ke
0+2U&w;Ek$i`YqZ~phcqXt7y0~?)~`XH*BD*&y?)0NMR|*-2kr;wBH1S&Lw}e@k`3->)_8KDy%1l)>@x!pW1&u+wOexu
2CRM^r*zH1tp%W64PS|dcHL=g>D*P4AF%f$j<t50$UeBjbUK=^FRM@vWJ~CQ-DT5W$+Gfy_sX`htunIw%pxj%07+$T`%
{rFG|;;%Pn*T3TCWy^~EWmYtkjcd-BXJua@6GhsA}3^@E;{b5V%B2#TL!1F2j!LkQ?{*+u7)ubhb$$61MsvjyJ4n(uUS
kCS%<p*F{HF3qB#jWmw|x>~`wZ>8z|Po;fXk7z1S!AlB!Cahxy=@1rjx(ZI$`p_T*R22Ytxre1KQOCqs;H|0E^z9~|L3
up85^NExDh?^VTi9G;H9WkglL6z(nbvmb;u+=ARlGa+b32^sKvSfKEDWa%ycFh{)5F45MbI7_wwu7TaiP;8M@qE}b)O2
C%AALND0xetU3T8Kdg}UZw$3Bt#v6Ucv%Eqt+s7<LiSaSCfcv_0c^S0vUma;6ze_<X8<Ld-ds0@Cv6r@>sDF;B0Tttr#
&{m5kF`1MF6QF7Huj`QHJ~W(2AkDWBfta|?qU;XUX@PzEowDTm6_;@+HEcR?KCMjS~3W%Z-xZpMem>)eCK5t7Ej!T#u=
sGo%vIH{^SqEFY1ti_RssRzF@&d@m+hq^M}1Rtdn9d`ixt2$6=M`Pr+PVchu2+j2&0yfaQ>m4NyT%(L)3PlamLXz7ZEE
dso3LyzThLeTB9}K{M~u1y+E9Kquuj%v(AN(}F^2TCBc7DZXm6dRCG=mLd)L2@kqaQ6yyrW{p%x`a$iqFMPT(C~a(XEy
=i!NQKVKCV;bF0cRihzIFc-A!$=-<G#{Enx}L>!ia;G4I^x*+0+^+$Jyp9W!I4g&WKHoQCR{JXo%N>Z&P)H-UUrddmzT
%?p-L0<c4g6Po9z(blZW7Mu?jT6)wE=583bH;#wDDn<tiq^j1qoF%#j^4hQ)D{1SeFQm*h3WN6|!Luj4t&xCi35x}rj^
^rRR8l7i1g<Ik&^fY+F-~m!R?ezi-C14-E;6xZ6AyW6m_;+;qGi171WauD5S|-C>WHhS7f$|LusK!{E#fx8LW5<F<EE$
gHsZH)W5W|seACozf>+y|0she~)sioDufT<zKeUR}k{otur6$5)vqR9L<W$(JE45|`1IYKjR_k2(erJ%6*dw>m8R<bv8
M6@=3b94*C3fb;y!}KbTWW~{Vtc!O?yKcDiM1tSG4ETp=Sg01Z!Z?^r!ivM&c*m#hRNv4^sulGkB<QwcS}`m}9k3}~&B
c?vtlfU<8dugLlbxb>>r@^>)7g)C`0<Iu8hzF@C5mSRWjnjNCTK>8w%EEEPcWEKtZkfMbKB5vpTg>aJQXjV7j|F+b%R*
br2*gx4AT#0?Kqf{V58@Wq88vxfhdE7`@)^-`x_uCfiC?^#TtZhs11&EI%^}aez51M3!H#a)|54_Iu~g8p)D@>6bzTGZ
|tG43wPaCZy-DsAf;8Qj~B3b`*Wa4jtdFj8T*HG+vbj&p*LSU#(#aop%m!}$63)b7f8VICX#Ikvo{yAxj1v<yL7QgR)+
)s+P&b@tj<o55eojvc`|4){m?-{DcNt(H#Zi&AQ;Fm1V4^xD;0)W8<DCK0(A{^Tl~4xrc9p>L`*L}IRi4#XB7)w#C%{n
w4h>d2E=2?G{r2~6w6eACOc55ltTr3RFQU$$X@VdnrV-Tp32YI693e@jsV@Y*rNw9i#N!7D98e9S3DCG{h^B@rWz6L8K
9>uQ5gO|T!X{4x$MJ$+s@ZIel^TPvq_B&dsj7_5ICOD`K-wEZ2DlXXn2wg-@a`&kuzTRub_7r;7;s$+)__HpA0%oFMF4
P_7XF^-vx*->Oj2EUTAE{H^yqa(1hktIcN*Qtfo`=lWDN-;^mE{SPVM7)_}M&$76^5v;H;Hsw1RhK}R@~VNo^Ai-2pQ4
D^a4ZM^aWV=oBsp{~O_g2Yj7%A72@9h9g+F-0p#%Uq0(EaZW`5j7D8gOxya#y{M1vq|3|dPJr~HFjn6LKUbkaCM|P_`$
*C;DbZo8NO`j#pYW((=<*zd7?wVH896VmIe+kGW9KgV6{WV`N6N;pd`8qx$XIVDhu&;9oh^2{3fl413fL@$kT&h;GbRb
{tYh8ooh&u97ET1L}o5sf9l*InVX@TUZa0ddb{FltQc{oE5pqQk!4`Uy&=Kv$_jQvstTG57U_fYbiZ8Xb+_buZ{NN>e?
miuYxpH1B<^rZ_iHO2)qd$*&xY3d_*5J<o4)c$F0RjK!|U0mCO8g&1gzW|;&4hlLTHb|KG-#l+j&$IW`lB=jaI!VOul?
<nD(m{ienZ8^2_#qg{V$7aO;yQD3zZp->QTT3LEuOg`tPx?2`9~$W~Ex4O<l2T(l(&G`3n(wQo!D-mGJ1x4pPitw7oV5
CMXKy~P@Qd}Uv+!`t3pW=|lBb)7E0;X_KhqoO8F>#K3DD<(yjF)p24FOr)aaG>6YUxrJo?nP@u=?f@;I@}u1yGozhiv9
QE_WGxe@#HP{PoLzG>-JkQN`4vf4AWXy0Y2B4@NwQbg~Eu{8+-he7V1G%$WpScTiM@M-Zt6mOLi446zLN=x|+%-)bwTi
REy(k`2;etF~M3!Kpz1~Sj{uiF}cXZy);Y~;<4<@*Txje)|k#)1`;v$p%4$L^+23j(d(I>O-GAN+6LN24W2CWmT&i~q_
s}ulXSs1+yLna#n_$GYel8%>`o#8TjV|fUud@z-*tesxM)GB9EOpJ5MzH)_Mla1in3|27$~f7Heu2q)k@!N#k6Ib4V@E
ptQonXiuyG|G`?e_mV;ye_qEE_|I~8u@g%K=j5pT4ApWK{&R<PKPSmWD5mn5(zGkTgUHG3FNX;*g$inq4TflX5@@5KeT
Hciw>G&ha$C*tyxU7goQ{R$rQ--&#E8V5O*`vpz4a6j<U6T_BkM5BGa04=+DbmsE1--zo#2K(d#LD#PmJ=Q{5T*-mKHq
MDWk_u1SV)9fR9oP2SE6cNe%}n8cWzuQkPmKshc*rQxNG$-E>6d*(<9?nd*|$$!o=po4;^yU9I5!p7#~+!x<KB9Hck3B
4$M~&o_zq}m%ev^2FZ^rJUXWCj_$&kZwU~6p~5~Frp?B+_XLu7L}gOe1@t$Ak_ga!ADYB`gsly5a`ViowJ^@{+RZHLc_
qU8OJxdQ#QO?eI+*i_`B|981$o7y`Ud6b=ynPhFvK_Gc}gA4HLON|6@89e@xf<fMl<%ask$Y@M^Rn1xX$l^hz*~AixnE
6QpStBKv>pt64=>3$Z@XpM6hq6ct3SC5>KKAbRVB8j4)Y#Zqd1u<8#oXt?GUl|75d_d`VWlXo?=irb9Koe5wy$#QUC@I
>LYGInR*39!4EBY#t6>^2N1ojTz6z;w!}Z(44$^@<`{?o2Ay%XrzDC_iG@8&Y`qWt{6RmYTlI^|CjgQf7ju_!|9DE0GM
1!hDpWf9L=V}iJ;OOK3FU<?&RU2>(}3;Qdg+R?3j|Zv2-03u=gR9esFZq((885aON1=bDUql{M?l{t_(y~&%W{vE5sl#
^+#^xxZ<uvMX`~WuZ+v43S!j5%*_QDijC5msW*A?!C-nXm=!2el;jpLF|Ty~?VlWx1dC^H43%2DH;B!t*jEwzN9SUf_|
~gCIYvP?=$ies6&(=?Z)<*OgI*0O`ArV-K1}s-9_wWmaePSh%nlG!b?w1zDGE|o{9cQYmKk(mPtaYTe3fP--ipCDImI-
LM*GrwESHI_Kt!_I4^2S1Jx*#iiM|6S(@))~(7w2~bt5G=2V=HnfW!~In3q%px#C(v#i;BwK~n=}NmNM=LceNaMYT|l+
yFyrN8LE?O+52l>C~%IQ6!c=?s$d%Bo_^P%_g2uFtyaH!%nsQrVLU&ybVBKn*Y5L^x~Cqd;8DZcp0gNnK!BzttnkRNPR
?~p@XA0m~-x#r;N+%8N*XV%%CV3CapE5NN^i7@_>ApT+g<|>+50xqAC32stYPa7)3XP%Jp=VvTWQC&t6m>G9PJipdt-~
{1Ut<hp$}#EfQraT`<?wL<}I7&qW*#HWj|lR++*5os;YzscMz?moypEhUq0xY=+nPdc{0j<3(5yip{RfCP@rJa*QZ3dQ
}x<DA^rGj54CjS4?4xJ4u60D+6?G!a`;nd8ZEGl5I;d*Cjwf8N-&5gAn$$ddP$n^c*&ENUxDdz)caFFJ1Ty6M+EjV8`0
ZVLEtITriXRTK8P0#>@d+#AuETdFI_>>UC=Ht?C7I{`w}lDawdq4mRjt%hW?D#>CTanjDNUR#{L2OHw<r5Lk|<9}~FJE
L-d#i{)+clsGUZ%PPc$;4iiXOJ_f|MX5pkSbUo=+KL~0hNuUo&|u4^Kyh{SC<h}`aV*tebm?W<Faw+N>%bzVCLkyk!e&
9gE>1M)H}DLjvq*Cs^Fm${=ru%i*rOb**3jNCLK^TJhBEAlU*Ex}m92z`iVV>(;<)G<NAb0Jyd^1M@nV4&a+Jjvg9k)K
hHGJk?-nKsUtQ6o^T{96`vj)l6Rr4snOKAc2b~h*&o23FQasX*mT-!oB0I*&0-_ZY1-6@|3_7k_^c#>WLi%wGa=I19A;
%d(8h1cnGtkt9%KIKC!IO!+Q(ZTJb^!l^LAPt32$6%a0Kyy{h1m8RBH%bh{<W}-qjAeiS9K9(>19?Kw$wL{pu|*j`0fS
;kts6kAY)VL_yGp$_*Ay%*Fh6+^W+zRgPzyE`EoP&!$5FQ=4z(`PBK&SbQsHrZ3HrIForjlVS`~fe^udG_VkOwl&N4}^
J267U4jSi^z%L`V&iALER0_wf=U!|1ZMl4E5b;#96uNX8%;#W3&t2QPehBFxIUir;lni?XUveBR1`8_-^dgp(SD#y5O(
xyj*f<eF|>nc2N<?hroqpzSBuaLc^x#M|L|lW_<PC{5m)6cSaqpIhy0dT&tPi?bE}TFbk<eVxlpqj)eWzf9u6Gv{`p{Q
P|ysm#v%O|ksXkZ4%<Qs1txA#@R<iJ)0e1Uf~@ux9U%OWP;>H4Lp+u>Z{<j&p|bz2jSc!|p6&d3F8qfqe^US4x-r5ICk
VkYvWiCu>f-82XJaD>eQD#Ipw&2qqU?(rQC3{8ls5RW_~39ly6tDG8b<7~{)PtRlM2NK&2;kc>Gz!aRlJ5q5;2RS=x;%
v0kmLlLGK!iHRNJG`R%oAJ1Y8%;hKM94v`+|ImBm8IUNH@+MW28?GH^8z@f*o9SWT-zUT1@R?waJC;BE+Cy_(zb&1ln!
Q|1{3QB|LGBWJ2N8yG!YNv~@ByhwJ8TkWK)Jr~r{={^4wg}u5qYxY03-dUtO(6bGCJl9@N$<*GY}kr(%HdEALR`Hi#x>
CA;Bcs1Fg#rpukT?{Y(og8DG?Vp@T`n{7U=p0X$8aU{NdIS=M<5P#}xewr#EmNVoAdN$wiDqnOS=Ybf@%s3p(%MfBiww
lV?+1)?*%Shr$>6=%p((%X`|VP?%bW#U0EpbP>W77a)b_H^~O|QM81k7<WtdDrIQJW+XSIYiaX5|B>x^%XHmFhyM^34M
dU4?&tnHam%f@etL&z5kPewLmuBd`IKrH&+=>uEA)=&43&Mn1L2@ezJvH=@g`ooLUyZOV+Q^xUUkIHvy)<?Jbd-EkcJW
-AHQ--#sO=CpLj!i-1oB_Y9bm*L1QdVcnpSi)PS@VHBNQFpz&)hCm}5TPR8AH4^??}1G>mA(l<(OvjBzuvgQ$Nkd!#uG
T+!&q9nQPvMq?z`gObk;-})50>u^Q&tL9-D^yxjppqJy^(0RjRmAEIxqRZr^!UlYn*;<0ucj0ptLGF-G~_nPIhIe?k~S
7~ec6qbCDK6elB|v9vhKkk`{GG-YOJDRYzCvGsyCy379Yfd{HIRw;Orai_BwR<ly(g|^d@j<Ujf9MkKSiDH#dRvS?{9v
ws+(E@1S%lOQ)duT4j5S{$+mw#TRcEH_0Uz&yC`3^o+CXTr4i%UR^?+co5&rVy?54bv9ejGp+Kl-TKLEC_m^9;tSEo+!
{c8o-Hc1ZZ2<L-@L_v%=-Pl=;hw7g<<>bTF_H+gRu2425&AztytEYp>@Y9-;FPC-eCFH7xO{#M!<HL!u<9wfD+*3QKah
70g^Yr!-OX_)MR0|HtY5W{TN!ixp@2f?F?JP2<{s-pOA2qVPn|%d9QOJGVT}To!iFD_Dy`BE_Z>G?|=o~x3?*L0%2^!)
=Y1p1sL^hx&naUf4xm|{|-<L@!||H1L#p3=m@^G>&(bp(1s*gVoWsij2`fFCxl2JLnr&VgzeF}bUM9(fai`UA_>jm)t3
uo{nxJ{qo*@`*(<FreSxsaA04z_LI1{hLp>E(!Jdk3+Qu6EqKKnD#dP9`0n}c9twt(T1p4N8jBs)kKT&7|E$}o!_4Shj
oFH9@yj<nAH}N9f!mc2UI9gFYUJiw*ypc<su7F~s1*})PY70i>47%9F8l)UrB7oTGb*o^9cl7j19l-Z~rKq%J(ApEQ7J
SPp3g!mD3l{oiiy?(?ZVN9&Xb_Y`6rmVQb82E}L}a!(A|XwmXb4~Pf!Z;k&Z<r4FrhO~cxnJ#)RIHzW|=^F{I`w#HFWU
bca2;8yuzj!%iA2yS)|o3pqfos9;XYxC1=N%rsp4b?;4<p$qHzZ%hrL@g^K^s<~YGlUrs?sywX)W_pwF@Yf9tl9Iqu_K
8jVpy6iF<u!!Nj?%R{a<}$e-$Q}rPL1+a80zz5Dv+Xk8U_xHoGEWuhWDdSGB-<8fq$gyPfH(;vtW^M{Hrgos)(ZZFI%=
V2%WVGf9lqAEY4c7B@r7Gx0)Uu(OpA6+mKbNR+x^_?iXJwC)+Giek3d9m_r7b$9l~`;h6|mpLG1wLV9%$;F0>a}$#186
4KaAHjokjf1G_OMf;mCAn{*)%_YH1mA`+MgB>jGk?<t3l%g@-*;y4&kQ+|q9g~Tt60W3cCQ$Cz<?g0L9JP)ULvyo&#NF
ufPI)8?^El&_Pf;$FDFBCDEaRHtb`MS8uAAkocS=wP?S|A-Jvst-4OYY)_6qlH@PNN`(tvm_-5$QT2_txfrqgRP^zoS(
W%(qX>_wv_q9BXOY>>!I2E?&+(ZgAxTFBXFUQNnjxNWOfhkN8o)j0En`nVBFni6q3bhl-2YuMBnQq`0r@=ZoUoJN&YrY
Nx#sBm`R`>4PYC$k!Mvjniq;UM;+!+3{-kh+?sBlWCAK7YjWXEJ)#O^yhc}GjK?WtKCO|%T&ftf@m|R(BSE}6%5Lvm~m
~nn%PQgi8jHrz~|9oMqf1GY-myzz?qUoeFwjUgHsi}3sosbP_^&VClBZh$X4+zP=v|pU49;@{ox;XjzOURTH4mG;F8f2
FMJrrH^qtJ#K(kWa3m$IX)BWo2S`&C8;`oc=-$2|6QnDGOK=?Ct5;nRa(n+?VOij15AjKDqpov#gmPU|62MnMDuZVBCa
G$-GS1i>jWG<1VwvJ#|LRB_tkSTKc(1&QuSBv$o~?zvp7rB5bJXeH#8=6cjV6vbO0R8>vnm?m>#NHF>NIa|7K3<DZH+B
!wXKOacC6Okg3j2zLJbLEe0|iKc-y_UIgw|#cX@TyzXAgN+1s0VHZ#VGgtr!9KN?)Ix;s8TFY=>i{Rwn^t<ZIVZPy{CA
?m!A_#h+~gKje8Xd{Teg|odXxt5}}9(RZ113$0u*fMNVWwwbmlN}2E{fks6CX1%FQRPXcA#CnViGz~td=^G)#6^0jtR2
spDg%*f@8s6SI`n2W$kXX^S)+U-oWFvW2%gd=6L&6&f$p?3lOnw2A%G560W_vmz)~~9CGeu5Y=x=D+s>s{5UC7au-gk9
ps?_v2r6%t+R%cTT|HG<oB<vg#6DIk%oS`MX~tG1PO~YHuKO2?O|5ZH^38%H+;Zs7KrU<o()KQXlJ#ADON2hzj$HtVLw
*-;Hn>X%hIYpnE33^sDFEd@)HUd>dNpQV@M9qC+P%(|s*f+lS0>efdUibJYjes`w5;S41DASGr>A@3J#sX-_?f}s!-_Q
$Q?)z%-PV0}2k$=F2ME_@FL+D31{Y5*gRy*<&Oo)q&qCUZQNJhunkAxE@nHp&o75;TE-MA_GR<?Sa{^{`;Hg1?=ST_Fc
@7{9oOF8O>gR=_)H6e8EqvwcXmT`$@C`b>uSAJ~vAlS%t_FvH>AHwkKxnR+B|Z8}V>yoctLzC)6v%bw+1;C-+#ceA;5w
!1Q%0;Kkx%MyQUVkv4YF4$kyCakRITUDXF~QcRKyF-B+SN$e_}B?ekFX6m@WscYqxpOLP%h_`Jy5x9WjzCWF!VBhc+zB
%_#{NgG+!WUF=M~*Vqefp&tEuD+V-Rbbn=a@5mn3Hpk_uG0p6Q<2oG?r}%^^h-zTI*1lIs{hV}9Ha!Gc*V&tu?1GRx6o
%ku?7v4NBh*oN&>0x84CDlv5+))+opnvY!61yypwi^9FgXDgDUHu)#u)opS0(Fh-O>x)j`B@Kic>BP8!NVlcMpE0Rr+W
K<&NXIlIzoF`?JxfTAPz5T4m?6MPZd}8rzI|j$N0XPR+?)#_K#GDUH5P=%F<hQ{8Bo=3a3ZIK{%(O-p-x-FjFg;i6l!@
9FPFJ$}J3ixe~<nF@<|3==uTI*c9lhXM7*|L$>9>Vh6OcSPkaWV+JGWB`L6w_N+!a&%O9@tpnaml*!*7M?D)Jj<hM%n+
nPDu&rJxIKBR*D5im4Pi%l9Gexiw_F%5DPNUWb|=H^MBewuw$J+Gp`&_&W10wo9l^xiB3r=t;uxD8k9{Pi5g!kJU`j$N
^{+b?B!E6S;f4-Bs2f2Tvg>f&YStLfQr~eM*Y2llwi_2!yE;B)3M+(W+RF6w2A7NEHc)$+VYKH4S;K3xMp)`Th`q_D=B
9q=bQ9qj?w<b=(_-~dfTrM>5Lxv1vJNK8%*;+d641M3xjt=NH%aQTVE3QzlSLXko<VJ|y2(9KRO!nh+znpa?gnJ5teo*
M^U9OuO~_t0_UVjC#>FXB^&CnxWgSO}w4+lg$2g7>DaNUkeU5Q%{KVg8cAw5UB#@XY(2T;c2M&8GUiG_(aWIDb;m&D0y
-WK2whMpQtfwY(y-CSND34E(QHcY8ao8Vl^g=&Shk*Qr7Tv%UF)X3ed6C|uA5*+4P964%%`FFGa&omw=8{NRR!FmWM{a
Leq0aHN@Yk8OjYBzNsMRw$2^PNI3w_GMwddpNAiQVRVsDY3B6?SO@(ZYQO;!0Ab5-&p1>yPj+US|Q$rF?D(O{HN^}K2Q
;^@pwGI2WaBZBJScd=V1z>q+cuIK?6P@Md0aJI$fy}XhhH%2RWy$Up)fvjjbF?2hZ^|eXmC-(T!I<MDf+hybb0WX8YBL
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
