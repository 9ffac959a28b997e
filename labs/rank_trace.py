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
c-qB%%aY^Bk>H;B6)1Fx1!RIulKH4Abb?$-(=*bjA2L--S~C_~1W9BjR3t$WU}bVhn$1b)-5r~qi}t#|Fnij=?4R_Pti
R#`5X|b<nC*<FE5UerczC#bczAeBvt?d5$vjyk%OdiM_&$h>Vx3MlMUqFmL(p!w(`BB{5<lwi8dEC1h-XPO%cdKw)Sj-
BxJbU>Ca?v+ahI(<Dmq-oizN6M&o{{^yK}yo{4tppZ78=+liV{s`98MU&XeM&D$O%h{RZX6t5vd`c?P1!Iw>~mCBf4;F
mSuOd6un%Mf?;j(q*vDHp|%|`YJ9S1o%JZ*)pPLqyFE&`{wI*4jnG<)4Q!FopCuR1%p}NCq<Ba1c-xpS^y3>sU6Q|Uts
E&X<j7DWbK(UQh&4hHj9=~e+cmYbiIzZ-qLS>NVd7>kEF<S9xqmrH_sk}r{E#Ie}MJ@a7qB+JxmIoeAQx-PvccGi;Co_
i2CmcY!83<?RB!6$J4~S7&dSF?&#t^NaE>3)c1C7(+%Aw^z*qJxVQK{FYvREpZECr%6$c&f7)d5<KPdm;z)J*$1Gh!kB
`}UmPdX1)1D{G`{LoYH{hRG#B*Ig9KYOgN<L2klupp<`jQ(su77ai<;+oK;=+UM!&v&kxt>Mqc=-Xkp+C}1zdIQJ27g0
M2F9aos2WlRq*KDMGt#Zy!>l8smYc;SS!-1BPYYS^f94G$@BM6ddGOC)`hYb+j2e2n{Mi=Qz>}u?;bxf@L7x6YGKz*n_
wUl5xk2yj?6NZohVEDLt4F_nCBM3z(Wrfw0@d<-JoO{|7<NbgU@&}&qNqD?C(sYf2L8$2pgU4z4G8_3K=!<+3+&c!7um
1Z$u!N=Z0TM4{^9+m(}_DTcL*5_|DY)42?%k%McAKiyPe+EKt|&|(L9-72giH46MWH6g2Gpr%pZW_zPXF&Z`7whGBX7G
*i@!Gm<4D<*vZSCO5<_D7;_iqjaym7D^KbwGWoy%;`;l&3uHcz*RGm}{M%%iXKS@)>CcM@CU-t>HjC{l0mj04QRHUCVc
cfZEnJvF&d@F4YW<Pzc<$UZ1i)>~FGVS<ZSeryVuvk-?$_Beaf4#LNkaEq_}2~Y;&~1~{uckZheq<W%GR*>1;N>)f@s%
B?>q$oHn!i}V7)M4`9dL8sF{_ygR%Q^M~Me_95Q%AX2OGkECv|?^r#RlNxq>zN@y1cM`rRH0j~|qFT}*nViB(u-_*-*k
*yORQ+wHeGZ?zx|KtC1N8xZ3#PfNS7Re%Kwn(2u2#5wBWewIHSzH4Fv}Zs=H+;E+)&!ope;AFa=%%KqXBXZ02Q{#bP06
tGLl^iTH<Q#fv$LCl;U2i?%oJ@lIdj&|vqj>0!vIG(0<MmKHId;Di^dGbXX&(X9@FB%DIO9BWd$G^5v7_%RCz<lz%~(Q
9(?<?h&zVP9!PDY8rm_=w=~WZjlVD#nyv2*x|8O)*-Y~yA(9f21EGS-a15GI7iLniX$|y?Bwjjd3a2*Pe@tgEnbL+x7|
B{^kGalK0&Ks3K~)C4HrgLYAqs7o;g3@8g39=Wrc~GlWU`P;&nP$W((|s*-&$Ogn8uE&Dtv%s%O2?m3j<l0Bya}<{A0^
Y_5C@nf--&tvH>mv>;;HF#J?KnY5op0r6^k^>$m_}5%u+F8$~T>V6*)9Kxi-%@Tq0q2ar_2?X7y;lBZMr0oBOe@MMc1p
gy`#4*n+TM-XYDizCSuLtn+~0y<g6+j$nxgd$$Z&p{ir)nvO;XLy&c^CEbB$mSq>r6`poaja8vknOV#%!?NX6CmXHY!Y
;dhhVXOL=9Mt%NMo&6D+ddQxW<ejPKUjLJ2d+NIEJ`3J5{~8I(X0`ryF&1|0_*;RGX;1;}raEb0ee9X2So%dH;V5~Z#F
aRB;4uAK+OEC>W=9O^+08O@$*I)KX9+`+U_V(c1)Ft9-M2c0<aQHz-upo;t~gQ3MsMV-#S{VUR^8YBD*V3np<Pb?AdK*
<c%G%s$1yCfGE*({ky#TxW9t$*!6)n4U+CcHc#&F{d)1cG@CBAyBg2LKLXGXYxRtU@y912P$o`~ZfR)Mj?H`VACrmPW1
%c)Np9(P8*Ng1B))KmZTBgS8tf(&+~RI>40{%t4<8qK=E;ZVhV)cSr=ePgH?LP)uMccfVIZd3s$R0UlyoBOZVIZnK;cW
J7FnG(<%bM$Bc}t4;pk?FazVH?|R)hAh;EBCD_|?3HzAcQ71<m~@~;RbR&Ekq^hLnIA$}AUM3k7$AlIkH+SEf;OyTpuv
im5A_Cv2<C{#fK5EtJCb0!1f@@--9gssNYOHGLDQUDxCP0x27!z-&1|_%DbPJ*t`2DjyS-UfnybecgyyW&AbftJxq}g%
$vv{3+(;1=BSb*H5hfneOpsdp^QB0hAxI@f{HSMQ!L|*XJD@+nqDxtXl>rL_!}{|f6|#QA<_1>oG+V525AW*UKf<Q#1p
?7*Lbs^5>N3ryFc6Q4mN3H<nl6=`+ku8bgM!)tH5U|Fhz$<#pEe>dr1SyO+Ig43$K>-apwC*4D9+3fV6mms2f~!}gk6W
$ko4!MP3sgOArMXaklFx}q&W=fm!X|OCuEQgW*Qesp2zpFmE<9-pQ3o7I1NNrqVm=7c9;|r>>lMRx>Us^Pkse1iSS^R0
TyP}JgM3yS`(&g4;VWD?jTHhVC5*7RHi}eA}*#6xW7&wop(v$RmOEU2hIzHEnW$0@e3e-&zcG**wiAh_9_9wiK5MNmfY
c1f4`TW+7EH=rLZ@AL6ecny4>$gUC2N}BdSpQBSreaTOvkFYH(Rla)kg0gn%Yirm>-i#T;}FSPoBUMWE>j(%fTID>McT
-1!_ez>|(J=~*TS4<YBA1{6yX?H_baTtEf4Rjx%ejikV}h`k<wnIC*Dz~^(=l%U=w<Z7ib#qLnE$b&_i=dh6k#*CjdQ2
}X42a6M-1{I+x3jm^Omil|dWoZzDLC0v&S%l`W=j$Rvm6|+dzGfpOKr2uN2pX`J0JYaV#0`-m=W1uxn&2+6iti(<R*>G
!)BA_wSi8Vay8&7oUm+ID3!ywium<o?vuTp!e7l@Bn<esZ42C-#MOaEDTp+*H6i@7dlYyazRlW{;XV{w?tkJZyYDG#+p
u|vs{RC<~1QuZgGX7Bh@@8rI8xUK5Ai`Y~BEuFrKT0thw7}d@%?2d+90*J4=emeBDTcxl(A%&A+1Y*xyyMBk%@5MZEm_
;zh$LX1AOW%TZD+vcc^4I8T7y!CP-Mhaip-Kln1a=5!m9=x+^qhzh`bWsG|FVqv{LPLfoACw)Uq?`YNXl`{cH(IDE4ur
UqZ`jH4wzm!)>IsqZd$C*x(Ll-JK-Bgn=<xIvy-t03TS$aHJ+BL)nepMAQ+h(9I?`+sE`WVjzJ?3Tq9J&Oq4-u@nk!05
YD3)wY5K6rNEbY!vc{FclmDH;yG_HTr~gqeFwXY&2*~dk&@#@e=3~wP@yCmM$F^eZtISoy1xJeW4W4W>fuC%C%M^tx1k
((qtycf*etLn_#!8&rAwI24keZG%r-KA9Z}YuGpa{@4VYc=6SNyJaAR&M$8(h|7NRZ)8jmaH4>DN!5xFZ#Bb4%N&78zy
UJFc-zcS!jAMKfYCp#7G@i_XL+(gU$WF{{x#2zNy2$;34qyr84~Ix*K+5Q<hq?jCQBVxL`F`o?vH>+^%{Ltlpz@C0`LH
QWip0^y>3nHqYv5`ID|m@#uy5x{zzrEpq|r&JsM4x;Ha;p7OdDW9&ml<BoQbwQ=oY?Y5?kH<{`3Zjs1RnQs{4wX3^bJH
54dAMnpf5dgtp3dK-o)a5l5_jDF!3#$fNx;XZf5b!khF!L>7u^{4p5nq)~`gXKmJ=Z`Sc#PMh#wb8zyVx85xGxOLdWAo
j^qTKM_<$wlD4?7G$g%XcZK#=v;&WS~+?e~3SpGae=5F~J%F$SgxW!^2a)pfXp6MDoZM;XH4Z%{s43I!fdTI3?JXZ37R
i*aXe(JrFNboK#zDU^LD$E1XGkzgfCR#hESo%7}ri5%V{&E-Y9KF)043h#{m7G-(8g?Qo3$CNs7cb8~3S;daM>pfrb?W
9pj=S-Hu2ovp*MXp1vDtAUdW=ni3Hm_x(qeC|k+3p4@}f5ut-?FO(UK);I%mCij*w$8g>{@u4<{N^h+h$ld{DqDWI0T9
r#(vKv$hauo-)HobrQtu*vG%}fkw@D;5n>#g-w0<0E-7qYa=EoS-bCRE!5+2lk@4_fyt9(2--iT{6H~oaQzlJu5zKw;Q
tMUF<%B4$FEF7npfG6Zu-GkW@(`sUM#n#nHEzW6EhZ?HiFt{|l(!w~KFVba*<^ouLqk~zOFgO{OVQHm38Ou-NKVv5@9Q
<;Wy(e_tfCms!+uGjE<CJq?%JQjnNpDok4v8E@I|B=KDVL0;Sks~Tv}Y)kii$)Bu2p5V&ZeOFGX0`S+qJFyilD}3WxU+
c5P>!<${N?L5L5E`RonOh3!kZMAY_3Dy@<tw>H-gnVMIU<JlW`QK^_DFGEYgnmoz+~9?_JJtPNt0>ilvl{FbZ0&I7RGd
Bb=V3@2#Bh<Ps}Cjvs+tw~*~-w;Cx!9m)voI#OOfI9A1=lsSmfaMc|O2;3E_E-r`gpJ7;RT51=L-%jdq>p=F2X<b-wH<
8KS;QZJ6kv|;LHo$td{~J_C^c9u5-eNy@4xxY-@F5I0U?2mEzc8>&a_W+VjP=8$|gE_0Np5s(wQZ9@Za1?=INb-ik_1^
O_NpO5O11qY01;U!~Hy)#B&FVr3;e$K>V<>=ka1Piyb^>2Kblr45*pJ57b*>S42gQIw4+f9Xy40==9lnd`RaB)6O<c<}
*db-+uF}FTSRw|C{9gi>H-0_FUK9zk2n`AAUDF8@zwt-G4Ux?*04a=xpzLgYZ54Uwc3N&V5h+w;cIrP~6IRWinpv-@l(
g*2^8COo{uS&gY2Gz}>t4!G|JP?EU-M@csM8_ULRJxc9DQmdG|}SkK`P9|?dW=sXmQc?8S?^xKZ5GLpuGIwO~E)3zVGq
hb0=dJNGOWyESd=|AM>!tM(0XR!W3-r(-b4KKbMy01nTZIC^MhlSAK!)NV~_kLE+5leLFen_^M<Ten_^GN)6Jb{W&5OM
oL>S&642UrbU7VEY1)jTac_dTeyv_{Y{0W0G+U&TwNtH^!1BW2F*zuc+z=>+X?dx6FJV|7x4tuz2pR&VFj3$G0zYbF_w
05}1w@B21XdM!L`l89C+FJQ7xLpNUU^7`Dnyy={gWVqnWpFo1ChX&eG&2e6A=Sk$YS`R=nP{PhWxMO{sRsd&31vs4rR0
ZocZYAAGXNa71cHr|$Vv<nkAjib+jSGALtrheswSKz<o)ozoSj+ELK%?I*f14+6{}xoGLScLYn*q1Bm5V<1{-6pzAlbP
N!0}b9>%4Yex4QTN|AUWfOmMET&V_W|uK`{kqW(w2&m;Kin*P!_u3;pvKLtOZ{Qk!R-*GN~ar4!s)A=1#fMuI~NLtcD_
fzn*kox}w|1@1sfjvvnS%y7NpCb1X{%q;bx(c#d4cJFSo8aIn*aqyCz>NpwkK?+yJW8-A*5N$i_xV%1$o@8cf<@njW#(
)taa&Flz#)Ua%9&~`uxRP)fOx~s4;LCv_9QfblJrKv@S`5ECk4#5#O0_aa5?;|o1esM;s+1pQdz+RO(CBrF*+KE4OCRm
`H%@~puxGz^?X%vtfzks5cP0?l?@3xw~axB&p{k*)^qPOA|5Jt@ZIqN6qC~S{bQOuMr;cTc>m6fHm`cwmiF<xI-~4!_E
=?m<;{_@J))vP2O{VPh8fz5jZOrl1^o6mU%pG?_4MJ_@j71Q9%>n6ht4V0CneEEy8;LSl*DAqBY#%F9`k<jU8F__0~%|
478fz-oMNx<`u=|3rSWhp(}xVWHTk}geLm_2MY@3L>IAEdtiTaD(`mCD3JSKGk|ePug`$W}QJ^a?5nixD{f-yJ&ffc=D
N7tZJeRAu!46NDL;X|So(=&u<u|gW2h{?1I!82c)7oeQIa)Yon*ylBw9mg?V`quC5qILbzlI-ffNlje@IhXnjV>g;*#i
oo6%x9|#}-y|jat4+Ks(Z1<Oz}j48cW9S!*6ok~t_O@3546pd+Z^(9P%BqZ@R49r9USX6r>fcY_=Lc?YxN2ADSz1)WjI
euMy^8P5ty13IHD#1pS_JdWcwVav@B;qKZ!C={9l#f;CncS6iz>5SB}r=l!xvpGx5aVE3h@vSuwR?n?UR@rP(-@w5-K?
lWzl)}D1HzX5TO*Mvxw?N`|)S6g+Cx6^5R?-x=OYF~YHt#dfPVlYrze>^DM2w{5H7-zSxa(kJRnBfFk92E<1+FF3HvSr
!u5jBiQ5}{RX!Hs~L#U$9cSW+I6edy_0gk=}D;d<-^<%uAm5P>1(b1gfeXuKw>NaRn*)lyKXWp{m0axr$Huiz5%u?t%F
r9B^Nsg@C2L=2c{H0wxwvA-3e&b1)f{3_|k2^ifcWIr?bF+$O=||UIav)t?U~Y3@3bgTcgYxqFD*Ko~Kah3LE}S4=fY8
aN6*O?c28cR^DO@QuNBDuD2D)c%G1wgfUbC=Gq8083%slk6pTqWkZ6HpU$XOKUTBAAM#j6Bi7X@3$k^|-iewRW2mUvja
DKeC4Xk-uF?CuU33`_@i6R73|gTmlBQyjVU43pgnwIEQ%ieeRBTs%HLwjVFs+4}whxJu_D|9G#qpYWMSLl?GaBuH}HyO
r@5xZmP$x(R@%O%Ae0mpK!Sq0GzcFQ<I{&eLE8F7}V3t6V#Aae|@0bWxvep)H_4Wu7nNA0m(_<)O?n$wv_mQ6K)zXTYp
sO%$Mykl7<!CCk$B;9RdGE`=z^)H+~5vxv#Y9K0Z{sQr-6W*|miSU>!d?7)^3@#@;>Ca?tfOHE*!8ee5y90F{HH8?Hn=
E*%CzUrc@(gNaKOKS0M{^Ww={AbtPJ1%mtTz*dVUg{dpB~SJXnWkicCrziz>a!>}fRePY4m$$zI=LswSO)obss@rd`KB
RVTUa4uUU?MK0=kxj?ka;FIH1Ks6jd=zEaG%|8f44`j&w4gNY*_t=>|-$p8I>)Qqihh#A{fE=!Xp}fMzrx3(Hr@ER8+a
1AfE%tI)aWBnzLc7wE?W5+8jC@EBY4-GGp*r9z5I0Pq38`3jbk6SG}dxB*vj@Ble?ip)X7H_A^Zc}k`m@};07o7hwbj$
JN~?4|7n4XY3Me~>7TXg{MmbXF&W#42R)PnQ-5ZRcB!hFO~9y)@|O@gZ3{+iXJ}Vt+AY-ra%zy)1OU<6nU+51sG-{9g&
w@BjSYx%gy@?1PHE+|`Nfao~LakAGoVjZW|1|KtBOBSX-Zwk-GcwX8$i`RN_#3jhr%syIe6Xs1(H)Jfp{0yGGM<qP;vf
o@!iF-H<mdJu$+X2J)uQo=Gyx4b=8!gP{7ouof&p|rY(K*`;pagrdBnF2j(p2{M}50H?9h9b~!<5f<Op}yn>C%C{vGG9
SkL~F*X>jy7NG%VYV5VV4LohKz4R;&(4Qv?g$lq|AM$tzCn(8M3kQbJ)r$$DrCd&*FL@X-gfE;~VU=0Xwz%c`RlRYIA<
eIZM^AbApv*ai$;+=Wv-KgWMZdPsObN10l^@{#ZR<;#n}EgjZ6XP-H()|=Z_%W0pzytrRrzFx~oJj*pM^rgrg5QK;2w4
?X~`92BW$aO&+fDtL_d6&>(ke&a54x?=YWPoIZ_~(392jG*Bwq>^pz`xtSynwc_dxO_BH%^Ez(!A<47|&Fz%H4+DJ3Kx
whngR5(`Hj37=9Sts?T)PY+ii#K0ovLIKUsE)nAOnSlg#VW$XeyK?qgkp@3i3S<4c@j|gT9U0hl@L{ctWXVG%e3DVXjV
CDSE=Q~KsU7z>YY1C=Z5rCK88kYs1jp=-PmP!HoWff{R5t<<-qk)`$r6Zpb&d=>>q6wD!F#+X^^8s3xgVMo0U(ig?VQ&
z?s*SAq=RDY!FjgalTuyIwN98LA*4}r8f{86Q;kebBAu&<q!<bQv<zdsXOxC~n_Ny-=1k3hqAp838yZ-2`?+=`F@oL!b
flpY&JS|?yrzmjI*1_K)!yIUkmZ6+x0YrvRO@N+_CQllcTv-hSXd)ZsEKk?KVCs<2m0e}M0kLo8E91Vbh8i_jtQ&q^5y
hrmyvmFF0HS<l@IaMxhfC)^Dc;fU9&e@M9aXtv==-oqC_!W0gf%<o!N4v<H%L*RwAm}=&}vk=D19Hq(~U{7*(B;yT=B-
Q)27F?7vzIxRrEkN7MXVOIxKP?lzHm3)E^u5TgZe?Fk#n5b&gf*gW}?fC1WZKiq8AWIl7TX%5IDe%dHeWB1rqBTPk=U$
#ws<fju$fJX_N_+K{LX%8y)sL|Zo2ukZ|NmOa9PpbP3|=^?9E&3itcpy8^e>Hg-<)BC5GEGRM$mS67fr>Hai4YVA_1uS
0r`P&uz0FgeVzR+wjV&}Wtj$*FlxAwyF@%EwHAsY@m=#Fc9QsJ#503-+TL6}40S1qG;=?kPAms*I6QJd&em6iUu{Ax{q
|0cPMH*=ImoQ%e`U$3)Od>=FI8qCL!@fI{uD1d7u1KL^0ZZnzPCzkQ6y7;l8t5!OQb|`%aJL7{E><A3aJeEXiuaF8QcS
p>yQO6XOf_yRpyotGtw9R4#3Q+M=gw^w{ds0(a-1Bd<73>gFfbth?j+etzW0fQi3nVM<M%npjmE##XTKUW`^7m+GcXz-
fpzT}T3*LDsWu155_I2*L4a1-t_F!l@Mk9w2M<m+tL#?o%gA|&9>Wm9SKs`3S4SOhxQojyx+Z>=wQo^*<p{4>cDuds$A
-?Dxf}O3evQ5B9513^4`#=A;@BjQyE-)eVQy|xR<Ig*NNcoc|kNuK-OGCGvUo<CYb+Bw&@R2WCYnumvcMXIJe48wIXUr
~)<Xl}PrUnxe7ht!?{G?YTGFo;#A_b<TE0H)X@#`_Wq$FC!HB}E|VhS(pW*9Q^Mxi-0G)V^yRJ7uaVov+j7V#u+BsXPd
ka*c87^>-vUUgmpzf?k$7BPkh02;)NkmsTuz;B4tX=!?(Asj_j`1+Ip?USk)wYoG^84Bubto>0b+FucwAJIHJsVa|WL)
I`#ZtECiR38Q2YU_qp>mAOCUbPLCW_(}~EzyNgZHPMnMYy(4SswA(4QwKjU2EWX`i@)FIiR@%^8K<Ge3ft%$=Jj~CGD$
y=)+*mMdZ4Yh?`U%w#r^+MG}e6nC&CVj%`(zLNp3Yg(j+ca6k?o{>ZxTx>@7)-eRIE#7j-fY5wyJrUFkvjBN>{$wbmjR
X-|G7Ku(O?n?|BO=cb2sV<K^)tngB<!AT<6bM`&pg`CIC)ZfR9E0-DbL%HF%n>VP42yuU-@lNKZPr?0BH5$9Da3Wl$VX
A>Q<NNiDX6wsS8r!OB?oc+W{*aWo%gQxd+gwZ@M`t0H0jbUhDh<u%Cu2tv#H5RD-}yvB<o1Bt8`Dvnql%UwFacqbT)&9
gdnyM@)B@YZve~O!vM#1P6353dLgHoDQg^wKW?`o_JGE<T=6W52gVRtoWYW`WT>ifeIB@uTn!nT6Z1g1QCr71x~@;bVj
On9(BW`OeovrkAt>5aK#u5{eS!LpR`bYRn+QQDnaPv<$dR1f3aE(knX*Q!n3^b9NZOnz)H@^w#Yuck%~zL89Xs{->JoK
H*Utj`a;98oKXOjT9W4etz{`NBxQfHGxe2E>iNK20Eqs0Z-@fi@T|1V0clgbB39XBGbVeHzcxZJgMO!-XMfY6%iw{)~-
j_QC%V4bhSXBx+>>hBsKy$=tR@THcXUE)Gmasp)T;({l$8zyXR<(6uRxZ5;cq{WDA_(^~gy{fVLgx~JoYtcug(SD(Ha5
8S*m8A^cI*Z^V|4H}Pew>wsN1>ZVCEl!`;5yg;JAvq5_({UlhbW=4!a>FgdGKT#WKP<Q6MKz6-T*+G1}y`9Pl(!eW<3f
RRBvvta`Bg%VSj^l_*&-bk0s41`geDmVR?Kh8MxuKWI}gt>cJiqS@rXu*Fkwvy(S_{^GV;(k<L`l>-xk9m7H+rgjJ~ci
i;>??=$V1doGY(+5&?IA}3vT8#~ir6D>2rP8?|h6Z8=&R0f_-#OAS>_Qynlx&wmi^rGQW3v7^$ZF45^sS1J*?2Gxt;2v
yCf67@LW=J}Q9A@uUcAcSiSy&4U%`H_EXX>zMlpc3bZ{!kD!7N8*v@_GPKV8zXUqFYaVF$%22EPraqu3)S4!~Np77(fw
bl$3(LsluRU&E(F=RzYDYve|HNh<W+rO&7KMG~)WReyyP!Ucmxq@?9ovxSMz*RoqdI_ZkFd>zy2pr>-*&%fld;tfTIl-
hEYZw>7is42SNMpjWaD5nzr@jxqP>h<jaTOmL6&2F5Xmr0X(;NDu1%@0@04ZY^>Hp(HNyq`;)FdEISn?;L^Z~^-!!K3}
EQNqAL_aMeV7p|avK?=Zm0<L}xrMULW?bB=yS5xtO2-d4s-)e1Dm4`qksVQMNjTrQ4d|nr!Qdtob&)nd<n^IqIVsR7dX
qAS8;>e<UbwtDzwDkV$2M#_xbYi!dzI7;K=_gsCbR=kmBZ?3Y;VKArobC&4{qZu(*5(TT@w*bVZYgY!DWn&B+AEND8dc
~#zjUU|2=h^=M(#TQQ_DIe?m{%+xvK8IHiju7(%Raj|3x#J$sF$bc@79BC8m2D54GNEu#ps6+_%()C+x)sM+*XEEu|D1
#7H)tLXTmk#8+iX6)FpuZ=j>yC!snmIL6ZD>a}k9DM6`hzu`ID{csfKn<CvVw1O#zx-TIFUIJA1Km;_2M!{Iq<UzxFs6
!{V{-^SA`~5L^QN>})qX^Lj3D+e<n+vl$PUKqUJ}H^fV>z{Ri}m`p~Hjm>w)}2x>knv!LZujm_vQq#acIPW*@W56|SJF
)dP`c4nQ{Z%AraQOgT_d0|U~Q(1VLDQ&vwv2bz^A=4kUIwayWQ>WL}O)c9*O{#P0qxJpd|jVoJ{YXI7MF#wKg9JBN-#`
f6vPZ~(*97hLJ1vy&>&5{3ERy;5c66G9F4u(J?xO@;M{yfG8M3x<`3I`k<z--G(;Q{n=z0dv-=_mvJj_hrjBO{$!n_cb
0H~zbfJO`Mtbp>%W#G@gVMA0(E7w?p>5gmea4g4aV@DIK+ijsV=mXm}QK+p#4?~Gcdjyy4o#>K~%JB$j9SeRuC``qdh)
)FtPUhvvKw8o_%9~86#4HZ`bpSa@vcL{rObkfgwhRt}_@~6z65)6BR4SDrms-BKIQDh{(L{0`;ghGROR6@)2P-<JlcVp
nAE>D7m2Mw?iwIQZ_njk*^*jDdNhkb%jqX0CE^+Jp~zbBu0?FV*OL{#(k>P=_x`c2sF^@4eV(b-ILuM_rqsvC@%M>BTr
9eaj0n>1M<?&sdyn+s~lH@Cw!Fy}aCYJ|pp6;L2(&!gU22#>F->3Ye0PSxJt1f_D+AchD+GSU!YD2DFMx#0M$`#QLfSC
M8Dblz?o5^)<gxO@{<8OdcQ>|QAqAq8!XkZZ7V-3c#mxbt&Eb7wc_(4CKNq|0c>7aI`TfPf8fEF2&aXl4~qyWED{VhAD
moOHi4%4~ViT)%rY=ypPMd`4dyQEEV#<FQz>F1DWAY7y34+;3suZEo(Il%4a->kcYBMjd=2J&+0_bmv}Nw8-E3jM5NHD
Y+HTeM(2*t_VCXM<Ci!ynco^J9b5eKEOC-REn|i<P}+;mO3XQ63)9YUgOt-r;}n7U@gfyEhEe^rWk94RciVWS?eN>hO!
Wi7y3C?zUT#8ue{;$&#A$S-YA&pY9(#8Qq$fKnaU_8kTzo2QUnvUfZif-`#oa7B=-5bN;P^Up8Hbd^ESoUm<+q4R*d#h
ymXP>-HHCmTL&%c+4P3Kzj}XvpDv>zb%)i@vE4I0KD6UR!wCZeJ(O~FEOhb=Ki-Ztn^^o71PV6aCyII7(Hm1JX|{GQCE
(R-K3@Gp#1_8_=1H{b^{0dB&=?6ekIA1v^v^s@>vsm7_UjP-yDrx^rWzb33@;*VAQq@aK5JHKkrZli9{uW!m@yG|dD{u
NY-e=dZTHTQ2B<?ukgsZ}LaiIMu7<OxV747aLn+cyMFQ2Q0%8<MG#Q%thwUmWJgSV-t^%1q1siN^_H@C8AzQvi0p6mE#
$Taz1zIGjv5fjl>#mo7_>%2+^_fau7AX+MuoK{QlGdBxvVF}TE&Nj2{wnyBT=({5Xy>c5%~R`7XPd2W-!BVPi7u7co<o
VJQi<`g9zNaJ6hya91lJg!cIK#{Z8JAey{r6IFYNgWyXRLyjV)pP{a^l>OlT)98?fo1GI*c6-ZC=w!}0AZn{V$kZQDi{
ua`Smf(O?jM?|_42k1Pw<|ZAmS>-n2J$W`y(X`=Tz|6y}`$5;lQYmEF!`{*|n^f)|A_R2X@Tz^ycMydf5JPcsHp5GK)2
&JFa`KiSG!{J0B`gZ#B|HY`as}hQS7!S^9Ll#hiD5GeUQ)<Cv3gisO04S?wVUpFqRj+YHURK)2lIZwZ7c@GKOdKxzF)@
^D37OIBABtNmeI-shV3<_hWod4s$ktgG#e_qiAcG0H}e7h-1o;O*ct6~W|rdyUKR9g^spvZ(dCDh@hGs(V(53sG5kxmy
-x+|WwFL?l)T>0uG??VyZSzMw#p;E0!i#6p5zt&+Bz0jdXo@CWnAy=>+7I}|BiILyZj*qg|JUH80<vbV1{0L4n_S7Obw
_Q$I-@PJaY!lv7Rv(55ch~&Dw!Fc_A33gBk$gs!0~BpLtc@>7P@Jfzc&eQnS_59As-)zSWAwaD6)x9nZ5|TFNj6W7OA}
q~Go7Q)~L<_vIIL$N>8nz4P9FUoF0EO}Bo(`-XSA*o!#`m+m-h*Yqiv%9U3WJ<3{SRY`g1)8PVcdsB2H0l*aEpwl;UdA
55Kyuxd*Z`@aCzhoZjF47rRfP%mp)m7YkIyp0H$icRQeTf@~swM1MJ@#0K6@3g(!g1?K8zI0LZA$3}wb8or>GG(u+R+U
)zLQG%XLfB6{5K%@FMVHK{l&gpRM5Jx_A$*<x&~qe+{^kAw$W^woh*lO=L?3nkpamHeU6cG0*P3~*yrnXouGR~h-h8PX
j|PYZPZ+ojqwTZR(Ph_Ku5g9m4f>?4DbNipU1_mDaIC4EDP!9=PD$g#NONQ;rl1o@T()cEF?Zq+exPMp>?(&6Or-sgS6
Jw2krzP_Q>uE_kbtVW6;OrLhHBPZh&DU%I7hN1ItH5ZDcXVBHjB9nJ<F24~v~PuMBgM(Wv%&%D1Mx8nAB?i?;a*D>)Xl
g86WySYt9bK{t-f{g})#f{(9$s;y9mSSiiv6<~#c_CfKx_JgOcr51JrwZ-8bPK%0cJGk4#QivAWb+)=bY&?|;F#97w1z
TS-R&rpy7JhRK6U&6z>Kd!|GLKZn!Ek7bcLv)|xb-B#Z(RrcLmHM{NqI+lIU0o(cemk|&)})PwVkO}H1F)73yW<BDT&~
K?eK_(Cv`8s_0+L$8Ai5@M7P$lI+dm~Ap0QY6NfhD%xN63_=V>9gr43w&_3erGshc5awzE2y$Eq`<~=4lGp7BnkedkFo
A%W$4W<;$GMG@<cbpb`oe^gk!=!_P70;g6eqhCQf|%IXB@h;1#}6j0I2e<XV=zl0EfBY$)*wf}a>wR62dGW3#s8ry4ua
P=_Dy<(!B#3@tO1?)>J>l_T0M0@S}@Jidq#eP*?|Z!7%AKN*wbMfZae4QOYwMslyj_vx5t=2aI{knP72={U9Ju3r3b<S
yODDT_7a_-Ltrb$e|^gfl_rjY@E9cwRN{CYsW!ya&V|Y{o@F)Pn%wXC*Y*V;p0&3^2o#Z)^Hlt5`e7o~QnKHmZ*>KeU|
`1+{IWc$sTdCWh;l@xm^NEI{;_R!JAneGW%7e=4`$<t(Mu1!Tf#T0>^7xEW0m#kfX8++RM=IKZI9r@75Tws1whzEK(dZ
3aV-38MNr4`FGt2zO0S4%9pcI6!NHS}(>`%vKKZ9OdYS<fsfU_3>q;4)G(2^0BUoQX0W$-dK<%-_{ot(~V}@dpbWq9FB
P8+!w$Hka<+v1BAi3;wflJ&sR*7olk!F(`>vwNz#59Ow*>IK~TwoIqi)_pDrT_MAvx#E+ws!-)!vMF!UvS|*b$v2dF-z
}W2gbe4a?ckKU(|tkW!&fZpu!q!)#)d+2g^Z(5NeH3afLI0J;d|75(~O)ch4_LY2b$lApfj)%k1&QauGi`EUE{36>v?|
&R%i&msfsZtqvIg)OC1`kZR0L+2~RWL~BA6Kes~05+j*{9Yja5EMYKM33l%IhkM2-66kWA+3IGqIdoNEOC8TJa7`pa_`
$&j;e+ETRHG>Dj+p`5NuE6E&_BPl$47<^j(9WnOAgF>&B`&!k6*H+Pm4xb)}5^Nsq%T5_RG`!{Nk)=DqYgL)FDZ5>7U*
3k`1oy#cFA_93a|um1YH^{vf?U>OTWEzC{<N^nS^)J}~4_N5wl5Me5QHyhPgMO)1(E?UT?vF-t!>PmB37uZy|Ref#$9#
S<D{T+4?NA#wX?Bzd{3_<Z{Z=XTOB9r=&t^xXF5M-Fj&G3nn<)-}<Y03=WsN<-|ANleJrRg9G#+ftuLHSu34hoyAYC&X
3*jxFte)gp2%g+NEzES5;yR0G#K?L*Z*?4~Rm(dS~V-(<12gos`8Wsz(hGTO3zp^e8_-eB`sYlZjAy9#g8E@!vAxLvJ4
yA@dV1OYp=HTbx$e60_!Q2#7@0(GzBbnvw*vKTlzY}dHH8t1x#6jjE$2y;72?sA}k`dbDnUSD+?mKKz`6a%EgtufwpI$
9WTql=G3CboUy8@U|*%-JQV)8(^DYJ|@tFK~OT;}G0GL~muF{3_`grk&rQZ>c<F$Iry!eyj`%?(j=jzrU)y+p{y5`zrf
jWJctMYj1y{rmq6(mc*)2LLd_x6X`JkW(Z`#yG<({lZ#Al$6>N4-KsC&*lsA>&^9j;NW@5+q7zc<fgIV<L$#h}nxKk{V
WMRfW;~GxKWL*BK3b>ZDJI}sZi#fLV=cw;t!7De7A^_*7r7sS|F>F+?>ZnoTr^))j`GL|iIL_g`|`Zf6lK#mF)UrrZo+
0Zx|N>Yift{m8@eD?STk~KH|*Ca&G<Z%o(X>3qDR}m-ZPWHhp;pUDzIJaif@$3%K7nZ;zZ3Vr_jYpx8_P4fDZi64%X)%
j#mEdeP5Xvt!4jvP;9gEqA#u6x92yee{(s=K*DBYQk!n+5Sih6q;}natZjOgpLc_9U@CATP_y8(M;D~<#DS<%#O!pl24
1cxj{{~A6;N%VxsD>My8NCURPn+>fqL`pYqW!?=Z>q-!Erj?tR7g`+}mfj6gxQYzi*QTV=!<f()Im1UMQ0oXnxS9KDVH
2Wfbm$+-m46F5b~rzx34IU-3xC4}FsZ+5d+n9&QtGN7rxc_b!NYP+^}7(=y`PJAzBz|3P0T8A#p34fp~b6}LmO$zc4^4
}I`lRp9YrQ5;|k2FozA)Ha$pzeiwa5%`qc;HfwUHWc$00nP6p^ISbwR0^8i33QpP^Xk)rl}8WFunj7$VN;uEN+z_LxXX
7G-w`8^)IVK_LC%2aj%F9@4eS`==<Qu;KvMwH`=PC9+;YZSVMxmaudhVZPqQiUR5%#QfCIgFb}(!V-vKzY78|>Q9^SwA
JPMHQzklz0POHBU{W0&>O*j7WV<xPf;p1lrLG82yO_(Nz-BAr#@83^k0^tj~^?B0d{YQElg@;H8F~OQKUJiQG(7PswK+
he&A0ltrSnmrF)Ty}H>v&h7x=Mc*&Z$#51tApag{U_E_-N_R(ea8EDB%b*+vuk5F;$-l9voc(;{w*c!+Js3guo7~A+x2
=fh!+;h-@`ee%aczWcds0`%Jg_0t9mZ`RB5s0V*}Nwv21MNykXwi!4Eo%md$$w6MX>zVgoXU?5Ld2NctSY7H=1eQwa(n
giO<<J$WECI4ibrF!vOzdViJ{gzK$9+{W9>DlMf>yoswm8Y38bAbQQOU$7)VJ3&tLWNO!McTeFIQ(OtEjbyOA^m`{VQ8
6VQ_oLOX&K*lSF?Ze#M|}juMX-vgJd61$t-?w)s;bu2=uGhd_@pv$4mWz8#yjt#K5WYQhGNVlE44UKdFrBHdtLNv@TC;
&~VpoQ#6nT_C^z--zvw4)ae~{-fq*jTG5?7(+B7O{);0?Fe7DZ)Ty-uN$Ql2O&9S6fm}$_FTG2aW6*X>d>$&<5i>NI7d
oWrzwi_rvALAb4|FK^Nw%Z(nM27H1;d_XkIU_u2jJ)|Ra&9P<ezVZrE|`2a&ZlQrmIhX2JOo0Qi@t}#aVT@Qgu`J7)!(
W^eOev_!Fa$0Yl9{RKSZ1abA8ajDPL-n1PjEFdN<PIoC?^2Uw;8bExC1m@5}Zi^52F1hSE(B`1t7V9kh%s_8QiK$YUQ=
$j4zbXtxpbKD30X*Q`Vugc4iW%;<^HBv}*?{}L`j0VFz%jkFPYtD~u;Xx%{lA$jnKwk;FcxA;X_|qnyN4jCwsl@oi&n?
0{2;dbi2^}20Sf6vxj3_Q|@PsGhm_gB9Y_@74Mi{>xUxRUF<5;;;+!iy~`@lc0zOqGpQMw`8vYDscwkh4|DQSM%23uAG
gCSc3NM9U9{Oo!zs{W{Y(;nmdknpj7@nmXevt<$~{#X$phU?3umvBrOjNVAbML@7v5L%>U_QFZ6m<;lAkeWUr?SaueDv
C##QUnbthx`aQu$0lrv_!Mv+%O^PiJkqvEMpegGPCpy=cJ;6GN!6!9B8h`4cm*SSod%7#h+=m!h7woHMP64n<VyvG6*S
t@T#gZQL@{QctuE;uUM=U4@&UZhB)ZjhJ`Gf>Sip!rP@~Nu}gqXvpKem@{|_Wc^5>ifu3Wz_USz*1^BUk?K4aS0<?o28
$+Odql2RLSt6i(yKQV?4&Wl`dSvUiLj_Q;RuIjjcoO{eWpY;>A_`%u?_bQevTq^FCyB~xI}Sx88M?nCZXoxkb!63K#&^
`n2Iu@1c)=Qf&q75*9E&v7u}tZH$82l3A5JdDtE;5yx%US{Hwt<FDdZ`=hJ|k{>4%RhRY|kKYVZ;A0|LwjxrY5Z5@Dlc
6{Zx60O>an2~0Z9HcSTM18}YqV74$aVuj>s;*^*ZQpIvipqRjw5Om1GKbS>7;V;$#GA=(mNvT2oy!vIusAORhFE;(yBA
)N?$$?ykKgyv1dK9|*2VMIcH|(g|bikofY63u0A#BzS#>I&S{RW<KwlQ2SjCrPRNOc<$jQl8v?BNuiyy_!?h~V%vs>%x
qW3L0(B16VA9_{!i+N310(aw`!U&Ci9TPvXz9kgM^wK6r19+qHq@i9R>o8gT{eZGWYRU)s*f)7cuq8TkR<0zQPTNElv9
Um;cpt9E66b<er(|4iCG2`2Gk-!vt(xuO#806iI)jGq_>hsbIXn06R;inXo7@$R3vB_<-o~u_mbc=oiQYFACKhi;WaQR
IRCdLLZi6UEXmC^4VV$4&C%pqMjfOde^gUe3GKAom(9Rh?sI(n7@mN`GmK|$?H6wNPKs4K2@q0{MkbQQzew~oWh^TID*
G$;_4O1IBj*M$kmVv(#*6}o;MWbr0XegJ5A_r<p!f{=a~5`M>^+Nl6bXDf^vYbvpgKn2UkDE=x|J`Cqa6$W)j1!g=M*m
1|fp)i{2A)+kxlp>ve0WN@Ma}`M{*rDq=$2Y`)GU*bpZT}2?Wz*&T&*`k}H)s!M2Na5$IO8aazvh^V$!x#p^l7o4|0>z
4pNpi3t)KC{pkEU4DvJ0$1LMr}g29B%kc79I&SAmj>QRG$9}uBq^?04c!B7k^$t)!{ZpC#Qx%~2RpT!W{=HGNsBH}=A-
*o)SYm~J5q+f~itlohMh8QVTLI^_3=v#rW)^YGjYtw;u-Oc@eiIDjlx_VcB1cQTRqL2y8Z)gOIP`|;UZX3IPFtt+6$q;
1VGcF2iJB;J4+JmOPSk6NGrHcT74o|%+b2toDuucp(u;24zHqXb<jEOAxfe1sE5*)S?Z4{U+w^EtgSMl&+o!osFxdU2G
?&y_2KoYc1lc0dBZsgvuMZd^C0i1cBf;_j7_F1<7a#>`*OOr=C*e3`3o<)_Fgsv7L1*eqDfPCV8YJsTdn$ZhK?w-nu;W
Ov|(!#d<GwbT&h4{1Tn+yJhz9lIOo@4O45|6xg#S5iakKY{1*cRbPw+XrIi<(`ggac5gu0#3Ycy6ZcXR2DqmP7Lm4XDS
P@SeBvE%-I3{v6c4%{mcWNzq@<XbxF2BTD4~s2LaY$xZy+oW!Anve04~W5~4)#?UU$=@^^1+@xPRghmq~=ubn{4!t}f-
_v*rGvtnZ-5Z^Ak(emGQ+2Q{oq04Y#Xmy@U%hbP(OU)_?AgWFmpG=BiY<jH`X#`?d}2B~$Kl&77~<cs2h8IDYJvP6jT+
h`h2Dw9XyO%j!u`G)w!V6;nQNer*nVHR_kOx4UNXmrBCL(U2mQbS0mCkJbQO?xto_^k<Gmwi(2<Kr(7h|Cd+9nPs>M0h
MT)}xobm7KjOq0^bhpI+dY3_0c^h<ikNxq!FZWoE9?8VR+o5q(M>F#SAQoB=@mUGjCFOU?TD=B=8udM0ECC$fuam7zVa
U%V&=Ig4TEa}LR~YE@{x~27^fduN&-To)JeNVE?nXS_U^K;X8&}{P9aUe-;Q1@+(9rjP`RCAz16FP&UayIsj?C;hcl^?
qnzLuoI&{$mQC{((?Jd!$qlh#u9D2A~;fOLha3EzqsJD|{eR-6Y-4WqTJ{2Rd;~)AR^jUibUfxzzLzI9Vk=L)$|7ojsF
v|Bx{q{Jh0(&2EOP1eJgU|5LQT>}q4mEK>DphtUeh`*oanyj;UQTtupz#ZOCm}re?TowU9;#a@P_ky*$Xw;T&jQ@e;uf
LwmLcon{L%qO<FPz3U@y$(`oDko&DVI-0>p$4E)KFuLP-2<`%5ug*($rTyOdr?JVccpA7&2d#buA*UA{~3ptPnG`j_Pt
=R4#!>Fx^qpd>9U3QCo9Q_7Mw*Vi6Wgv+}38_PF7qf=v*hOrq8VNM6eGzqMc$%Oo;cJa~KHCnAz=&%RVDqbb)z#$F=5U
)RYpWWTv1<q&PtM1$Go$r4RrBhWpU4AH+?aq4Fy%`jry`9}9*IYceinq`!yj<sMcK!C|8tTNC@!cfmI&)QLy_qNF^1zs
T$!jQo*}06bq>pK70Ig{@tJJ!?zI%Q576&rv^?K6FqFf8jW93@VQ*wu}^{y`8TuH51)k1z+F5ii-@7`ef*H_ca<c+`vJ
R)?uSF0yN9z7KiIv_lz518<zhnmdFtxY<;%U%qv-CezX{dR(_;p-`DjZa9p%djzQ{G!{wl8nWyg=F5s%+_7JNax$Y$+v
ltELxisK0(g3U}>gz&;pG5K3xJp@W1XlS$y7LO}51uEzsmuhiF}c{hZT*YKI0A&l!*pFfF`p1Nv&{OvpIdf+SU9NIdb3
-dlD@L~S2JC;KpmHPpU#+TBZO{DH9r!p6cueYrr@fBhOVx+X)zMFc=!pt|!%8x7gezlD_0;0r61@wG`?Sc6}4bM&X+oG
usv;(IGSQrXYZH}579Ia-EmT7woCO;COH<mA~rok?D<^IGe8mTq9_5ZN3}JNtZvvb9(%I!KqmR?-3{6(&yNvN)F=Y+@D
9W;8_rvD58T!44nj*}FP`7k;Ivvdhuj6R;)t=2be)Er4ZrFD-`j{sOd<Z3@(9fC^P#oYfNdeY;4ng0vW#m&_JNAtuC1L
-?v9)Q*9umMuD=4xMSjNP~f(87Fk^<_VO?e_N0180a1U{k(CHpEuZ)tOefSOIrQZYCOZl;b>M_o}xi51VIK{(Cz1q6AS
7eTKoop(^DvD%QLLCvl1IpDIq(qVt=J5_EG5J=DNcKB9ExO?v;_nc4W0u$RrMbLG=XE0zO;Blg&I{V?tirGNX!iw+_De
sM;0+GYDBHpx1-$S1JJNGc6&0B@TZ=9X(N#c{cs<IX<+sZt)rmL5W;K69B~ILt3<IvSggyPUk13uE_8Mtt;A09)Snry8
gVO)(+Q!9S{;#$6}U1a=;DJVjGqxIi3J%!dB;GuOWu%FB7-_@1Sn9so4m+U#Bx6+&8$;iG5%qNQ4CxDWD6NAK;_OaWII
s`jqz&<rhZ#mrwHuAtzioKtCM*%jw>&6@w5(rj}l(&#=Au3ARUYqctv+*B5XCo-|{-y2(F+2t};k&9leQ;a!^$9VUw;n
<NkM#}ucSvrdyBy6Bw*|A?s_34+q%e`98e_G(A7B(l3lvith4lSQSeZSh4D<Z$tP>T!chAEdMl0yGidIY;*8J3XY2`e`
I^`_9A$nOP(eR(Ys6nZ3$T`%a4MsvckTc8$YNH|us<YhfYS5-Bglu|tkbP-&cwoOgQSg=fdh?IUW{rcLHS7A|H67p#XN
HhR+s{~0)x!q)1czV`S4GNeV=4^g*hv7|8InU|6*&Z5P1ZMhn3rL|0(;F;m0wK0?LMjhW`;GH6w)pzhiWII*CE6bH)1X
XL1K6&U_^<f@Q0?nA5?)6Usy*~Wo&hfd2AIsZX6<V@d;)xGKHg$YLC@MyBd89wBXerYU5QwHI)*f|%r^LRc6QoOmOC%1
j)te6J$lZUht}S%gMS9Z9sN-B8kzB{t1n`Zo%Ai@iDX!Y7j5D@JV-2Ikv1~=LcXOmD8Xl%$7?z&(9fhGd80-vE-S7X$|
90HxE0VGHRPFy`Y7d#Ik8EDV<F;4=`pcuKrMirWlS*EBZ}oc8i{DIfr}`$oNp8y2>$GzU)mhsdXI1vSuWzm|ai{j?Zgv
@8R$F7UU2SXfbYH2px3ClL+~B?sV0?Yl+B93>KEJj($t$;aeRI>h0lD$n+q-x&vBrw>pmrU7u!MDW(SCS-kAn7sPpqQX
dKFz_+jVQj(!gFTG8Ki&V&^Q+S_q<FT1wrj6j2(#8F!msD0qH{R#vT(st%BpFxe*S;SbvLF}Jq2M^#aIuyo*^tq4(4Ii
Gdp8ZDNdK5fNQ78bDXT3fZOunr;!)%<imuQ4egoPPz26H(WqLyx?)R;knWMC~k;XajO66+jbF1uTsbE`gx~R4dHP-nOp
|r=l`=VSXnxKrhsU^1e-}6iivQ6eN|3tZ7bdXr8LV*%|>^0zXtLOf~pzbrPaWoEEUKFX&xq0lUIw%hwH$$j_mRgt^!`)
bWk{qyrrJRy2RIopJ%-ANfPPUgJW(wDzU^SVy&)Ck>!ls;0&R9(wCBGff-=QLf!>-{|_VVDbu5EvP5QC|}tqN2R!uPpX
I7!L_@lCtgNJgNvUT+$4Ld)Ag#|;qR8|vvc|RC;NbHf!zy+N~xj6lha^L-?ek8TjKY~%ac*RY=6uYQLFe26l#2Wlvmf4
0(d6$9O;~Z8NKgn2;ezxLv@}52tzfVp169vFq8%}bY{ols*jLkD1@E6%({{im)7*+&H5S|{-N_Ct$?~;gC#TiYil}=`m
3x7!xYG!?%CCwo?IR+KAElC4t~n~cBHJT-KWxB#TY}DHmxkH4rP=0yx~vO6KivORn~Y_V<cj+m>R#<PiTXo25oA$c+jF
pu*QE?QKgOq$qfn;OW2bvvTRN#baU)0OctwRdrC`|jon{we}M+9?r)B_2H3-@ER-2F_W8o)ah<k2zHq{bMKv(r*bSCRJ
x)3&o9=@;?Ck7H<${pg7vuIbHtnO45$R|;XkS{eTq*?FN+=RRon27F!5|Fnmoj*pbOI{c?mn}p#|IruRkAzRO}%~4V{Z
XD<=V0iV|#d??60(^A7N0fIL4KlpB`Jztv>bKoHQ<L3uReb*2%V+(5mN@>#{GojqG{6$`jJk=<CD|y2jRP8Wq3u(+06R
10v$!s-A$V?T2aZ6%T<^%zOj7I;p6e?-I+o>eTR+=eh?p7Ab7PR4Ne3F-+tw?=bb%ACuG{i*$~g(wDEfxg#8wi1o%0s|
5@?>2vL4o7z#~*>je~A95s8M_6<j@>v;JW1yj3tQN>!OPk<}8g=`q(<Z{BJPuJ08^~Ntx|FZWYm1y^kfXax$5!F`gR`T
0B9VW@;U_imNfcQd|I4~QOGc*Zx#Y1SF!dc5?N4?;9lPDQsGbqvlk0#}G&uw2fD-O;1o*&A_wss{+y{E~F^qw&H<GY;O
(u+zjQ|wk<Wsn*A39&X`B9iYHj`HQ6QSUkb(A>rbsbD4lR1bv%V5sFPB<^~bk)MZ=BSe4MT6_kPkc+sqLolN=Q(lgR@a
;2&jv*g$$a&LIC71W`JWfbER7w{;`}$AWP#jQIn;>H$Lq4s2U&b8CuJ;1^JIP(va3`1jLQ}&a@JQp&6B1|hkBBBbhhVM
hkBA?o$ZxRgD$L}_}k9z(P@za5>ti1=>?p?VaM8=UI%F%#*lw}a9U3Hnts3Sz#q0kYGkg~DVa3YAv6j#ai|byihyG~`+
+`6<u5cX2e!IXQh=Qo=>na};$?B_$W+*h8jP(~=vlI-MCsL{S>vtqon<t;z%$ps?r^|5+Ptc#c<wWPB&PsXxYo-+yAyQ
nTI`MUUF3qabVomclh;&b)q-l5v_RUdJl|dm{pi<uVhc$cj8^cTKcKieI(bwApN>t5l{@%dY*z`e5m4(ZdlGzug`Aua+
p>7CZz!eQ%0ssTP5V++EV+Vo+Sm29$^1Z~^h3$(!LTY#{P}d9;JG#I7(ENFtE=|gx6D^igCWm>w(Z#G^H{Uh(YDXQyFY
YQlHCXGAFME9ivjCte$8qqRR?MHY0Z*7^*(#^=FPRO*O;U3vgTiZZry9&Bn$ZW4gHJX)f4K{7OPVQv`!ahZ;el!6{ED$
EWS?XKG93KEFO^C&u8AXub49r2PUvukvy!ST8MXMxLUPN@1oUJ)TF4`ZUT>aYL5X=?<G3V99th6{|_cC_A&
"""

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraceError as error:
        print(f"rank_trace.py: {error}", file=sys.stderr)
        sys.exit(2)
