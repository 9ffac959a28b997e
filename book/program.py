"""Programs: files under ``snippets/``, ``labs/``, ``assessment/``; what is true of each.

A program has a transcript beside it (``NAME.cpu.txt``, ``NAME.cuda.txt``), a chapter embeds it,
its commands print what the transcript says, and if it draws ``NAME.svg`` that figure lies
beside it. A program with no CPU transcript needs a GPU, and must say so in one sentence where
there is none.
"""

from __future__ import annotations

import datetime
import difflib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from book import BookError, runner
from book.transcript import (
    Provenance,
    Step,
    Transcript,
    TranscriptError,
    difference,
    output_lines,
    same_line,
)

FOLDERS = ("snippets", "labs", "assessment")
LAUNCH = "labs/launch/"  # job scripts and what they start: their commands are typed in there
SUFFIXES = (".py", ".cu", ".cpp", ".sh")
DEVICES = ("cpu", "cuda")


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

    @property
    def figure(self) -> Path:
        """Where the figure lies that it draws, if it draws one."""
        return self.path.with_suffix(".svg")

    @property
    def devices(self) -> list[str]:
        """The devices it has transcripts for."""
        return [device for device in DEVICES if self.transcript_path(device).exists()]

    def transcript(self, device: str) -> Transcript:
        """Its transcript; raises BookError with file and line where that cannot be read."""
        path = self.transcript_path(device)
        try:
            return Transcript.parse(path.read_text("utf-8"))
        except TranscriptError as error:
            name = path.relative_to(self.root).as_posix()
            raise BookError(f"{name}:{error.line}: {error}") from None
        except UnicodeDecodeError as error:
            name = path.relative_to(self.root).as_posix()
            raise BookError(f"{name}:1: it is not UTF-8 text: {error}") from None


def is_program(path: Path, root: Path) -> bool:
    """Whether a file is a program: directly in a folder, or anywhere under some of them."""
    try:
        first, *rest = path.relative_to(root).parts
    except ValueError:
        return False
    if path.suffix not in SUFFIXES or path.name.startswith(("_", ".")) or path.is_symlink():
        return False  # a link to a program, which labs/ may hold, is not one more
    anywhere = first == "snippets" or (first == "labs" and rest[:1] == ["launch"])
    return (anywhere and bool(rest)) or (first in FOLDERS and len(rest) == 1)


def programs(root: Path) -> list[Program]:
    """Every program of the book."""
    return [
        Program(root, path)
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if is_program(path, root)
    ]


def stray_transcripts(folder: Path, root: Path) -> Iterator[Path]:
    """Transcripts and figures in ``folder`` which have no program."""
    for path in sorted(folder.iterdir()):
        match = re.match(r"(?P<stem>.+?)(\.cpu\.txt|\.cuda\.txt|\.svg)$", path.name)
        if match and not any((folder / (match["stem"] + s)).exists() for s in SUFFIXES):
            yield path


def check_shown(program: Program, embedded: dict[str, list[str]]) -> None:
    """Raise BookError unless the program has a transcript and a page shows both.

    ``embedded`` is what `book.embeds.embedded_files` found. A lab is shown by its own page.
    """
    if not program.devices:
        if program.name.startswith("labs/") and _named_in_a_lab(program):
            return
        raise BookError(
            f"{program.name}:1: it has no transcript: write its `$ command` lines in "
            f"{program.transcript_path('cpu').name} and record them with "
            f"`make record WHAT={program.name}`"
        )
    for device in program.devices:
        if program.transcript(device).provenance is None:
            raise BookError(
                f"{program.transcript_path(device).relative_to(program.root)}:1: it was never "
                f"recorded: `make record WHAT={program.name}`"
            )
    if program.name.startswith("labs/") and not program.name.startswith(LAUNCH):
        return
    if program.name not in embedded:
        raise BookError(f"{program.name}:1: no page of docs/ embeds it")
    if not any(
        program.transcript_path(device).relative_to(program.root).as_posix() in embedded
        for device in program.devices
    ):
        raise BookError(
            f"{embedded[program.name][0]}: the page embeds {program.name} but no page embeds "
            f"its transcript"
        )
    if program.figure.exists():
        pages = (program.root / "docs").rglob("*.md")
        wanted = program.figure.relative_to(program.root).as_posix()
        if not any(wanted in page.read_text("utf-8") for page in pages):
            raise BookError(f"{program.name}:1: it draws {wanted}, which no page shows")


