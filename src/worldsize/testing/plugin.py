"""A pytest plugin that tests the programs, pages and figures of the book.

pytest docs/02_ddp.md                 check the code blocks of a page
pytest snippets/02_ddp/naive.py       compare a program with its transcripts
pytest snippets/02_ddp -k hooks -x    use the options of pytest
pytest --device cuda                  use the GPU transcripts, and run the blocks with GPUs
pytest --record snippets/02_ddp       write the transcripts whose output has changed
pytest --launcher=prefork snippets/02_ddp    fork commands from a process that imported torch
pytest --no-cache                     also run the tests that have passed and are unchanged
pytest --mutants written snippets     run wrong versions of the programs, which must fail
pytest --nproc 5 snippets             use a different number of ranks
pytest --strict-time                  fail if a file exceeds its budget in tests/budget.toml
pytest --record-compatibility         list the programs that passed on this release of torch
pytest --shard 2/4                    run the second of four shards with about equal budgets
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import re
import shutil
import signal
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NoReturn

import pytest

from worldsize.execution import host_checks, processes, runner
from worldsize.execution.prefork import Launcher
from worldsize.execution.program_run import gpu_lock
from worldsize.execution.requirements import gpus_needed, missing_requirement
from worldsize.execution.shared_gpu import missing_gpus
from worldsize.model import BookError, compatibility
from worldsize.model.page import embedded_files
from worldsize.model.program import (
    LAUNCH,
    Program,
    assume_unchanged,
    gpu_kind,
    is_orphan,
    is_program,
)
from worldsize.model.traces import SUFFIX, TRACES, trace_settings
from worldsize.testing import code_blocks, mutation, program_check, result_cache, shown, traces

SESSION = pytest.StashKey["Session"]()
INPUTS = pytest.StashKey[str]()
REPOSITORY_DIGEST = pytest.StashKey[str]()
START_TIME = pytest.StashKey[float]()
# Seconds. The processor time of a shorter test is added to the time of the next test.
MIN_MEASURED_DURATION = 0.05


FLAGS = {
    "--record": "write the transcripts, figures and outputs that have changed",
    "--no-cache": "also run the tests that have passed with the same inputs (CI does the same)",
    "--record-compatibility": "list in snippets/compatibility.csv which programs passed on "
    "this release of torch",
    "--strict-time": "fail if the tests of a file need more processor time than "
    "tests/budget.toml allows",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("book", "the book")
    group.addoption(
        "--device",
        choices=("cpu", "cuda", "auto"),
        default="auto",
        help="compare programs with the transcripts of the CPU, of GPUs, or of both (auto, the "
        "default)",
    )
    for name, description in FLAGS.items():
        group.addoption(name, action="store_true", help=description)
    group.addoption(
        "--launcher",
        choices=("auto", "prefork", "process"),
        default="auto",
        help="how commands start: prefork forks them from a process that has imported torch, "
        "process starts each command exactly as it is typed, and auto (the default) forks most "
        "commands, but no command if it records",
    )
    group.addoption(
        "--mutants",
        choices=mutation.KINDS,
        help="test mutants instead of programs: the mutants that are listed in tests/mutants/ "
        "(written), those that are generated from the syntax tree (made), or both (all). The "
        "test of a mutant fails if the mutant survives",
    )
    group.addoption(
        "--nproc",
        type=int,
        metavar="N",
        help="start N ranks if a command contains a number of ranks. The program must then run "
        "without an error, or print one sentence about the numbers that it supports",
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="end a command after this time, because it hangs (default 900)",
    )
    group.addoption(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="run shard I of N. Each file belongs to one shard, and the shards have about the "
        "same budget",
    )


def _shard(text: str) -> tuple[int, int]:
    """Return the number of a shard and the number of all shards; "2/4" gives (2, 4)."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "cpu: runs on any machine",
        "gpu: needs a CUDA device",
        "multi_gpu: needs more than one CUDA device",
        "inputs(*names): the files on which this test depends, instead of its module's INPUTS",
    ):
        config.addinivalue_line("markers", marker)
    if not hasattr(config, "workerinput"):
        _use_one_temporary_folder()
    # pytest-xdist would otherwise run no test at all, and print no reason
    if missing := [arg for arg in config.args if not Path(arg.partition("::")[0]).exists()]:
        raise pytest.UsageError(f"these files do not exist: {', '.join(missing)}")
    if config.getoption("--record") and config.getoption("--device") == "cuda":
        raise pytest.UsageError(
            "`--record` records only on the CPU. Use `make record-gpu` to record on GPUs"
        )
    # Imported and collected objects are not freed, and looking for garbage among them needed a
    # fifth of the time of a collection.
    gc.disable()
    if not config.getoption("--record"):  # recorded times must be the times of a reader
        host_checks.use_batch_scheduling()
    config.stash[SESSION] = Session(config)
    if error := host_checks.loopback_error():
        raise pytest.UsageError(error)
    signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator:
    with assume_unchanged({}):
        return (yield)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _use_one_temporary_folder() -> None:
    """Use a new folder for all temporary files, and remove it at the end of the session.

    The folder also contains the files that workers and commands do not remove, for example
    those of torchrun. The folder that pytest keeps for the analysis of a failure is not in it.
    """
    base = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", base)
    if base.startswith("/var/folders/"):
        base = "/tmp"  # macOS: the names of sockets must be short
    os.environ["TMPDIR"] = tempfile.tempdir = folder = tempfile.mkdtemp(prefix="ws-", dir=base)
    os.chmod(folder, 0o711)  # a program in it may run as a different user
    # after multiprocessing has removed its own folder, which is inside, with priority -100
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def _interrupt(*_: object) -> NoReturn:
    """Handle SIGTERM like Ctrl-C, which a terminal also sends to the workers."""
    processes.end_workers()
    raise KeyboardInterrupt


