"""Fixtures and hooks of all tests: small books, the built site, and the log of read files."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import processes
import pytest
from processes import HANG, use_default_signals

from worldsize.model.fingerprint import file_hashes
from worldsize.testing.plugin import SESSION, inputs_of, mark_unchanged
from worldsize.testing.result_cache import CODE_OF

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
# Tests with the same match share something that is slow to create, so they run in one worker.
SHARED_SETUP = re.compile(
    r"tests/test_engine\.py::test_broken|"
    r"tests/test_labs\.py::test_wrong_answer_gets_its_hint\[lab\d+|"
    r"tests/test_labs\.py::test_check_survives|"
    r"tests/test_labs\.py::test_check_and_machine_survive|"
    r"tests/test_assessment\.py::test_wrong_whole_run|"
    r"tests/test_assessment\.py::test_wrong_answer_gets_its_hint\["
    r"(?:(?P<small>assignment|challenge)|[a-z]+)"
)
SITE_TESTS = re.compile(r"tests/test_(site|browser_\w+)\.py")
# the files and folders from which the site is built
SITE = ["assessment", "src", "docs", "labs", "mkdocs.yml", "overrides", "snippets"]
# the same for tests that read no comments and docstrings of the programs in snippets/
SITE_WITHOUT_COMMENTS = [*SITE[:-1], "code of snippets"]
PROGRAMS_AND_PAGES = {*SITE} - {"src", "overrides"}
READ_TRACKER = Path(__file__).parent / "read_tracker"
LOG_START = pytest.StashKey[int]()  # size of the log of read files when the test started
# these do not have to be in INPUTS: every test reads them, or every digest contains them
IGNORED_READS = (".venv/", ".git/", ".cache/", "site/", "tests/read_tracker/", "requirements/")
IMPORT_READS: dict[Path, set[str]] = {}  # test module → files that were read during its import
# the files of the site that were requested during the current test and the current module
SERVED_FILES: tuple[set[str], set[str]] = set(), set()
SERVED_DIGEST = pytest.StashKey[str]()
CHROMIUM = ["chromium", "chromium-browser", "google-chrome"]
# The address bar of a window consists of two more pages, which need as much time as the tested
# page. This option replaces the same option of Playwright, so it also contains Playwright's
# features that contact hosts or delay painting.
DISABLED_FEATURES = (
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup,AimEnabled,OptimizationHints,PaintHolding,"
    "NetworkTimeServiceQuerying,PreconnectToSearch,HttpsUpgrades"
)
RECORDED = (
    "# recorded 2026-01-01 on 2 CPU cores (test), torch 2.13.0, Python 3.11.7, in 1.0 s\n"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times",
        type=int,
        default=0,
        help="kill a rank of the capstone and resume the run this many times (default 0)",
    )
    parser.addoption(
        "--every-answer",
        action="store_true",
        help="grade all right and wrong answers to the labs, and run the labs with all numbers "
        "of ranks; by default only a sample, or the tests that -k selects",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with a parameter that is not in the sample."""
    if config.option.every_answer or config.option.keyword:
        return
    deselected = {item for item in items if not _is_sampled(item)}
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = [item for item in items if item not in deselected]


def _is_sampled(item: pytest.Item) -> bool:
    """Return whether a test runs without `--every-answer`.

    A parameter with the attribute ``sampled = False`` excludes it.
    """
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return all(getattr(value, "sampled", True) for value in values)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Schedule single tests, but all tests with the same shared setup in the same worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if SITE_TESTS.match(nodeid):
                return "site"
            match = SHARED_SETUP.match(nodeid)
            return match.lastgroup or match[0] if match else nodeid

    return Scheduling(config, log)


