"""Plugin: how pytest sees the book.

pytest docs/02_ddp.md                 the blocks of a chapter
pytest snippets/02_ddp/naive.py       a program against its transcripts
pytest snippets/02_ddp -k hooks -x    as anywhere
pytest --device cuda                  the transcripts recorded on GPUs, and blocks that see them
pytest --record snippets/02_ddp       rewrite transcripts that no longer hold
pytest --launcher=prefork snippets/02_ddp         faster, from a process that has torch already
pytest --no-cache                          also what has passed already, unchanged
pytest --mutants written snippets     each program made wrong: what then still passes fails
pytest --nproc 5 snippets             with another number of ranks: right, or one sentence
pytest --strict-time                  what works longer than tests/budget.toml allows fails
pytest --record-compatibility                         note what held on this release of torch
pytest --shard 2/4                    the second of four parts that take about as long
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
from worldsize.testing import code_blocks, mutation, program_check, result_cache, shown

SESSION = pytest.StashKey["Session"]()
INPUTS = pytest.StashKey[str]()
EVERYTHING = pytest.StashKey[str]()
STARTED = pytest.StashKey[float]()
WORTH_A_LOOK = 0.05  # seconds; what a shorter test works counts with the next


FLAGS = {
    "--record": "rewrite the transcripts, figures and outputs that no longer hold",
    "--no-cache": "run everything, also what has passed with the same inputs before (CI does)",
    "--record-compatibility": "list in snippets/compatibility.csv which programs passed on "
    "this release of torch",
    "--strict-time": "fail if a file takes more processor time than tests/budget.toml allows",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("book", "the book")
    group.addoption(
        "--device",
        choices=("cpu", "cuda", "auto"),
        default="auto",
        help="which transcripts to hold programs to: those of the CPU, of GPUs, or of whatever "
        "this machine has (default)",
    )
    for name, does in FLAGS.items():
        group.addoption(name, action="store_true", help=does)
    group.addoption(
        "--launcher",
        choices=("auto", "prefork", "process"),
        default="auto",
        help="how commands start: prefork forks them from a process that has imported torch, "
        "process starts each exactly as it is typed, auto (the default) forks most torchrun "
        "commands, and none when it records",
    )
    group.addoption(
        "--mutants",
        choices=mutation.KINDS,
        help="in place of the programs their mutants: those written in tests/mutants/, those "
        "made of their syntax, or both; a mutant that does as recorded fails",
    )
    group.addoption(
        "--nproc",
        type=int,
        metavar="N",
        help="start N ranks wherever a command says how many; then a program does what it "
        "should, or says in one sentence which numbers it takes",
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="what takes longer hangs, on whatever machine (default 900)",
    )
    group.addoption(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="run the I-th of N shards: each file is in one, and their budgets are about equal",
    )


def _shard(text: str) -> tuple[int, int]:
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return number, of


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "cpu: runs on any machine",
        "gpu: needs a CUDA device",
        "multi_gpu: needs more than one CUDA device",
        "inputs(*names): the files on which this test depends, in place of its module's INPUTS",
    ):
        config.addinivalue_line("markers", marker)
    if not hasattr(config, "workerinput"):
        _put_aside_in_one_folder()
    if config.getoption("--record") and config.getoption("--device") == "cuda":
        raise pytest.UsageError("`make record-gpu` records on GPUs; this option, on the CPU")
    gc.disable()  # what is imported and collected stays: a fifth of that time went to looking
    if not config.getoption("--record"):  # what is recorded is timed as readers will start it
        host_checks.use_batch_scheduling()
    config.stash[SESSION] = Session(config)
    if why := host_checks.loopback_error():
        raise pytest.UsageError(why)
    signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator:
    with assume_unchanged({}):
        return (yield)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _put_aside_in_one_folder() -> None:
    """Remove with the session what it, its workers and what they start leave; torchrun does.

    What pytest keeps for those who look at a failure stays where it is.
    """
    base = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", base)
    if base.startswith("/var/folders/"):
        base = "/tmp"  # macOS: the names of sockets must be short
    os.environ["TMPDIR"] = tempfile.tempdir = folder = tempfile.mkdtemp(prefix="ws-", dir=base)
    os.chmod(folder, 0o711)  # what another user is to run may lie in it
    # at the very end: multiprocessing removes its own, with priority -100, and it lies in here
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def _interrupt(*_: object) -> NoReturn:
    """SIGTERM does what Ctrl-C does, which a terminal sends to the workers as well."""
    processes.end_workers()
    raise KeyboardInterrupt


_HOW = re.compile(r"(?<!\S)(-n \d+|--dist \w+|--(launcher|color|junitxml)=\S+|-[qv]+)(?!\S)")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> pytest.ExitCode | None:
    """Say so at once where all is as it was when everything passed."""
    root = Path(config.rootpath).resolve()
    options = _HOW.sub("", " ".join(config.invocation_params.args)).split()
    part = options not in ([], ["--no-cache"]) or "PYTEST_ADDOPTS" in os.environ
    if part or hasattr(config, "workerinput") or not (root / ".gitignore").exists():
        return None
    digest = config.stash[EVERYTHING] = _everything(root)
    again = options or os.environ.get("CI") == "true"
    if not again and (summary := result_cache.ResultCache(root).summary(digest)):
        print(
            f"nothing has changed since everything passed: {summary} (--no-cache runs it again)"
        )
        return pytest.ExitCode.OK
    return None


def _everything(root: Path) -> str:
    return result_cache.ResultCache(root).everything(*runner.gpu_names())


class Session:
    """What the items of one pytest session share."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.root = Path(config.rootpath).resolve()
        self.passed = result_cache.ResultCache(self.root)
        self.record = option("--record")
        self.repeat_all = option("--no-cache") or self.record or os.environ.get("CI") == "true"
        self.mutants = option("--mutants")
        self.ranks = option("--nproc")
        on_cpu = self.mutants or self.ranks or self.record
        self.device = "cpu" if on_cpu else option("--device")
        self.devices = ["cpu", "cuda"] if self.device == "auto" else [self.device]
        # starts commands; None where all run as typed
        launcher = option("--launcher")
        as_typed = launcher == "process" or (self.record and launcher == "auto")
        self.warm = None if as_typed else Launcher(launcher == "prefork")
        self.run_options = program_check.CheckOptions(
            limit=option("--time-limit"), launcher=self.warm, record=self.record
        )
        self.worked = 0.0  # seconds of processor time, when last asked

    @cached_property
    def embedded(self) -> dict[str, list[str]]:
        """Which files the chapters embed, and where."""
        return embedded_files(self.root)

    @cached_property
    def _budgets(self) -> dict[str, float]:
        path = self.root / "tests/budget.toml"
        return tomllib.loads(path.read_text("utf-8")) if path.exists() else {}

    def budget(self, file: str) -> float:
        """The processor seconds that the tests of a file may take."""
        return self._budgets.get(file, self._budgets.get("default", math.inf))


