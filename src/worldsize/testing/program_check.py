"""Hold: what holds a program to its transcript, its figure and the pages that show it."""

from __future__ import annotations

import datetime
import difflib
import fcntl
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from worldsize.execution import gpu_clocks, runner
from worldsize.execution.prefork import Launcher
from worldsize.model import BookError, atomic_write, compatibility
from worldsize.model.program import LAUNCH, ON_GPUS, Program, on_gpus, programs, release, up_to
from worldsize.model.transcript import (
    Clocks,
    Command,
    Provenance,
    Transcript,
    difference,
    output_lines,
    same_line,
)

# what a learner has, with the same paths as in the repository; the graders use `execution`
LABS = ("labs", "assessment", "graders", "src/worldsize/__init__.py", "src/worldsize/execution")
NO_COPIES = shutil.ignore_patterns("__pycache__", "*.txt", ".*")
TOOLS = ("nvcc", "g++", "ncu", "nsys", "compute-sanitizer")
PREFORK_LIMIT = 300.0  # seconds: what hangs because it was started warm is found earlier


@dataclass(frozen=True)
class RunOptions:
    """How the commands of this session are run."""

    limit: float = 900.0  # seconds that one may take
    record: bool = False  # write down what is not as recorded
    warm: Launcher | None = None  # starts commands; None: all run as typed
    device: str = "cpu"  # that the blocks of pages see


@dataclass
class CheckResult:
    """What running a program against its transcript came to."""

    seconds: float = 0.0  # spent in its commands
    recorded: bool = False
    rerun_cold: bool = False  # started warm, it did not do as recorded, and ran again as typed


# --- shown -----------------------------------------------------------------------------------


def check_shown(program: Program, embedded: dict[str, list[str]]) -> None:
    """Raise BookError unless the program has a transcript and a page shows both.

    ``embedded`` is what `page.embedded_files` found. A lab is shown by its own page.
    """
    transcripts = program.transcripts()
    if not transcripts:
        if program.name.startswith("labs/") and _named_in_a_lab(program):
            return
        raise BookError(
            f"{program.name}:1: it has no transcript: write its `$ command` lines in "
            f"{program.transcript_path('cpu').name} and record them with "
            f"`make record WHAT={program.name}`"
        )
    for device, transcript in transcripts.items():
        make = "make record" if device == "cpu" else "make record-gpu"
        if transcript.provenance is None:
            raise BookError(
                f"{program.transcript_name(device)}:1: it was never "
                f"recorded: `{make} WHAT={program.name}`"
            )
        if device != "cpu" and not _as_listed(program, transcript):
            raise BookError(
                f"{program.transcript_name(device)}:1: {ON_GPUS} says other commands, or none: "
                f"change it, or `{make} WHAT={program.name}`"
            )
    newest = compatibility.newest(program.root)
    if program.older and newest not in compatibility.releases(program):
        raise BookError(
            f"{program.name}:1: it prints something else on older releases of torch, and did "
            f"not run on {newest} as it is: `make test-torch-versions RELEASES={newest} "
            f"WHAT={program.name}`"
        )
    if program.name.startswith("labs/") and not program.name.startswith(LAUNCH):
        return
    if program.name not in embedded:
        raise BookError(f"{program.name}:1: no page of docs/ embeds it")
    if not any(program.transcript_name(device) in embedded for device in transcripts):
        raise BookError(
            f"{embedded[program.name][0]}: the page embeds {program.name} but no page embeds "
            f"its transcript"
        )
    if program.figure.exists():
        pages = (program.root / "docs").rglob("*.md")
        wanted = program.figure.relative_to(program.root).as_posix()
        if not any(wanted in page.read_text("utf-8") for page in pages):
            raise BookError(f"{program.name}:1: it draws {wanted}, which no page shows")


def _as_listed(program: Program, transcript: Transcript) -> bool:
    """Whether a GPU transcript has the commands that are to be run on a GPU."""
    listed = program.on_gpu.commands if program.on_gpu else []
    return [each.command_line for each in transcript.commands] == [
        each.command_line for each in listed
    ]


def _named_in_a_lab(program: Program) -> bool:
    name = program.name.removeprefix(LAUNCH)
    labs = (other for other in programs(program.root) if other.name.startswith("labs/"))
    found = (transcript for other in labs for transcript in other.transcripts().values())
    return any(
        name in each.command_line for transcript in found for each in transcript.commands
    )


