"""What the tests share: small books of their own, run by pytest in a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.server
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import processes
import pytest
from processes import HANG, use_default_signals

from worldsize.model.fingerprint import file_hashes
from worldsize.testing.plugin import SESSION, inputs_of, skip_unchanged

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
# Tests whose names begin alike share something that is slow to make: they go to one worker.
TOGETHER = re.compile(
    r"tests/test_engine\.py::test_broken|"
    r"tests/test_labs\.py::test_wrong_answer_gets_its_hint\[lab\d+|"
    r"tests/test_labs\.py::test_check_survives|"
    r"tests/test_labs\.py::test_check_and_machine_survive|"
    r"tests/test_assessment\.py::test_wrong_whole_run|"
    r"tests/test_assessment\.py::test_wrong_answer_gets_its_hint\["
    r"(?:(?P<small>assignment|challenge)|[a-z]+)"
)
ON_THE_SITE = re.compile(r"tests/test_(site|browser_\w+)\.py")
# what the built site is made of
SITE = ["assessment", "src", "docs", "labs", "mkdocs.yml", "overrides", "snippets"]
PROGRAMS_AND_PAGES = {*SITE} - {"src", "overrides"}
READS, READ = Path(__file__).parent / "read_tracker", pytest.StashKey[int]()
# read by all, or known to all tests
NEVER = (".venv/", ".git/", ".cache/", "site/", "tests/read_tracker/", "requirements/")
IMPORTED: dict[Path, set[str]] = {}  # what each module of tests read when it was imported
SERVED: tuple[set[str], set[str]] = set(), set()  # files of the site: in a test, in its module
AS_SERVED = pytest.StashKey[str]()
CHROMIUM = ["chromium", "chromium-browser", "google-chrome"]
# A window's address bar is two more pages, and these cost as much as the one that is tested.
# The option replaces Playwright's: what of that asks other hosts, or waits to paint, stands here.
OFF = "WebUIOmniboxPopup,WebUIOmniboxAimPopup,AimEnabled,OptimizationHints,PaintHolding"
OFF += ",NetworkTimeServiceQuerying,PreconnectToSearch,HttpsUpgrades"
RECORDED = (
    "# recorded 2026-01-01 on 2 CPU cores (test), torch 2.13.0, Python 3.11.7, in 1.0 s\n"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times",
        type=int,
        default=0,
        help="how often the capstone's rank is killed and its run resumed (0)",
    )
    parser.addoption(
        "--every-answer",
        action="store_true",
        help="grade every answer to a lab, right or wrong, and run the labs with every number of "
        "ranks; by default, a sample, or what -k selects",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with a parameter that is not in the sample."""
    if config.option.every_answer or config.option.keyword:
        return
    left = {item for item in items if not _is_sampled(item)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def _is_sampled(item: pytest.Item) -> bool:
    """Whether no parameter of a test says that a run without `--every-answer` leaves it out."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return all(getattr(value, "sampled", True) for value in values)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give each worker one test after the other, but those of `TOGETHER` at once."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if ON_THE_SITE.match(nodeid):
                return "site"
            together = TOGETHER.match(nodeid)
            return together.lastgroup or together[0] if together else nodeid

    return Scheduling(config, log)


# --- what a test reads ------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Let this Python, and those that the tests start with `reading`, note what they open."""
    handle, os.environ["READS"] = tempfile.mkstemp(prefix="reads-")
    os.close(handle)
    importlib.import_module("read_tracker.sitecustomize")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start warm in tests, too, unless all is to start as typed."""
    processes.LAUNCHER[0] = session.config.stash[SESSION].warm


def pytest_unconfigure() -> None:
    Path(os.environ.pop("READS")).unlink()


def reading(environment: dict[str, str]) -> dict[str, str]:
    """The variables of a Python whose reading counts as that of the test."""
    path = os.pathsep.join(filter(None, [str(READS), environment.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path, "READS": os.environ["READS"]}


def source(name: str) -> str:
    """The source of a module that was read compiled."""
    folder, cached, file = name.rpartition("__pycache__/")
    return f"{folder}{file.split('.')[0]}.py" if cached else name


def read_since(start: int) -> set[str]:
    """The files of the repository that were read since the record of them was so long."""
    with open(os.environ["READS"]) as file:
        file.seek(start)
        return set(map(source, file.read().splitlines()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    sys.modules["read_tracker.sitecustomize"].SEEN.clear()
    start = Path(os.environ["READS"]).stat().st_size
    report = yield
    if isinstance(collector, pytest.Module):
        IMPORTED[collector.path] = read_since(start)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    sys.modules["read_tracker.sitecustomize"].SEEN.clear()
    item.stash[READ] = Path(os.environ["READS"]).stat().st_size
    SERVED[0].clear()
    result = yield
    if nextitem is None or nextitem.path != item.path:
        SERVED[1].clear()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A test that has read what its inputs do not name would stay green when that changes.

    One that reads the site only as it is served is run again where a file has changed that it
    was served: most programs and pages change none of these.
    """
    session, name = item.config.stash[SESSION], f"{item.nodeid} as served"
    served = None if item.user_properties else reads_as_served(item)
    known = "" if session.repeat_all else session.passed.known.get(name, "")
    if served is not None and known and known == as_served(item, known.splitlines()[1:]):
        skip_unchanged(item)
        return (yield)
    result = yield
    if isinstance(item, pytest.Function):
        names, read = inputs_of(item), read_since(item.stash[READ])
        known = tuple(f"{name}/" for name in names)
        unnamed = {name for name in read - set(names) if not name.startswith((*known, *NEVER))}
        if "built_site" in item.fixturenames:
            unnamed |= {"src", "mkdocs.yml", "overrides"} - set(names)
        assert not unnamed, f"INPUTS of {item.path.name} does not name {sorted(unnamed)}"
        if served is not None:
            read |= IMPORTED[item.path]
            files = {f"/{name}" for name in SERVED[served]}
            files |= {name for name in read if not name.startswith(NEVER)}
            item.stash[AS_SERVED] = as_served(item, sorted(files))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.failed or (report.when == "call" and AS_SERVED in item.stash):
        found = None if report.failed else item.stash[AS_SERVED]
        report.book_also = {f"{item.nodeid} as served": found}
    return report


def reads_as_served(item: pytest.Item) -> int | None:
    """Whether the site is for a test only an address; if so, which of `SERVED` is what it read.

    A page that tests share is loaded by the first of them.
    """
    if "site_url" not in item.fixturenames:
        return None
    fixtures = {name: each[-1] for name, each in item._fixtureinfo.name2fixturedefs.items()}
    known = {name for name, each in fixtures.items() if "built_site" in each.argnames}
    if "built_site" in item._fixtureinfo.argnames or known != {"site_url"}:
        return None
    return int(any(each.scope == "module" for each in fixtures.values()))


def as_served(item: pytest.Item, names: list[str]) -> str:
    """A digest of what a test depends on, and these names: files, of the site with a slash."""
    site, own = item._request.getfixturevalue("built_site"), set(inputs_of(item))
    files = {ROOT / name for name in names if name[0] != "/"}
    files |= {ROOT / name for name in own - PROGRAMS_AND_PAGES}
    texts = [
        line.removeprefix(f"{site}")
        for name in names
        if name[0] == "/"
        for line in file_hashes(site / name[1:])
    ]
    digest = item.config.stash[SESSION].passed.digest(item.nodeid, *texts, *sorted(files))
    return "\n".join([digest, *names])


@dataclass
class Report:
    """What a run of pytest on a small book said."""

    status: int
    text: str
    outcomes: dict[str, str] = field(default_factory=dict)  # test name: passed, failed, skipped
    messages: dict[str, str] = field(default_factory=dict)  # test name: why


class Book:
    """A book in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "pyproject.toml",
            "[tool.pytest.ini_options]\naddopts = ['-p', 'worldsize.testing.plugin', '-p', 'no:codeblocks', '-p', 'no:cacheprovider']\n",
        )
        for folder in ("docs", "snippets", "labs"):
            (root / folder).mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the book."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), "utf-8")
        return path

    def read(self, name: str) -> str:
        return (self.root / name).read_text("utf-8")

    def program(
        self, name: str, code: str, transcript: str | None, *, embed: bool = True
    ) -> str:
        """Write a program, its transcript and a page that embeds both; return its path."""
        path = f"snippets/t/{name}.py"
        self.write(path, code)
        if transcript is not None:
            self.write(
                f"snippets/t/{name}.cpu.txt",
                RECORDED + textwrap.dedent(transcript).lstrip("\n"),
            )
        if embed:
            self.write(
                f"docs/{name}.md",
                f'# {name}\n\n```python\n--8<-- "{path}"\n```\n\n'
                f'```console\n--8<-- "snippets/t/{name}.cpu.txt"\n```\n',
            )
        return path

    def words(self, *arguments: str, warm: bool) -> tuple[list[str], dict[str, str]]:
        """What starts pytest on the book, behind `python`, and with which variables.

        A process with torch in it costs more than the one or two commands of a small book, so
        these start as typed but where `warm` asks for what a session does by default.
        """
        env = {
            key: value
            for key, value in os.environ.items()
            if key not in {"CI"} and not key.startswith("PYTEST_")
        }
        if "-n" not in arguments:
            env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of a small book's time
        path = filter(None, [str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH")])
        launcher = [] if warm else ["--launcher=process"]
        words = [*processes.PYTEST, "--color=no", *arguments, *launcher]
        return words, env | {"PYTHONPATH": os.pathsep.join(path)}

    def start(self, *arguments: str, warm: bool = False) -> subprocess.Popen:
        """Start pytest on the book, as one does in a terminal."""
        words, env = self.words(*arguments, warm=warm)
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=use_default_signals,
        )

    def pytest(self, *arguments: str, warm: bool = False) -> Report:
        """Run pytest on the book and read what came of it."""
        results = self.root.with_name(f"{self.root.name}-{os.getpid()}.xml")
        words, env = self.words(f"--junitxml={results}", *arguments, warm=warm)
        process = processes.start(["python", *words], self.root, env)
        text = "".join(process.communicate(timeout=HANG))
        report = Report(process.returncode, text)
        if results.exists():
            for case in ElementTree.parse(results).iter("testcase"):
                # pytest writes the file as a class name: docs/02_ddp.md becomes docs.02_ddp.md
                name = (
                    f"{case.get('classname')}::{case.get('name')}"
                    if case.get("classname")
                    else case.get("name")
                )
                kinds = [
                    child for child in case if child.tag in {"failure", "error", "skipped"}
                ]
                report.outcomes[name] = (
                    {"failure": "failed", "error": "error", "skipped": "skipped"}[kinds[0].tag]
                    if kinds
                    else "passed"
                )
                report.messages[name] = "\n".join(kind.text or "" for kind in kinds)
            results.unlink()
        return report


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """An empty book.

    Tests change its files within a second, and at times not in length: what Python had
    compiled of such a file would still hold.
    """
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Book(tmp_path)


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site as it is published, built once for all tests that read it."""
    if "SITE" in os.environ:  # another one, which is there
        return Path(os.environ["SITE"]).resolve()
    for needed in ("mkdocs", "material", "ziamath"):
        pytest.importorskip(needed)
    around = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        around = around.parent  # of all workers: who comes first builds, the others wait
    folder, built = around / "site", around / "site.built"
    with (around / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return folder
        build = subprocess.run(  # not --quiet: what is not said does not count as a warning
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
            cwd=ROOT,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # it reads what not each page needs
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        said = f"the site does not build:\n{build.stdout}{build.stderr}"
        assert build.returncode == 0, said
        built.touch()
    return folder


@pytest.fixture(scope="session")
def site_url(built_site: Path) -> Iterator[str]:
    """Where the built site is served: a URL that ends in a slash, on a free port."""
    with serve(built_site) as url:
        yield url


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port, at the URL that is given."""
    handler = functools.partial(_Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def open_complete(page: Page, url: str) -> None:
    """Open a page, and wait until it has loaded and asks for no more files.

    The network can be idle for half a second before a slow machine has read a long page.
    """
    page.goto(url)
    page.wait_for_load_state("networkidle")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        file = super().translate_path(path)
        name = os.path.relpath(file, self.directory) + "/index.html" * os.path.isdir(file)
        for served in SERVED:
            served.add(name)
        return file

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, the one installed on this machine."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is on the PATH")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", f"--disable-features={OFF}"]
        browser = driver.chromium.launch(executable_path=chromium, args=options)
        for name in ("new_context", "new_page"):  # what moves is drawn again and again
            setattr(
                browser,
                name,
                functools.partial(getattr(browser, name), reduced_motion="reduce"),
            )
        yield browser
        browser.close()
