"""Plugin: how pytest sees the book.

pytest docs/02_ddp.md                 the blocks of a chapter
pytest snippets/02_ddp/naive.py       a program against its transcripts
pytest snippets/02_ddp -k hooks -x    as anywhere
pytest --device cuda                  the transcripts recorded on GPUs
pytest --record snippets/02_ddp       rewrite transcripts that no longer hold
pytest --warm snippets/02_ddp         faster, from a process that has torch already
pytest --all                          also what has passed already, unchanged
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from book import BookError, embeds, fences, passed, program, runner
from book.program import Program

ENGINE = Path(__file__).resolve().parent
DEPENDS = tuple(
    ENGINE / f"{name}.py"
    for name in ("transcript", "embeds", "runner", "warm", "program", "fences", "plugin")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("book", "the book")
    group.addoption(
        "--device",
        choices=("cpu", "cuda", "auto"),
        default="auto",
        help="which transcripts to hold programs to: those of the CPU, of GPUs, or of whatever "
        "this machine has (default)",
    )
    group.addoption(
        "--record",
        action="store_true",
        help="rewrite the transcripts, figures and outputs that no longer hold",
    )
    group.addoption(
        "--all",
        action="store_true",
        help="run everything, also what has passed with the same inputs before (CI does)",
    )
    group.addoption(
        "--warm",
        action="store_true",
        help="start all programs from a process that has imported torch already",
    )
    group.addoption(
        "--plain",
        action="store_true",
        help="start every command as typed (by default most torchrun commands start from a "
        "process that has torch; the workflow runs all as typed)",
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="the longest any one command may take (default 180)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "cpu: runs on any machine",
        "gpu: needs a CUDA device",
        "multi_gpu: needs more than one CUDA device",
    ):
        config.addinivalue_line("markers", marker)
    if (
        config.getoption("--record")
        and config.getoption("--device") == "cuda"
        and not runner.gpu_names()
    ):
        raise pytest.UsageError(
            "there is no NVIDIA GPU here (nvidia-smi lists none), and so nothing to record on"
        )
    config.stash[SESSION] = Session(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        config.stash[SESSION].close()


class Session:
    """What the items of one pytest session share."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = Path(config.rootpath).resolve()
        self.passed = passed.Passed(self.root)
        self.repeat_all = (
            config.getoption("--all")
            or config.getoption("--record")
            or os.environ.get("CI") == "true"
        )
        self.record = config.getoption("--record")
        self.limit = config.getoption("--time-limit")
        self._warm = None
        self._embedded: dict[str, list[str]] | None = None
        self.reports: dict[str, dict] = {}

    @property
    def warm(self):
        """What starts commands warm (see `book.warm`), or None where all run as typed."""
        eager = self.config.getoption("--warm")
        if self.config.getoption("--plain") or (self.record and not eager):
            return None
        if self._warm is None:
            from book.warm import Launcher

            self._warm = Launcher(eager)
        return self._warm

    @property
    def embedded(self) -> dict[str, list[str]]:
        """Which files the chapters embed, and where."""
        if self._embedded is None:
            self._embedded = embeds.embedded_files(self.root)
        return self._embedded

    @property
    def devices(self) -> list[str]:
        """The devices whose transcripts count in this session."""
        chosen = self.config.getoption("--device")
        if chosen != "auto":
            return [chosen]
        return ["cpu", "cuda"]

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()


SESSION = pytest.StashKey[Session]()


# --- collecting ------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """docs/labs is a link to labs/: its programs are collected once."""
    root = Path(config.rootpath)
    if collection_path.is_symlink() and collection_path.is_relative_to(root / "docs"):
        return True
    return None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    session = parent.config.stash[SESSION]
    path = file_path.resolve()
    if program.is_program(path, session.root):
        return ProgramFile.from_parent(parent, path=file_path)
    if path.suffix == ".md" and path.is_relative_to(session.root / "docs"):
        if session.config.getoption("--device") == "cuda":
            return None
        return Chapter.from_parent(parent, path=file_path)
    if path.name.endswith((".cpu.txt", ".cuda.txt", ".svg")) and path.is_relative_to(
        session.root
    ):
        folder = path.parent
        if path.relative_to(session.root).parts[0] in program.FOLDERS and path in list(
            program.stray_transcripts(folder, session.root)
        ):
            return Stray.from_parent(parent, path=file_path)
    return None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """A program named on the command line is not a test module as well."""
    session = parent.config.stash[SESSION]
    if program.is_program(module_path.resolve(), session.root):
        return Nothing.from_parent(parent, path=module_path)
    return None