# options that do not change which tests run
_NEUTRAL_OPTIONS = re.compile(
    r"(?<!\S)(-n \d+|--dist \w+|--(launcher|color|junitxml)=\S+|-[qv]+)(?!\S)"
)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> pytest.ExitCode | None:
    """End the session without collecting tests if no file has changed since all passed."""
    root = Path(config.rootpath).resolve()
    options = _NEUTRAL_OPTIONS.sub("", " ".join(config.invocation_params.args)).split()
    is_partial = options not in ([], ["--no-cache"]) or "PYTEST_ADDOPTS" in os.environ
    if is_partial or hasattr(config, "workerinput") or not (root / ".gitignore").exists():
        return None
    digest = config.stash[REPOSITORY_DIGEST] = _repository_digest(root)
    ignore_cache = options or os.environ.get("CI") == "true"
    if not ignore_cache and (summary := result_cache.ResultCache(root).summary(digest)):
        print(
            f"nothing has changed since all tests passed: {summary} "
            "(--no-cache runs them again)"
        )
        return pytest.ExitCode.OK
    return None


def _repository_digest(root: Path) -> str:
    return result_cache.ResultCache(root).everything(*runner.gpu_names())


class Session:
    """The options and the results that all tests of one pytest session share."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.root = Path(config.rootpath).resolve()
        self.result_cache = result_cache.ResultCache(self.root)
        self.record = option("--record")
        is_ci = os.environ.get("CI") == "true"
        self.ignore_cache = option("--no-cache") or self.record or is_ci
        self.mutants = option("--mutants")
        self.ranks = option("--nproc")
        on_cpu = self.mutants or self.ranks or self.record
        self.device = "cpu" if on_cpu else option("--device")
        self.devices = ["cpu", "cuda"] if self.device == "auto" else [self.device]
        name = option("--launcher")
        no_forks = name == "process" or (self.record and name == "auto")
        # the prefork launcher, or None if all commands start exactly as they are typed
        self.launcher = None if no_forks else Launcher(name == "prefork")
        self.run_options = program_check.CheckOptions(
            limit=option("--time-limit"), launcher=self.launcher, record=self.record
        )
        self.processor_seconds = 0.0  # at the end of the last measured test

    @cached_property
    def embedded(self) -> dict[str, list[str]]:
        """Return each file that pages embed, with the places that embed it."""
        return embedded_files(self.root)

    @cached_property
    def _budgets(self) -> dict[str, float]:
        path = self.root / "tests/budget.toml"
        return tomllib.loads(path.read_text("utf-8")) if path.exists() else {}

    def budget(self, file: str) -> float:
        """Return the number of processor seconds that the tests of a file may use."""
        return self._budgets.get(file, self._budgets.get("default", math.inf))


# --- collect the tests -----------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore docs/labs, a link to labs/, so that its programs are not collected twice."""
    root = Path(config.rootpath)
    if collection_path.is_symlink() and collection_path.is_relative_to(root / "docs"):
        return True
    return None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    session = parent.config.stash[SESSION]
    path, root = file_path.resolve(), session.root
    inside = path.suffix == ".py" and path.is_relative_to(root)
    if session.mutants and inside and mutation.tests_of(path, root):
        return TestedProgramFile.from_parent(parent, path=file_path)
    if is_program(path, root):
        return ProgramFile.from_parent(parent, path=file_path)
    if session.mutants:
        return None
    if path.name.endswith(SUFFIX) and path.is_relative_to(root):
        return OrphanTraceFile.from_parent(parent, path=file_path)
    if path.suffix == ".md" and path.is_relative_to(root / "docs"):
        return PageFile.from_parent(parent, path=file_path)
    return OrphanFile.from_parent(parent, path=file_path) if is_orphan(path, root) else None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Do not collect a program that the command line names as a test module, too."""
    session = parent.config.stash[SESSION]
    if session.mutants or is_program(module_path.resolve(), session.root):
        return EmptyFile.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of all other shards.

    Each file is added to the shard with the smallest sum of budgets; large budgets come first.
    """
    if not (shard := config.getoption("--shard")):
        return
    (number, count), budget = shard, config.stash[SESSION].budget
    files = sorted({_file(item) for item in items})
    selected, sums = set(), [0.0] * count
    for file in sorted(files, key=budget, reverse=True):
        smallest = sums.index(min(sums))
        sums[smallest] += budget(file)
        if smallest == number - 1:
            selected.add(file)
    deselected = [item for item in items if _file(item) not in selected]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if _file(item) in selected]


