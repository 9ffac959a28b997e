"""Run a program under the recorder labs/rank_trace.py, and merge what its ranks write."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from worldsize.execution import runner
from worldsize.execution.prefork import Launcher
from worldsize.execution.staging import stage_program
from worldsize.model import BookError
from worldsize.model.program import Program
from worldsize.model.traces import RECORDER, TRACES, TraceSettings


@dataclass
class RecordedRun:
    """The merged trace of a run, and the result of its command."""

    trace: dict
    result: runner.Result


def load_recorder(root: Path) -> ModuleType:
    """Return labs/rank_trace.py as a module."""
    path = root / RECORDER
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _load(path: Path, _mtime: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location("worldsize_trace_recorder", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need their module there
    spec.loader.exec_module(module)
    return module


def record_trace(
    program: Program,
    settings: TraceSettings,
    *,
    limit: float,
    launcher: Launcher | None = None,
    source: str | None = None,
    recorder_source: str | None = None,
) -> RecordedRun:
    """Run the command of a trace in a new folder on the CPU, and merge the recordings.

    ``source`` replaces the text of the program, and ``recorder_source`` replaces the text of
    the recorder. Raise BookError if the recordings of the ranks cannot be merged.
    """
    recorder = load_recorder(program.root)
    command = settings.recording_command()
    with runner.empty_folder() as folder:
        stage_program(program, folder, source)
        shutil.copy2(program.root / RECORDER, folder / "rank_trace.py")
        if recorder_source is not None:
            (folder / "rank_trace.py").write_text(recorder_source, "utf-8")
        events = folder.parent / "events"
        result = runner.run(
            command,
            folder,
            limit=limit,
            launcher=launcher
            if launcher and launcher.accepts(command, program.name, 1)
            else None,
            variables={"TRACE_FOLDER": str(events)},
        )
        try:
            recordings = recorder.read_ranks(events)
            trace = recorder.merge(recordings, result.seconds if result.timed_out else None)
        except recorder.TraceError as error:
            explained = runner.explain(result)
            raise BookError(
                f"{program.name}:1: {TRACES}: `{command}` gave no trace: {error}\n{explained}"
            ) from None
    return RecordedRun(trace, result)