# --- what a run finds in its folder, and on its machine --------------------------------------


def labs(root: Path) -> dict[str, Path]:
    """The labs and the assessment as a learner has them, each with its name in the folder."""
    return {name: root / name for name in LABS if (root / name).exists()}


def required_files(program: Program) -> dict[str, Path]:
    """What a reader would have in the folder, by name: the program alone, or the labs.

    With a program go the programs beside it that its commands name or that it imports, and
    the tables that they read; with one of labs/launch/ all of that folder, in which its
    commands are typed.
    """
    if program.name.startswith(LAUNCH):
        return {".": program.root / LAUNCH}
    if program.name.startswith(("labs/", "assessment/")):
        return labs(program.root)
    paths = (program.path, *(each.path for each in program.dependencies()), *program.data())
    return {path.name: path for path in paths}


def stage_files(files: dict[str, Path], folder: Path) -> None:
    """Copy files and folders into ``folder`` under their names, without transcripts."""
    for name, source in files.items():
        target = folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=NO_COPIES, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def inputs(program: Program, device: str) -> tuple[str | Path, ...]:
    """What the outcome of `check` depends on: texts and files."""
    listed = "" if device == "cpu" else on_gpus(program.root).get(program.name, "")
    texts = program.name, device, runner.describe_device(device), listed
    transcripts = map(program.transcript_path, [*program.devices, *program.older.values()])
    return (
        *texts,
        *required_files(program).values(),
        *transcripts,
        program.figure_path(device),
    )


# packages that are no part of requirements/test.txt, and the files there that have them
APART = {
    "ray": "ray", "tensorflow": "tensorflow", "tensorboard": "tensorboard", "fla": "fla",
    "cutlass": "cute", "cuda.tile": "cutile", "helion": "helion", "tilelang": "tilelang",
}  # fmt: skip


def missing_tool(program: Program, transcript: Transcript) -> str | None:
    """What the commands need and this machine lacks: a compiler, a package, Linux, Slurm, root.

    Only what is not made for every system counts: all else is in the requirements.
    """
    for command in (each.command_line for each in transcript.commands):
        tool = command.split()[0]
        if tool in TOOLS and shutil.which(tool) is None:
            return tool
        if "cuda_on_cpu.py" in command and sys.platform != "linux":
            return "Linux"
        if "labs/cluster.py" in command and (why := no_cluster(program.root)):
            return f"what labs/cluster.py needs ({why})"
        if "slurm/rehearse.py" in command:
            path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
            if any(shutil.which(name, path=path) is None for name in ("munged", "slurmctld")):
                return "Slurm (Debian: slurm-wlm, munge)"
            if os.geteuid() != 0:
                return "root, which a cluster of one's own needs,"
    text = program.path.read_text("utf-8")
    if 'which("nvcc")' in text and shutil.which("nvcc") is None:
        return "nvcc"
    if "has_int8_kernel" in text and not has_instructions("avx512_vnni"):
        return "AVX-512 VNNI, without which torch multiplies int8 in a plain loop,"
    older = os.environ.get("ATEN_CPU_CAPABILITY") == "default"
    if "get_cpu_capability" in text and (older or not has_instructions("avx2")):
        return "AVX2, for which torch compiles FlexAttention on a CPU,"
    asks = "$(command -v vllm)" in text
    if asks and not (shutil.which("vllm") and importlib.util.find_spec("uvicorn")):
        return "transformers serve or vLLM (requirements/engines.txt)"
    if "AsyncIOBuilder().load()" in text:  # a run would compile it anew, in minutes
        found = importlib.util.find_spec("deepspeed")
        built = found and [*Path(found.origin).parent.glob("ops/aio/async_io_op*.so")]
        if not built:
            return "libaio in DeepSpeed (libaio-dev, then DS_BUILD_AIO=1 pip install deepspeed)"
    for package in program.imports("triton", "numba", *map(re.escape, APART)):
        if not is_installed(package):
            file = APART.get(package)
            return package + (f" (pip install -r requirements/{file}.txt)" if file else "")
    return None