# --- collecting ------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """docs/labs is a link to labs/: its programs are collected once."""
    root = Path(config.rootpath)
    if collection_path.is_symlink() and collection_path.is_relative_to(root / "docs"):
        return True
    return None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    session = parent.config.stash[SESSION]
    path, root = file_path.resolve(), session.root
    inside = path.suffix == ".py" and path.is_relative_to(root)
    if session.mutants and inside and mutation.tests_of(path, root):
        return Module.from_parent(parent, path=file_path)
    if is_program(path, root):
        return ProgramFile.from_parent(parent, path=file_path)
    if session.mutants:
        return None
    if path.suffix == ".md" and path.is_relative_to(root / "docs"):
        return PageFile.from_parent(parent, path=file_path)
    return OrphanFile.from_parent(parent, path=file_path) if is_orphan(path, root) else None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """A program named on the command line is not a test module as well."""
    session = parent.config.stash[SESSION]
    if session.mutants or is_program(module_path.resolve(), session.root):
        return EmptyFile.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one shard: the file with the largest budget goes where there is least so far."""
    if not (shard := config.getoption("--shard")):
        return
    (number, of), budget = shard, config.stash[SESSION].budget
    files = sorted({_file(item) for item in items})
    mine, loads = set(), [0.0] * of
    for file in sorted(files, key=budget, reverse=True):
        least = loads.index(min(loads))
        loads[least] += budget(file)
        if least == number - 1:
            mine.add(file)
    config.hook.pytest_deselected(items=[item for item in items if _file(item) not in mine])
    items[:] = [item for item in items if _file(item) in mine]


def _file(test: pytest.Item | pytest.TestReport) -> str:
    return test.nodeid.partition("::")[0]


class EmptyFile(pytest.File):
    """A file with no tests of this kind."""

    def collect(self) -> list[pytest.Item]:
        return []


class BookItem(pytest.Item):
    """A test of the book.

    ``check`` does it, and returns what it came to (None if it is cheap). ``inputs`` says what
    its outcome can depend on, texts and files; a test with none is always run.
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
        outcome = self.check()
        facts = vars(outcome) if outcome else {"cheap": True}
        facts["took"] = time.monotonic() - start
        self.user_properties.append(("book", facts))

    def reportinfo(self):
        return self.path, self.line - 1, self.title

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, BookError):
            return str(excinfo.value)
        if host_checks.is_disk_full(excinfo.value):
            return (
                f"{host_checks.DISK_FULL}: make room, or name another folder, "
                "TMPDIR=FOLDER make test"
            )
        return super().repr_failure(excinfo, style)


