"""Programs: files under ``snippets/``, ``labs/``, ``assessment/``; what is true of each.

A program has a transcript beside it (``NAME.cpu.txt``, ``NAME.cuda.txt``), a chapter embeds it,
its commands print what the transcript says, and if it draws ``NAME.svg`` that figure lies
beside it. A program with no CPU transcript needs a GPU, and must say so in one sentence where
there is none.

``snippets/gpu.toml`` says which programs have something to show on a GPU. ``NAME.cuda.txt`` is
what the first kind of GPU printed, and says which; another kind's is named for it
(``NAME.a100.txt``). What a GPU draws is named like its transcript (``NAME.cuda.svg``).

``NAME.cpu.txt`` is what today's torch prints. Where an older release prints something else,
``NAME.cpu-torch-2-13.txt`` is what it prints up to 2.13.
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
LAUNCH = "labs/launch/"  # job scripts and what they start: their commands are typed in there
SUFFIXES = (".py", ".cu", ".cpp", ".sh")
ON_GPUS = "snippets/gpu.toml"
MEASURED = "snippets/measured.toml"
_IN_FOLDER = re.compile(rf"[^/]+({'|'.join(map(re.escape, SUFFIXES))})$")
_IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
_STARTED = re.compile(r"\bpython (\w+)\.py\b")
_DATA = re.compile(r"[\w.-]+\.(?:toml|csv|(?:cpu|cuda)\.txt)")
_ENDS = (".toml", ".csv", ".txt")  # found sooner than the names
_DEVICE = r"[a-z0-9]+(?:-[a-z0-9]+)*"
_OLDER = re.compile(r"cpu-torch-(\d+)-(\d+)")
_RECORDED = re.compile(rf"(?P<stem>.+?)\.(?:(?P<device>{_DEVICE})\.txt|(?:{_DEVICE}\.)?svg)")


_known: dict | None = None  # what programs have answered, while no file changes


@contextmanager
def assume_unchanged(known: dict) -> Iterator[None]:
    """No file changes in here: what a program has answered it repeats, from ``known``."""
    global _known
    before, _known = _known, known
    try:
        yield
    finally:
        _known = before


def memoized_while_unchanged(answer: Callable) -> Callable:
    """A function whose answers are kept where files are `assume_unchanged`."""

    @wraps(answer)
    def kept(*asked: Program | Path | str) -> object:
        if _known is None:
            return answer(*asked)
        if (key := (answer, *asked)) not in _known:
            _known[key] = answer(*asked)
        return _known[key]

    return kept


@dataclass(frozen=True)
class Program:
    """One program of the book at ``root``."""

    root: Path
    path: Path

    @property
    def name(self) -> str:
        """Its path in the book: ``snippets/02_ddp/naive.py``."""
        return self.path.relative_to(self.root).as_posix()

    def transcript_path(self, device: str) -> Path:
        """Where its transcript for ``device`` lies, or would lie."""
        return self.path.with_suffix(f".{device}.txt")

    def transcript_name(self, device: str) -> str:
        """The path of its transcript in the book."""
        return self.transcript_path(device).relative_to(self.root).as_posix()

    @property
    def figure(self) -> Path:
        """Where the figure lies that it draws, if it draws one."""
        return self.figure_path("cpu")

    def figure_path(self, device: str) -> Path:
        """Where the figure lies that it draws on ``device``: a GPU's replaces no other."""
        return self.path.with_suffix(".svg" if device == "cpu" else f".{device}.svg")

    @property
    def figures(self) -> dict[str, Path]:
        """The figures it has, by device: the CPU's, then those of GPUs."""
        drawn = {each: self.figure_path(each) for each in ["cpu", *self.devices]}
        return {each: path for each, path in drawn.items() if path.exists()}

    @property
    def devices(self) -> list[str]:
        """The devices it has transcripts for: cpu, cuda, then further kinds of GPUs."""
        found = {each for each in self._recorded if not _OLDER.fullmatch(each)}
        return sorted(found, key=lambda device: (device not in ("cpu", "cuda"), device))

    @property
    def older(self) -> dict[tuple[int, int], str]:
        """The releases of torch up to which it printed something else, the newest first.

        By release the device that the transcript is named for: {(2, 13): "cpu-torch-2-13"}.
        """
        found = filter(None, map(_OLDER.fullmatch, self._recorded))
        releases = {(int(match[1]), int(match[2])): match[0] for match in found}
        return dict(sorted(releases.items(), reverse=True))

    @property
    def _recorded(self) -> set[str]:
        """What its transcripts are named for."""
        return _recorded(self.path.parent).get(self.path.stem, set())

    def expected_transcript(self, device: str, torch: str) -> str:
        """What the transcript is named for that a run on this release of torch is held to."""
        fits = [name for last, name in self.older.items() if release(torch) <= last]
        return fits[-1] if fits and device == "cpu" else device

    @property
    def on_gpu(self) -> Transcript | None:
        """Its commands on a GPU, without outputs; None where it has nothing to show on one.

        What compiles it is as in its CPU transcript.
        """
        command_line = on_gpus(self.root).get(self.name)
        if command_line is None:
            return None
        commands = Transcript.parse(command_line, ON_GPUS).commands
        if self.path.suffix == ".cu":
            commands = [*self.transcript("cpu").commands[:1], *commands]
        return Transcript([Command(each.command_line, [], each.status) for each in commands])

    def gpu_device(self, gpu: str) -> str:
        """How its transcript of such a GPU is named: cuda, or for the GPU beside another's."""
        known = self.transcript("cuda").provenance if "cuda" in self.devices else None
        return gpu if known and gpu_kind(known.device) != gpu else "cuda"

    def transcript(self, device: str) -> Transcript:
        """Its transcript, read once for each state of the file.

        Raises BookError with file and line where it cannot be read.
        """
        path = self.transcript_path(device)
        return _read(path, self.transcript_name(device), path.stat().st_mtime_ns)

    def transcripts(self) -> dict[str, Transcript]:
        """All its transcripts, by device."""
        return {device: self.transcript(device) for device in self.devices}

    @property
    def machines(self) -> list[str]:
        """What its transcripts were recorded on: `2 CPU cores (…)`, `1 × NVIDIA H200`."""
        recorded = [transcript.provenance for transcript in self.transcripts().values()]
        return [provenance.device for provenance in recorded if provenance]

    @memoized_while_unchanged
    def _words(self, device: str) -> set[str]:
        """What the commands of one transcript are made of, or of all and snippets/gpu.toml."""
        words = set() if device else set(on_gpus(self.root).get(self.name, "").split())
        for each in [device] if device else self.devices:
            try:
                commands = self.transcript(each).commands
            except BookError:
                continue  # its own test says so
            words |= {word for command in commands for word in command.command_line.split()}
        return words

    @memoized_while_unchanged
    def dependencies(self, device: str = "") -> list[Program]:
        """The other programs of its folder that its transcripts' commands name (or those of the
        ``device``), and those that any of them imports or starts."""
        words = sorted(self._words(device))
        queue = [self.path.with_name(word) for word in words if _IN_FOLDER.match(word)]
        found = {self.path: self}
        queue += self._imported()
        while queue:
            path = queue.pop(0)
            if path not in found and path.exists() and is_program(path, self.root):
                found[path] = Program(self.root, path)
                queue += found[path]._imported()
        return list(found.values())[1:]

    @memoized_while_unchanged
    def _imported(self) -> list[Path]:
        """What it imports, or, where it is a script of a shell, what it starts."""
        pattern = {".py": _IMPORTED, ".sh": _STARTED}.get(self.path.suffix)
        names = pattern.findall(self.path.read_text("utf-8")) if pattern else []
        return [self.path.with_name(f"{name}.py") for name in names]

    @memoized_while_unchanged
    def data(self, device: str = "") -> list[Path]:
        """TOML, CSV and transcripts beside it that it, its companions or its commands name."""
        programs = (self, *self.dependencies(device))
        names = set(_DATA.findall(" ".join(self._words(device))))
        names.update(*(each._named() for each in programs if each.path.suffix == ".py"))
        found = (self.path.with_name(name) for name in sorted(names))
        return [path for path in found if path.exists()]

    @memoized_while_unchanged
    def _named(self) -> list[str]:
        """What its text names that could be a table or a transcript."""
        text = self.path.read_text("utf-8")
        return _DATA.findall(text) if any(end in text for end in _ENDS) else []

    @property
    def tolerances(self) -> Tolerances:
        """How far its output may differ from a transcript, as snippets/measured.toml says."""
        path = self.root / MEASURED
        measured = _measured(path, path.stat().st_mtime_ns) if path.exists() else {}
        return measured.get(self.name, Tolerances())

    def imports(self, *packages: str) -> list[str]:
        """Which of these packages it imports."""
        if self.path.suffix != ".py" or not packages:
            return []
        statement = rf"^\s*(?:import|from) ({'|'.join(packages)})\b"
        return re.findall(statement, self.path.read_text("utf-8"), re.MULTILINE)