class Nothing(pytest.File):
    """A file with no tests of this kind."""

    def collect(self) -> list[pytest.Item]:
        return []


class BookItem(pytest.Item):
    """A test of the book: knows what its outcome depends on, and what it has cost."""

    def inputs(self) -> str:
        """A digest of everything the outcome can depend on."""
        raise NotImplementedError

    def check(self, session: Session) -> dict:
        """Do it; return facts for the summary (``seconds`` spent in commands, ``recorded``)."""
        raise NotImplementedError

    def runtest(self) -> None:
        session = self.config.stash[SESSION]
        start = time.monotonic()
        facts = self.check(session)
        facts["took"] = time.monotonic() - start
        self.user_properties.append(("book", facts))

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, BookError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


class ProgramFile(pytest.File):
    """A program: one test that the book shows it, and one for each device."""

    def collect(self) -> Iterator[pytest.Item]:
        session = self.config.stash[SESSION]
        this = Program(session.root, self.path.resolve())
        if "cpu" in session.devices and not session.record:
            yield Shown.from_parent(self, name="shown", program=this)
        for device in session.devices:
            if not this.devices:
                continue  # `shown` says so
            new = session.record and session.config.getoption("--device") == "cuda"
            if device == "cuda" and device not in this.devices and not new:
                continue
            if device == "cuda" and session.record and not runner.gpu_names():
                continue
            item = Run.from_parent(self, name=device, program=this, device=device)
            item.add_marker("gpu" if device == "cuda" else "cpu")
            if device == "cuda" and device in this.devices:
                needs = program.gpus_needed(this.transcript("cuda"))
                if needs > 1:
                    item.add_marker("multi_gpu")
                item.needs = needs
            yield item


class Shown(BookItem):
    """The book shows the program and its transcript."""

    def __init__(self, *, program: Program, **kwargs) -> None:
        super().__init__(**kwargs)
        self.program = program

    def inputs(self) -> str:
        return ""  # cheap: always checked

    def check(self, session: Session) -> dict:
        program.check_shown(self.program, session.embedded)
        return {"cheap": True}

    def reportinfo(self):
        return self.path, 0, f"{self.program.name}: shown"