class ProgramFile(pytest.File):
    """A program: one test that the book shows it, and one for each device."""

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
            return  # `shown` says so
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

    def mutants(self, program: Program, session: Session) -> Iterator[pytest.Item]:
        """One test for each mutant of a program that runs here."""
        if "cpu" not in program.devices or program.name.startswith(LAUNCH):
            return  # what launchers do is not computed by the programs of labs/launch
        try:
            found = mutation.of(program, session.mutants)
        except BookError as error:
            raise self.CollectError(str(error)) from None
        for mutant in found:
            yield BookItem.from_parent(
                self,
                name=mutant.what,
                title=f"{program.name}: {mutant.what}",
                line=mutant.line,
                check=partial(_check_mutant, program, mutant, session.run_options),
                inputs=partial(_mutant_inputs, program, mutant),
            )


class Module(pytest.File):
    """A program that tests of `tests/` check: one test for each of its mutants."""

    def collect(self) -> Iterator[pytest.Item]:
        session, path = self.config.stash[SESSION], self.path.resolve()
        try:
            found = mutation.of_module(path, session.root, session.mutants)
        except BookError as error:
            raise self.CollectError(str(error)) from None
        for mutant, tests in found:
            yield BookItem.from_parent(
                self,
                name=mutant.what,
                title=f"{self.name}: {mutant.what}",
                line=mutant.line,
                check=partial(mutation.check_module, path, session.root, mutant, tests),
            )


def _mutant_inputs(program: Program, mutant: mutation.Mutant) -> tuple[str | Path, ...]:
    return (*program_check.inputs(program, "cpu"), mutant.source)


def _check_mutant(
    program: Program, mutant: mutation.Mutant, run_options: program_check.CheckOptions
) -> program_check.CheckResult:
    """A mutant does something else than recorded; skipped where nobody could notice it."""
    if mutant.equivalent:
        pytest.skip(f"equivalent: {mutant.equivalent}")
    if tool := missing_requirement(program, program.transcript("cpu")):
        pytest.skip(f"{tool} is not on this machine")
    return mutation.check(program, "cpu", mutant, run_options)


def _gpu_device(program: Program) -> str:
    """What it is held to on this machine's GPU; where that has recorded nothing, the first."""
    gpu = gpu_kind(runner.describe_device("cuda"))
    device = program.gpu_device(gpu)
    return device if device in program.devices else "cuda"


def _check_program(
    program: Program, device: str, run_options: program_check.CheckOptions
) -> program_check.CheckResult:
    """Its commands print what the transcript says; skipped where this machine cannot run it."""
    have = len(runner.gpu_names())
    if device != "cpu":
        _need_gpu()
        transcript, here = program.transcript(device), runner.describe_device("cuda")
        if (needs := gpus_needed(transcript)) > have:
            pytest.skip(f"needs {needs} GPUs, this machine has {have}")
        if (at := transcript.provenance) and gpu_kind(at.device) != gpu_kind(here):
            pytest.skip(f"recorded on {at.device}, this machine has {here}")
    elif "cpu" not in program.devices:
        if have:
            pytest.skip("needs a GPU, and is held to its GPU transcript on this machine")
        return program_check.check_refusal(program, run_options)
    if tool := missing_requirement(program, program.transcript(device)):
        pytest.skip(f"{tool} is not on this machine")
    return program_check.check(program, device, run_options)


def _need_gpu() -> None:
    if not runner.gpu_names():
        pytest.skip("this machine has no GPU")


class OrphanFile(pytest.File):
    """A transcript or figure without a program."""

    def collect(self) -> Iterator[pytest.Item]:
        yield BookItem.from_parent(self, name="stray", title=self.name, check=self.fail)

    def fail(self) -> None:
        name = self.path.resolve().relative_to(self.config.stash[SESSION].root).as_posix()
        raise BookError(f"{name}:1: there is no program of this name beside it")