@memoized_while_unchanged
def _recorded(folder: Path) -> dict[str, set[str]]:
    """What the transcripts of a folder are named for, by what stands before it."""
    found = defaultdict(set)
    for match in filter(None, map(_RECORDED.fullmatch, os.listdir(folder))):
        if match["device"]:
            found[match["stem"]].add(match["device"])
    return found


@lru_cache(maxsize=1024)
def _read(path: Path, name: str, _mtime: int) -> Transcript:
    try:
        return Transcript.parse(path.read_text("utf-8"), name)
    except UnicodeDecodeError as error:
        raise BookError(f"{name}:1: it is not UTF-8 text: {error}") from None


def is_program(path: Path, root: Path) -> bool:
    """Whether a file is a program: directly in a folder, or anywhere under some of them."""
    if path.suffix not in SUFFIXES or path.name.startswith(("_", ".")) or path.is_symlink():
        return False  # a link to a program, which labs/ may hold, is not one more
    try:
        first, *rest = path.relative_to(root).parts
    except ValueError:
        return False
    anywhere = first == "snippets" or (first == "labs" and rest[:1] == ["launch"])
    return (anywhere and bool(rest)) or (first in FOLDERS and len(rest) == 1)


@memoized_while_unchanged
def programs(root: Path) -> list[Program]:
    """Every program of the book."""
    return [
        Program(root, path)
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if is_program(path, root)
    ]


