"""Machines that lack something: the book works there, or one sentence names cause and cure."""

from __future__ import annotations

import importlib
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

from graders import host_checks
from worldsize.execution import runner

INPUTS = ["src", "graders", "labs", "Makefile", "tests/conftest.py"]
ROOT = Path(__file__).resolve().parent.parent
PYTEST = f"'{sys.executable}' -m pytest -p no:cacheprovider --color=no --launcher=process"


def elsewhere(spaces: str, script: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Run a script in namespaces of its own; return its status and all that it said.

    `spaces`: the options of unshare, `--net` say. Who is not root becomes it there.
    """
    own = [[], ["--map-root-user"]]
    tools = (
        [["unshare", *more, *spaces.split()] for more in own] if shutil.which("unshare") else []
    )
    starts = (
        tool
        for tool in tools
        if not subprocess.run([*tool, "true"], capture_output=True).returncode
    )
    if (tool := next(starts, None)) is None:
        pytest.skip(f"unshare {spaces} is not permitted on this machine")
    kept = {key: value for key, value in os.environ.items() if not re.match("CI$|PYTEST_", key)}
    done = subprocess.run(
        [*tool, "bash", "-euc", script],
        cwd=folder,
        env=kept | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=HANG,
    )
    return done.returncode, done.stdout


def test_without_loopback_one_sentence_says_so(book: Book) -> None:
    book.program("hello", "print(1)\n", "$ python hello.py\n1\n")
    status, said = elsewhere("--net", PYTEST, book.root)
    assert status != 0 and "this machine does not reach 127.0.0.1" in said, said
    assert "ip link set lo up" in said and "Traceback" not in said, said


def test_a_host_name_that_leads_nowhere_is_not_given_to_ranks(tmp_path: Path) -> None:
    code = "from worldsize.execution import runner; from pathlib import Path; "
    code += "print(runner.environment(Path('x/y'), 'cpu').get('PET_LOCAL_ADDR'))"
    script = "hostname no-such-name.invalid; "
    status, said = elsewhere("--uts", f'{script} "{sys.executable}" -c "{code}"', tmp_path)
    assert (status, said.split()) == (0, ["localhost"]), said


def test_a_terminal_that_lacks_a_character_gets_another(tmp_path: Path) -> None:
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


def test_a_full_disk_is_named(book: Book) -> None:
    """The folder for temporary files takes a small file, and not this program."""
    large = "#" * 400_000
    book.program("large", f"print(1)\n{large}\n", "$ python large.py\n1\n", embed=False)
    small = book.root / "small"
    small.mkdir()
    script = f"mount -t tmpfs -o size=64k none '{small}'; {PYTEST} -k cpu"
    status, said = elsewhere("--mount", script, book.root, TMPDIR=str(small))
    assert status != 0 and f"{host_checks.FULL}: make room" in said, said
    assert "Traceback" not in said, said


@pytest.mark.skipif(shutil.which("ip") is None, reason="this machine has no ip")
def test_grading_needs_no_name_server(tmp_path: Path) -> None:
    """torch's store asks one for the name of each rank, and says so where none answers."""
    check = f"'{sys.executable}' '{ROOT}/labs/check.py' '{ROOT}/labs/lab02_ddp.py' --step 2"
    status, said = elsewhere("--net", f"ip link set lo up; {check}", tmp_path)
    assert status == 0 and "cannot be retrieved" not in said, said


@pytest.mark.parametrize("command", ["test", "record", "mutants", "gpu", "site", "serve"])
def test_make_names_a_disk_without_one_free_byte(command: str) -> None:
    """Where no file may have a byte, Python finds no folder for temporary ones."""
    if shutil.which("make") is None:
        pytest.skip("this machine has no make")
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; make {command} PYTHON='{sys.executable}' ADDRESS=localhost:0"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode != 0 and "Traceback" not in done.stderr, done
    assert f"or use a different folder: TMPDIR=FOLDER make {command}" in done.stderr


def test_a_folder_is_gone_although_its_removal_was_interrupted(monkeypatch) -> None:
    remove = shutil.rmtree

    def interrupted(*arguments, **options) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(*arguments, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `&` ignores it
    try:
        with pytest.raises(KeyboardInterrupt), runner.empty_folder() as folder:
            (folder / "large").touch()
            monkeypatch.setattr(shutil, "rmtree", interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not folder.parent.exists()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux knows batch processes")
def test_a_session_and_what_it_starts_drive_nobody_from_a_core(book: Book, monkeypatch) -> None:
    """But what is recorded is timed as readers will start it."""
    # a warm Python started before, as a batch process
    monkeypatch.setattr("processes.LAUNCHER", [None])
    book.program("how", "import os\nprint(os.sched_getscheduler(0))\n", "$ python how.py\n")
    mine = os.sched_getscheduler(0)  # what is started inherits it
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    recorded = book.pytest("--record", "--device", "cpu", "snippets")
    host_checks.use_batch_scheduling()
    assert mine == os.sched_getscheduler(0) == os.SCHED_BATCH
    assert book.read("snippets/t/how.cpu.txt").endswith(f"\n{os.SCHED_OTHER}\n"), recorded


def test_a_copy_that_did_not_fit_is_not_left(tmp_path: Path) -> None:
    """A learner makes room, and the same command writes the copy."""
    start = f"'{sys.executable}' '{ROOT}/labs/start.py' 2"
    script = "mount -t tmpfs -o size=16k none .; cd .; "
    script += f"{start} && exit 9; test ! -e my_labs/lab02_ddp.py"
    status, said = elsewhere("--mount", f"cd '{tmp_path}'; {script}", tmp_path)
    assert status == 0, said
    assert (
        f"start.py cannot write my_labs/lab02_ddp.py: {host_checks.FULL}. Make sure" in said
    ), said


def test_a_book_that_can_only_be_read_passes(tmp_path: Path) -> None:
    """Under a path with a space and an umlaut, and in the locale C."""
    root = tmp_path / "mein Büch"
    root.mkdir()
    book = Book(root)
    book.program("größe", "print('Ψ = 1')\n", "$ python größe.py\nΨ = 1\n")
    where = 'mount --bind . .; mount -o remount,bind,ro .; cd "$PWD"; '
    status, said = elsewhere("--mount", where + PYTEST, root, LC_ALL="C")
    assert status == 0 and "what passed cannot be noted" in said, said
    assert "Traceback" not in said, said


@pytest.mark.parametrize("workers", [0, 2])
def test_a_terminated_session_leaves_nothing(
    book: Book, workers: int, tmp_path_factory
) -> None:
    """make passes SIGTERM on to pytest alone, Ctrl-C in a terminal reaches the workers too."""
    if workers:
        pytest.importorskip("xdist")
    mark, folder = f"asleep-{os.getpid()}-{workers}", tmp_path_factory.mktemp("temporary")
    begun = folder / "begun"
    code = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(3600)\n"
    conftest = "import tempfile\ndef pytest_runtestloop(): tempfile.mkdtemp()\n"
    book.write("conftest.py", conftest)  # something that is nobody's to remove
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
        until(begun.exists, process)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert not left_behind(mark, in_command=True)
    assert not left_behind(str(folder))
    assert {each.name.partition("-")[0] for each in folder.iterdir()} <= {"begun", "pytest"}


def test_an_interrupted_install_is_repaired(tmp_path: Path) -> None:
    """A .venv whose Python is gone is made again, and what pip did not finish is installed."""
    if shutil.which("make") is None:
        pytest.skip("this machine has no make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        about = "tiny-1.dist-info/"
        wheel.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        wheel.writestr(
            f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}RECORD", "")
    (tmp_path / "requirements").mkdir()
    wanted = tmp_path / "requirements/read.txt"
    wanted.write_text("tiny==1\n")
    stamp = tmp_path / ".venv/.read"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/nowhere/python3")
    stamp.touch()  # of the Python that is gone

    def make() -> tuple[int, str]:
        # with `make test PYTHON=python3` an inner make would inherit that variable
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

    status, said = make()
    assert status == 0 and "Creating the environment .venv" in said and stamp.exists(), said
    (folder,) = tmp_path.glob(".venv/lib/python*/site-packages")
    stamp.unlink()
    (folder / "tiny.py").unlink()
    (folder / "tiny-1.dist-info/INSTALLER").unlink()  # killed before it wrote this
    status, said = make()
    assert status == 0 and (folder / "tiny.py").exists(), said
    assert "Creating the environment" not in said
    wanted.write_text("tiny==2\n")  # newer than the stamp, and not to be had
    os.utime(stamp, (0, 0))
    status, said = make()
    assert status != 0 and "pip printed the reason above" in said, said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_processes_are_found_where_the_kernel_keeps_no_list_of_children(monkeypatch) -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 3600 & echo; wait"], stdout=subprocess.PIPE
    ) as shell:
        shell.stdout.readline()  # its child has been started
        grading = importlib.import_module("graders.runner")  # it imports torch
        listed = grading._descendants(shell.pid)
        monkeypatch.setattr(grading.os.path, "exists", lambda _: False)
        found = grading._descendants(shell.pid)
        monkeypatch.undo()
        for process in (*listed, shell.pid):
            os.kill(process, signal.SIGKILL)
    assert len(found) == 1 and found == listed
