"""Tests of the planner: its numbers, its launch files, and its error messages."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

INPUTS = ["snippets/planner", "snippets/03_model_parallelism", "snippets/04_zero_and_fsdp"]
INPUTS += ["snippets/09_inference/fleet.py"]
FOLDER = ROOT / "snippets/planner"


SMALL = "layers=2,hidden=64,heads=4,ffn=4,vocabulary=8"
HEAD = "model,nodes,micro_batch,accumulation,global_batch_sequences,dp,pp,tp,zero,"
HEAD += "tokens_per_s,memory_gib\n"
ROW, FAILED = "1B,1,1,64,256,4,2,1,0,303958,26.8\n", "1B,1,1,64,256,4,2,1,1,nan,nan\n"
STALLED = "3B,64,1,1,256,256,2,1,0,20000,40\n"


def plan(*words: str, program: str = "plan.py") -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / program), *words]
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
        (["--why", "dp=256,b=0"], "--why: b, v and ep are at least 1"),
        (["--why", "dp=256,recompute=1"], "--why: recompute is mlp or layer, not 1"),
        (["--why", "dp=256,zero=4"], "--why: zero is 0, 1, 2 or 3, not 4"),
        (["--why", "dp=256,ep=3"], "--why: EP 3 does not divide"),
        (["--why", "dp=16,tp=8,cp=2", "--sequence", "8191"], "do not cut 8,191 tokens"),
        (["--what-if", "price=3"], "--what-if: NAME=VALUE"),
        (["--what-if", "batch=1K"], "a step has less than one sequence"),
        (["--what-if", "gpus=1.5"], "--what-if: 1.5 is no whole number"),
        (["--what-if", "memory=80"], "memory_gib"),
        (["--model", f"{SMALL},tied=1"], "--model: tied is 1, and neither true nor false"),
        (["--model", f"{SMALL},head_dim=-1"], "--model: head_dim must be at least 0, not -1"),
        (["--model", f"{SMALL},tied=yes"], "--model: 'tied=yes' is no part such as"),
        (["--why", "dp=²"], "--why: 'dp=²' has no number"),
        (["--price", "2"], "--price: it also needs --tokens"),
        (["--restart", "60", "--tokens", "1T"], "--restart: it also needs --save"),
        (["--gpus", "8", "--inter-node", "1GB/s"], "--inter-node: 8 GPUs share one node"),
        (["--gpus", "8", "--what-if", "network=1GB/s"], "--what-if: 8 GPUs share one node"),
        (["--inter-node", "1.5GB"], "--inter-node: '1.5GB' is no rate, such as 1.5GB/s"),
        (["--inter-node", "1.5"], "--inter-node: 1.5 is 1.5 bytes per second for each GPU"),
        (["--gpus", "8", "--gpus", "16", "--what-if", "gpus=8"], "combined with --gpus"),
        (["--what-if", "network=1GB/s", "--inter-node", "2GB/s"], "combined with --inter-node"),
        (["--what-if", "gpus=8", "--why", "dp=256"], "--what-if: it cannot vary gpus"),
        (["--hardware", "gone.toml"], "--hardware: gone.toml cannot be read"),
        (["--hardware", str(FOLDER / "plan.py")], "is not TOML"),
        (["--hardware", str(FOLDER / "hardware.toml")], "--gpu: which of a100, h100"),
        (["--hardware", str(FOLDER / "models.toml")], "[llama-3-8b] has 'layers'; a GPU has"),
        (["--model", "gone.json"], "--model: gone.json cannot be read"),
        (["--tokens", "1T", "--save", "1e9"], "--save: with its restarts"),
        (["--emit", "jax"], "argument --emit: invalid choice: 'jax'"),
        (["--post-training", "answer=8192"], "prompt 512 plus answer 8192 at most the 8,192"),
        (["--post-training", "answer=long"], "answer must be a whole number, not 'long'"),
        (["--post-training", "critic=2"], "--post-training: critic must be 0 or 1, not '2'"),
        (
            ["--post-training", "group=8"],
            "--post-training: unknown setting 'group'; allowed: prompt, answer",
        ),
        (["--post-training", "--tokens", "1T"], "--post-training: it cannot be combined with"),
        (["--post-training", "--gpus", "8"], "no layout trains this model on all 8 GPUs"),
        (["--post-training", "tp=3"], "--post-training: no engine has room"),
        (["--score", "gone.csv"], "--score: gone.csv cannot be read"),
        (["--score", str(FOLDER / "plan.py")], "there is no column nodes"),
    ],
)
def test_wrong_input_gives_one_sentence_with_the_field(words: list[str], field: str) -> None:
    run = plan(*words)
    assert run.returncode == 1 and not run.stdout
    assert field in run.stderr and "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "llama-3-8b", "--gpus", "1", "--batch", "128K"], "none of"),
        (["--model", "llama-3-8b", "--gpus", "7", "--batch", "3670016"], "DP 7"),
        (["--model", "llama-3-8b", "--gpus", "64", "--sequence", "1M", "--batch", "8M"], "CP "),
        (["--model", "mixtral-8x7b", "--gpus", "64"], "EP 8"),
        # one matrix of an MLP, cut by TP 4, has the same number of elements as a norm
        (["--model", f"{SMALL},gated=false", "--gpus", "8", "--batch", "64K"], "TP 4"),
        (
            ["--gpus", "8", "--why", "tp=8,dp=1", "--tokens", "1T", "--price", "2"],
            "GPU-hour: $",
        ),
        (
            ["--model", "llama-3-8b", "--gpus", "64", "--tokens", "1T", "--price", "2"],
            " days  $",
        ),
        (["--gpus", "8", "--why", "tp=8,dp=1,recompute=mlp"], "b 1 ZeRO-1 recompute MLP"),
        (["--model", "llama-3-8b", "--gpus", "32", "--post-training"], "16 GPUs train while"),
        (
            ["--model", "llama-3-8b", "--gpus", "8", "--post-training", "critic=1"],
            "separate GPUs: no split fits",
        ),
        (
            ["--model", "llama-3-8b", "--gpus", "2048", "--sequence", "8192", "--batch", "4M"],
            "TP",
        ),
    ],
)
def test_unusual_input_gives_a_result(words: list[str], message: str) -> None:
    run = plan(*words, *["--top", "2"] * (not {"--why", "--post-training"} & set(words)))
    assert run.returncode == 0, run.stderr
    assert message in run.stdout


def test_the_phases_of_post_training_have_the_bytes_of_their_models() -> None:
    """The sampling engines, the reference and the critic have 2, 2 and 18 bytes a parameter."""
    run = plan("--model", "llama-3-8b", "--gpus", "16", "--gpu", "h200", "--post-training",
               "critic=1,tp=2")  # fmt: skip
    turns, apart = re.split(r"^(?=\d+ GPUs train)", run.stdout, flags=re.M)
    count, gpus = 8_030_261_248 / 2**30, int(apart.split()[0])
    for text, ranks in ((turns, 16), (apart, gpus)):
        for name, size in (("reference", 2), ("critic", 18), ("optimizer", 12)):
            found = re.findall(rf"{name} ([\d.]+)", text)
            assert found and all(
                abs(float(each) - size * count / ranks) < 0.051 for each in found
            )
        assert set(re.findall(r"sampler weights ([\d.]+)", text)) == {f"{2 * count / 2:.1f}"}

    def seconds_of(text: str) -> dict[str, float]:
        found = re.findall(r"^  ([a-z]+(?: [a-z]+)?) +([\d.]+) s", text, re.M)
        return {name: float(seconds) for name, seconds in found}

    # both sides of the separate layout work at the same time, so the slower side decides
    rows = seconds_of(apart)
    total = float(re.search(r"sample: ([\d.]+) s a step", apart)[1])
    sides = rows["sample"] + rows["weight sync"], rows["reference"] + rows["train"]
    assert abs(total - max(sides)) < 0.11
    total = float(re.search(r"in turn: ([\d.]+) s a step", turns)[1])
    assert abs(total - sum(seconds_of(turns).values())) < 0.26


@pytest.mark.parametrize(
    "text, message",
    [
        (HEAD, "--score: the file has no rows"),
        (HEAD.replace(",memory_gib", "") + ROW, "--score: there is no column memory_gib"),
        (HEAD + ROW + ROW.replace(",64,", ",,"), "row 2 of FILE: accumulation is '', and no"),
        (HEAD + ROW[:8], "row 1 of FILE: dp is None, and no number"),
        (HEAD + ROW.replace("303958", "0"), "row 1 of FILE: tokens_per_s cannot be 0"),
        (HEAD + ROW[:-12] + "inf,1", "row 1 of FILE: tokens_per_s cannot be inf"),
        (HEAD + ROW.replace("1B", "9B"), "row 1 of FILE: model '9B' is not in models.toml"),
        ("\ufeff" + HEAD + FAILED.replace("nan", ""), "memory of rank 0: no rows\n"),
        (HEAD + FAILED + ROW.replace("26.8", ""), "throughput -8%: 1B on 1 nodes"),
        (HEAD + STALLED, "1 pipelines said to stall: no rows\n"),
        (HEAD + ROW.replace(",64,", ",32,"), "throughput: no rows\n"),
    ],
)
def test_a_file_of_runs_is_scored_or_one_sentence_names_the_error(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text, "utf-8")
    run = plan("--score", str(file))
    assert message.replace("FILE", str(file)) in (run.stderr if run.returncode else run.stdout)
    assert len(run.stderr.splitlines()) == run.returncode


def test_a_stage_needs_sequences_that_its_layout_can_split() -> None:
    run = plan("--cp", "3", program="rank_memory.py")
    assert (run.returncode, run.stderr) == (1, "TP 4 and CP 3 do not cut 8,192 tokens evenly\n")
    run = plan("--tp", "2", "--pp", "1", "--sequence", "8190", program="rank_memory.py")
    assert "CP          TP 2 and CP 2 do not cut 8,190 tokens evenly\n" in run.stdout


def test_launch_files_can_be_parsed() -> None:
    small = ["--model", "llama-3-8b", "--gpus", "16", "--top", "1"]
    torchtitan = plan(*small, "--emit", "torchtitan").stdout
    module = ast.parse(
        torchtitan[torchtitan.index("# planned.py") : torchtitan.index("torchrun")]
    )
    given = {
        ast.unparse(node.targets[0]).removeprefix("config."): node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
    }
    assert ast.literal_eval(given["training.max_context_length"]) == 8192
    assert ast.literal_eval(given["training.num_tokens_per_train_step"]) == 512 * 8192
    degrees = [ast.literal_eval(n) for name, n in given.items() if name.endswith("_degree")]
    assert math.prod(degrees) == 16
    alone = plan(*small, "--emit", "deepspeed").stdout
    if "DP alone" not in alone:
        start, end = alone.index("{\n"), alone.rindex("}") + 1
        assert json.loads(alone[start:end])["train_batch_size"] == 512


def printed(code: str) -> str:
    """Return what this code prints; all names of plan.py are imported."""
    command = [sys.executable, "-c", f"from plan import *; {code}"]
    return subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, check=True
    ).stdout


def evaluate(code: str) -> list:
    return json.loads(printed(code))


def emitted(target: str, model: str = "llama-3-8b", **layout: int | str) -> str:
    arguments = f"argparse.Namespace(model={model!r}, sequence=8192), the_model({model!r})"
    return printed(f"print(emit({target!r}, {arguments}, Layout(**{layout}), the_gpu('h100')))")


def test_each_launch_file_contains_the_planned_layout() -> None:
    sharded = emitted("megatron", dp=16, zero=3)
    assert "--data-parallel-sharding-strategy optim_grads_params" in sharded
    assert "--rdzv-endpoint" in sharded and "--rdzv-endpoint" not in emitted("fsdp", dp=8)
    assert "megatron-fsdp" not in emitted("megatron", dp=16, zero=1)
    assert "--moe-router-topk 2" in emitted("megatron", "mixtral-8x7b", dp=8, ep=8)
    assert "not mixtral" in emitted("torchtitan", "mixtral-8x7b", dp=8)
    pipeline = emitted("torchtitan", dp=2, pp=4, micro_batches=8, recompute="layer")
    assert "num_pp_microbatches = 8" in pipeline and "disable_cuda_graphs = True" in pipeline
    assert "first_stage_less_layers = 0" in pipeline and "per_stage = 8" in pipeline
    assert "= FullAC.Config()" in pipeline
    mlp = {"dp": 8, "zero": 3, "recompute": "mlp"}
    alone = emitted("torchtitan", **mlp)
    ast.parse(alone[: alone.index("torchrun")])
    assert "FullAC._wrap_block = mlp_alone" in alone and "mlp_alone" not in pipeline
    assert "granularity selective --recompute-modules mlp" in emitted("megatron", **mlp)
    assert "--recompute-modules moe" in emitted("megatron", "mixtral-8x7b", ep=8, **mlp)
    assert "# each block.feed_forward through" in emitted("fsdp", **mlp)
    chunked = {"dp": 1, "pp": 16, "tp": 8, "micro_batches": 32, "virtual": 2}
    pipeline = emitted("torchtitan", "llama-3-405b", **chunked)
    assert "= 'Interleaved1F1B'" in pipeline and "per_stage = 4" in pipeline
    assert "less_layers = 1" in pipeline and "model_registry('405B')" in pipeline
    for layout in ({"tp": 8}, {"cp": 2, "zero": 1}):  # Megatron-LM stops on an H100 without it
        assert emitted("megatron", **layout).startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torch")
    assert emitted("megatron", tp=2, dp=4, zero=3).startswith("torchrun")
    uneven = emitted("megatron", "llama-3-405b", **chunked)  # 126 layers and two ends by 16
    assert "--num-virtual-stages-per-pipeline-rank 2" in uneven
    assert "--account-for-loss-in-pipeline-split" in uneven
    assert "split" not in emitted("megatron", pp=4, micro_batches=8)
    stages = [emitted("deepspeed", dp=8, zero=zero) for zero in (1, 2)]
    assert all('"grad_accum_dtype": "fp32"' in each for each in stages)
    for setting in (
        f'"reduce_bucket_size": {(2 * 32 + 2 * 8) * 128 * 4096 + 3 * 4096 * 14336 + 2 * 4096}',
        '"use_multi_rank_bucket_allreduce": false',
        '"communication_data_type": "fp32"',
    ):
        assert [setting in each for each in stages] == [False, True]
    for zero, gradients, parameters in ((1, True, True), (2, False, True), (3, False, False)):
        lines = emitted("fsdp", dp=8, zero=zero).splitlines()
        assert ("model.set_requires_gradient_sync(last)" in lines) == gradients
        assert ("model.set_reshard_after_backward(last)" in lines) == parameters
    assert "strategy optim_grads " in emitted("megatron", dp=8, zero=2)
    assert "grad_accum_dtype" not in emitted("deepspeed", dp=8, zero=3)
    assert "reshard_after_forward=True" in emitted("fsdp", dp=8, zero=3)
    assert "DistributedDataParallel" in emitted("fsdp", dp=8, zero=0)
    for target in ("deepspeed", "fsdp"):
        assert "DP alone" in emitted(target, dp=4, tp=2)
        assert "DP alone" in emitted(target, "mixtral-8x7b", dp=8, ep=8)


def test_the_missing_memory_of_a_layout_is_right() -> None:
    """For layouts that almost fit, the search must print the same memory as option --why."""
    for model, gpus in (("llama-3-70b", 64), ("llama-3-405b", 1024)):
        nearest = re.findall(
            r"^  DP (\d+) PP (\d+)(?:×(\d))? TP (\d+)(?: CP (\d+))? b (\d+)(?: (ZeRO-1|ZeRO-2|FSDP))?"
            r"(?: (recompute.*))?, .*?: (.* GiB too much on stage \d+)",
            plan("--model", model, "--gpus", f"{gpus}").stdout,
            re.M,
        )
        assert len(nearest) == 3
        for dp, pp, v, tp, cp, b, zero, again, lacks in nearest:
            layout = f"dp={dp},pp={pp},tp={tp},v={v or 1},cp={cp or 1},b={b}"
            layout += f",zero={['', 'ZeRO-1', 'ZeRO-2', 'FSDP'].index(zero)}"
            layout += ",recompute=" + again.split()[-1].lower() if again else ""
            why = plan("--model", model, "--gpus", f"{gpus}", "--why", layout).stdout
            assert lacks in why, why


GPU = {"flops": "312e12", "memory_gib": "40", "bandwidth": "1.5e12", "link": "3e11"}
GPU |= {"network": "1e9", "node": "4"}


def hardware_file(folder: Path, **changed: str | None) -> str:
    """Write a hardware file with one GPU, `mine`, and return its path; None removes a field."""
    fields = {name: value for name, value in (GPU | changed).items() if value is not None}
    file = folder / "own.toml"
    text = "\n".join(f"{name} = {value}" for name, value in fields.items())
    file.write_text(f"[mine]\n{text}\n", "utf-8")
    return str(file)


def main_of_plan(words: list[str], capsys, monkeypatch) -> tuple[str, str]:
    """Run plan.py in this process; return its output and its error message."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import plan

    monkeypatch.setattr(sys, "argv", ["plan.py", *words])
    error_message = ""
    try:
        plan.main()
    except SystemExit as error:
        error_message = str(error.code)
    return capsys.readouterr().out, error_message