def _named_in_a_lab(program: Program) -> bool:
    return any(
        program.name.removeprefix(LAUNCH) in step.command
        for other in programs(program.root)
        if other.name.startswith("labs/")
        for device in other.devices
        for step in other.transcript(device).steps
    )


# --- running ---------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What running a program against its transcript came to."""

    seconds: float  # spent in its commands
    recorded: bool = False
    doubted: bool = False  # started warm, it did not do as recorded, and ran again as typed


def place(program: Program, folder: Path) -> None:
    """Copy into ``folder`` what a reader would: the program alone, or the labs as they stand.

    With a program go the programs beside it that its commands name, and with one of
    labs/launch/ all of that folder, in which its commands are typed.
    """
    if program.name.startswith(LAUNCH):
        shutil.copytree(
            program.root / LAUNCH,
            folder,
            ignore=shutil.ignore_patterns("__pycache__", "*.txt", ".*"),
            dirs_exist_ok=True,
        )
    elif program.name.startswith(("labs/", "assessment/")):
        copy_labs(program.root, folder)
    else:
        for path in (program.path, *companions(program)):
            shutil.copy2(path, folder / path.name)


def companions(program: Program) -> list[Path]:
    """The other programs of its folder that its transcripts' commands name."""
    words: set[str] = set()
    for device in program.devices:
        try:
            steps = program.transcript(device).steps
        except BookError:
            continue  # its own test says so
        words |= {word for step in steps for word in step.command.split()}
    return [
        path
        for path in sorted(program.path.parent.iterdir())
        if path.name in words and path != program.path and is_program(path, program.root)
    ]


def missing_tool(program: Program, transcript: Transcript) -> str | None:
    """What the commands need and this machine lacks: a compiler, a package, Linux, Slurm, root.

    Only what is not made for every system counts: all else is in the requirements.
    """
    for step in transcript.steps:
        tool = step.command.split()[0]
        if tool in {"nvcc", "g++", "ncu", "nsys"} and shutil.which(tool) is None:
            return tool
        if "cuda_on_cpu.py" in step.command and sys.platform != "linux":
            return "Linux"
        if "labs/cluster.py" in step.command and (why := no_cluster(program.root)):
            return f"what labs/cluster.py needs ({why})"
        if "slurm/rehearse.py" in step.command:
            path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
            if any(shutil.which(name, path=path) is None for name in ("munged", "slurmctld")):
                return "Slurm (Debian: slurm-wlm, munge)"
            if os.geteuid() != 0:
                return "root, which a cluster of one's own needs,"
    for package in _kernel_packages(program):
        if importlib.util.find_spec(package) is None:
            return package
    if _needs_ray(program) and importlib.util.find_spec("ray") is None:
        return "ray (pip install -r requirements/ray.txt)"
    return None


