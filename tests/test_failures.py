"""The failures on purpose: killed twenty times over, on a disk that is really small, interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from processes import HANG, as_in_a_terminal, carrying, end, left_behind, start, until

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "snippets/clusters"
INPUTS = [
    "snippets/clusters/kill_and_resume.py",
    "snippets/clusters/node_cut_off.py",
    "snippets/clusters/full_disk.py",
]

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who is whose child")


@linux
def test_a_rank_is_killed_at_random(pytestconfig) -> None:
    """Each time another rank at another moment: `pytest -k killed_at_random --times 20`."""
    times = pytestconfig.getoption("--times")
    if not times:
        pytest.skip("its transcript does it once; --times 20 does it twenty times in a row")
    command = [sys.executable, PROGRAMS / "kill_and_resume.py", "--times", str(times)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=HANG)
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.count("killed after step") == times


@linux
def test_the_old_checkpoint_outlives_a_full_file_system(tmp_path: Path) -> None:
    """On a tmpfs of 600 kB, in a mount namespace that ends with the command."""
    small = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-rm"]
    mount = f"mount -t tmpfs -o size=600k small {tmp_path}"
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*small, "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system lets nobody but root mount a small file system")
    program = f"{mount} && {sys.executable} {PROGRAMS / 'full_disk.py'} --on {tmp_path}"
    done = subprocess.run(
        [*small, "sh", "-c", program], capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not saved, ENOSPC") == 2
    assert "careful" in done.stdout and "a resume finds: step 8\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


ORDER = """
import os, sys
from pathlib import Path
import torch.distributed as dist
import full_disk

dist.get_rank, dist.broadcast_object_list = lambda: 0, lambda report, src: None
fsync, replace = os.fsync, os.replace
done = []

def recording_fsync(number):
    done.append("fsync " + os.readlink(f"/proc/self/fd/{number}").rsplit("/")[-1])
    if done[-1] == refuse:
        raise OSError(28, "No space left on device")
    fsync(number)

def recording_replace(old, new):
    done.append("replace")
    replace(old, new)

os.fsync, os.replace = recording_fsync, recording_replace
for name, refuse in ("one", ""), ("two", "fsync checkpoint.tmp"):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    error = full_disk.save_carefully({"step": 1}, folder / "checkpoint.pt")
    print(done, error, sorted(path.name for path in folder.iterdir()))
    done.clear()
"""


@linux
def test_a_checkpoint_is_on_the_disk_before_its_name(tmp_path: Path) -> None:
    """The file, then its name, then the folder; and a full disk may show at the first of them."""
    (tmp_path / "order.py").write_text(ORDER)
    env = os.environ | {"PYTHONPATH": str(PROGRAMS), "PYTHONDONTWRITEBYTECODE": "1"}
    out, err = start(["python", "order.py", str(tmp_path)], tmp_path, env).communicate(HANG)
    assert out.splitlines() == [
        "['fsync checkpoint.tmp', 'replace', 'fsync one'] None ['checkpoint.pt']",
        "['fsync checkpoint.tmp'] ENOSPC []",
    ], err


@linux
@pytest.mark.parametrize(
    ("program", "sign"),
    [("node_cut_off", "*/beat.1"), ("kill_and_resume", "*/undisturbed/life.0")],
)
def test_an_interrupted_program_leaves_nothing(program: str, sign: str, tmp_path: Path) -> None:
    tag = uuid.uuid4().hex
    running = subprocess.Popen(
        [sys.executable, PROGRAMS / f"{program}.py"],
        env=os.environ | {"TAG": tag, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_in_a_terminal,
    )
    try:
        until(lambda: list(tmp_path.glob(sign)), running)
        assert len(carrying(tag)) > 3  # the program, its torchruns, their ranks
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=HANG) != 0
        assert left_behind(tag) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        end(tag)
