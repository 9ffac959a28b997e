"""Tests of the launchers: each runs the same script and reaches the same loss as torchrun."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import HANG, left_behind, until

if importlib.util.find_spec("torch") is None:  # an import would slow down every collection
    pytest.skip("torch is missing", allow_module_level=True)
yaml = pytest.importorskip("yaml")

INPUTS = ["labs/launch"]
LAUNCH = Path(__file__).resolve().parent.parent / "labs/launch"
FINAL = "step 60, loss 0.05689"  # equal for one, two and three ranks: same global batch
SLURM = ["munged", "slurmctld", "slurmd", "sbatch"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with copies of the training script and the job scripts."""
    for path in [LAUNCH / "train.py", *(LAUNCH / "slurm").iterdir()]:
        shutil.copy2(path, tmp_path)
    return tmp_path


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, shell=True, executable="/bin/bash", cwd=folder, env=environment(),
        capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip


TRANSCRIPTS = [
    "train", "by_hand", "ssh/by_ssh", "accelerate/launch", "deepspeed/launch", "slurm/rehearse",
    "ray/train_ray",
]  # fmt: skip


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_every_launcher_reaches_the_same_loss(name: str) -> None:
    """Check the transcripts. Their own tests run the launchers that are installed."""
    output = (LAUNCH / f"{name}.cpu.txt").read_text()
    assert output.startswith("# recorded ")
    last = [line for line in output.splitlines() if "loss" in line][-1]
    assert last.endswith(FINAL)


def test_without_a_launcher_the_script_asks_for_one(folder: Path) -> None:
    done = run(folder, f"env -u RANK -u WORLD_SIZE {sys.executable} train.py --checkpoints x")
    assert done.returncode == 1
    assert "start this program with a launcher" in done.stderr
    assert "Traceback" not in done.stderr


def test_by_hand_ends_all_ranks_when_one_fails(folder: Path) -> None:
    """Rank 1 fails at once; rank 0 would run forever."""
    (folder / "rank.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(1e9)\n"
    )
    shutil.copy2(LAUNCH / "by_hand.py", folder)
    done = run(folder, f"{sys.executable} by_hand.py --nproc-per-node=2 rank.py")
    assert done.returncode == 3
    assert left_behind(str(folder), in_command=True) == []


def test_by_ssh_ends_all_hosts_when_one_fails(folder: Path) -> None:
    """The second host fails at once; the first one would run forever."""
    (folder / "rsh.sh").write_text('[ "$1" = b ] && exit 3\nexec sleep 1000000\n')
    command = f'HOSTS="a b" RSH="bash rsh.sh" bash {LAUNCH}/ssh/by_ssh.sh'
    done = run(folder, command)
    assert done.returncode == 3


def test_deepspeed_ends_the_other_node_when_one_fails(folder: Path) -> None:
    """The deepspeed command starts a second process and does not forward signals to it.

    If one node fails, for example because its port is in use, the other node must not wait.
    """
    (folder / "deepspeed").write_text(
        "#!/bin/bash\n[[ $* == *--node_rank=0* ]] && exit 3\n"
        f'bash -c "sleep 1000000; : {folder}"\n'
    )
    (folder / "deepspeed").chmod(0o755)
    done = run(folder, f"PATH={folder}:$PATH bash {LAUNCH}/deepspeed/launch.sh")
    assert done.returncode == 3
    until(lambda: left_behind(str(folder), in_command=True) == [])


@pytest.mark.parametrize("name", ["ssh/by_ssh", "deepspeed/launch", "slurm/several_nodes"])
def test_the_port_of_a_job_is_outside_the_ephemeral_range(name: str) -> None:
    script = (LAUNCH / f"{name}.sh").read_text()
    first, count = map(int, re.search(r"\$\(\((\d+) \+ \S+ % (\d+)\)\)", script).groups())
    assert first > 1024 and first + count <= 32768  # the ephemeral ports of Linux begin there