def _file(test: pytest.Item | pytest.TestReport) -> str:
    return test.nodeid.partition("::")[0]


class EmptyFile(pytest.File):
    """A file without tests."""

    def collect(self) -> list[pytest.Item]:
        return []


class BookItem(pytest.Item):
    """A test of a program, a page or a figure.

    ``check`` runs the test; it returns None if the test is cheap. ``inputs`` returns the texts
    and files on which the result depends. A test without inputs always runs.
    """

    def __init__(
        self,
        *,
        title: str,
        check: Callable[[], program_check.CheckResult | None],
        inputs: Callable[[], tuple[str | Path, ...]] = tuple,
        line: int = 1,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.title, self.check, self.inputs, self.line = title, check, inputs, line

    def runtest(self) -> None:
        start = time.monotonic()
        result = self.check()
        properties = vars(result) if result else {"cheap": True}
        properties["duration"] = time.monotonic() - start
        self.user_properties.append(("book", properties))

    def reportinfo(self):
        return self.path, self.line - 1, self.title

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, BookError):
            return str(excinfo.value)
        if host_checks.is_disk_full(excinfo.value):
            return (
                f"{host_checks.DISK_FULL}: free some space, or use a different folder: "
                "TMPDIR=FOLDER make test"
            )
        return super().repr_failure(excinfo, style)