def on_gpus(root: Path) -> dict[str, str]:
    """The programs with something to show on a GPU, worth most first, and their commands."""
    path = root / ON_GPUS
    return _listed(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=8)
def _listed(path: Path, _mtime: int) -> dict[str, str]:
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
    """The two numbers of a release of torch that say what it can do: (2, 13) of 2.13.0."""
    major, minor = re.findall(r"\d+", torch)[:2]
    return int(major), int(minor)


def up_to(release: tuple[int, int]) -> str:
    """What a transcript is named for that holds up to a release of torch: cpu-torch-2-13."""
    return "cpu-torch-{}-{}".format(*release)


def gpu_kind(gpus: str) -> str:
    """What kind of GPU it is, as a file's name has it: h100 of `1 × NVIDIA H100 80GB HBM3`."""
    words = re.findall(r"[a-z0-9]+", gpus.partition(",")[0].rpartition("×")[2].lower())
    words = [word for word in words if word not in ("nvidia", "geforce", "tesla")]
    model = next((n for n, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "-".join(words[: model + 1])


def recorded_on(path: Path) -> str | None:
    """The device that a transcript is named for; None for any other file."""
    match = _RECORDED.fullmatch(path.name)
    return match["device"] if match else None


def owning_program(path: Path, root: Path) -> Program | None:
    """The program that a transcript or a figure belongs to; None if there is none."""
    if match := _RECORDED.fullmatch(path.name):
        for suffix in SUFFIXES:
            if (program := path.with_name(match["stem"] + suffix)).exists():
                return Program(root, program)
    return None


def is_orphan(path: Path, root: Path) -> bool:
    """Whether a file is a transcript or a figure which has lost its program."""
    at_home = path.is_relative_to(root) and path.relative_to(root).parts[0] in FOLDERS
    return (
        at_home and bool(_RECORDED.fullmatch(path.name)) and owning_program(path, root) is None
    )
