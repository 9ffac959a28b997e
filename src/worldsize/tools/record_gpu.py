"""Record the outputs of the programs that are worth running on a GPU, the most useful first.

``make record-gpu`` starts this module. It runs one program after the other, and writes each
transcript completely or not at all. It skips programs that are already recorded and unchanged,
so the next call continues where this one stopped. It needs only the standard library and torch.
It also skips a program whose packages are missing.
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
from worldsize.execution.requirements import missing_requirement
from worldsize.execution.shared_gpu import missing_gpus
from worldsize.model import BookError, atomic_write
from worldsize.model.program import GPU_COMMANDS, Program, gpu_commands, gpu_kind
from worldsize.testing import program_check
from worldsize.testing.result_cache import ENGINE, ResultCache

UNCHANGED = "already recorded and unchanged"
REPORT = ".cache/gpu.txt"  # the messages of all calls, which the archive also contains


def main() -> None:
    """Read the command line, and record the outputs."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="make record-gpu", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="record only these programs and folders")
    parser.add_argument("--budget", type=float, help="stop after this number of seconds")
    parser.add_argument("--archive", type=Path, help="put all new files into this .tar.gz")
    options = parser.parse_args()
    if not runner.gpu_names():
        sys.exit(
            "torch sees no NVIDIA GPU on this machine: run this command on a machine with a GPU"
        )
    deadline = start + options.budget if options.budget else float("inf")
    sys.exit(Recording(Path.cwd(), options.what, options.archive).run(deadline))


class Recording:
    """One call of ``make record-gpu`` for the book at ``root``."""

    def __init__(self, root: Path, what: list[str], archive: Path | None) -> None:
        self.root, self.archive = root, archive
        self.results = ResultCache(root)
        self.gpus = runner.describe_device("cuda")
        self.new: set[str] = set()  # paths of the files to put into the archive, if they exist
        self.chosen: list[Program] = []
        self.skipped: dict[str, list[Program]] = defaultdict(list)  # by their reasons
        self.failed: dict[Program, str] = {}
        for program in _selected_programs(root, what):
            if why := self._reason_to_skip(program):
                self.skipped[why].append(program)
            else:
                self.chosen.append(program)
        self.chosen.sort(key=self._sort_key)
        if archive and archive.exists():
            try:
                with tarfile.open(archive) as tar:
                    self.new.update(tar.getnames())
            except tarfile.TarError as error:
                sys.exit(
                    f"{archive} exists but is not an archive of transcripts ({error}): "
                    "choose a different name"
                )

    def _device(self, program: Program) -> str:
        """Return the device in the names of the program's files, such as `cuda` or `a100`."""
        return program.gpu_device(gpu_kind(self.gpus))

    def _inputs(self, program: Program) -> str:
        """Return a digest of everything that the output of the program depends on."""
        return self.results.digest(
            *program_check.inputs(program, self._device(program)), *ENGINE
        )

    def _reason_to_skip(self, program: Program) -> str:
        """Return why a program is skipped; an empty string if it runs."""
        if self.results.has(f"{program.name}::cuda", self._inputs(program)):
            return UNCHANGED
        if why := missing_gpus(program, program.gpu_template):
            return why
        missing = [
            missing_requirement(program, program.gpu_template),
            *_missing_packages(program),
        ]
        return "; ".join(f"{each} is missing" for each in dict.fromkeys(filter(None, missing)))

    def _sort_key(self, program: Program) -> tuple[bool, bool]:
        """Return a sort key: new programs first, then recorded ones, then those that failed."""
        failed = self.results.has(f"{program.name}::cuda failed", self._inputs(program))
        return failed, self._device(program) in program.devices

    def log(self, *lines: str) -> None:
        """Print lines, and append them to the report."""
        print(*lines, sep="\n", flush=True)
        (self.root / REPORT).parent.mkdir(exist_ok=True)
        with open(self.root / REPORT, "a", encoding="utf-8") as report:
            report.writelines(f"{line}\n" for line in lines)

    def write_archive(self) -> None:
        """Write the archive with all new files and the report."""
        if not self.archive:
            return
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            for name in sorted({*self.new, REPORT}):
                if (self.root / name).exists():
                    tar.add(self.root / name, name)
        atomic_write(self.archive, content.getvalue())

    def run(self, deadline: float) -> int:
        """Record all chosen programs until the deadline; return the exit status."""
        time_is_up = []

        def on_timeout(*_: object) -> None:
            time_is_up.append(True)
            signal.raise_signal(signal.SIGINT)  # this signal is deferred while a program starts

        signal.signal(signal.SIGALRM, on_timeout)
        # background jobs ignore SIGINT by default
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        limit = "" if deadline == float("inf") else f" in {deadline - time.monotonic():.0f} s"
        self.log(
            f"{self.gpus}, torch {runner.torch_version()}: {len(self.chosen)} to record{limit}"
        )
        self.log(*_name_lines(self.chosen))
        for why, programs in self.skipped.items():
            self.log(f"skipped ({why}):", *_name_lines(programs))
        self.write_archive()
        left, status = list(self.chosen), 0
        try:
            if limit:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, deadline - time.monotonic()))
            for program in self.chosen:
                self._record(
                    program, f"[{len(self.chosen) - len(left) + 1}/{len(self.chosen)}]"
                )
                left.remove(program)
                self.write_archive()
        except KeyboardInterrupt:
            status = 0 if time_is_up else 130
            self.log("the time budget is used up" if time_is_up else "interrupted")
            if time_is_up and left == self.chosen:  # it would use up the budget of every call
                self._add_failure(
                    left.pop(0), "it was the first program and did not end within the budget"
                )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            done = len(self.chosen) - len(left) - len(self.failed)
            self.log(f"{done} recorded, {len(self.failed)} failed, {len(left)} left")
            for program, why in self.failed.items():
                self.log(
                    f"failed: {program.name}", *(f"    {line}" for line in why.splitlines())
                )
            if left:
                self.log("left for the next call:", *_name_lines(left))
            self.write_archive()
        return status or bool(self.failed)

    def _record(self, program: Program, number: str) -> None:
        """Record one program, and print and store the result."""
        print(f"{number} {program.name} …", flush=True)
        device, start = self._device(program), time.monotonic()
        for path in program.transcript_path(device), program.figure_path(device):
            self.new.add(path.relative_to(self.root).as_posix())
        try:
            outcome = program_check.check(
                program, device, program_check.CheckOptions(record=True)
            )
        except Exception as error:  # record the other programs, whatever the error is
            self._add_failure(
                program, str(error) if isinstance(error, BookError) else repr(error)
            )
            return
        self.results.add({f"{program.name}::cuda": self._inputs(program)})
        summary = "recorded" if outcome.recorded else "equal to the recorded transcript"
        self.log(f"{number} {program.name}: {summary}, {time.monotonic() - start:.1f} s")

    def _add_failure(self, program: Program, why: str) -> None:
        """Store and print that a program failed."""
        self.failed[program] = why
        self.results.add({f"{program.name}::cuda failed": self._inputs(program)})
        self.log(f"{program.name}: FAILED")