class ProgramFile(pytest.File):
    """A program, with a test that a page shows it and one test for each device."""

    def collect(self) -> Iterator[pytest.Item]:
        session = self.config.stash[SESSION]
        program = Program(session.root, self.path.resolve())
        if session.mutants:
            yield from self.mutants(program, session)
            return
        if session.ranks:
            if program_check.starts_ranks(program):
                yield BookItem.from_parent(
                    self,
                    name=f"ranks-{session.ranks}",
                    title=f"{program.name}: {session.ranks} ranks",
                    check=partial(
                        program_check.check_ranks, program, session.ranks, session.run_options
                    ),
                    inputs=lambda: (*program_check.inputs(program, "cpu"), str(session.ranks)),
                )
            return
        if "cpu" in session.devices and not session.record:
            yield BookItem.from_parent(
                self,
                name="shown",
                title=f"{program.name}: shown",
                check=lambda: shown.check_shown(program, session.embedded),
            )
        if not program.devices:
            return  # the test `shown` reports it
        for name in session.devices:
            device = name if name == "cpu" else _gpu_device(program)
            if name == "cuda" and device not in program.devices:
                continue
            item = BookItem.from_parent(
                self,
                name=name,
                title=f"{program.name} ({device})",
                check=partial(_check_program, program, device, session.run_options),
                inputs=partial(program_check.inputs, program, device),
            )
            item.add_marker("gpu" if name == "cuda" else "cpu")
            if name == "cuda" and gpus_needed(program.transcript(device)) > 1:
                item.add_marker("multi_gpu")
            yield item
        settings = trace_settings(session.root).get(program.name)
        if settings and "cpu" in session.devices:
            yield BookItem.from_parent(
                self,
                name="trace",
                title=f"{program.name} (trace)",
                check=partial(traces.check_trace, program, settings, session.run_options),
                inputs=partial(traces.trace_inputs, program, settings),
            )

    def mutants(self, program: Program, session: Session) -> Iterator[pytest.Item]:
        """Yield a test for each mutant of a program that can run on a CPU."""
        if "cpu" not in program.devices or program.name.startswith(LAUNCH):
            return  # the programs of labs/launch show launchers and compute nothing themselves
        try:
            found = mutation.mutants_of_program(program, session.mutants)
        except BookError as error:
            raise self.CollectError(str(error)) from None
        for mutant in found:
            yield BookItem.from_parent(
                self,
                name=mutant.description,
                title=f"{program.name}: {mutant.description}",
                line=mutant.line,
                check=partial(_check_mutant, program, mutant, session.run_options),
                inputs=partial(_mutant_inputs, program, mutant),
            )


class TestedProgramFile(pytest.File):
    """A program that tests in `tests/` check, with one test for each of its mutants."""

    def collect(self) -> Iterator[pytest.Item]:
        session, path = self.config.stash[SESSION], self.path.resolve()
        try:
            found = mutation.mutants_with_tests(path, session.root, session.mutants)
        except BookError as error:
            raise self.CollectError(str(error)) from None
        for mutant, tests in found:
            yield BookItem.from_parent(
                self,
                name=mutant.description,
                title=f"{self.name}: {mutant.description}",
                line=mutant.line,
                check=partial(mutation.check_with_tests, path, session.root, mutant, tests),
            )


def _mutant_inputs(program: Program, mutant: mutation.Mutant) -> tuple[str | Path, ...]:
    return (*program_check.inputs(program, "cpu"), mutant.source)


def _check_mutant(
    program: Program, mutant: mutation.Mutant, run_options: program_check.CheckOptions
) -> program_check.CheckResult:
    """Check that a mutant fails, or skip the test if no check can detect the mutant."""
    if mutant.third_text:
        pytest.skip(f"equivalent: {mutant.third_text}")
    if tool := missing_requirement(program, program.transcript("cpu")):
        pytest.skip(f"{tool} is not on this machine")
    return mutation.check(program, "cpu", mutant, run_options)


def _gpu_device(program: Program) -> str:
    """Return the name of the transcript for the GPU of this machine, or else "cuda"."""
    gpu = gpu_kind(runner.describe_device("cuda"))
    device = program.gpu_device(gpu)
    return device if device in program.devices else "cuda"


def _check_program(
    program: Program, device: str, run_options: program_check.CheckOptions
) -> program_check.CheckResult:
    """Compare a program with a transcript, or skip the test if this machine cannot run it."""
    gpu_count = len(runner.gpu_names())
    if device != "cpu":
        _skip_without_gpu()
        transcript, here = program.transcript(device), runner.describe_device("cuda")
        if why := missing_gpus(program, transcript):
            pytest.skip(why)
        recorded = transcript.provenance
        if recorded and gpu_kind(recorded.device) != gpu_kind(here):
            pytest.skip(f"recorded on {recorded.device}, this machine has {here}")
    elif "cpu" not in program.devices:
        if gpu_count:
            pytest.skip("it has no CPU transcript; its test for the GPU runs on this machine")
        return program_check.check_refusal(program, run_options)
    if tool := missing_requirement(program, program.transcript(device)):
        pytest.skip(f"{tool} is not on this machine")
    return program_check.check(program, device, run_options)