def test_every_pair_of_options_has_an_effect_or_an_error_message(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two options must change the output of one option, or an error must name an option."""
    values = {
        "model": "layers=4,hidden=4096,heads=32,ffn=16384,vocabulary=4096", "gpus": "16", "gpu": "a100",
        "hardware": hardware_file(tmp_path), "inter-node": "20MB/s", "sequence": "512",
        "batch": "16K", "tokens": "15T", "price": "2", "save": "30", "restart": "5", "top": "2",
        "emit": "megatron", "why": "dp=8,tp=2,zero=3", "what-if": "link=1e9,1e11",
        "score": str(FOLDER / "measured.csv"), "post-training": "answer=99,prompt=9",
    }  # fmt: skip
    common = {"model": "layers=2,hidden=4096,heads=32,ffn=16384,vocabulary=4096"}
    common |= {"gpus": "32", "sequence": "1K", "batch": "64K"}
    needed = {"price": ["tokens"], "save": ["tokens"], "restart": ["tokens", "save"]}
    needed |= {"why": ["gpus"]}  # options that require other options

    def run_options(*names: str) -> tuple[str, str]:
        arguments = {name: common[name] for name in common if "score" not in names}
        for name in names:
            arguments |= {each: values[each] for each in (*needed.get(name, ()), name)}
        words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
        return main_of_plan(words, capsys, monkeypatch)

    alone = {name: run_options(name) for name in values}
    rejected = set()
    for one, other in itertools.combinations(values, 2):
        text, message = run_options(one, other)
        if message:
            assert f"--{one}" in message or f"--{other}" in message, (one, other, message)
            rejected.add((one, other))
            continue
        for name, rest in ((one, other), (other, one)):
            if name in needed.get(rest, ()):
                continue  # `rest` requires `name`
            assert text != alone[rest][0], f"--{name} has no effect with --{rest}"
    for pair in (("why", "what-if"), ("inter-node", "what-if"), ("gpus", "why")):
        assert pair not in rejected
    for pair in (("top", "why"), ("tokens", "what-if"), ("emit", "what-if"), ("why", "score"),
                 ("why", "post-training"), ("price", "post-training")):  # fmt: skip
        assert pair in rejected


def test_option_what_if_works_with_option_why() -> None:
    run = plan("--gpus", "16", "--model", "llama-3-8b", "--why", "dp=16,zero=3,b=1,recompute=layer",
               "--what-if", "network=50e9,1GB/s,64Gb/s/node")  # fmt: skip
    first, second, third = run.stdout.splitlines()
    for line in (first, second, third):
        assert "DP 16 PP 1 TP 1 b 1 FSDP recompute" in line and "tokens/s/GPU" in line
    speeds = [float(re.search(r"([\d,]+) tokens/s", each)[1].replace(",", "")) for each in
              (first, second, third)]  # fmt: skip
    assert speeds[0] > 2 * speeds[1] and speeds[1] == speeds[2]  # 64 Gb/s shared by 8 GPUs


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"flops": None, "node": None}, "[mine] lacks flops, node"),
        ({"flops": "312"}, "[mine] flops is 312, and must be FLOP per second (312e12 for"),
        ({"memory_gib": "42949672960"}, "memory_gib is 42949672960, and must be GiB"),
        ({"node": "2.5"}, "[mine] node is 2.5, and must be the number of GPUs"),
        ({"link": '"fast"'}, "[mine] link is 'fast', and must be bytes per second one way"),
        ({"bandwidth": "true"}, "[mine] bandwidth is True, and must be bytes per second"),
        ({"memory": "80"}, "[mine] has 'memory'; a GPU has flops, memory_gib"),
    ],
)
def test_a_wrong_hardware_file_is_reported_with_its_field(
    tmp_path: Path, changed: dict, message: str
) -> None:
    run = plan("--hardware", hardware_file(tmp_path, **changed))
    assert run.returncode == 1 and message in run.stderr and len(run.stderr.splitlines()) == 1


def test_all_numbers_of_a_hardware_file_are_used(tmp_path: Path) -> None:
    """The output changes with the size of a node, but not with the name of the GPU."""
    h100 = tomllib.loads((FOLDER / "hardware.toml").read_text("utf-8"))["h100"]
    same = {name: str(h100[name]) for name in GPU}
    words = ["--model", "llama-3-8b", "--gpus", "16", "--top", "1"]
    assert (
        plan(*words, "--hardware", hardware_file(tmp_path, **same)).stdout
        == plan(*words).stdout
    )
    small = plan(*words, "--hardware", hardware_file(tmp_path, **same | {"node": "4"}))
    assert small.stdout != plan(*words).stdout
    paid = plan(*words, "--hardware", hardware_file(tmp_path, **same), "--tokens", "1B")
    assert "GPU-hours" in paid.stdout and "MWh" not in paid.stdout  # the file gives no watts


def test_parameters_of_a_config_json_equal_those_of_transformers(tmp_path: Path) -> None:
    """transformers creates the models without allocating memory."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    known = evaluate(
        "import config_json; c = config_json; print(json.dumps([[name, config, published,"
        "parameters(c.shape_of(config)) + c.left_out(config, c.shape_of(config))]"
        "for name, (config, published) in c.PUBLISHED.items()]))"
    )
    kinds = {"Llama": "llama", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen2": "qwen2",
             "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}  # fmt: skip
    assert known
    for name, config, published, counted_here in known:
        kind = kinds[config["architectures"][0].removesuffix("ForCausalLM")]
        given = {key: value for key, value in config.items() if key != "architectures"}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.CONFIG_MAPPING[kind](**given)
            )
        built = sum(each.numel() for each in model.parameters())
        assert counted_here == published == built, name
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config), "utf-8")
    run = plan("--model", str(file), "--gpus", "64", "--top", "1")
    assert run.stdout.startswith("30.5 B parameters") and "EP" in run.stdout
    named = plan("--model", "qwen3-30b-a3b", "--gpus", "64", "--top", "1")
    assert plan("--model", str(tmp_path), "--gpus", "64", "--top", "1").stdout == named.stdout


