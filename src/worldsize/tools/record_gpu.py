"""Gpu: record what has something to show on a GPU, worth most first, while there is time.

``make record-gpu`` starts it. One program runs after the other; a transcript is written whole
or not
at all. What is recorded and unchanged is left as it is, so that the next call goes on where
this one stopped. It needs the standard library and torch; a program whose package is missing
is skipped.
"""

from __future__ import annotations

import argparse
import ast
import io
import signal
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from worldsize.execution import runner
from worldsize.execution.requirements import gpus_needed, missing_requirement
from worldsize.model import BookError, atomic_write
from worldsize.model.program import ON_GPUS, Program, gpu_kind, on_gpus
from worldsize.testing import program_check
from worldsize.testing.result_cache import ENGINE, ResultCache

CURRENT = "recorded, and unchanged since"
REPORT = ".cache/gpu.txt"  # what was said, in the archive too


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="make record-gpu", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="only these programs and folders")
    parser.add_argument("--budget", type=float, help="seconds after which it ends")
    parser.add_argument("--archive", type=Path, help="put all that is new into this .tar.gz")
    options = parser.parse_args()
    if not runner.gpu_names():
        sys.exit("there is no NVIDIA GPU here that torch sees, and so nothing to record on")
    ends = start + options.budget if options.budget else float("inf")
    sys.exit(Recording(Path.cwd(), options.what, options.archive).run(ends))


