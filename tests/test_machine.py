"""Tests on restricted machines: the book works, or a message names the problem and the fix."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import Book
from processes import HANG, left_behind, until

from worldsize.execution import host_checks, processes, runner

INPUTS = ["src", "graders", "labs", "Makefile", "tests/conftest.py"]
ROOT = Path(__file__).resolve().parent.parent
PYTEST = f"'{sys.executable}' -m pytest -p no:cacheprovider --color=no --launcher=process"


def run_in_namespaces(
    spaces: str, script: str, folder: Path, **variables: str
) -> tuple[int, str]:
    """Run a script in new namespaces; return its status and its output.

    `spaces` contains options of unshare, for example `--net`. In the namespaces, the user is
    root.
    """
    users = [[], ["--map-root-user"]]
    tools = (
        [["unshare", *user, *spaces.split()] for user in users]
        if shutil.which("unshare")
        else []
    )
    permitted = (
        tool
        for tool in tools
        if not subprocess.run([*tool, "true"], capture_output=True).returncode
    )
    if (tool := next(permitted, None)) is None:
        pytest.skip(f"unshare {spaces} is not permitted on this machine")
    env = {key: value for key, value in os.environ.items() if not re.match("CI$|PYTEST_", key)}
    done = subprocess.run(
        [*tool, "bash", "-euc", script],
        cwd=folder,
        env=env | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=HANG,
    )
    return done.returncode, done.stdout


def test_without_loopback_the_error_names_the_fix(book: Book) -> None:
    book.program("hello", "print(1)\n", "$ python hello.py\n1\n")
    status, output = run_in_namespaces("--net", PYTEST, book.root)
    assert status != 0 and "this machine does not reach 127.0.0.1" in output, output
    assert "ip link set lo up" in output and "Traceback" not in output, output


def test_ranks_use_localhost_if_the_host_name_does_not_resolve(tmp_path: Path) -> None:
    code = "from worldsize.execution import runner; from pathlib import Path; "
    code += "print(runner.environment(Path('x/y'), 'cpu').get('PET_LOCAL_ADDR'))"
    script = "hostname no-such-name.invalid; "
    status, output = run_in_namespaces(
        "--uts", f'{script} "{sys.executable}" -c "{code}"', tmp_path
    )
    assert (status, output.split()) == (0, ["localhost"]), output


def test_characters_that_the_terminal_cannot_show_are_replaced(tmp_path: Path) -> None:
    start = [sys.executable, ROOT / "labs/start.py", "2"]
    subprocess.run(start, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    file = (tmp_path / "my_labs/lab02_ddp.py").rename(tmp_path / "lab02_ddp-Ψ.py")
    done = subprocess.run(
        [sys.executable, ROOT / "labs/check.py", file, "--step", "1"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 1 and "lab02_ddp-?.py, graded on" in done.stdout, done


def test_a_full_disk_is_reported(book: Book) -> None:
    """The temporary folder has space for a small file, but not for this program."""
    large = "#" * 400_000
    book.program("large", f"print(1)\n{large}\n", "$ python large.py\n1\n", embed=False)
    small = book.root / "small"
    small.mkdir()
    script = f"mount -t tmpfs -o size=64k none '{small}'; {PYTEST} -k cpu"
    status, output = run_in_namespaces("--mount", script, book.root, TMPDIR=str(small))
    assert status != 0 and f"{host_checks.DISK_FULL}: make room" in output, output
    assert "Traceback" not in output, output


@pytest.mark.skipif(shutil.which("ip") is None, reason="this machine has no ip")
def test_grading_needs_no_name_server(tmp_path: Path) -> None:
    """torch looks up the name of each rank, and prints a warning if no server answers."""
    check = f"'{sys.executable}' '{ROOT}/labs/check.py' '{ROOT}/labs/lab02_ddp.py' --step 2"
    status, output = run_in_namespaces("--net", f"ip link set lo up; {check}", tmp_path)
    assert status == 0 and "cannot be retrieved" not in output, output


@pytest.mark.parametrize(
    "command", ["test", "record", "mutants", "record-gpu", "site", "serve"]
)
def test_make_reports_a_disk_without_free_space(command: str) -> None:
    """If files must be empty, Python finds no usable folder for temporary files."""
    if shutil.which("make") is None:
        pytest.skip("this machine has no make")
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; make {command} PYTHON='{sys.executable}' ADDRESS=localhost:0"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode != 0 and "Traceback" not in done.stderr, done
    assert f"or use a different folder: TMPDIR=FOLDER make {command}" in done.stderr


def test_a_temporary_folder_is_removed_despite_an_interruption(monkeypatch) -> None:
    remove = shutil.rmtree

    def interrupted(*arguments, **options) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(*arguments, **options)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt), runner.empty_folder() as folder:
            (folder / "large").touch()
            monkeypatch.setattr(shutil, "rmtree", interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not folder.parent.exists()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch scheduling")
def test_tests_use_batch_scheduling_but_recording_does_not(book: Book, monkeypatch) -> None:
    """Recorded times must be those that readers get, so recording uses normal scheduling."""
    # the fork server may already run with batch scheduling
    monkeypatch.setattr("processes.LAUNCHER", [None])
    book.program("how", "import os\nprint(os.sched_getscheduler(0))\n", "$ python how.py\n")
    before = os.sched_getscheduler(0)  # child processes inherit it
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    recorded = book.pytest("--record", "--device", "cpu", "snippets")
    host_checks.use_batch_scheduling()
    assert before == os.sched_getscheduler(0) == os.SCHED_BATCH
    assert book.read("snippets/t/how.cpu.txt").endswith(f"\n{os.SCHED_OTHER}\n"), recorded


def test_an_incomplete_copy_is_removed_on_a_full_disk(tmp_path: Path) -> None:
    """Afterwards, a learner can free some space and run the same command again."""
    start = f"'{sys.executable}' '{ROOT}/labs/start.py' 2"
    script = "mount -t tmpfs -o size=16k none .; cd .; "
    script += f"{start} && exit 9; test ! -e my_labs/lab02_ddp.py"
    status, output = run_in_namespaces("--mount", f"cd '{tmp_path}'; {script}", tmp_path)
    assert status == 0, output
    assert (
        f"start.py cannot write my_labs/lab02_ddp.py: {host_checks.DISK_FULL}. Make sure"
        in output
    ), output


def test_a_read_only_book_passes(tmp_path: Path) -> None:
    """The path contains a space and an umlaut, and the locale is C."""
    root = tmp_path / "mein Büch"
    root.mkdir()
    book = Book(root)
    book.program("größe", "print('Ψ = 1')\n", "$ python größe.py\nΨ = 1\n")
    where = 'mount --bind . .; mount -o remount,bind,ro .; cd "$PWD"; '
    status, output = run_in_namespaces("--mount", where + PYTEST, root, LC_ALL="C")
    assert status == 0 and "what passed cannot be noted" in output, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("workers", [0, 2])
def test_a_terminated_session_leaves_no_process_and_no_file(
    book: Book, workers: int, tmp_path_factory
) -> None:
    """make forwards SIGTERM to pytest only; Ctrl-C in a terminal also reaches the workers."""
    if workers:
        pytest.importorskip("xdist")
    mark, folder = f"asleep-{os.getpid()}-{workers}", tmp_path_factory.mktemp("temporary")
    started = folder / "started"
    code = f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(3600)\n"
    conftest = "import tempfile\ndef pytest_runtestloop(): tempfile.mkdtemp()\n"
    book.write("conftest.py", conftest)  # creates a folder that no fixture removes
    book.program("asleep", f"{code}# {mark}\n", f"$ python asleep.py {mark}\n")
    process = subprocess.Popen(
        [*PYTEST.replace("'", "").split(), *(["-n", str(workers)] if workers else [])],
        cwd=book.root,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        until(started.exists, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert not left_behind(mark, in_command=True)
    assert not left_behind(str(folder))
    assert {each.name.partition("-")[0] for each in folder.iterdir()} <= {"started", "pytest"}


# the smallest build backend for `pip install --editable .`
BUILD_BACKEND = """
import pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(pathlib.Path(folder, "book-1-py3-none-any.whl"), "w") as wheel:
        about = "book-1.dist-info/"
        wheel.writestr(f"{about}METADATA", "Metadata-Version: 2.1\\nName: book\\nVersion: 1\\n")
        wheel.writestr(
            f"{about}WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        )
        wheel.writestr(f"{about}RECORD", "")
    return "book-1-py3-none-any.whl"
"""


def test_an_interrupted_installation_is_repaired(tmp_path: Path) -> None:
    """A .venv without a Python is created again, and an incomplete package is reinstalled."""
    if shutil.which("make") is None:
        pytest.skip("this machine has no make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", BUILD_BACKEND)
        about = "tiny-1.dist-info/"
        wheel.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        wheel.writestr(
            f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}RECORD", "")
    (tmp_path / "requirements").mkdir()
    requirements = tmp_path / "requirements/read.txt"
    requirements.write_text("tiny==1\n")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["tiny"]\nbuild-backend = "tiny"\n'
        '[project]\nname = "book"\nversion = "1"\n'
    )
    stamp = tmp_path / ".venv/.read"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/nowhere/python3")
    stamp.touch()  # written by the Python that does not exist any more

    def make() -> tuple[int, str]:
        # an inner make would inherit the variable of `make test PYTHON=python3`
        env = {key: text for key, text in os.environ.items() if not key.startswith("MAKE")}
        env |= {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
        }
        done = subprocess.run(
            ["make", f"BASE_PYTHON={sys.executable}", ".venv/.read"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    status, output = make()
    assert status == 0 and "Creating the environment .venv" in output and stamp.exists(), output
    (folder,) = tmp_path.glob(".venv/lib/python*/site-packages")
    stamp.unlink()
    (folder / "tiny.py").unlink()
    (folder / "tiny-1.dist-info/INSTALLER").unlink()  # as if pip was killed before writing it
    status, output = make()
    assert status == 0 and (folder / "tiny.py").exists(), output
    assert "Creating the environment" not in output
    requirements.write_text("tiny==2\n")  # newer than the stamp, but not available
    os.utime(stamp, (0, 0))
    status, output = make()
    assert status != 0 and "pip printed the reason above" in output, output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_processes_are_found_without_the_kernels_list_of_children(monkeypatch) -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 3600 & echo; wait"], stdout=subprocess.PIPE
    ) as shell:
        shell.stdout.readline()  # its child has been started
        listed = processes.descendants(shell.pid)
        monkeypatch.setattr(processes.os.path, "exists", lambda _: False)
        found = processes.descendants(shell.pid)
        monkeypatch.undo()
        for process in (*listed, shell.pid):
            os.kill(process, signal.SIGKILL)
    assert len(found) == 1 and found == listed