# --- the files that a test reads --------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Log the files that this process opens, and those of processes with `with_read_log`."""
    handle, os.environ["READS"] = tempfile.mkstemp(prefix="reads-")
    os.close(handle)
    importlib.import_module("read_tracker.sitecustomize")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the tests start commands with the prefork launcher, if the session has one."""
    processes.LAUNCHER[0] = session.config.stash[SESSION].launcher


def pytest_unconfigure() -> None:
    Path(os.environ.pop("READS")).unlink()


def with_read_log(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables for a Python process that logs the files that it opens."""
    path = os.pathsep.join(filter(None, [str(READ_TRACKER), environment.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path, "READS": os.environ["READS"]}


def source_file(name: str) -> str:
    """Return the source file of a compiled module; any other name unchanged."""
    folder, cached, file = name.rpartition("__pycache__/")
    return f"{folder}{file.split('.')[0]}.py" if cached else name


def files_read_since(start: int) -> set[str]:
    """Return the files of the repository that the log lists after position ``start``."""
    with open(os.environ["READS"]) as file:
        file.seek(start)
        return set(map(source_file, file.read().splitlines()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    sys.modules["read_tracker.sitecustomize"].SEEN.clear()
    start = Path(os.environ["READS"]).stat().st_size
    report = yield
    if isinstance(collector, pytest.Module):
        IMPORT_READS[collector.path] = files_read_since(start)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    sys.modules["read_tracker.sitecustomize"].SEEN.clear()
    item.stash[LOG_START] = Path(os.environ["READS"]).stat().st_size
    SERVED_FILES[0].clear()
    result = yield
    if nextitem is None or nextitem.path != item.path:
        SERVED_FILES[1].clear()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Fail a test that has read a file which is not in its inputs.

    Such a test would not run again if this file changes. A test that only requests files from
    the server of the site runs again only if one of the requested files has changed.
    """
    session, name = item.config.stash[SESSION], f"{item.nodeid} as served"
    index = None if item.user_properties else served_index(item)
    stored = "" if session.ignore_cache else session.result_cache.known.get(name, "")
    if index is not None and stored and stored == served_digest(item, stored.splitlines()[1:]):
        mark_unchanged(item)
        return (yield)
    result = yield
    if isinstance(item, pytest.Function):
        names = [name.removeprefix(CODE_OF) for name in inputs_of(item)]
        files = files_read_since(item.stash[LOG_START])
        allowed = (*(f"{name}/" for name in names), *IGNORED_READS)
        missing = {name for name in files - set(names) if not name.startswith(allowed)}
        if "built_site" in item.fixturenames:
            missing |= {"src", "mkdocs.yml", "overrides"} - set(names)
        assert not missing, f"add these to INPUTS of {item.path.name}: {sorted(missing)}"
        if index is not None:
            files |= IMPORT_READS[item.path]
            inputs = {f"/{name}" for name in SERVED_FILES[index]}
            inputs |= {name for name in files if not name.startswith(IGNORED_READS)}
            item.stash[SERVED_DIGEST] = served_digest(item, sorted(inputs))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.failed or (report.when == "call" and SERVED_DIGEST in item.stash):
        digest = None if report.failed else item.stash[SERVED_DIGEST]
        report.more_results = {f"{item.nodeid} as served": digest}
    return report


def served_index(item: pytest.Item) -> int | None:
    """Return the index of `SERVED_FILES` with the files that a test requested from the site.

    Return 1 if the test uses a fixture of its module, because the first test of the module then
    requests the files for all of them. Return None if the test does not use the server, or if
    it also uses the folder of the site.
    """
    if "site_url" not in item.fixturenames:
        return None
    fixtures = {name: each[-1] for name, each in item._fixtureinfo.name2fixturedefs.items()}
    users = {name for name, each in fixtures.items() if "built_site" in each.argnames}
    if "built_site" in item._fixtureinfo.argnames or users != {"site_url"}:
        return None
    return int(any(each.scope == "module" for each in fixtures.values()))


def served_digest(item: pytest.Item, names: list[str]) -> str:
    """Return a digest of these files and of the inputs of a test, followed by the names.

    The names of files of the site start with a slash.
    """
    site, inputs = item._request.getfixturevalue("built_site"), set(inputs_of(item))
    files = {ROOT / name for name in names if name[0] != "/"}
    files |= {ROOT / name for name in inputs - PROGRAMS_AND_PAGES}
    texts = [
        line.removeprefix(f"{site}")
        for name in names
        if name[0] == "/"
        for line in file_hashes(site / name[1:])
    ]
    cache = item.config.stash[SESSION].result_cache
    digest = cache.digest(item.nodeid, *texts, *sorted(files))
    return "\n".join([digest, *names])


@dataclass
class Report:
    """The result of a run of pytest on a small book."""

    status: int
    text: str  # the output
    outcomes: dict[str, str] = field(default_factory=dict)  # test → passed, failed or skipped
    messages: dict[str, str] = field(default_factory=dict)  # test → its message


class Book:
    """A small book in a separate folder, which tests write and run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "pyproject.toml",
            "[tool.pytest.ini_options]\naddopts = ['-p', 'worldsize.testing.plugin', '-p', 'no:codeblocks', '-p', 'no:cacheprovider']\n",
        )
        for folder in ("docs", "snippets", "labs"):
            (root / folder).mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the book and return its path; ``text`` may be indented."""
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

    def command(self, *arguments: str, fork: bool) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of `python` that run pytest on the book, and the variables.

        The option --launcher has its default value only with ``fork``. Otherwise no command is
        forked, because importing torch once lasts longer than the commands of a small book.
        """
        env = {
            key: value
            for key, value in os.environ.items()
            if key not in {"CI"} and not key.startswith("PYTEST_")
        }
        if "-n" not in arguments:
            # loading the plugins would need half of the time of a small book
            env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        path = filter(None, [str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH")])
        launcher = [] if fork else ["--launcher=process"]
        words = [*processes.PYTEST, "--color=no", *arguments, *launcher]
        return words, env | {"PYTHONPATH": os.pathsep.join(path)}

    def start(self, *arguments: str, fork: bool = False) -> subprocess.Popen:
        """Start pytest on the book; signals reach it as in a terminal."""
        words, env = self.command(*arguments, fork=fork)
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=use_default_signals,
        )

    def pytest(self, *arguments: str, fork: bool = False) -> Report:
        """Run pytest on the book and return its report."""
        results = self.root.with_name(f"{self.root.name}-{os.getpid()}.xml")
        words, env = self.command(f"--junitxml={results}", *arguments, fork=fork)
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
    """Return an empty book.

    Python stores no compiled files of it. A test may change a program within a second without
    changing its length, and Python would then use the old compiled file.
    """
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Book(tmp_path)


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site; it is built once for all tests.

    The variable SITE can name a site that is already built.
    """
    if "SITE" in os.environ:
        return Path(os.environ["SITE"]).resolve()
    for package in ("mkdocs", "material", "ziamath"):
        pytest.importorskip(package)
    parent = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        parent = parent.parent  # all workers share this folder: one builds, and the others wait
    folder, built = parent / "site", parent / "site.built"
    with (parent / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return folder
        build = subprocess.run(  # without --quiet, because --strict would miss hidden warnings
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
            cwd=ROOT,
            # without the read log, because the build reads more files than one page needs
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        message = f"the build of the site failed:\n{build.stdout}{build.stderr}"
        assert build.returncode == 0, message
        built.touch()
    return folder


@pytest.fixture(scope="session")
def site_url(built_site: Path) -> Iterator[str]:
    """Yield the URL of a server of the built site; it ends with a slash."""
    with serve(built_site) as url:
        yield url


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port, and yield the URL."""
    handler = functools.partial(_LoggingHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def open_complete(page: Page, url: str) -> None:
    """Open a page, and wait until it has loaded and requests no more files.

    The event "networkidle" alone is not enough. On a slow machine, the network can be idle for
    half a second before the browser has read a long page.
    """
    page.goto(url)
    page.wait_for_load_state("networkidle")


class _LoggingHandler(http.server.SimpleHTTPRequestHandler):
    """A handler that adds the requested files to `SERVED_FILES` and prints nothing."""

    def translate_path(self, path: str) -> str:
        file = super().translate_path(path)
        name = os.path.relpath(file, self.directory) + "/index.html" * os.path.isdir(file)
        for names in SERVED_FILES:
            names.add(name)
        return file

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def finger(page: Page) -> Iterator[Callable[..., None]]:
    """Yield a function that sends real touch events: Start, Move or End, and the points."""
    touch = page.context.new_cdp_session(page)

    def send(what: str, *points: dict) -> None:
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{what}", "touchPoints": points})

    yield send
    touch.detach()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Yield a headless browser: the Chromium that is installed on this machine."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is on the PATH")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", f"--disable-features={DISABLED_FEATURES}"]
        browser = driver.chromium.launch(executable_path=chromium, args=options)
        for name in ("new_context", "new_page"):  # without animations, which need much time
            setattr(
                browser,
                name,
                functools.partial(getattr(browser, name), reduced_motion="reduce"),
            )
        yield browser
        browser.close()