def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path, monkeypatch) -> None:
    """A checkpoint that could not be synced gets no name, so the previous one is loaded."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(LAUNCH)
    train = importlib.import_module("train")
    monkeypatch.delitem(sys.modules, "train")  # other tests may use this name
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    train.save(tmp_path, 20, model, optimizer)
    train.save(tmp_path, 40, model, optimizer)

    def cut_off(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", cut_off)
    with pytest.raises(OSError, match="no space"):
        train.save(tmp_path, 60, model, optimizer)
    assert train.resume(tmp_path, model, optimizer) == 40


# --- time limits: saving < torchrun's shutdown timeout < the notice of the scheduler ----------


def test_torchrun_times_out_before_the_scheduler_kills_it() -> None:
    for name in ("one_node", "several_nodes"):
        script = (LAUNCH / f"slurm/{name}.sh").read_text()
        notice = int(re.search(r"^#SBATCH --signal=TERM@(\d+)", script, re.M)[1])
        timeout = int(
            re.search(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", script, re.M)[1]
        )
        assert 30 < timeout < notice
    for name in ("trainjob", "pytorchjob"):
        script = (LAUNCH / f"kubernetes/{name}.yaml").read_text()
        notice = int(re.search(r"terminationGracePeriodSeconds: (\d+)", script)[1])
        timeout = int(re.search(r'TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "(\d+)"', script)[1])
        assert 30 < timeout < notice


# --- Slurm: tests with a real installation -------------------------------------------------


def slurm_or_skip() -> None:
    missing = [name for name in SLURM if not shutil.which(name, path=environment()["PATH"])]
    if missing:
        pytest.skip(f"Slurm needs {', '.join(missing)}: install slurm-wlm and munge")
    if os.geteuid() != 0:
        pytest.skip("the rehearsal of Slurm must run as root")


def assert_nothing_left(folder: Path) -> None:
    assert left_behind(str(folder), in_command=True) == []
    assert not list(folder.glob("slurm-*")), "the folder of the cluster still exists"


def test_a_job_at_its_time_limit_saves_and_continues_without_a_lost_step() -> None:
    output = (LAUNCH / "slurm/rehearse.cpu.txt").read_text()
    assert "Restarts=1" in output
    assert (
        "run 0 of job world-size on 2 nodes\n2 ranks, from the beginning\ntime is up" in output
    )
    saved = int(re.search(r"time is up: saved step ≈(\d+), leaving", output)[1])
    assert int(re.search(r"2 ranks, resumed at step ≈(\d+)", output)[1]) == saved
    assert 5 < saved < 60, "between the first checkpoint and the end"
    # digits after ≈ are not compared, but the number of distinct values must be the same
    assert output.rstrip().splitlines()[-1] == f"      2 step ≈{saved}"


@pytest.mark.parametrize("again", [(), (0.05, 0.1)], ids=["one signal", "three signals"])
def test_an_interrupted_rehearsal_leaves_nothing(folder: Path, again: tuple) -> None:
    """Test one Ctrl-C, and three in a row from an impatient user."""
    slurm_or_skip()
    process = subprocess.Popen(
        [sys.executable, "rehearse.py", "--nodes", "2", "sleep", "77"],
        cwd=folder, env=environment() | {"TMPDIR": str(folder)},
    )  # fmt: skip
    until(lambda: list(folder.glob("slurm-*/munge.socket")), process)
    for pause in (0, *again):
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    assert process.wait(HANG) == 128 + signal.SIGINT
    assert_nothing_left(folder)


# --- Kubernetes: the manifests and the published models of their schemas --------------------


@pytest.fixture
def understood():
    """Return the module that checks manifests with the published models."""
    pytest.importorskip("kubeflow_trainer_api.models")
    pytest.importorskip("kubeflow.training.api_client")
    path = LAUNCH / "kubernetes/understood.py"
    spec = importlib.util.spec_from_file_location("understood", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["trainjob", "pytorchjob"])
def test_the_schema_accepts_every_field_of_a_manifest(name: str, understood) -> None:
    manifest = yaml.safe_load((LAUNCH / f"kubernetes/{name}.yaml").read_text())
    assert not understood.unknown_fields(manifest, understood.round_trip(manifest))
    manifest["spec"]["nodesPerJob"] = 3
    unknown = understood.unknown_fields(manifest, understood.round_trip(manifest))
    assert unknown == ["/spec/nodesPerJob"]