class Recording:
    """One call of ``make record-gpu`` for the book at ``root``."""

    def __init__(self, root: Path, what: list[str], archive: Path | None) -> None:
        self.root, self.archive = root, archive
        self.passed = ResultCache(root)
        self.gpus = runner.describe_device("cuda")
        self.new: set[str] = set()  # the files to put into the archive, where there are such
        self.chosen: list[Program] = []
        self.left_out: dict[str, list[Program]] = defaultdict(list)  # by the reason
        self.failed: dict[Program, str] = {}
        for program in _listed(root, what):
            if why := self._why_not(program):
                self.left_out[why].append(program)
            else:
                self.chosen.append(program)
        self.chosen.sort(key=self._later)
        if archive and archive.exists():
            try:
                with tarfile.open(archive) as tar:
                    self.new.update(tar.getnames())
            except tarfile.TarError as error:
                sys.exit(f"{archive} is there, and is no archive of transcripts: {error}")

    def _device(self, program: Program) -> str:
        return program.gpu_device(gpu_kind(self.gpus))

    def _inputs(self, program: Program) -> str:
        return self.passed.digest(
            *program_check.inputs(program, self._device(program)), *ENGINE
        )

    def _why_not(self, program: Program) -> str:
        """Why a program is not run; nothing where it is."""
        if self.passed.has(f"{program.name}::cuda", self._inputs(program)):
            return CURRENT
        if (needs := gpus_needed(program.on_gpu)) > len(runner.gpu_names()):
            return f"needs {needs} GPUs"
        lacks = [
            missing_requirement(program, program.on_gpu),
            *_missing_packages(program),
        ]
        return "; ".join(f"{each} is missing" for each in dict.fromkeys(filter(None, lacks)))

    def _later(self, program: Program) -> tuple[bool, bool]:
        """What has failed before, as it is, comes last; before it what is recorded already."""
        failed = self.passed.has(f"{program.name}::cuda failed", self._inputs(program))
        return failed, self._device(program) in program.devices

    def say(self, *lines: str) -> None:
        """Print lines, and keep them."""
        print(*lines, sep="\n", flush=True)
        (self.root / REPORT).parent.mkdir(exist_ok=True)
        with open(self.root / REPORT, "a", encoding="utf-8") as report:
            report.writelines(f"{line}\n" for line in lines)

    def pack(self) -> None:
        """Write the archive: all that is new, and what was said."""
        if not self.archive:
            return
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name in sorted({*self.new, REPORT}):
                if (self.root / name).exists():
                    tar.add(self.root / name, name)
        atomic_write(self.archive, packed.getvalue())

    def run(self, ends: float) -> int:
        """Record until everything is, or it is time to end; return the exit status."""
        time_is_up = []

        def alarm(*_: object) -> None:
            time_is_up.append(True)
            signal.raise_signal(signal.SIGINT)  # which waits for what is just being started

        signal.signal(signal.SIGALRM, alarm)
        for number in (signal.SIGINT, signal.SIGTERM):  # INT is ignored in the background
            signal.signal(number, _interrupt)
        limit = "" if ends == float("inf") else f" in {ends - time.monotonic():.0f} s"
        self.say(
            f"{self.gpus}, torch {runner.torch_version()}: {len(self.chosen)} to record{limit}"
        )
        self.say(*_names(self.chosen))
        for why, programs in self.left_out.items():
            self.say(f"not run, {why}:", *_names(programs))
        self.pack()
        left, status = list(self.chosen), 0
        try:
            if limit:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, ends - time.monotonic()))
            for program in self.chosen:
                self._record(
                    program, f"[{len(self.chosen) - len(left) + 1}/{len(self.chosen)}]"
                )
                left.remove(program)
                self.pack()
        except KeyboardInterrupt:
            status = 0 if time_is_up else 130
            self.say("the time is up" if time_is_up else "interrupted")
            if time_is_up and left == self.chosen:  # the next call of this length would, too
                self._fails(left.pop(0), "it takes longer than there was time, and was first")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            done = len(self.chosen) - len(left) - len(self.failed)
            self.say(f"{done} recorded, {len(self.failed)} failed, {len(left)} left")
            for program, why in self.failed.items():
                self.say(
                    f"failed: {program.name}", *(f"    {line}" for line in why.splitlines())
                )
            if left:
                self.say("left for the next call:", *_names(left))
            self.pack()
        return status or bool(self.failed)

    def _record(self, program: Program, number: str) -> None:
        print(f"{number} {program.name} …", flush=True)
        device, start = self._device(program), time.monotonic()
        for path in program.transcript_path(device), program.figure_path(device):
            self.new.add(path.relative_to(self.root).as_posix())
        try:
            outcome = program_check.check(
                program, device, program_check.CheckOptions(record=True)
            )
        except Exception as error:  # whatever it is, the others are worth the GPU's time
            self._fails(program, str(error) if isinstance(error, BookError) else repr(error))
            return
        self.passed.add({f"{program.name}::cuda": self._inputs(program)})
        summary = "recorded" if outcome.recorded else "as it was recorded"
        self.say(f"{number} {program.name}: {summary}, {time.monotonic() - start:.1f} s")

    def _fails(self, program: Program, why: str) -> None:
        self.failed[program] = why
        self.passed.add({f"{program.name}::cuda failed": self._inputs(program)})
        self.say(f"{program.name}: FAILED")


def _listed(root: Path, what: list[str]) -> Iterator[Program]:
    """The listed programs that are asked for."""
    places = [root / each for each in what] or [root]
    found = [
        Program(root, root / name)
        for name in on_gpus(root)
        if any((root / name).is_relative_to(place) for place in places)
    ]
    if not found:
        sys.exit(f"{ON_GPUS} names nothing there that has something to show on a GPU")
    yield from found


def _names(programs: list[Program]) -> list[str]:
    """A line for each folder that follows on another, with the names of its programs."""
    lines: list[str] = []
    for program in programs:
        folder = f"  {program.path.parent.relative_to(program.root)}: "
        if lines and lines[-1].startswith(folder):
            lines[-1] += f", {program.path.name}"
        else:
            lines.append(folder + program.path.name)
    return lines


def _missing_packages(program: Program) -> list[str]:
    """What it imports, or a program that its commands name does, and is not to be found."""
    names: list[str] = []
    for path in [program.path, *(each.path for each in program.dependencies())]:
        nodes = [ast.parse(path.read_text("utf-8"))] if path.suffix == ".py" else []
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            elif not isinstance(node, ast.Try):  # it knows what to do without
                nodes += ast.iter_child_nodes(node)
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    beside = {path.stem for path in program.path.parent.glob("*.py")}
    return sorted(name for name in packages - beside if find_spec(name) is None)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