@pytest.mark.parametrize(
    "config, message",
    [
        ("{", "config.json is not JSON"),
        ("[]", "config.json is JSON, but not an object"),
        ("{}", 'config.json has no "architectures"'),
        (
            '{"architectures": ["MambaForCausalLM"]}',
            "describes MambaForCausalLM; the planner reads",
        ),
        ('{"architectures": ["LlamaForCausalLM"]}', '"num_attention_heads" is missing'),
    ],
)
def test_a_config_json_without_a_shape_is_rejected_with_one_sentence(
    tmp_path: Path, config: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(config, "utf-8")
    run = plan("--model", str(tmp_path / "config.json"))
    assert run.returncode == 1 and message in run.stderr and len(run.stderr.splitlines()) == 1


def test_a_limited_attention_window_is_reported(tmp_path: Path) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
    }
    config |= {"num_attention_heads": 4, "intermediate_size": 4, "vocab_size": 8}
    file = tmp_path / "config.json"
    for window, notes in ((4096, 1), (None, 0)):
        file.write_text(json.dumps(config | {"sliding_window": window}), "utf-8")
        run = plan("--model", str(file), "--gpus", "8", "--batch", "64K", "--top", "1")
        assert run.returncode == 0 and len(run.stderr.splitlines()) == notes
        assert not notes or "a window of 4,096 tokens" in run.stderr


