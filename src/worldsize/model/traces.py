"""Read snippets/traces.toml, the list of the programs whose traces the book stores.

A trace shows what each rank of a program does, line by line. The trace of ``NAME.py`` is the
file ``NAME.trace.json`` in the same folder. The page docs/contributing/recording.md describes
its format.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from worldsize.model import BookError
from worldsize.model.program import Program

TRACES = "snippets/traces.toml"
RECORDER = "labs/rank_trace.py"
SUFFIX = ".trace.json"
_COMMAND = re.compile(r"(?P<before>.*\btorchrun --nproc-per-node=\d+ )(?P<program>\w+\.py.*)")


@dataclass(frozen=True)
class TraceSettings:
    """An entry of snippets/traces.toml: how the trace of a program is recorded."""

    command: str  # a torchrun command, as in a transcript
    watch: str  # two to six sentences for readers: what to look at
    section: tuple[str, ...] = ()  # functions or markers, see `rank_trace.py --help`
    only_pass: int = 0  # the number of the run of the section to record; 0 records all
    functions: tuple[str, ...] = ()  # only the lines of these functions
    variables: tuple[str, ...] = ()  # only these variables
    until_error: bool = False  # whether a rank stops when a call raises an error
    racing_ends: bool = False  # whether timing decides how the processes end
    question: str = ""  # the title of the page on which readers step through the program
    group: str = ""  # the heading above the program in the list of these pages

    def options(self) -> str:
        """Return the options of rank_trace.py as they are typed in a shell."""
        words = [f"--section={name}" for name in self.section]
        if self.only_pass:
            words.append(f"--pass={self.only_pass}")
        if self.functions:
            words.append(f"--functions={','.join(self.functions)}")
        if self.variables:
            words.append(f"--variables={','.join(self.variables)}")
        if self.until_error:
            words.append("--until-error")
        return shlex.join(words)

    def recording_command(self) -> str:
        """Return the torchrun command that runs the recorder in each rank."""
        match = _COMMAND.fullmatch(self.command)
        before, program = match["before"], match["program"]
        return f"{before}rank_trace.py {self.options()} {program}".replace("  ", " ")


def trace_path(program: Program) -> Path:
    """Return the path of the trace of a program, even if there is none."""
    return program.path.with_suffix(SUFFIX)


def trace_settings(root: Path) -> dict[str, TraceSettings]:
    """Return the entries of snippets/traces.toml by the name of the program."""
    path = root / TRACES
    return _read(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=8)
def _read(path: Path, _mtime: int) -> dict[str, TraceSettings]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise BookError(f"{TRACES}:1: this file is not valid TOML: {error}") from None
    known = {each.name for each in fields(TraceSettings)}
    found = {}
    for name, entry in content.items():
        if wrong := sorted({"command", "watch"} - entry.keys() | entry.keys() - known):
            raise BookError(f"{TRACES}:1: {name}: a missing or unknown key: {', '.join(wrong)}")
        if not _COMMAND.fullmatch(entry["command"]):
            raise BookError(
                f"{TRACES}:1: {name}: the command must be "
                "`torchrun --nproc-per-node=N FILE.py …`"
            )
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        found[name] = TraceSettings(**values)
    return found
