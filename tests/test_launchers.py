"""One training script under every launcher: each ends with the loss that plain torchrun gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import marked_processes

pytest.importorskip("torch")
yaml = pytest.importorskip("yaml")

INPUTS = ["labs/launch", "tests/test_launchers.py"]
LAUNCH = Path(__file__).resolve().parent.parent / "labs/launch"
FINAL = "step 60, loss 0.05689"  # of one rank, of two, of three: the global batch is the same
SLURM = ["munged", "slurmctld", "slurmd", "sbatch"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the script and the job scripts."""
    for path in [LAUNCH / "train.py", *(LAUNCH / "slurm").iterdir()]:
        shutil.copy2(path, tmp_path)
    return tmp_path


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, command: str, limit: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, shell=True, executable="/bin/bash", cwd=folder, env=environment(),
        capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("torchrun --standalone --nproc-per-node=3 train.py", "torch"),
        ("accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
         "--mixed_precision no --dynamo_backend no --main_process_port 0 train.py", "accelerate"),
        ("deepspeed --num_gpus 2 --master_port {port} train.py", "deepspeed"),
    ],
    ids=["torchrun", "accelerate", "deepspeed"],
)  # fmt: skip
def test_the_launcher_gives_the_loss(folder: Path, command: str, package: str) -> None:
    pytest.importorskip(package)
    ended = run(folder, command.format(port=free_port()) + " --checkpoints saved")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert FINAL in ended.stdout
    assert (folder / "saved/step000060.pt").exists()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_without_a_launcher_it_says_how_to_start_it(folder: Path) -> None:
    ended = run(folder, f"env -u RANK -u WORLD_SIZE {sys.executable} train.py --checkpoints x")
    assert ended.returncode == 1
    assert "start me with a launcher" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- Slurm, the real one ------------------------------------------------------------------


def slurm_or_skip() -> None:
    missing = [name for name in SLURM if not shutil.which(name, path=environment()["PATH"])]
    if missing:
        pytest.skip(f"no Slurm: {', '.join(missing)} not installed (slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("the rehearsal of Slurm needs root")


def nothing_left(folder: Path) -> None:
    assert not marked_processes(str(folder))
    assert not list(folder.glob("slurm-*")), "the cluster's folder"


def test_a_job_whose_time_is_up_saves_queues_again_and_ends_with_the_same_loss(
    folder: Path,
) -> None:
    slurm_or_skip()
    ended = run(
        folder,
        f"{sys.executable} rehearse.py --nodes 2 bash preempt.sh several_nodes.sh --pause 0.2",
        limit=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "JobState=COMPLETED" in ended.stdout
    assert "Restarts=1" in ended.stdout
    said = (folder / "world-size-1.out").read_text()
    assert "run 0 of job world-size on 2 nodes\n4 ranks, from the beginning" in said
    resumed = int(re.search(r"4 ranks, resumed at step ≈(\d+)", said)[1])
    assert 20 <= resumed < 60, "no step before the signal is lost"
    assert FINAL in said
    nothing_left(folder)


def test_a_rehearsal_that_is_interrupted_leaves_nothing(folder: Path) -> None:
    slurm_or_skip()
    process = subprocess.Popen(
        [sys.executable, "rehearse.py", "--nodes", "2", "sleep", "77"],
        cwd=folder, env=environment() | {"TMPDIR": str(folder)},
    )  # fmt: skip
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    nothing_left(folder)


# --- Kubernetes: the manifests against the published models of their schemas ----------------


def lost(asked: object, understood: object, path: str = "") -> list[str]:
    """The fields of a manifest that the model does not have, or reads as something else."""
    if isinstance(asked, dict):
        if not isinstance(understood, dict):
            return [path]
        return [f for k, v in asked.items() for f in lost(v, understood.get(k), f"{path}/{k}")]
    if isinstance(asked, list):
        if not isinstance(understood, list) or len(asked) != len(understood):
            return [path]
        pairs = zip(asked, understood, strict=True)
        return [f for n, (a, b) in enumerate(pairs) for f in lost(a, b, f"{path}[{n}]")]
    return [] if asked == understood else [path]


def understood(manifest: dict) -> dict:
    if manifest["kind"] == "TrainJob":
        models = pytest.importorskip("kubeflow_trainer_api.models")
        return models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    client = pytest.importorskip("kubeflow.training.api_client").ApiClient()

    class Answer:
        data = json.dumps(manifest)

    job = client.deserialize(Answer(), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(job)


@pytest.mark.parametrize("name", ["trainjob", "pytorchjob"])
def test_manifest_says_what_its_schema_knows(name: str) -> None:
    manifest = yaml.safe_load((LAUNCH / f"kubernetes/{name}.yaml").read_text())
    assert not lost(manifest, understood(manifest))
    manifest["spec"]["nodesPerJob"] = 3
    assert lost(manifest, understood(manifest)) == ["/spec/nodesPerJob"]