def test_an_option_that_is_reported_to_fit_also_fits_in_a_replay() -> None:
    """An option must be reported to fit only if one of its layouts stays below the limit."""
    code = (
        "shape, gpu = the_model('layers=8,hidden=1024,heads=8,ffn=4096,vocabulary=1024'),"
        " replace(the_gpu('h100'), memory=1.0e9)\n"
        "made = [each.layout for each in timed_layouts(shape, 2, 1024, 4, gpu)]\n"
        "limit, step = CONSTANTS['memory']['room'] * gpu.memory, Step(1, 1, 1, {})\n"
        "def weighed(layout): return weigh(shape, layout, 1024, gpu, step).needed\n"
        "rows = []\n"
        "for option in advice.OPTIONS:\n"
        "  found = advice.find(option, shape, made, 1024, limit, weighed)\n"
        "  need = [weighed(each) + advice.adapter_bytes(option, shape, each)\n"
        "          for each in (advice.changed(option, shape, each) for each in made)]\n"
        "  rows.append([found.fits, found.needed, min(need), limit])\n"
        "print(json.dumps(rows))"
    )
    rows = evaluate(code)
    assert {fits for fits, *_ in rows} == {True, False}
    for fits, needed, least, limit in rows:
        assert fits == (least <= limit) and fits == (needed <= limit)


