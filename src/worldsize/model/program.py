"""Find the programs of the book, and the files that belong to each program.

A program is a file in ``snippets/``, ``labs/`` or ``assessment/``. Its transcripts,
``NAME.DEVICE.txt``, and its figures are in the same folder. A program without a CPU transcript
needs a GPU. On a machine without a GPU, it must print in one sentence that it needs one.

The part ``DEVICE`` of a file name is called the device of the transcript:

- ``cpu``: the output of the current release of torch.
- ``cpu-torch-2-13``: the output of torch 2.13 and older releases, if it is different.
- ``cuda``: the output on the kind of GPU on which the program was recorded first.
- ``a100`` and other names: the output on a different kind of GPU.

``NAME.svg`` is the figure that the program draws on a CPU, and ``NAME.cuda.svg`` is the figure
that it draws on a GPU. ``snippets/gpu.toml`` lists the programs that are recorded on a GPU.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path

from worldsize.model import BookError
from worldsize.model.transcript import Command, Tolerances, Transcript

FOLDERS = ("snippets", "labs", "assessment")
LAUNCH = "labs/launch/"  # job scripts and their programs; the commands run in this folder
SUFFIXES = (".py", ".cu", ".cpp", ".sh")
GPU_COMMANDS = "snippets/gpu.toml"
CPU_COMMANDS = "as on a CPU"  # in that file, for the commands of the CPU transcript
OWN_GPUS = "own_gpus"  # in that file, the key of the programs whose ranks cannot share a GPU
GLOO_ONLY = "gloo_only"  # in that file, the programs that never use NCCL, by reason
MEASURED = "snippets/measured.toml"
_IN_FOLDER = re.compile(rf"[^/]+({'|'.join(map(re.escape, SUFFIXES))})$")
_IMPORT = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
_PYTHON_COMMAND = re.compile(r"\bpython (\w+)\.py\b")
_DATA = re.compile(r"[\w.-]+\.(?:toml|csv|(?:cpu|cuda)\.txt)")
_DATA_SUFFIXES = (".toml", ".csv", ".txt")  # a search for these is faster than _DATA
_DEVICE = r"[a-z0-9]+(?:-[a-z0-9]+)*"
_OLDER = re.compile(r"cpu-torch-(\d+)-(\d+)")
_OUTPUT_FILE = re.compile(rf"(?P<stem>.+?)\.(?:(?P<device>{_DEVICE})\.txt|(?:{_DEVICE}\.)?svg)")


_cache: dict | None = None  # the cache of `assume_unchanged`; None outside of this context


@contextmanager
def assume_unchanged(cache: dict) -> Iterator[None]:
    """Assume that no file of the book changes in this context.

    The functions that are decorated with `memoized_while_unchanged` store their results in
    ``cache``, and return the stored result when they are called again.
    """
    global _cache
    before, _cache = _cache, cache
    try:
        yield
    finally:
        _cache = before


def memoized_while_unchanged(function: Callable) -> Callable:
    """Decorate a function so that its results are cached in the context `assume_unchanged`."""

    @wraps(function)
    def wrapper(*arguments: Program | Path | str) -> object:
        if _cache is None:
            return function(*arguments)
        if (key := (function, *arguments)) not in _cache:
            _cache[key] = function(*arguments)
        return _cache[key]

    return wrapper


@dataclass(frozen=True)
class Program:
    """A program of the book in the folder ``root``."""

    root: Path
    path: Path

    @property
    def name(self) -> str:
        """Return the path in the book, for example ``snippets/02_ddp/naive.py``."""
        return self.path.relative_to(self.root).as_posix()

    def transcript_path(self, device: str) -> Path:
        """Return the path of the transcript for ``device``, even if it does not exist."""
        return self.path.with_suffix(f".{device}.txt")

    def transcript_name(self, device: str) -> str:
        """Return the path of the transcript in the book, for messages."""
        return self.transcript_path(device).relative_to(self.root).as_posix()

    @property
    def figure(self) -> Path:
        """Return the path of the figure for the CPU, even if the program draws none."""
        return self.figure_path("cpu")

    def figure_path(self, device: str) -> Path:
        """Return the path of the figure for ``device``, even if the program draws none."""
        return self.path.with_suffix(".svg" if device == "cpu" else f".{device}.svg")

    @property
    def figures(self) -> dict[str, Path]:
        """Return the paths of the existing figures by device, the CPU first."""
        paths = {device: self.figure_path(device) for device in ["cpu", *self.devices]}
        return {device: path for device, path in paths.items() if path.exists()}

    @property
    def devices(self) -> list[str]:
        """Return the devices of its transcripts: cpu, cuda, then other kinds of GPUs.

        Transcripts of older releases are left out.
        """
        found = {each for each in self._transcript_devices if not _OLDER.fullmatch(each)}
        return sorted(found, key=lambda device: (device not in ("cpu", "cuda"), device))

    @property
    def older_transcripts(self) -> dict[tuple[int, int], str]:
        """Return the devices of the transcripts of older releases, the newest release first.

        The key is the last release that prints this output: ``{(2, 13): "cpu-torch-2-13"}``.
        """
        found = filter(None, map(_OLDER.fullmatch, self._transcript_devices))
        releases = {(int(match[1]), int(match[2])): match[0] for match in found}
        return dict(sorted(releases.items(), reverse=True))

    @property
    def _transcript_devices(self) -> set[str]:
        """Return the devices of all its transcripts."""
        return _devices_by_stem(self.path.parent).get(self.path.stem, set())

    def expected_device(self, device: str, torch: str) -> str:
        """Return the device of the transcript that a run on this release of torch must match.

        For a CPU, this can be the transcript of an older release.
        """
        older = self.older_transcripts.items()
        matches = [name for last, name in older if release(torch) <= last]
        return matches[-1] if matches and device == "cpu" else device

    @property
    def gpu_template(self) -> Transcript | None:
        """Return a transcript with the commands to record on a GPU, and without outputs.

        Return None if snippets/gpu.toml does not list the program. If it lists `as on a CPU`,
        the commands are those of the CPU transcript. The command that compiles a CUDA program
        is the first command of its CPU transcript.
        """
        command_lines = gpu_commands(self.root).get(self.name)
        if command_lines is None:
            return None
        if command_lines == CPU_COMMANDS:
            commands = self.transcript("cpu").commands
        else:
            commands = Transcript.parse(command_lines, GPU_COMMANDS).commands
        if self.path.suffix == ".cu":
            commands = [*self.transcript("cpu").commands[:1], *commands]
        return Transcript([Command(each.command_line, [], each.status) for each in commands])

    @property
    def needs_own_gpus(self) -> bool:
        """Return whether each rank needs its own GPU, as snippets/gpu.toml declares."""
        path = self.root / GPU_COMMANDS
        listed = _gpu_file(path, path.stat().st_mtime_ns) if path.exists() else {}
        return self.name in listed.get(OWN_GPUS, [])

    def gpu_device(self, gpu: str) -> str:
        """Return the device of its transcript for this kind of GPU.

        The device is "cuda", or ``gpu`` if "cuda" was recorded on a different kind of GPU.
        """
        first = self.transcript("cuda").provenance if "cuda" in self.devices else None
        return gpu if first and gpu_kind(first.device) != gpu else "cuda"

    def transcript(self, device: str) -> Transcript:
        """Return its transcript for a device, which is cached until the file changes.

        Raises BookError, with file and line, if the file is not a valid transcript.
        """
        path = self.transcript_path(device)
        return _read(path, self.transcript_name(device), path.stat().st_mtime_ns)

    def transcripts(self) -> dict[str, Transcript]:
        """Return its transcripts by device, without those of older releases."""
        return {device: self.transcript(device) for device in self.devices}

    @property
    def machines(self) -> list[str]:
        """Return the machines that recorded it: `2 CPU cores (…)`, `1 × NVIDIA H200`."""
        provenances = [transcript.provenance for transcript in self.transcripts().values()]
        return [provenance.device for provenance in provenances if provenance]

    @memoized_while_unchanged
    def _words(self, device: str) -> set[str]:
        """Return the words of all commands of the transcript for ``device``.

        Without a device, return the words of all transcripts and of snippets/gpu.toml.
        """
        words = set() if device else set(gpu_commands(self.root).get(self.name, "").split())
        for each in [device] if device else self.devices:
            try:
                commands = self.transcript(each).commands
            except BookError:
                continue  # the test of this program reports the error
            words |= {word for command in commands for word in command.command_line.split()}
        return words

    @memoized_while_unchanged
    def dependencies(self, device: str = "") -> list[Program]:
        """Return the other programs of its folder that its commands need.

        The commands of its transcripts name these programs, or the program or one of these
        programs imports or starts them. With ``device``, only that transcript counts.
        """
        words = sorted(self._words(device))
        queue = [self.path.with_name(word) for word in words if _IN_FOLDER.match(word)]
        found = {self.path: self}
        queue += self._imported_paths()
        while queue:
            path = queue.pop(0)
            if path not in found and path.exists() and is_program(path, self.root):
                found[path] = Program(self.root, path)
                queue += found[path]._imported_paths()
        return list(found.values())[1:]

    @memoized_while_unchanged
    def _imported_paths(self) -> list[Path]:
        """Return the paths that it may import; for a shell script, those that it starts.

        The paths need not exist, because the names of installed packages are included.
        """
        pattern = {".py": _IMPORT, ".sh": _PYTHON_COMMAND}.get(self.path.suffix)
        names = pattern.findall(self.path.read_text("utf-8")) if pattern else []
        return [self.path.with_name(f"{name}.py") for name in names]

    @memoized_while_unchanged
    def data(self, device: str = "") -> list[Path]:
        """Return the TOML files, CSV files and transcripts of its folder that its run needs.

        These are the files that its commands, its text or the text of a dependency name.
        """
        programs = (self, *self.dependencies(device))
        names = set(_DATA.findall(" ".join(self._words(device))))
        names.update(*(each._data_names() for each in programs if each.path.suffix == ".py"))
        found = (self.path.with_name(name) for name in sorted(names))
        return [path for path in found if path.exists()]

    @memoized_while_unchanged
    def _data_names(self) -> list[str]:
        """Return the file names in its text that could be tables or transcripts."""
        text = self.path.read_text("utf-8")
        return _DATA.findall(text) if any(end in text for end in _DATA_SUFFIXES) else []

    @property
    def tolerances(self) -> Tolerances:
        """Return the tolerances of its output, which snippets/measured.toml declares."""
        path = self.root / MEASURED
        measured = _measured(path, path.stat().st_mtime_ns) if path.exists() else {}
        return measured.get(self.name, Tolerances())

    def imports(self, *packages: str) -> list[str]:
        """Return those of these packages that it imports."""
        if self.path.suffix != ".py" or not packages:
            return []
        statement = rf"^\s*(?:import|from) ({'|'.join(packages)})\b"
        return re.findall(statement, self.path.read_text("utf-8"), re.MULTILINE)


@memoized_while_unchanged
def _devices_by_stem(folder: Path) -> dict[str, set[str]]:
    """Return the devices of the transcripts of a folder, for each name without suffix."""
    found = defaultdict(set)
    for match in filter(None, map(_OUTPUT_FILE.fullmatch, os.listdir(folder))):
        if match["device"]:
            found[match["stem"]].add(match["device"])
    return found


@lru_cache(maxsize=1024)
def _read(path: Path, name: str, _mtime: int) -> Transcript:
    try:
        return Transcript.parse(path.read_text("utf-8"), name)
    except UnicodeDecodeError as error:
        raise BookError(
            f"{name}:1: this transcript is not UTF-8 text, so save it as UTF-8: {error}"
        ) from None


def is_program(path: Path, root: Path) -> bool:
    """Return whether a file is a program of the book.

    In ``snippets/`` and ``labs/launch/``, programs can also be in subfolders.
    """
    if path.suffix not in SUFFIXES or path.name.startswith(("_", ".")) or path.is_symlink():
        return False  # labs/ may contain a link to a program, which must not count twice
    try:
        first, *rest = path.relative_to(root).parts
    except ValueError:
        return False
    has_subfolders = first == "snippets" or (first == "labs" and rest[:1] == ["launch"])
    return (has_subfolders and bool(rest)) or (first in FOLDERS and len(rest) == 1)


@memoized_while_unchanged
def programs(root: Path) -> list[Program]:
    """Return all programs of the book, sorted by path in each folder."""
    return [
        Program(root, path)
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if is_program(path, root)
    ]


def gpu_commands(root: Path) -> dict[str, str]:
    """Return the commands to record on a GPU for each program, the most important first."""
    path = root / GPU_COMMANDS
    return _gpu_commands(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=8)
def _gpu_commands(path: Path, _mtime: int) -> dict[str, str]:
    listed = _gpu_file(path, _mtime)
    return {name: value for name, value in listed.items() if name not in (OWN_GPUS, GLOO_ONLY)}


@lru_cache(maxsize=8)
def _gpu_file(path: Path, _mtime: int) -> dict:
    return tomllib.loads(path.read_text("utf-8"))


@lru_cache(maxsize=8)
def _measured(path: Path, _mtime: int) -> dict[str, Tolerances]:
    """Return the tolerances of the programs that a file of measured numbers lists."""
    content = tomllib.loads(path.read_text("utf-8"))
    figures = content.get("figures", [])
    return {
        name: Tolerances(tuple(numbers.get(name, ())), name not in figures)
        for numbers in [content.get("numbers", {})]
        for name in {*numbers, *figures}
    }


def release(torch: str) -> tuple[int, int]:
    """Return the major and the minor version of torch, for example (2, 13) for "2.13.0"."""
    major, minor = re.findall(r"\d+", torch)[:2]
    return int(major), int(minor)


def device_up_to(release: tuple[int, int]) -> str:
    """Return the device of a CPU transcript for releases up to this one: cpu-torch-2-13."""
    return "cpu-torch-{}-{}".format(*release)


def gpu_kind(gpus: str) -> str:
    """Return the kind of a GPU as in file names: h100 for `1 × NVIDIA H100 80GB HBM3`."""
    words = re.findall(r"[a-z0-9]+", gpus.partition(",")[0].rpartition("×")[2].lower())
    words = [word for word in words if word not in ("nvidia", "geforce", "tesla")]
    model = next((n for n, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "-".join(words[: model + 1])


def transcript_device(path: Path) -> str | None:
    """Return the device of a transcript; None for any other file."""
    match = _OUTPUT_FILE.fullmatch(path.name)
    return match["device"] if match else None


def owning_program(path: Path, root: Path) -> Program | None:
    """Return the program that a transcript or a figure belongs to; None if there is none."""
    if match := _OUTPUT_FILE.fullmatch(path.name):
        for suffix in SUFFIXES:
            if (program := path.with_name(match["stem"] + suffix)).exists():
                return Program(root, program)
    return None


def is_orphan(path: Path, root: Path) -> bool:
    """Return whether a file is a transcript or a figure whose program does not exist."""
    in_book = path.is_relative_to(root) and path.relative_to(root).parts[0] in FOLDERS
    is_output = in_book and bool(_OUTPUT_FILE.fullmatch(path.name))
    return is_output and owning_program(path, root) is None