class PageFile(pytest.File):
    """A page of ``docs/``: one test for each block; for GPUs, for each that is run."""

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
    """A block of a chapter runs, on a GPU sees it, compiles or is valid."""
    if block.skip == "":
        raise block.error("a skipped block must say why")
    if device == "cuda":
        _need_gpu()
    with gpu_lock(device):
        seconds = code_blocks.check(block, replace(run_options, device=device))
    if block.skip:
        pytest.skip(block.skip)
    return program_check.CheckResult(seconds)


# --- what has passed already -----------------------------------------------------------------


def _inputs(item: pytest.Item, session: Session) -> str:
    """The digest of an item's inputs; empty for one that is always run.

    A module of ``tests/`` may name the files and folders it depends on in a list ``INPUTS``,
    and what a test is parametrized with may have fewer, its own ``inputs``.
    """
    if isinstance(item, BookItem):
        inputs = item.inputs()
        return session.passed.digest(*inputs, *result_cache.ENGINE) if inputs else ""
    names = inputs_of(item)
    return session.passed.digest(item.nodeid, *(session.root / name for name in names))


def inputs_of(item: pytest.Item) -> tuple[str, ...]:
    """The files and folders of the repository on which a test of ``tests/`` depends."""
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
    """Before an item is run: if it passed with the same inputs, do not run it again."""
    session = item.config.stash[SESSION]
    item.stash[STARTED] = time.monotonic()
    session.worked = session.worked or processes.processor_seconds()
    inputs = item.stash[INPUTS] = _inputs(item, session)
    if inputs and not session.repeat_all and session.passed.has(item.nodeid, inputs):
        skip_unchanged(item)