def test_bytes_of_8_bit_moments_and_of_adapters_equal_those_of_the_libraries() -> None:
    """Compare with torchao's AdamW8bit, and with the adapters of peft on a Llama."""
    torch = pytest.importorskip("torch")
    optim = pytest.importorskip("torchao.optim")
    parameter = torch.nn.Parameter(torch.randn(64, 4096))
    optimizer = optim.AdamW8bit([parameter])
    moment = optimizer._new_buffer(parameter, True)  # a complete step would be compiled
    bytes_per_element = (moment.codes.nbytes + moment.scale.nbytes) / parameter.numel()
    moments, adapters = evaluate(
        "print(json.dumps([advice.EIGHT['moment_bytes'], advice.adapter_parameters("
        "the_model('layers=2,hidden=64,heads=4,kv_heads=2,ffn=96,vocabulary=128'))]))"
    )
    assert moments == bytes_per_element
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    assert lora.get_nb_trainable_parameters()[0] == adapters


def test_every_gpu_has_a_source_and_every_constant_an_explanation() -> None:
    for name, entry in tomllib.loads((FOLDER / "hardware.toml").read_text("utf-8")).items():
        assert entry["source"], name
    for line in (FOLDER / "constants.toml").read_text("utf-8").splitlines():
        assert " = " not in line or "#" in line, line