def _skip_without_gpu() -> None:
    if not runner.gpu_names():
        pytest.skip("this machine has no GPU")


class OrphanFile(pytest.File):
    """A transcript or a figure that belongs to no program; its test always fails."""

    def collect(self) -> Iterator[pytest.Item]:
        yield BookItem.from_parent(self, name="stray", title=self.name, check=self.fail)

    def fail(self) -> None:
        name = self.path.resolve().relative_to(self.config.stash[SESSION].root).as_posix()
        raise BookError(f"{name}:1: this folder contains no program with this name")


class OrphanTraceFile(pytest.File):
    """A trace, with a test that fails if snippets/traces.toml does not list its program."""

    def collect(self) -> Iterator[pytest.Item]:
        root = self.config.stash[SESSION].root
        name = self.path.resolve().relative_to(root).as_posix().removesuffix(SUFFIX) + ".py"
        if name not in trace_settings(root):
            yield BookItem.from_parent(self, name="stray", title=self.name, check=self.fail)

    def fail(self) -> None:
        name = self.path.resolve().relative_to(self.config.stash[SESSION].root).as_posix()
        raise BookError(f"{name}:1: {TRACES} does not list the program of this trace")


class PageFile(pytest.File):
    """A page of ``docs/``, with one test for each block; on GPUs, only for blocks that run."""

    def collect(self) -> Iterator[pytest.Item]:
        session = self.config.stash[SESSION]
        try:
            found = code_blocks.extract(self.path.resolve(), session.root)
        except BookError as error:
            raise self.CollectError(str(error)) from None
        device = "cpu" if "cpu" in session.devices else "cuda"
        for block in found:
            if device == "cuda" and not block.runs:
                continue
            item = BookItem.from_parent(
                self,
                name=f"{self.path.name}:{block.fence.line}",
                title=f"{block.name}:{block.fence.line} ({block.fence.language})",
                line=block.fence.line,
                check=partial(_check_block, block, device, session.run_options),
                inputs=partial(block.inputs, device),
            )
            item.add_marker("gpu" if device == "cuda" else "cpu")
            yield item


def _check_block(
    block: code_blocks.Block, device: str, run_options: program_check.CheckOptions
) -> program_check.CheckResult:
    """Check that a block runs, compiles or is valid; on "cuda", it runs with access to GPUs."""
    if block.skip == "":
        raise block.error("this block is skipped without a reason: write it after `skip=`")
    if device == "cuda":
        _skip_without_gpu()
    with gpu_lock(device):
        seconds = code_blocks.check(block, replace(run_options, device=device))
    if block.skip:
        pytest.skip(block.skip)
    return program_check.CheckResult(seconds)


# --- tests that have passed with the same inputs ---------------------------------------------


def _inputs(item: pytest.Item, session: Session) -> str:
    """Return a hash of the inputs of a test, or "" for a test that always runs."""
    cache = session.result_cache
    if isinstance(item, BookItem):
        inputs = item.inputs()
        return cache.digest(*inputs, *result_cache.ENGINE) if inputs else ""
    names = inputs_of(item)
    texts = [name for name in names if name.startswith(result_cache.CODE_OF)]
    paths = [session.root / name for name in names if name not in texts]
    return cache.digest(item.nodeid, *texts, *paths)


