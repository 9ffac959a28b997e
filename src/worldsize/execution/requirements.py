"""Check whether this machine meets the requirements of a program.

``snippets/requirements.toml`` declares the requirements. Its table ``requirements`` defines
each requirement with the fields of the class `Requirement`. The table ``programs`` lists the
requirements of each program. The table ``packages`` lists the Python packages that a program
may import although ``requirements/test.txt`` does not install them on every machine.
``never_forked`` lists the programs that must start in a new interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from worldsize.model.program import Program
from worldsize.model.transcript import NPROC, Transcript

FILE = "snippets/requirements.toml"
_PYTHON_COMMAND = re.compile(r"\bpython ([\w-]+\.py)\b")
TOOLS = ("nvcc", "g++", "ncu", "nsys", "compute-sanitizer")  # the first word of some commands


@dataclass(frozen=True)
class Requirement:
    """A requirement. A machine meets it if all its checks succeed."""

    label: str  # its name in the message "… is not on this machine"
    system: str = ""  # the value of sys.platform
    root: bool = False  # whether the user must be root
    tools: list[str] = field(default_factory=list)  # executables on the PATH or in /usr/sbin
    packages: list[str] = field(default_factory=list)  # Python packages
    package_file: str = ""  # PACKAGE/PATTERN, for a file that must exist in a package
    cpu_flag: str = ""  # the name of an instruction set in /proc/cpuinfo
    variable_unset: str = ""  # NAME=VALUE that the environment must not contain
    command: str = ""  # a command that exits with 0 if the program can run

    def failure(self, root: Path) -> str | None:
        """Return None if this machine meets the requirement; otherwise the label.

        If the command failed, its output follows the label.
        """
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
        name, _, value = self.variable_unset.partition("=")
        checks = (
            not self.system or sys.platform == self.system,
            not self.root or os.geteuid() == 0,
            all(shutil.which(tool, path=path) for tool in self.tools),
            all(map(is_installed, self.packages)),
            not self.package_file or has_package_file(self.package_file),
            not self.cpu_flag or has_instructions(self.cpu_flag),
            not name or os.environ.get(name) != value,
        )
        if not all(checks):
            return self.label
        reason = command_failure(self.command, root) if self.command else None
        return f"{self.label} ({reason})" if reason else None


@dataclass(frozen=True)
class Declarations:
    """The content of ``snippets/requirements.toml``."""

    requirements: dict[str, Requirement] = field(default_factory=dict)
    programs: dict[str, list[str]] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)  # package: requirements file
    never_forked: list[str] = field(default_factory=list)  # names of programs


def declarations(root: Path) -> Declarations:
    """Return the declarations of the book in ``root``; empty if the file does not exist."""
    path = root / FILE
    return _read(path, path.stat().st_mtime_ns) if path.exists() else Declarations()


@lru_cache(maxsize=8)
def _read(path: Path, _mtime: int) -> Declarations:
    content = tomllib.loads(path.read_text("utf-8"))
    tables = content.get("requirements", {}).items()
    requirements = {name: Requirement(**fields) for name, fields in tables}
    return Declarations(**content | {"requirements": requirements})


def missing_requirement(program: Program, transcript: Transcript) -> str | None:
    """Return the first requirement that this machine does not meet; None if it meets all.

    These are the requirements of the program, of its commands, and of the other programs that
    its commands start with Python.
    """
    return next(_missing(program, transcript), None)


def _missing(program: Program, transcript: Transcript) -> Iterator[str]:
    for command in transcript.commands:
        tool = command.command_line.split()[0]
        if tool in TOOLS and shutil.which(tool) is None:
            yield tool
    declared = declarations(program.root)
    folder = program.path.parent.relative_to(program.root)
    commands = " ".join(command.command_line for command in transcript.commands)
    started = [(folder / name).as_posix() for name in _PYTHON_COMMAND.findall(commands)]
    for each in dict.fromkeys([program.name, *started]):
        for name in declared.programs.get(each, ()):
            if failure := declared.requirements[name].failure(program.root):
                yield failure
    for package in program.imports(*map(re.escape, declared.packages)):
        if not is_installed(package):
            file = declared.packages[package]
            yield package + (f" (pip install -r {file})" if file else "")


def is_never_forked(program: Program, command_line: str) -> bool:
    """Return whether a command starts a program that is listed in ``never_forked``."""
    script = next((word for word in command_line.split() if word.endswith(".py")), "")
    is_listed = program.name in declarations(program.root).never_forked
    return is_listed and Path(script).name == program.path.name


def gpus_needed(transcript: Transcript) -> int:
    """Return the number of GPUs that the commands need: the largest ``--nproc-per-node``."""
    text = "\n".join(command.command_line for command in transcript.commands)
    return max([1, *(int(match[2]) for match in NPROC.finditer(text))])


def is_installed(package: str) -> bool:
    """Return whether Python finds a package or a subpackage such as ``cuda.tile``."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


def has_package_file(pattern: str) -> bool:
    """Return whether an installed package contains a file such as ``package/name*.so``."""
    package, _, file_pattern = pattern.partition("/")
    spec = importlib.util.find_spec(package)
    return bool(spec) and any(Path(spec.origin).parent.glob(file_pattern))


@lru_cache
def has_instructions(flag: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the x86 processor has the instructions that Linux calls ``flag``.

    Return True if the system does not list the instructions, so that the programs run.
    """
    flags = re.findall(r"(?m)^flags\s*:(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return not flags or flag in flags[0].split()


@lru_cache
def command_failure(command: str, root: Path) -> str | None:
    """Run a command in ``root``. Return its output if it fails, and None if it succeeds."""
    words = [sys.executable if word == "python" else word for word in command.split()]
    done = subprocess.run(
        words, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode == 0 else (done.stdout or done.stderr).strip()