def recorded_numbers(program: str, pattern: str) -> list[tuple[float, ...]]:
    """Return the numbers in the transcript of a program that match this pattern."""
    text = (ROOT / f"snippets/{program}.cpu.txt").read_text("utf-8").replace(",", "")
    return [tuple(map(float, each.groups())) for each in re.finditer(pattern, text, re.M)]


def test_bytes_equal_those_that_programs_of_the_book_count() -> None:
    """These programs count the bytes that gloo or the profiler reports."""
    code = (
        "from memory import state_bytes; import json\n"
        "small = Shape(1, 64, 1, 1, 256, 1)\n"
        "ring = [traffic(small, Layout(cp=c, micro_batch=2), 960, 8)[0].bytes for c in (2, 3, 4)]\n"
        "block = Shape(1, 192, 4, 4, 768, 1)\n"
        "tp = traffic(block, Layout(tp=4, micro_batch=2), 48, 8)[0].bytes\n"
        "big = the_model('llama-3-70b')\n"
        "fsdp = traffic(big, Layout(dp=1024, zero=3), 8192, 8)[0].bytes\n"
        "state = [sum(stage_parameters(big, each, 1)) for each in stages(big, 1)]\n"
        "cut = [Layout(dp=4, zero=zero, gradient_bytes=2) for zero in range(4)]\n"
        "states = [list(state_bytes(1, each).values()) for each in cut]\n"
        "two = [traffic(big, Layout(dp=2, zero=2, micro_batches=m), 8192, 8)[0].bytes\n"
        "       for m in (1, 2)]\n"
        "print(json.dumps([ring, tp, fsdp, state, states, two]))"
    )
    ring, tp, fsdp, [full_state], states, two = evaluate(code)
    # context parallelism: fp32 in the program, bf16 in the plan
    rows = recorded_numbers(
        "03_model_parallelism/ring_attention", r"^ +[234] +\d+ +(\d+) KiB +(\d+) KiB"
    )
    assert [2 * each / 1024 for each in ring] == [sum(row) for row in rows]
    # tensor parallelism with SP: fp32 in the program; its backward gathers a second time
    [(kib,)] = recorded_numbers(
        "03_model_parallelism/sequence_parallel", r"TP \+ SP(?:.*\n){2}.* = (\d+) KiB"
    )
    assert 2 * tp / 1.25 / 1024 == kib
    # FSDP2: the last unit is not gathered again, and padding is added
    sent = recorded_numbers(
        "04_zero_and_fsdp/seventy_billion", r"^  \w+ +(?:all-|reduce-)\w+ +\d+ +([\d.]+)"
    )
    assert abs(fsdp / 1e9 / sum(gb for (gb,) in sent) - 1) < 0.01
    [(parameters,)] = recorded_numbers("04_zero_and_fsdp/seventy_billion", r"^Ψ = (\d+)")
    assert full_state == parameters
    # DeepSpeed with each of its four stages; a gradient has two bytes
    rows = recorded_numbers(
        "04_zero_and_fsdp/stages", r"^ +([0-3]) +([\d.]+) +([\d.]+) +([\d.]+) "
    )
    assert [tuple(each) for each in states] == [row[1:] for row in rows]
    # DeepSpeed's stage 2, which reduces to owners, with two micro-batches: the scatters send
    # four bytes, the gather sends two
    scatter = two[1] - two[0]
    elements = 2 * scatter / 4 + (two[0] - scatter) / 2
    [(sent,)] = recorded_numbers(
        "04_zero_and_fsdp/deepspeed_stages", r"^stage 2: use_multi\w+ False +([\d.]+)"
    )
    assert elements / parameters == sent


