"""Compare the trace of a new run with the stored trace, or store the new one.

Lines, messages, collectives and the order of the steps must be equal. Values of variables may
differ a little, because the kernels of each instruction set round differently. Times are not
compared.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

from worldsize.execution.trace_run import load_recorder, record_trace
from worldsize.model import BookError, atomic_write
from worldsize.model.program import Program
from worldsize.model.traces import RECORDER, TRACES, TraceSettings, trace_path
from worldsize.testing.program_check import CheckOptions, CheckResult, inputs

MAX_COMPRESSED = 60_000  # bytes; the largest trace that a page may load
TIME_LIMIT = 120.0  # seconds; every recorded program ends sooner, even if its ranks hang
RELATIVE = 2e-3  # relative tolerance; numbers are stored with four digits
NOT_COMPARED = ("times", "recorded")


def trace_inputs(program: Program, settings: TraceSettings) -> tuple[str | Path, ...]:
    """Return the texts and files on which the outcome of `check_trace` depends."""
    return (
        *inputs(program, "cpu"),
        f"{settings.recording_command()} {settings.racing_ends}",
        program.root / RECORDER,
        trace_path(program),
    )


def check_trace(
    program: Program, settings: TraceSettings, options: CheckOptions
) -> CheckResult:
    """Run the program under the recorder, and compare its trace with the stored one.

    With ``options.record``, a trace that differs is stored. If a forked run differs, the
    program runs once more as it is typed. Raise BookError with file and line of the first
    difference.
    """
    path = trace_path(program)
    name = path.relative_to(program.root).as_posix()
    stored = read_trace(path, name) if path.exists() else None
    if stored is None and not options.record:
        raise BookError(
            f"{program.name}:1: {TRACES} lists it, but {name} does not exist: run "
            f"`make record WHAT={program.name}`"
        )
    limit = min(options.limit, TIME_LIMIT)
    run = record_trace(program, settings, limit=limit, launcher=options.launcher)
    seconds, rerun = run.result.seconds, False
    found = trace_difference(program.name, stored, run.trace, settings)
    if found and options.launcher is not None:
        run = record_trace(program, settings, limit=limit)
        seconds, rerun = seconds + run.result.seconds, True
        found = trace_difference(program.name, stored, run.trace, settings)
    if not found:
        return CheckResult(seconds, rerun_in_fresh_process=rerun)
    if not options.record:
        hint = f"if the new trace is right, run: make record WHAT={program.name}"
        raise BookError(f"{found}\n{hint}")
    text = load_recorder(program.root).trace_text(run.trace)
    if (size := compressed_size(text)) > MAX_COMPRESSED:
        raise BookError(
            f"{program.name}:1: its trace has {size:,} bytes after compression, and the limit "
            f"is {MAX_COMPRESSED:,}: choose a smaller section or fewer variables in {TRACES}"
        )
    atomic_write(path, text)
    return CheckResult(seconds, recorded=True, rerun_in_fresh_process=rerun)


def read_trace(path: Path, name: str) -> dict:
    """Return a stored trace. Raise BookError if the file is not valid."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BookError(f"{name}:1: this trace is not valid JSON: {error}") from None


def compressed_size(text: str) -> int:
    """Return the number of bytes of a text after gzip, as a web server sends it."""
    return len(gzip.compress(text.encode(), mtime=0))


def trace_difference(
    program: str, stored: dict | None, new: dict, settings: TraceSettings
) -> str:
    """Return the first difference between two traces, with file and line; "" if there is none.

    ``program`` is the name of the program for the message.
    """
    if stored is None:
        return f"{program}:1: its trace was never recorded"
    new = json.loads(json.dumps(new))
    for step, (old, now) in enumerate(zip(stored["steps"], new["steps"], strict=False)):
        if text := _step_difference(stored, new, old, now):
            return f"{program}:{now[3]}: step {step}, tick {now[0]}, rank {now[1]}: {text}"
    counts = len(stored["steps"]), len(new["steps"])
    if counts[0] != counts[1]:
        longer = stored if counts[0] > counts[1] else new
        line = longer["steps"][min(counts)][3]
        return f"{program}:{line}: the trace has {counts[0]} steps, and the new run {counts[1]}"
    skipped = {*NOT_COMPARED, "steps", "functions", *(["ends"] if settings.racing_ends else ())}
    for key in sorted((stored.keys() | new.keys()) - skipped):
        old, now = stored.get(key), new.get(key)
        if isinstance(old, list) and isinstance(now, list) and len(old) == len(now):
            for number, (a, b) in enumerate(zip(old, now, strict=True)):
                if not same(a, b):
                    line = b.get("line", 1) if isinstance(b, dict) else 1
                    change = f"was {_text(a)}, and is now {_text(b)}"
                    return f"{program}:{line}: {key} {number} {change}"
        elif not same(old, now):
            return f"{program}:1: {key} was {_text(old)}, and is now {_text(now)}"
    return ""


def _step_difference(stored: dict, new: dict, old: list, now: list) -> str:
    """Return how two steps differ; "" if they are equal."""
    if old[:2] != now[:2]:
        return f"the trace has tick {old[0]} of rank {old[1]} at this place"
    if old[2:4] != now[2:4]:
        return f"the trace has `{old[2]}` at line {old[3]}, and the new run `{now[2]}`"
    if old[2] not in ("line", "return"):
        return (
            "" if old[4:] == now[4:] else f"the trace has {old[4:]}, and the new run {now[4:]}"
        )
    functions = stored["functions"][old[4]], new["functions"][now[4]]
    if functions[0] != functions[1]:
        return f"the trace is in `{functions[0][0]}`, and the new run in `{functions[1][0]}`"
    if old[5] != now[5]:
        return f"the trace is in call {old[5]} of this rank, and the new run in call {now[5]}"
    for name in sorted(old[6].keys() | now[6].keys()):
        if name not in old[6] or name not in now[6]:
            which = "the new run" if name in now[6] else "the trace"
            return f"`{name}` changes only in {which}"
        if not same(old[6][name], now[6][name]):
            return f"`{name}` was {_text(old[6][name])}, and is now {_text(now[6][name])}"
    return ""


def same(a: object, b: object, scale: float = 0.0) -> bool:
    """Return whether two stored values are equal, apart from rounding.

    ``scale`` is the size of the numbers of a tensor. Whole numbers outside of tensors are
    compared exactly.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return False
        if a.get("t") and not a["t"].startswith(("int", "uint", "bool")):
            scale = max(_size(a), _size(b)) or 1e-12
        return all(
            same(a[key], b[key], scale if key in "cv" or key == "value" else 0.0) for key in a
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, scale) for x, y in zip(a, b, strict=True))
    if type(a) in (int, float) and type(b) in (int, float):
        if type(a) is type(b) is int and not scale:
            return a == b
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=RELATIVE * scale)
    return type(a) is type(b) and a == b


def _size(value: dict) -> float:
    """Return the largest absolute value, or the root mean square, of a stored tensor."""
    value = value.get("value", value)
    numbers = value.get("v") or value.get("c", [])[1:2]
    return max((abs(x) for x in numbers if type(x) in (int, float)), default=0.0)


def _text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
