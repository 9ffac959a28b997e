"""The planner: odd questions get sense or a sentence, and what it emits can be read."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

INPUTS = ["snippets/planner"]
FOLDER = ROOT / "snippets/planner"


def plan(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / "plan.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    "words, field",
    [
        (["--gpus", "0"], "--gpus: 0 is not above zero"),
        (["--gpus", "521"], "--gpus: no layout shares 512 sequences"),
        (["--gpus", "2.5"], "--gpus: 2.5 is no whole number"),
        (["--batch", "4k", "--sequence", "8192"], "--batch: 4,096 tokens are less than"),
        (["--sequence", "long"], "--sequence: 'long' is no number"),
        (["--gpu", "h1000"], "--gpu: 'h1000' is not in hardware.toml"),
        (["--model", "gpt"], "--model: 'gpt' is not in models.toml"),
        (["--model", "layers=2,width=3"], "--model: 'width' is no part of a shape"),
        (["--model", "layers=2,hidden=64"], "--model: a shape needs heads, ffn, vocabulary"),
        (["--model", "gone.toml"], "--model: gone.toml cannot be read"),
        (["--why", "dp=3,tp=8"], "--why: dp=3,tp=8 makes 24 GPUs, not 256"),
        (["--why", "tp=x"], "--why: 'tp=x' has no number"),
        (["--what-if", "price=3"], "--what-if: NAME=VALUE"),
        (["--score", "gone.csv"], "--score: gone.csv cannot be read"),
        (["--score", str(FOLDER / "plan.py")], "has not the columns"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_field(words: list[str], field: str) -> None:
    run = plan(*words)
    assert run.returncode == 1 and not run.stdout
    assert field in run.stderr and "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words, said",
    [
        (["--model", "llama-3-8b", "--gpus", "1", "--batch", "128K"], "none of"),
        (["--model", "llama-3-8b", "--gpus", "7"], "PP 7"),
        (["--model", "llama-3-8b", "--gpus", "64", "--sequence", "1M", "--batch", "8M"], "CP "),
        (["--model", "mixtral-8x7b", "--gpus", "64"], "EP 8"),
        (
            ["--model", "llama-3-8b", "--gpus", "2048", "--sequence", "8192", "--batch", "4M"],
            "TP",
        ),
    ],
)
def test_odd_questions_make_sense(words: list[str], said: str) -> None:
    run = plan(*words, "--top", "2")
    assert run.returncode == 0, run.stderr
    assert said in run.stdout


def test_what_is_emitted_can_be_read() -> None:
    small = ["--model", "llama-3-8b", "--gpus", "16", "--top", "1"]
    torchtitan = plan(*small, "--emit", "torchtitan").stdout
    settings = torchtitan[torchtitan.index("[training]") : torchtitan.index("torchrun")]
    assert tomllib.loads(settings)["training"]["seq_len"] == 8192
    alone = plan(*small, "--emit", "deepspeed").stdout
    if "alone has no TP" not in alone:
        start, end = alone.index("{\n"), alone.rindex("}") + 1
        assert json.loads(alone[start:end])["train_batch_size"] == 512


def test_every_gpu_has_its_source_and_every_constant_its_meaning() -> None:
    for name, entry in tomllib.loads((FOLDER / "hardware.toml").read_text("utf-8")).items():
        assert entry["source"], name
    for line in (FOLDER / "constants.toml").read_text("utf-8").splitlines():
        assert " = " not in line or "#" in line, line