def test_waiting_blocks_depend_on_how_far_the_cpu_runs_ahead() -> None:
    code = (
        "shape = the_model('1B'); c = {'in_flight': 50}\n"
        "fast, back, slow = (Step(0, gpu, 1, {}) for gpu in (2, 0.8, 0.5))\n"
        "def blocks(step, **cuts): return waiting_blocks(shape, Layout(**cuts), step, c, 8)\n"
        "print(json.dumps([blocks(fast, tp=1), blocks(fast, tp=8), blocks(slow, tp=8),\n"
        "  blocks(fast, tp=8, micro_batches=9), blocks(slow, tp=8, pp=4, micro_batches=9),\n"
        "  blocks(slow, tp=8, pp=2, micro_batches=9), blocks(fast, tp=8, pp=4, stalls=True),\n"
        "  blocks(back, tp=8), blocks(back, tp=8, pp=4, micro_batches=9),\n"
        "  blocks(fast, tp=8, pp=4, micro_batches=4)]))"
    )
    # 16 layers scatter two blocks each. A stage has four layers, and only the first two forward
    # passes count. A CPU that is faster only in backward runs ahead in a pipeline, but never by
    # all of its forward passes.
    assert evaluate(code) == [0, 32, 2, 50, 16, 0, 0, 2, 50, 24]