def inputs_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the files and folders of the repository on which a test of ``tests/`` depends.

    A module lists them in ``INPUTS``. The marker ``inputs`` replaces this list for one test.
    The attribute ``inputs`` of a parameter replaces it for one set of parameters. The name
    `code of FOLDER` is a folder in which changes of comments and docstrings do not count.
    """
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    own = getattr(getattr(item, "module", None), "INPUTS", ("src", "tests"))
    if marker := item.get_closest_marker("inputs"):
        own = marker.args
    own = next((value.inputs for value in values if hasattr(value, "inputs")), own)
    module = item.path.relative_to(item.config.rootpath).as_posix()
    return (
        *own,
        module,
        "pyproject.toml",
        "src/worldsize/__init__.py",
        "src/worldsize/execution/__init__.py",
        "src/worldsize/execution/host_checks.py",
        "src/worldsize/execution/prefork_imports.py",
        "src/worldsize/execution/prefork.py",
        "src/worldsize/execution/processes.py",
        "tests/conftest.py",
        "tests/processes.py",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem) -> None:
    """Mark a test as unchanged if it has passed with the same inputs."""
    session = item.config.stash[SESSION]
    item.stash[START_TIME] = time.monotonic()
    session.processor_seconds = session.processor_seconds or processes.processor_seconds()
    inputs = item.stash[INPUTS] = _inputs(item, session)
    passed = bool(inputs) and session.result_cache.has(item.nodeid, inputs)
    if passed and not session.ignore_cache:
        mark_unchanged(item)


def mark_unchanged(item: pytest.Item) -> None:
    """Report a test as unchanged instead of running it and its fixtures."""
    item.runtest = lambda: None
    item.setup = lambda: None
    item.user_properties.append(("book", {"unchanged": True}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" or report.failed:
        report.book_inputs = item.stash.get(INPUTS, "")
    if report.when != "teardown":
        return report
    if time.monotonic() - item.stash[START_TIME] > MIN_MEASURED_DURATION:
        session = item.config.stash[SESSION]
        before = session.processor_seconds
        session.processor_seconds = processes.processor_seconds()
        # The sum decreases if a process has ended and its parent did not wait for it.
        report.processor_seconds = max(0.0, session.processor_seconds - before)
    return report


def _properties(report: pytest.TestReport) -> dict:
    """Return what `BookItem.runtest` and `mark_unchanged` stored about a test."""
    return dict(getattr(report, "user_properties", ())).get("book", {})


def pytest_report_teststatus(report, config: pytest.Config):
    properties = _properties(report)
    if report.when == "call" and report.passed and properties.get("unchanged"):
        return "unchanged", "u", "UNCHANGED"
    if report.when == "call" and report.passed and properties.get("recorded"):
        return "recorded", "R", "RECORDED"
    return None


# --- the summary -----------------------------------------------------------------------------


def _mutant_lines(stats: dict[str, list]) -> Iterator[str]:
    """Yield a line for each folder with the number of its mutants that were detected.

    Mutants that no check can detect were skipped, so they are not counted.
    """
    killed, survived = Counter(), Counter()
    for category in ("passed", "unchanged", "failed"):
        for report in stats.get(category, ()):
            folder = _file(report).rpartition("/")[0]
            (survived if category == "failed" else killed)[folder] += 1
    for folder in sorted({*killed, *survived}):
        count, total = killed[folder], killed[folder] + survived[folder]
        yield f"{folder}: {count} of {total} mutants killed, {100 * count / total:.0f}%"


def _seconds_by_file(stats: dict[str, list]) -> tuple[Counter[str], Counter[str]]:
    """Return the processor seconds and the elapsed seconds of the tests of each file."""
    processor, elapsed = Counter(), Counter()
    for report in (each for kind in stats.values() for each in kind):
        if isinstance(report, pytest.TestReport):
            processor[_file(report)] += getattr(report, "processor_seconds", 0.0)
            elapsed[_file(report)] += report.duration
    return processor, elapsed


def _time_lines(stats: dict[str, list]) -> Iterator[str]:
    """Yield the total times, and the times of each folder of programs and each test module."""
    processor, elapsed = Counter(), Counter()
    for parts, files in zip((processor, elapsed), _seconds_by_file(stats), strict=True):
        for file, seconds in files.items():
            parts[file if file.startswith("tests/") else file.rpartition("/")[0]] += seconds
    yield f"{processor.total():.0f} s of processor time and {elapsed.total():.0f} s elapsed:"
    for part, seconds in processor.most_common():
        if elapsed[part] > elapsed.total() / 100:
            yield f"  {seconds:6.1f} s  {elapsed[part]:6.1f} s  {part}"


def _over_budget(stats: dict[str, list], session: Session) -> dict[str, str]:
    """Return a message for each file whose tests exceeded the budget of the file."""
    processor, _ = _seconds_by_file(stats)
    return {
        file: f"{file} needed {seconds:.1f} s of processor time, but tests/budget.toml allows "
        f"only {session.budget(file):g}"
        for file, seconds in processor.most_common()
        if seconds > session.budget(file)
    }


def _record_compatibility(root: Path, stats: dict[str, list]) -> None:
    """Write into snippets/compatibility.csv which programs passed on this release of torch."""
    found = {
        Program(root, root / _file(report)): category in ("passed", "unchanged")
        for category in ("passed", "unchanged", "failed", "error")
        for report in stats.get(category, ())
        if report.nodeid.endswith("::cpu")
    }
    compatibility.write_results(
        root, runner.torch_version(), datetime.date.today().isoformat(), found
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Set the exit status.

    With ``--device cuda``, it is no failure if no program has a GPU transcript. With
    ``--strict-time``, a file that exceeds its budget is a failure.
    """
    option, status = session.config.option, session.exitstatus
    may_be_empty = option.device == "cuda" and not (option.keyword or option.markexpr)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and may_be_empty:
        session.exitstatus = pytest.ExitCode.OK
    # a worker has no terminal reporter
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    strict = option.strict_time and reporter and status == pytest.ExitCode.OK
    if strict and _over_budget(reporter.stats, session.config.stash[SESSION]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus, config: pytest.Config) -> None:
    session, stats = config.stash[SESSION], terminalreporter.stats
    reports = [
        (report, _properties(report))
        for category in ("passed", "recorded", "failed", "error")
        for report in stats.get(category, ())
    ]
    if not session.record:
        cache, news = session.result_cache, {}
        for category in ("passed", "unchanged", "recorded", "failed", "error"):
            for report in stats.get(category, ()):
                if report.when == "call" or report.failed:
                    passed = category in ("passed", "unchanged")
                    inputs = getattr(report, "book_inputs", "") if passed else ""
                    news[report.nodeid] = inputs or None
                    news |= getattr(report, "more_results", {})
        before = config.stash.get(REPOSITORY_DIGEST, "")
        try:
            cache.add(news)
            if exitstatus == 0 and before and before == _repository_digest(session.root):
                passed = len(stats.get("passed", ())) + len(stats.get("unchanged", ()))
                summary = f"{passed} passed, {len(stats.get('skipped', ()))} skipped"
                cache.add_whole_run(before, summary)
        except OSError as error:
            terminalreporter.write_line(
                f"the results cannot be stored, so the tests will run again: "
                f"{cache.path}: {error.strerror}"
            )

    if config.getoption("--record-compatibility"):
        _record_compatibility(session.root, stats)
    calls = [(report, properties) for report, properties in reports if report.when == "call"]
    slow = [(r.duration, r.nodeid) for r, properties in calls if not properties.get("cheap")]
    commands = sum(properties.get("seconds", 0.0) for _, properties in calls)
    total = sum(properties["duration"] for _, properties in calls if properties.get("seconds"))
    unchanged = len(stats.get("unchanged", ()))
    write = terminalreporter.write_line
    terminalreporter.section("the book")
    if session.device == "cuda" and not any(
        getattr(report, "nodeid", "").endswith("::cuda")
        for kind in stats.values()
        for report in kind
    ):
        write("no GPU transcript of these programs was recorded yet (use `make record-gpu`)")
    # The budgets are for forked commands, so GitHub shows no warning if no command is forked.
    use_warnings = session.launcher and os.environ.get("GITHUB_ACTIONS") == "true"
    for file, message in _over_budget(stats, session).items():
        if config.getoption("--strict-time"):
            write(message, red=True)
        elif use_warnings:
            write(f"::warning file={file}::{message}")
    if session.mutants:
        for line in _mutant_lines(stats):
            write(line)
        return
    line = f"{len(slow)} ran, {unchanged} unchanged since they passed"
    write(line + (" (--no-cache runs them too)" if unchanged else ""))
    if commands:
        rest = total - commands
        write(
            f"the commands lasted {commands:.1f} s, and the tests of these commands needed "
            f"{rest:.1f} s more ({100 * rest / commands:.1f}%)"
        )
    for report, properties in calls:
        if properties.get("rerun_in_fresh_process") and not properties.get("recorded"):
            write(f"differed when it was forked, but passed as it is typed: {report.nodeid}")
        if properties.get("recorded"):
            write(f"recorded {report.nodeid}")
    if slow:
        for line in _time_lines(stats):
            write(line)
        write("slowest:")
        for seconds, name in sorted(slow, reverse=True)[:10]:
            write(f"  {seconds:6.1f} s  {name}")