def skip_unchanged(item: pytest.Item) -> None:
    """Do not run an item: it would come to what it came to when it passed."""
    item.runtest = lambda: None
    item.setup = lambda: None  # nor its fixtures
    item.user_properties.append(("book", {"unchanged": True}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" or report.failed:
        report.book_inputs = item.stash.get(INPUTS, "")
    if report.when == "teardown" and time.monotonic() - item.stash[STARTED] > WORTH_A_LOOK:
        session, before = item.config.stash[SESSION], item.config.stash[SESSION].worked
        session.worked = processes.processor_seconds()
        # less than before where something ended for which nobody waits, such as a browser
        report.worked = max(0.0, session.worked - before)
    return report


def _facts(report: pytest.TestReport) -> dict:
    return dict(getattr(report, "user_properties", ())).get("book", {})


def pytest_report_teststatus(report, config: pytest.Config):
    facts = _facts(report)
    if report.when == "call" and report.passed and facts.get("unchanged"):
        return "unchanged", "u", "UNCHANGED"
    if report.when == "call" and report.passed and facts.get("recorded"):
        return "recorded", "R", "RECORDED"
    return None


# --- the summary -----------------------------------------------------------------------------


def _killed(stats: dict[str, list]) -> Iterator[str]:
    """For each folder, how many mutants were noticed, of those that somebody could notice."""
    noticed, survived = Counter(), Counter()
    for category in ("passed", "unchanged", "failed"):
        for report in stats.get(category, ()):
            folder = _file(report).rpartition("/")[0]
            (survived if category == "failed" else noticed)[folder] += 1
    for folder in sorted({*noticed, *survived}):
        good, of = noticed[folder], noticed[folder] + survived[folder]
        yield f"{folder}: {good} of {of} mutants killed, {100 * good / of:.0f}%"


def _by_file(stats: dict[str, list]) -> tuple[Counter[str], Counter[str]]:
    """What each file's tests took: of processors, and on the clock."""
    worked, waited = Counter(), Counter()
    for report in (each for kind in stats.values() for each in kind):
        if isinstance(report, pytest.TestReport):
            worked[_file(report)] += getattr(report, "worked", 0.0)
            waited[_file(report)] += report.duration
    return worked, waited


def _by_part(stats: dict[str, list]) -> Iterator[str]:
    """What each chapter's programs and each module of tests took, the most first."""
    worked, waited = Counter(), Counter()
    for parts, files in zip((worked, waited), _by_file(stats), strict=True):
        for file, seconds in files.items():
            parts[file if file.startswith("tests/") else file.rpartition("/")[0]] += seconds
    yield f"{worked.total():.0f} s of processor time and {waited.total():.0f} s on the clock:"
    for part, seconds in worked.most_common():
        if waited[part] > waited.total() / 100:
            yield f"  {seconds:6.1f} s  {waited[part]:6.1f} s  {part}"


def _over_budget(stats: dict[str, list], session: Session) -> dict[str, str]:
    """The files whose tests took more than their budget, and what to say of each."""
    worked, _ = _by_file(stats)
    return {
        file: f"{file} took {seconds:.1f} s of processor time, tests/budget.toml allows "
        f"{session.budget(file):g}"
        for file, seconds in worked.most_common()
        if seconds > session.budget(file)
    }


def _note_held(root: Path, stats: dict[str, list]) -> None:
    """Write down which programs did as recorded on this release of torch, and which did not."""
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
    """Where no GPU has recorded anything, nothing failed; what went over its budget did."""
    option, summary = session.config.option, session.exitstatus
    named = option.keyword or option.markexpr or option.device != "cuda"
    if summary == pytest.ExitCode.NO_TESTS_COLLECTED and not named:
        session.exitstatus = pytest.ExitCode.OK
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # not in a worker
    strict = option.strict_time and reporter and summary == pytest.ExitCode.OK
    if strict and _over_budget(reporter.stats, session.config.stash[SESSION]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus, config: pytest.Config) -> None:
    session, stats = config.stash[SESSION], terminalreporter.stats
    reports = [
        (report, _facts(report), category)
        for category in ("passed", "recorded", "failed", "error")
        for report in stats.get(category, ())
    ]
    if not session.record:
        news: dict[str, str | None] = {}
        for category in ("passed", "unchanged", "recorded", "failed", "error"):
            for report in stats.get(category, ()):
                if report.when == "call" or report.failed:
                    good = category in ("passed", "unchanged")
                    inputs = getattr(report, "book_inputs", "") if good else ""
                    news[report.nodeid] = inputs or None
                    news |= getattr(report, "book_also", {})
        before = config.stash.get(EVERYTHING, "")
        try:
            session.passed.add(news)
            if exitstatus == 0 and before and before == _everything(session.root):
                good = len(stats.get("passed", ())) + len(stats.get("unchanged", ()))
                summary = f"{good} passed, {len(stats.get('skipped', ()))} skipped"
                session.passed.add_whole_run(before, summary)
        except OSError as error:
            terminalreporter.write_line(
                f"what passed cannot be noted, and will run again: "
                f"{session.passed.path}: {error.strerror}"
            )

    if config.getoption("--record-compatibility"):
        _note_held(session.root, stats)
    called = [(report, facts) for report, facts, _ in reports if report.when == "call"]
    slow = [(r.duration, r.nodeid) for r, facts in called if not facts.get("cheap")]
    commands = sum(facts.get("seconds", 0.0) for _, facts in called)
    took = sum(facts["took"] for _, facts in called if facts.get("seconds"))
    unchanged = len(stats.get("unchanged", ()))
    write = terminalreporter.write_line
    terminalreporter.section("the book")
    if session.device == "cuda" and not any(
        getattr(report, "nodeid", "").endswith("::cuda")
        for kind in stats.values()
        for report in kind
    ):
        write("none of these programs has been recorded on a GPU yet (`make record-gpu` does)")
    # on GitHub a warning, but not where all run as typed: a budget is for commands started warm
    warn = session.warm and os.environ.get("GITHUB_ACTIONS") == "true"
    for file, said in _over_budget(stats, session).items():
        if config.getoption("--strict-time"):
            write(said, red=True)
        elif warn:
            write(f"::warning file={file}::{said}")
    if session.mutants:
        for line in _killed(stats):
            write(line)
        return
    line = f"{len(slow)} ran, {unchanged} unchanged since they passed"
    write(line + (" (--no-cache runs them too)" if unchanged else ""))
    if commands:
        extra = 100 * (took - commands) / commands
        write(
            f"{commands:.1f} s in commands, {took - commands:.1f} s around them ({extra:.1f}%)"
        )
    for report, facts in called:
        if facts.get("rerun_in_fresh_process") and not facts.get("recorded"):
            write(f"did something else when started warm, right as typed: {report.nodeid}")
        if facts.get("recorded"):
            write(f"recorded {report.nodeid}")
    if slow:
        for line in _by_part(stats):
            write(line)
        write("slowest:")
        for seconds, name in sorted(slow, reverse=True)[:10]:
            write(f"  {seconds:6.1f} s  {name}")