def test_a_pipeline_is_split_where_layers_reach_or_exceed_an_equal_part() -> None:
    """The head of 1B counts as four layers, so five layers are a quarter of the total.

    The head of 8B is less than fifteen sixteenths, so the loss is on a separate stage.
    """
    code = (
        "ties = [[s.layers for s in stages(the_model('1B'), 4, c)] for c in ('reached', 'passed')]\n"
        "ends = stages(the_model('8B'), 16, 'reached')[-2:]\n"
        "print(json.dumps([ties, [[s.layers, s.head, s.loss] for s in ends]]))"
    )
    ties, ends = evaluate(code)
    assert ties == [[5, 5, 5, 1], [6, 5, 5, 0]]
    assert ends == [[2, True, False], [0, False, True]]


def test_a_pipeline_counts_as_stalling_under_the_right_conditions() -> None:
    code = (
        "three, eight = (the_model(name) for name in ('3B', '8B'))\n"
        "def named(shape, nodes, **cuts):\n"
        "  return not_repeated(shape, Layout(cut='reached', **cuts), nodes)\n"
        "print(json.dumps([named(three, 64, pp=2), named(three, 2, pp=2, tp=32),\n"
        "  named(three, 8, pp=2, dp=16, zero=0), named(three, 32, pp=2, dp=32, tp=4),\n"
        "  named(eight, 32, pp=2, dp=16, tp=8, micro_batch=2),\n"
        "  named(eight, 1, pp=2, dp=4, micro_batches=64),\n"
        "  named(three, 64, dp=512), named(three, 8, pp=2, dp=32, zero=0),\n"
        "  named(three, 32, pp=2, dp=16, tp=8, micro_batch=2), named(three, 1, pp=2, dp=4)]))"
    )
    results = evaluate(code)
    assert all(results[:6]) and len(set(results[:6])) == 6 and not any(results[6:])


def test_near_the_memory_limit_fragments_are_freed_but_waiting_blocks_are_not() -> None:
    code = (
        "gpu = replace(the_gpu('h100'), memory=100 * GIB)\n"
        "c = {'unseen': 0, 'workspaces': 0, 'room': 0.8, 'in_flight': 50}\n"
        "shape, step = the_model('llama-3-70b'), Step(0, 2, 1, {})\n"
        "def first(reserved, **cuts):\n"
        "  given = {0: (reserved * GIB, 60 * GIB)}\n"
        "  return memory_of(shape, Layout(**cuts), 8192, gpu, c, step, given).first / GIB\n"
        "print(json.dumps([first(70), first(90), first(70, tp=8, micro_batch=2)]))"
    )
    assert evaluate(code) == [70, 60, 80]


def test_the_gpu_measurement_prints_measured_and_planned_memory(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Run the loop for a GPU on the CPU, with shapes that a CPU can train."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    import one_gpu
    from memory import Layout
    from transformer import Shape

    for name, value in {
        "get_device_name": "NVIDIA H200",
        "max_memory_allocated": 3 << 30,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shape, layout = (
        Shape(2, 64, 4, 2, 96, 128),
        Layout(micro_batch=2, zero=0, recompute="layer"),
    )
    monkeypatch.setattr(one_gpu, "CASES", [(shape, layout)])
    monkeypatch.setattr(one_gpu, "SEQUENCE", 32)
    measured = one_gpu.measured
    monkeypatch.setattr(
        one_gpu, "measured", lambda *case: measured(*case[:2], torch.device("cpu"))
    )
    one_gpu.main()
    row = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r" +2 +64 +2  layer +0\.\d{3}  ≈ *\d+\.\d{3} +0\.\d   ≈ +3\.0  ≈0%", row
    )

    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(one_gpu, "measured", too_large)  # the next case must still run
    one_gpu.main()
    row = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r" +2 +64 +2  layer +0\.\d{3} +0\.\d   out of memory", row)


def test_the_fleet_of_chapter_09_uses_the_gpus_of_the_planner() -> None:
    text = (ROOT / "snippets/09_inference/fleet.py").read_text("utf-8")
    gpus = tomllib.loads((FOLDER / "hardware.toml").read_text("utf-8"))
    found = re.findall(r"^([A-Z]+\d+) = Hardware\((\S+), (\S+), (\S+)e9\)$", text, re.M)
    assert {name for name, *_ in found} == {"H100", "A100", "B200"}
    for name, *figures in found:
        gpu = gpus[name.lower()]
        assert [float(x) for x in figures] == [
            gpu[key] for key in ("flops", "bandwidth", "memory_gib")
        ]
    (network,) = re.findall(r"^NETWORK = (\S+)", text, re.M)
    assert float(network) == gpus["h100"]["network"]
    model = tomllib.loads((FOLDER / "models.toml").read_text("utf-8"))["llama-3-8b"]
    assert f"LAYERS, HIDDEN = {model['layers']}, {model['hidden']}\n" in text
    assert f"CACHE_BYTES = 2 * LAYERS * {model['kv_heads']} * 128 * 2 " in text