class Run(BookItem):
    """The program's commands print what the transcript says."""

    def __init__(self, *, program: Program, device: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.program, self.device, self.needs = program, device, 1

    def inputs(self) -> str:
        name = self.program.name
        root, own = self.program.root, [self.program.path]
        if name.startswith(program.LAUNCH):
            own = [root / program.LAUNCH]
        elif name.startswith("labs/"):
            own = [root / "labs"]
        elif name.startswith("assessment/"):  # with start.py, check.py and their runner
            own = [root / "assessment", root / "labs"]
        return passed.digest(
            name,
            self.device,
            runner.describe_device(self.device),
            *own,
            *program.companions(self.program),
            *(self.program.transcript_path(device) for device in program.DEVICES),
            self.program.figure,
            *DEPENDS,
        )

    def check(self, session: Session) -> dict:
        if self.device == "cuda":
            have = len(runner.gpu_names())
            if have == 0:
                pytest.skip("this machine has no GPU")
            if self.needs > have:
                pytest.skip(f"needs {self.needs} GPUs, this machine has {have}")
        if self.device == "cpu" and "cpu" not in self.program.devices:
            if runner.gpu_names():
                pytest.skip("needs a GPU, and is held to its GPU transcript on this machine")
            outcome = program.check_refusal(self.program, limit=session.limit)
        else:
            known = self.device if self.device in self.program.devices else "cpu"
            if known in self.program.devices:
                tool = program.missing_tool(self.program, self.program.transcript(known))
                if tool:
                    pytest.skip(f"{tool} is not on this machine")
            outcome = program.check(
                self.program,
                self.device,
                limit=session.limit,
                record=session.record,
                warm=session.warm,
            )
        return vars(outcome)

    def reportinfo(self):
        return self.path, 0, f"{self.program.name} ({self.device})"


class Stray(pytest.File):
    """A transcript or figure without a program."""

    def collect(self) -> Iterator[pytest.Item]:
        yield StrayItem.from_parent(self, name="stray")


class StrayItem(BookItem):
    def inputs(self) -> str:
        return ""

    def check(self, session: Session) -> dict:
        name = self.path.resolve().relative_to(session.root).as_posix()
        raise BookError(f"{name}:1: there is no program of this name beside it")


class Chapter(pytest.File):
    """A page of ``docs/``: one test for each fence."""

    def collect(self) -> Iterator[pytest.Item]:
        session = self.config.stash[SESSION]
        try:
            found = fences.extract(self.path.resolve(), session.root)
        except BookError as error:
            raise self.CollectError(str(error)) from None
        seen: dict[str, int] = {}
        for fence in found:
            name = f"{self.path.name}:{fence.line}"
            seen[name] = seen.get(name, 0) + 1
            item = Block.from_parent(self, name=name, fence=fence)
            item.add_marker("cpu")
            yield item


class Block(BookItem):
    """A fence of a chapter runs, compiles or is valid."""

    def __init__(self, *, fence: fences.Fence, **kwargs) -> None:
        super().__init__(**kwargs)
        self.fence = fence

    def inputs(self) -> str:
        fence = self.fence
        if fence.embeds or fence.language == "text":
            return ""  # cheap: always checked
        named = "labs/" in fence.code or "assessment/" in fence.code
        labs = [fence.root / name for name in ("labs", "assessment")] if named else []
        return passed.digest(
            str(fence.language),
            repr(sorted(fence.options.items())),
            fence.code,
            repr(fence.expected),
            *labs,
            *DEPENDS,
        )

    def check(self, session: Session) -> dict:
        if self.fence.skip == "":
            raise BookError(f"{self.fence.where}: a skipped block must say why")
        seconds = fences.check(
            self.fence, limit=session.limit, record=session.record, warm=session.warm
        )
        if self.fence.skip:
            pytest.skip(self.fence.skip)
        return {"seconds": seconds}

    def reportinfo(self):
        return self.path, self.fence.line - 1, f"{self.fence.where} ({self.fence.language})"


# --- what has passed already -----------------------------------------------------------------


def _inputs(item: pytest.Item, session: Session) -> str:
    """The digest of an item's inputs; empty for one that is always run.

    A module of ``tests/`` may name the files and folders it depends on in a list ``INPUTS``.
    """
    if isinstance(item, BookItem):
        return item.inputs()
    module = getattr(item, "module", None)
    own = getattr(module, "INPUTS", ("book", "tests"))
    shared = ("pyproject.toml", "requirements", "tests/conftest.py")
    return passed.digest(
        item.nodeid, item.path, *(session.root / name for name in (*own, *shared))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem) -> None:
    """Before an item is run: if it passed with the same inputs, do not run it again."""
    session = item.config.stash[SESSION]
    inputs = _inputs(item, session)
    item.stash[INPUTS] = inputs
    if inputs and not session.repeat_all and session.passed.has(item.nodeid, inputs):
        item.runtest = lambda: None
        item.setup = lambda: None  # nor its fixtures
        item.user_properties.append(("book", {"unchanged": True}))


INPUTS = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" or report.failed:
        report.book_inputs = item.stash.get(INPUTS, "")
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


def pytest_terminal_summary(terminalreporter, exitstatus, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    stats = terminalreporter.stats
    news: dict[str, str | None] = {}
    ran, commands, took, slow = 0, 0.0, 0.0, []
    for category in ("passed", "recorded", "failed", "error"):
        for report in stats.get(category, ()):
            inputs = getattr(report, "book_inputs", "")
            if report.when == "call" or report.failed:
                good = report.passed and category == "passed" and inputs
                news[report.nodeid] = inputs if good else None
            if getattr(report, "when", None) != "call":
                continue
            facts = _facts(report)
            if not facts.get("cheap"):
                ran += 1
                slow.append((report.duration, report.nodeid))
            commands += facts.get("seconds", 0.0)
            took += facts.get("took", 0.0) if facts.get("seconds") else 0.0
    if not session.record:
        session.passed.add(news)
    unchanged = len(stats.get("unchanged", ()))
    write = terminalreporter.write_line
    terminalreporter.section("the book")
    line = f"{ran} ran, {unchanged} unchanged since they passed"
    write(line + (" (--all runs them too)" if unchanged else ""))
    if commands:
        extra = 100 * (took - commands) / commands
        write(
            f"{commands:.1f} s in commands, {took - commands:.1f} s around them ({extra:.1f}%)"
        )
    for report in stats.get("passed", ()):
        if _facts(report).get("doubted"):
            write(f"did something else when started warm, right as typed: {report.nodeid}")
    for report in stats.get("recorded", ()):
        write(f"recorded {report.nodeid}")
    if slow:
        write("slowest:")
        for seconds, name in sorted(slow, reverse=True)[:10]:
            write(f"  {seconds:6.1f} s  {name}")