def _selected_programs(root: Path, what: list[str]) -> Iterator[Program]:
    """Yield the programs of the list GPU_COMMANDS that are in the files and folders `what`."""
    paths = [root / each for each in what] or [root]
    found = [
        Program(root, root / name)
        for name in gpu_commands(root)
        if any((root / name).is_relative_to(path) for path in paths)
    ]
    if not found:
        sys.exit(
            f"{GPU_COMMANDS} lists no program in {', '.join(what) or 'this folder'}: "
            "give a program or a folder of this list, or add the program to the list"
        )
    yield from found


def _name_lines(programs: list[Program]) -> list[str]:
    """Return a line for each folder, with the names of its programs."""
    lines: list[str] = []
    for program in programs:
        folder = f"  {program.path.parent.relative_to(program.root)}: "
        if lines and lines[-1].startswith(folder):
            lines[-1] += f", {program.path.name}"
        else:
            lines.append(folder + program.path.name)
    return lines


def _missing_packages(program: Program) -> list[str]:
    """Return the missing packages that a program and its dependencies import."""
    names: list[str] = []
    for path in [program.path, *(each.path for each in program.dependencies())]:
        nodes = [ast.parse(path.read_text("utf-8"))] if path.suffix == ".py" else []
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            elif not isinstance(node, ast.Try):  # the program handles a missing package itself
                nodes += ast.iter_child_nodes(node)
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    local_modules = {path.stem for path in program.path.parent.glob("*.py")}
    return sorted(name for name in packages - local_modules if find_spec(name) is None)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
