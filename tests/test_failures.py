"""Tests of the failure programs: repeated kills, a full file system, and interruptions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from processes import HANG, end, left_behind, processes_with, start, until, use_default_signals

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "snippets/clusters"
INPUTS = [
    "snippets/clusters/kill_and_resume.py",
    "snippets/clusters/node_cut_off.py",
    "snippets/clusters/full_disk.py",
]

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lists the children of a process"
)


@linux
def test_training_survives_kills_at_random_moments(pytestconfig) -> None:
    """Kill a different rank at a different moment: `pytest -k random_moments --times 20`."""
    times = pytestconfig.getoption("--times")
    if not times:
        pytest.skip("the transcript has one kill; run with --times 20 for twenty kills")
    command = [sys.executable, PROGRAMS / "kill_and_resume.py", "--times", str(times)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=HANG)
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.count("killed after step") == times


@linux
def test_the_old_checkpoint_survives_a_full_file_system(tmp_path: Path) -> None:
    """Use a tmpfs of 600 kB in a mount namespace, which ends with the command."""
    small = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-rm"]
    mount = f"mount -t tmpfs -o size=600k small {tmp_path}"
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*small, "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("on this system, only root can mount a small file system")
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
def test_a_checkpoint_is_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    """Check the order: sync the file, rename it, sync the folder. The first sync can fail."""
    (tmp_path / "order.py").write_text(ORDER)
    env = os.environ | {"PYTHONPATH": str(PROGRAMS), "PYTHONDONTWRITEBYTECODE": "1"}
    out, err = start(["python", "order.py", str(tmp_path)], tmp_path, env).communicate(HANG)
    assert out.splitlines() == [
        "['fsync checkpoint.tmp', 'replace', 'fsync one'] None ['checkpoint.pt']",
        "['fsync checkpoint.tmp'] ENOSPC []",
    ], err


@linux
@pytest.mark.parametrize(
    ("program", "first_file"),
    [("node_cut_off", "*/beat.1"), ("kill_and_resume", "*/undisturbed/life.0")],
)
def test_an_interrupted_program_leaves_no_process_and_no_file(
    program: str, first_file: str, tmp_path: Path
) -> None:
    tag = uuid.uuid4().hex
    running = subprocess.Popen(
        [sys.executable, PROGRAMS / f"{program}.py"],
        env=os.environ | {"TAG": tag, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=use_default_signals,
    )
    try:
        until(lambda: list(tmp_path.glob(first_file)), running)
        assert len(processes_with(tag)) > 3  # the program, its torchruns and their ranks
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=HANG) != 0
        assert left_behind(tag) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        end(tag)