def is_installed(package: str) -> bool:
    """Whether Python finds the package, which may be a part of another, as `cuda.tile` is."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


@lru_cache
def has_instructions(flag: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the x86 processor has the instructions that Linux calls ``flag``.

    Where the system does not say so, the answer is yes, and the programs are run.
    """
    flags = re.findall(r"(?m)^flags\s*:(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return not flags or flag in flags[0].split()


@lru_cache
def no_cluster(root: Path) -> str | None:
    """Why labs/cluster.py can build no network namespaces here; None if it can."""
    command = [sys.executable, str(root / "labs/cluster.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else (done.stdout or done.stderr).strip()


_RANKS = re.compile(r"(--nproc[-_]per[-_]node[= ])(\d+)")


def gpus_needed(transcript: Transcript) -> int:
    """How many GPUs its commands take: the largest ``--nproc-per-node``."""
    command_line = "\n".join(command.command_line for command in transcript.commands)
    return max([1, *(int(match[2]) for match in _RANKS.finditer(command_line))])


@contextmanager
def gpu_lock(device: str) -> Iterator[None]:
    """The GPU is one resource: runs on it wait for each other, in whatever process they are."""
    if device == "cpu":
        yield
        return
    shared = os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # by sessions
    with open(Path(shared, f"world-size-gpu-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- running ---------------------------------------------------------------------------------


@dataclass
class ProgramRun:
    """The commands of a transcript, run once in a folder of their own."""

    program: Program
    device: str
    expected_transcript: str  # what the transcript is named for
    wanted: Transcript
    printed: list[Command] = field(default_factory=list)
    drawn: str | None = None  # the figure, if one was drawn
    seconds: float = 0.0  # spent in commands
    warmed: bool = False  # a command was started warm
    changed: list[str] = field(default_factory=list)  # messages: what is not as recorded
    clocks: Clocks | None = None  # of the GPU, while the commands ran
    source: str | None = None  # of the program, where it is not its own

    def differs(self, message: str) -> None:
        """Note a difference. Where a command was started warm, the first one ends the run."""
        if self.warmed:
            raise BookError(message)
        self.changed.append(message)


def check(program: Program, device: str, options: RunOptions) -> CheckResult:
    """Run the program's commands for ``device`` and hold them to its transcript.

    What does not hold when it was started warm is run once more, all of it as typed, and that
    counts. Recording writes the transcript (and the figure) where it does not hold, on a GPU
    that of the commands that are listed. Raises BookError with file, line, command and a diff.
    """
    expected_transcript = program.expected_transcript(device, runner.torch_version())
    recorded = program.transcript(expected_transcript) if device in program.devices else None
    again = recorded and (
        device == "cpu" or not options.record or _as_listed(program, recorded)
    )
    wanted = recorded if again else program.on_gpu
    attempt, rerun_cold = ProgramRun(program, device, expected_transcript, wanted), False
    with gpu_lock(device):
        try:
            if options.record and device != "cpu":
                with gpu_clocks.Recorder() as recorder:
                    _perform(attempt, options.limit, None)
                attempt.clocks = recorder.result()
            else:
                _perform(attempt, options.limit, options.warm if device == "cpu" else None)
        except BookError:
            if not attempt.warmed:
                raise
            attempt, rerun_cold = ProgramRun(program, device, expected_transcript, wanted), True
            _perform(attempt, options.limit, None)
    # numbers without a clock are replaced, so that clock and numbers are of the same run
    unclocked = attempt.clocks and wanted.provenance and not wanted.provenance.clocks
    if options.record and (attempt.changed or wanted.provenance is None or unclocked):
        if any("draws no such figure" in message for message in attempt.changed):
            raise BookError("\n".join(attempt.changed))
        _write(attempt)
        return CheckResult(attempt.seconds, recorded=True, rerun_cold=rerun_cold)
    if attempt.changed:
        make = "make record" if device == "cpu" else "make record-gpu"
        hint = f"if that is right: {make} WHAT={program.name}"
        raise BookError("\n".join([*attempt.changed, hint]))
    return CheckResult(attempt.seconds, rerun_cold=rerun_cold)


def run_changed(
    program: Program, device: str, source: str, options: RunOptions
) -> CheckResult | None:
    """Run the commands with this source in place of the program's; None if nothing differs.

    What has a grader is graded as well, as a learner's file: beside the program as it is.
    """
    expected_transcript = program.expected_transcript(device, runner.torch_version())
    attempt = ProgramRun(
        program,
        device,
        expected_transcript,
        program.transcript(expected_transcript),
        source=source,
    )
    with gpu_lock(device):
        try:
            _perform(attempt, options.limit, options.warm)
        except BookError:
            return CheckResult(attempt.seconds)
    if not attempt.changed and list(program.root.glob(f"graders/*/{program.path.stem}.py")):
        with runner.empty_folder() as folder:
            stage_files(labs(program.root), folder)
            (folder / program.path.name).write_text(source, "utf-8")
            command_line = f"python labs/check.py {program.path.name}"
            result = runner.run(command_line, folder, limit=options.limit, warm=options.warm)
        return CheckResult(attempt.seconds) if result.status or result.timed_out else None
    return CheckResult(attempt.seconds) if attempt.changed else None


def _perform(attempt: ProgramRun, limit: float, warm: Launcher | None) -> None:
    """Make an attempt. Raises BookError where a command fails or breaks a rule."""
    program = attempt.program
    deterministic = program.deterministic
    with runner.empty_folder() as folder:
        files = required_files(program)
        stage_files(files, folder)
        if attempt.source is not None:
            under = next(each for each in files.items() if program.path.is_relative_to(each[1]))
            copied = folder / under[0] / program.path.relative_to(under[1])
            copied.write_text(attempt.source, "utf-8")
        for number, command in enumerate(attempt.wanted.commands):
            name = program.transcript_name(attempt.expected_transcript)
            where = f"{name}:{command.line}: `{command.command_line}`"
            by = (
                warm
                if warm and warm.takes(command.command_line, program.name, number)
                else None
            )
            attempt.warmed = attempt.warmed or by is not None
            longest = min(limit, PREFORK_LIMIT) if by else limit
            result = runner.run(
                command.command_line, folder, limit=longest, device=attempt.device, warm=by
            )
            attempt.seconds += result.seconds
            output = _output(program, command, result, folder, where)
            attempt.printed.append(Command(command.command_line, output, command.status))
            if diff := difference(command.output, output, deterministic):
                attempt.differs(f"{where} printed something else:\n" + "\n".join(diff))
        figure = folder / program.figure.name
        attempt.drawn = figure.read_text("utf-8") if figure.exists() else None
        kept = program.figure_path(attempt.device)
        if message := _compare_figure(program, kept, attempt.drawn, deterministic):
            attempt.differs(message)


def _output(
    program: Program, command: Command, result: runner.Result, folder: Path, where: str
) -> list[str]:
    """What a command printed. Raises BookError where it failed, or broke a rule."""
    if result.timed_out or result.status != command.status:
        wanted = f"status {command.status}" if command.status else "success"
        came = "" if result.timed_out else f" left with status {result.status}, not {wanted}:"
        line = result.line_in(program.path.name) or 1
        renamed = {f"{folder}/{name}/": f"{name}/" for name in LABS}
        renamed[f"{folder}/"] = f"{program.path.parent.relative_to(program.root)}/"
        why = runner.explain(result, renamed)
        raise BookError(f"{program.name}:{line}: {where}{came}\n{why}")
    if result.leftovers:
        raise BookError(f"{program.name}:1: {where} {result.left_running}")
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


def check_refusal(program: Program, options: RunOptions) -> CheckResult:
    """A program that needs a GPU says so in one sentence where there is none.

    Raises BookError where it does anything else.
    """
    command = program.transcript("cuda").commands[0].command_line
    with runner.empty_folder() as folder:
        stage_files(required_files(program), folder)
        result = runner.run(command, folder, limit=options.limit, device="cpu")
    said = [line for line in result.stderr.splitlines() if line.strip()]
    sentence = [line for line in said if re.search(r"\b(GPU|CUDA|accelerator)s?\b", line)]
    if result.status == 0 or not sentence or any(line.startswith("Traceback") for line in said):
        raise BookError(
            f"{program.name}:1: `{command}` needs a GPU; where there is none it must say "
            f"so in one sentence on stderr, without a traceback, and leave with a non-zero "
            f"status; it left with {result.status} and said:\n" + "\n".join(said[-8:])
        )
    return CheckResult(result.seconds)


def starts_ranks(program: Program) -> bool:
    """Whether a command of its CPU transcript says how many ranks to start, and succeeds."""
    commands = program.transcript("cpu").commands if "cpu" in program.devices else []
    return any(not each.status and _RANKS.search(each.command_line) for each in commands)


def check_ranks(program: Program, ranks: int, options: RunOptions) -> CheckResult:
    """With another number of ranks the commands that succeed still do, or say why not.

    Raises BookError where one hangs, or ends in a traceback of the program.
    """
    seconds = 0.0
    with runner.empty_folder() as folder:
        stage_files(required_files(program), folder)
        for number, command in enumerate(program.transcript("cpu").commands):
            if command.status:
                continue
            command_line = _RANKS.sub(rf"\g<1>{ranks}", command.command_line)
            by = (
                options.warm
                if options.warm and options.warm.takes(command_line, program.name, number)
                else None
            )
            result = runner.run(command_line, folder, limit=options.limit, warm=by)
            seconds += result.seconds
            line = result.line_in(program.path.name)
            if result.timed_out or (result.status and line):
                raise BookError(
                    f"{program.name}:{line or 1}: `{command_line}` neither works nor says "
                    f"in a sentence how many ranks it takes:\n{runner.explain(result)}"
                )
    return CheckResult(seconds)


def _write(attempt: ProgramRun) -> None:
    """Write transcript and figure, each at once or not at all.

    What an older release of torch printed is kept beside what a newer one prints.
    """
    recorded = Provenance(
        datetime.date.today().isoformat(),
        runner.describe_device(attempt.device),
        runner.torch_version(),
        ".".join(map(str, sys.version_info[:3])),
        attempt.seconds,
        attempt.clocks,
    )
    text = Transcript(attempt.printed, recorded).text()
    name, was = attempt.expected_transcript, attempt.wanted.provenance
    if attempt.device == "cpu" and was:
        here, there = release(recorded.torch), release(was.torch)
        if here > there:
            atomic_write(attempt.program.transcript_path(up_to(there)), attempt.wanted.text())
        elif here < there:
            name = up_to(here)
    atomic_write(attempt.program.transcript_path(name), text)
    if name not in ("cpu", attempt.device):
        return  # a figure is of today's torch
    if attempt.drawn is not None:
        text = "\n".join(line.rstrip() for line in attempt.drawn.splitlines())
        atomic_write(attempt.program.figure_path(attempt.device), text + "\n")


# --- figures ---------------------------------------------------------------------------------

COORDINATES = ("d", "points", "transform", "x", "y", "width", "height", "cx", "cy", "r")
_COORDINATE = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
NUDGE = 15.0  # how far a point may lie from where it was; figures are some 500 wide


def read_figure(text: str) -> tuple[list[str], list[list[float]]]:
    """The words of a figure (not its bare numbers) and the coordinates of its lines, in order.

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
    lines = [
        [float(n) for name in COORDINATES for n in _COORDINATE.findall(e.get(name, ""))]
        for e in tree.iter()
        if not e.tag.endswith("}text")  # where words stand is free
    ]
    return [label for label in labels if re.search(r"[^\W\d_]", label)], lines


def _farthest(lines: list[list[float]], places: list[list[float]]) -> float:
    """How far a point lies from where it was; infinite where there are other lines.

    matplotlib leaves out points of a long line: where their number differs, its ends count.
    """
    if len(lines) != len(places):
        return math.inf
    far = 0.0
    for line, place in zip(lines, places, strict=True):
        pairs = [line, place]
        if len(line) != len(place):
            if not (line and place):
                return math.inf
            pairs = [[f(each[k::2]) for f in (min, max) for k in (0, 1)] for each in pairs]
        far = max([far, *(abs(a - b) for a, b in zip(*pairs, strict=True))])
    return far


def _compare_figure(
    program: Program, kept: Path, drawn: str | None, deterministic: bool
) -> str | None:
    """What is wrong with the figure just drawn beside the one kept; None if nothing.

    Where the program is ``deterministic``, its points are held too.
    """
    name = kept.relative_to(program.root).as_posix()
    if drawn is None:
        missing = f"{name} is in the book, but {program.name} draws no such figure"
        return missing if kept.exists() else None
    try:
        new, lines = read_figure(drawn)
        if not new:
            raise BookError("it has no words: label its axes, and keep text as text")
    except BookError as error:
        raise BookError(f"{program.name}:1: the figure {kept.name} it drew: {error}") from None
    if not kept.exists():
        return f"{program.name}:1: it draws {kept.name}, which is not in the book yet"
    old, places = read_figure(kept.read_text("utf-8"))
    if len(old) == len(new) and all(map(same_line, old, new)):
        far = _farthest(lines, places) if deterministic else 0.0
        if far <= NUDGE:
            return None
        moved = f"a point {far:.0f} away" if math.isfinite(far) else "other lines"
        return f"{name}: {program.name} draws {moved}"
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    words = [line for line in diff if line[:2] not in {"--", "++", "@@"}]
    return f"{name}: {program.name} draws other words:\n" + "\n".join(words)