@lru_cache
def no_cluster(root: Path) -> str | None:
    """Why labs/cluster.py can build no network namespaces here; None if it can."""
    command = [sys.executable, str(root / "labs/cluster.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else (done.stdout or done.stderr).strip()


def _kernel_packages(program: Program) -> list[str]:
    """Which of triton and numba a program imports."""
    if program.path.suffix != ".py":
        return []
    imports = r"^\s*(?:import|from) (triton|numba)\b"
    return re.findall(imports, program.path.read_text("utf-8"), re.MULTILINE)


def _needs_ray(program: Program) -> bool:
    """Ray is no part of what the book installs."""
    imports = r"^\s*import ray$"
    return program.path.suffix == ".py" and bool(
        re.search(imports, program.path.read_text("utf-8"), re.MULTILINE)
    )


def copy_labs(root: Path, folder: Path) -> None:
    """The labs and the assessment as a learner has them, without their transcripts."""
    for name in ("labs", "assessment"):
        if (root / name).exists():
            shutil.copytree(
                root / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.txt", ".*"),
            )


def gpus_needed(transcript: Transcript) -> int:
    """How many GPUs a transcript was recorded with: its largest ``--nproc-per-node``."""
    counts = re.findall(
        r"--nproc[-_]per[-_]node[= ](\d+)", "\n".join(step.command for step in transcript.steps)
    )
    return max([1, *map(int, counts)])


def check(
    program: Program, device: str, *, limit: float, record: bool = False, warm=None
) -> Outcome:
    """Run the program's commands for ``device`` and hold them to its transcript.

    ``warm`` is a `book.warm.Launcher`, or None. What does not hold when it was started warm is
    run once more, all of it as typed, and that counts. With ``record``, write the transcript
    (and the figure) where it does not hold. Raises BookError with file, line, command and a
    diff.
    """
    # the process that starts commands warm has imported triton: too late for its variables
    if warm is not None and device == "cpu" and "triton" not in _kernel_packages(program):
        try:
            return _check(program, device, limit, record, warm)
        except _Doubt:
            outcome = _check(program, device, limit, record, None)
            outcome.doubted = True
            return outcome
    return _check(program, device, limit, record, None)


class _Doubt(Exception):
    """A command that was started warm did not do as recorded."""


def _check(program: Program, device: str, limit: float, record: bool, warm) -> Outcome:
    path = program.transcript_path(device)
    if not path.exists():
        transcript = _first_gpu_transcript(program)
    else:
        transcript = program.transcript(device)
    name = path.relative_to(program.root).as_posix()
    changed: list[str] = []
    results: list[tuple[Step, list[str]]] = []
    with runner.empty_folder() as folder, one_at_a_time(device):
        place(program, folder)
        seconds = 0.0
        warmed = False
        for number, step in enumerate(transcript.steps):
            where = f"{name}:{step.line}: `{step.command}`"
            by = (
                warm
                if warm is not None and warm.takes(step.command, program.name, number)
                else None
            )
            warmed = warmed or by is not None
            # one that hangs because it was started warm is found early, and run as typed
            longest = limit if by is None else min(limit, 60.0)
            result = runner.run(step.command, folder, limit=longest, device=device, warm=by)
            seconds += result.seconds
            try:
                output = _output(program, step, result, folder, where)
            except BookError as error:
                raise error if by is None else _Doubt from None
            results.append((step, output))
            diff = difference(step.output, output)
            if diff and by is not None:
                raise _Doubt
            if diff:
                changed.append(f"{where} printed something else:\n" + "\n".join(diff))
        drawn = folder / program.figure.name
        if message := _compare_figure(program, drawn if drawn.exists() else None):
            if warmed:
                raise _Doubt
            changed.append(message)
        unrecorded = transcript.provenance is None
        if record and (changed or unrecorded):
            if any("draws no such figure" in message for message in changed):
                raise BookError("\n".join(changed))
            _write(program, device, results, seconds, drawn if drawn.exists() else None)
            return Outcome(seconds, recorded=True)
    if changed:
        hint = f"if that is right: make record WHAT={program.name}"
        raise BookError("\n".join([*changed, hint]))
    return Outcome(seconds)


def _output(
    program: Program, step: Step, result: runner.Result, folder: Path, where: str
) -> list[str]:
    """What a command printed. Raises BookError where it failed, or broke a rule."""
    if result.timed_out or result.status != step.status:
        wanted = f"status {step.status}" if step.status else "success"
        came = "" if result.timed_out else f" left with status {result.status}, not {wanted}:"
        place_of_error = _place_of_error(program, result) or f"{program.name}:1"
        renamed = {
            f"{folder}/labs/": "labs/",
            f"{folder}/assessment/": "assessment/",
            f"{folder}/": f"{program.path.parent.relative_to(program.root)}/",
        }
        raise BookError(f"{place_of_error}: {where}{came}\n{runner.explain(result, renamed)}")
    if result.leftovers:
        raise BookError(
            f"{program.name}:1: {where} left processes running (killed now):\n"
            + "\n".join(f"  {left}" for left in result.leftovers)
        )
    try:
        output = output_lines(result.stdout)
    except ValueError as error:
        raise BookError(f"{program.name}:1: {where}: {error}") from None
    if any(str(folder.parent) in line for line in output):
        raise BookError(
            f"{program.name}:1: {where} printed the path of the folder it ran in, "
            f"which no reader has: print names, not paths"
        )
    return output


def check_refusal(program: Program, *, limit: float) -> Outcome:
    """A program that needs a GPU says so in one sentence where there is none.

    Raises BookError where it does anything else.
    """
    step = program.transcript("cuda").steps[0]
    with runner.empty_folder() as folder:
        place(program, folder)
        result = runner.run(step.command, folder, limit=limit, device="cpu")
    said = [line for line in result.stderr.splitlines() if line.strip()]
    sentence = [line for line in said if re.search(r"\b(GPU|CUDA|accelerator)s?\b", line)]
    if result.status == 0 or not sentence or any(line.startswith("Traceback") for line in said):
        raise BookError(
            f"{program.name}:1: `{step.command}` needs a GPU; where there is none it must say "
            f"so in one sentence on stderr, without a traceback, and leave with a non-zero "
            f"status; it left with {result.status} and said:\n" + "\n".join(said[-8:])
        )
    return Outcome(result.seconds)


def _first_gpu_transcript(program: Program) -> Transcript:
    """The commands of the CPU transcript, with no more ranks than this machine has GPUs.

    What `cuda_on_cpu.py` ran is run as compiled.
    """
    count = max(1, len(runner.gpu_names()))
    steps = []
    for step in program.transcript("cpu").steps:
        command = re.sub(
            r"(--nproc[-_]per[-_]node[= ])(\d+)",
            lambda m: m[1] + str(min(int(m[2]), count)),
            step.command,
        )
        command = re.sub(r"^python cuda_on_cpu\.py (\w+)\.cu --check$", r"./\1", command)
        if command not in [other.command for other in steps]:
            steps.append(Step(command, status=step.status, line=step.line))
    return Transcript(steps)


def _place_of_error(program: Program, result: runner.Result) -> str | None:
    """``snippets/…/naive.py:12`` where the run's last traceback passes through the program."""
    text = "\n".join(stack for _, stack in result.stacks) or result.stderr
    lines = re.findall(rf'File "[^"]*{re.escape(program.path.name)}", line (\d+)', text)
    if not lines:
        return None
    return f"{program.name}:{lines[0] if result.stacks else lines[-1]}"


def _write(
    program: Program,
    device: str,
    results: list[tuple[Step, list[str]]],
    seconds: float,
    drawn: Path | None,
) -> None:
    """Write transcript and figure, each at once or not at all."""
    recorded = Transcript(
        [Step(step.command, output, step.status) for step, output in results],
        Provenance(
            datetime.date.today().isoformat(),
            runner.describe_device(device),
            runner.torch_version(),
            ".".join(map(str, sys.version_info[:3])),
            seconds,
        ),
    )
    replace(program.transcript_path(device), recorded.text())
    if drawn is not None:
        text = "\n".join(line.rstrip() for line in drawn.read_text("utf-8").splitlines())
        replace(program.figure, text + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file by renaming a complete one over it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(text, "utf-8")
    partial.replace(path)


@contextmanager
def one_at_a_time(device: str) -> Iterator[None]:
    """The GPU is one resource: runs on it wait for each other, in whatever process they are."""
    if device != "cuda":
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"world-size-gpu-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- figures ---------------------------------------------------------------------------------


def figure_labels(text: str) -> list[str]:
    """The words of a figure (not its bare numbers), in order.

    Raises BookError where it is not SVG, or where it would ask another host for something.
    """
    try:
        tree = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise BookError(f"it is not SVG: {error}") from None
    for element in tree.iter():
        for key, value in element.attrib.items():
            if key.endswith("href") and not value.startswith(("#", "data:")):
                raise BookError(f"it refers to {value}")
    labels = ["".join(e.itertext()).strip() for e in tree.iter() if e.tag.endswith("}text")]
    return [label for label in labels if re.search(r"[^\W\d_]", label)]


def _compare_figure(program: Program, drawn: Path | None) -> str | None:
    """What is wrong with the figure just drawn beside the one in the book; None if nothing."""
    kept = program.figure
    name = kept.relative_to(program.root).as_posix()
    if drawn is None:
        return (
            f"{name} is in the book, but {program.name} draws no such figure"
            if kept.exists()
            else None
        )
    try:
        new = figure_labels(drawn.read_text("utf-8"))
        if not new:
            raise BookError("it has no words: label its axes, and keep text as text")
    except BookError as error:
        raise BookError(f"{program.name}:1: the figure {drawn.name} it drew: {error}") from None
    if not kept.exists():
        return f"{program.name}:1: it draws {drawn.name}, which is not in the book yet"
    old = figure_labels(kept.read_text("utf-8"))
    if len(old) == len(new) and all(map(same_line, old, new)):
        return None
    diff = [
        line
        for line in difflib.unified_diff(old, new, lineterm="", n=0)
        if line[:2] not in {"--", "++", "@@"}
    ]
    return f"{name}: {program.name} draws other words:\n" + "\n".join(diff)
