"""Tests which programs use NCCL if there are GPUs, with a stand-in for the GPUs."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import with_read_log
from processes import HANG

from worldsize.execution.requirements import gpus_needed
from worldsize.model.program import GLOO_ONLY, GPU_COMMANDS, Program, gpu_commands

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = "tests/nccl_stand_in.py"  # a program: it replaces the GPU and NCCL
INPUTS = [
    ".github/workflows/gpu.yml",
    "docs/01_ranks_on_one_gpu.md",
    "src/worldsize/execution",
    "src/worldsize/model",
    "snippets",
    "labs",
    "assessment",
    STAND_IN,
]
SETTINGS = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_RUNTIME_CONNECT")


def called_functions(path: Path) -> list[str]:
    """Return the name of the called function for each call of a program, without its module."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return [ast.unparse(function).rpartition(".")[2] for function in calls]


def programs_with(pattern: str) -> list[str]:
    """Return the programs of snippets/ whose text contains a match of this pattern."""
    paths = sorted((ROOT / "snippets").rglob("*.py"))
    matches = [path for path in paths if re.search(pattern, path.read_text("utf-8"))]
    return [str(path.relative_to(ROOT)) for path in matches]


WITH_LIMITS = programs_with("def init_with_limits")
SHRINK = "snippets/clusters/shrink_group.py"  # it also forms new groups after the first one


def test_each_program_that_uses_only_gloo_is_listed_with_its_reason() -> None:
    listed = tomllib.loads((ROOT / GPU_COMMANDS).read_text("utf-8"))[GLOO_ONLY]
    names = [name for reason in listed.values() for name in reason]
    assert len(names) == len(set(names)), "a program is listed twice"
    gloo = set(programs_with(r'init_process_group\(\s*"gloo"'))
    only_gloo = gloo - set(programs_with("def init_distributed"))
    assert sorted(set(names) - only_gloo) == [], "these programs can use NCCL"
    assert sorted(only_gloo - set(names)) == [], "add these programs with a reason"
    assert not only_gloo & set(gpu_commands(ROOT)), "they print nothing new on a GPU"


def test_programs_about_errors_are_recorded_on_gpus() -> None:
    assert len(WITH_LIMITS) == 13
    assert set(WITH_LIMITS) <= set(gpu_commands(ROOT))


def test_the_workflow_and_the_page_say_how_many_programs_one_gpu_can_check() -> None:
    """If this test fails, correct the numbers in .github/workflows/gpu.yml and in the page."""
    programs = [Program(ROOT, ROOT / name) for name in gpu_commands(ROOT)]
    ranks = [gpus_needed(program.gpu_template) for program in programs]
    own = sum(program.needs_own_gpus for program in programs)
    single, several = ranks.count(1), len(ranks) - ranks.count(1)
    workflow = (ROOT / ".github/workflows/gpu.yml").read_text("utf-8").replace("\n# ", " ")
    page = (ROOT / "docs/01_ranks_on_one_gpu.md").read_text("utf-8").replace("\n", " ")
    assert own == 2 and max(ranks) == 8
    assert f"snippets/gpu.toml lists {len(ranks)} programs." in workflow
    can = f"one GPU can check {len(ranks) - own} of them: {single} with one rank"
    assert f"{can}, and {several - own} that torchrun starts with 2 to 8 ranks." in workflow
    assert f"The book has {several} programs with 2 to 8 ranks" in page
    assert f"One GPU is enough for {several - own} of them." in page


@pytest.mark.parametrize(
    ("kind", "count", "alone", "second_of_two"),
    [
        ("cpu", 0, "cpu", "cpu"),
        ("mps", 1, "mps:0", "cpu"),
        ("cuda", 1, "cuda:0", "cpu"),  # each process needs a GPU of its own
        ("cuda", 2, "cuda:0", "cuda:1"),
    ],
)
def test_the_first_program_uses_the_devices_in_the_table_of_the_setup_page(
    kind: str, count: int, alone: str, second_of_two: str
) -> None:
    pick_device = runpy.run_path(str(ROOT / "snippets/setup/first_run.py"))["pick_device"]
    of_torchrun = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for variables, expected in (({}, alone), (of_torchrun, second_of_two)):
        with (
            mock.patch.dict(os.environ, variables, clear=True),
            mock.patch.multiple(
                torch.accelerator,
                is_available=lambda: count > 0,
                device_count=lambda: count,
                current_accelerator=lambda: torch.device(kind),
                set_device_index=mock.Mock(),
            ),
        ):
            assert pick_device() == torch.device(expected)


@pytest.mark.parametrize("name", WITH_LIMITS)
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_program_about_errors_uses_nccl_on_gpus(name: str, gpus: int) -> None:
    """Two ranks share one GPU. NCCL reads its settings when the process group is created."""
    calls = called_functions(ROOT / name)
    assert calls.count("init_with_limits") == 1
    assert calls.count("init_process_group") == (4 if name == SHRINK else 2)
    variables = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    program = runpy.run_path(str(ROOT / name), run_name="stand-in")
    recorder = mock.Mock()
    settings = []
    recorder.init_process_group.side_effect = lambda *_, **__: settings.extend(
        os.environ.get(setting) for setting in SETTINGS
    )
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.multiple(
            torch.accelerator,
            device_count=lambda: gpus,
            current_accelerator=lambda: torch.device("cuda"),
            set_device_index=mock.Mock(),
        ),
        mock.patch.object(torch.backends.mps, "is_available", return_value=False),
        mock.patch.object(dist, "init_process_group", recorder.init_process_group),
        mock.patch.object(torch, "set_default_device", recorder.set_default_device),
        mock.patch("faulthandler.dump_traceback_later", recorder.dump_traceback_later),
    ):
        device = program["init_with_limits"]()
    assert settings == ["1", "0"]
    if gpus == 0:
        assert device == torch.device("cpu")
        assert recorder.mock_calls == [mock.call.init_process_group("gloo")]
    else:
        assert device == torch.device("cuda", 1 % gpus)
        assert recorder.mock_calls == [
            mock.call.init_process_group(device_id=device),
            mock.call.set_default_device(device),
            mock.call.dump_traceback_later(60, exit=True),
        ]


def test_a_reader_can_choose_the_watchdog_of_nccl() -> None:
    program = runpy.run_path(str(ROOT / WITH_LIMITS[0]), run_name="stand-in")
    functions = program["init_with_limits"].__globals__
    with (
        mock.patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT="0"),  # restores all variables
        mock.patch.dict(functions, init_distributed=mock.Mock()),
    ):
        program["init_with_limits"]()
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


@pytest.mark.parametrize("name", WITH_LIMITS)
def test_all_ranks_end_a_group_in_the_same_way(name: str) -> None:
    """Since NCCL 2.31, no rank can destroy a group that another rank has aborted."""
    calls = called_functions(ROOT / name)
    if name == "snippets/02_ddp/dead_rank.py":  # it destroys a group only if no rank has failed
        text = (ROOT / name).read_text("utf-8")
        assert re.search(r"if status == 0:.*\n +dist\.destroy_process_group\(\)", text)
    elif name != "snippets/02_ddp/one_compiles_longer.py":  # all ranks time out
        assert "abort" in calls, f"{name} destroys a group that a rank may have aborted"


@pytest.mark.parametrize(
    "name",
    [
        "snippets/01_parallelism_strategies/two_groups_order.py",
        "snippets/03_model_parallelism/pipeline_deadlock.py",
    ],
)
def test_a_message_is_too_large_for_the_buffers_of_nccl(name: str) -> None:
    """Otherwise a send completes although no rank receives, and no deadlock is visible."""
    text = (ROOT / name).read_text("utf-8")
    setting = re.search(r'setdefault\("NCCL_BUFFSIZE", "(\d+)"\)', text)
    assert setting and setting.start() < text.index("    init_with_limits()")
    channels = 64  # MAXCHANNELS in NCCL's src/include/device.h
    floats = runpy.run_path(str(ROOT / name), run_name="stand-in")["SIZE"]
    assert int(setting[1]) * channels < 4 * floats


def test_the_watchdog_ends_a_process_before_it_can_use_a_wrong_result() -> None:
    """A filter must match the message of torch up to 2.14 and the message of torch 2.15."""
    commands = [line for text in gpu_commands(ROOT).values() for line in text.splitlines()]
    watchdog = [line for line in commands if "TORCH_NCCL_BLOCKING_WAIT=0" in line]
    assert len(watchdog) == 3
    assert all("TORCH_NCCL_ASYNC_ERROR_HANDLING=3" in line for line in watchdog)
    filtered = [line for line in commands if "WorkNCCL" in line]
    assert len(filtered) == 4 and all("Aborting process" in line for line in filtered)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "nccl2"])
def test_the_flight_recorder_of_the_backend_is_read(backend: str, tmp_path: Path) -> None:
    """Up to torch 2.14, the name nccl means the backend nccl, and since 2.15 it means nccl2."""
    import torch._C._distributed_c10d as c10d

    name = "snippets/11_references/flight_recorder.py"
    program = runpy.run_path(str(ROOT / name), run_name="stand-in")
    record = pickle.dumps({"entries": [], "pg_config": {}})
    with (
        mock.patch.object(dist, "group", mock.MagicMock()) as group,
        mock.patch.object(dist, "get_rank", lambda: 3),
        mock.patch.object(c10d, "_dump_fr_trace", return_value=record) as general,
        mock.patch.object(c10d, "_dump_nccl_trace", return_value=record, create=True) as nccl,
    ):
        group.WORLD._get_backend.return_value.name.return_value = backend
        program["dump"](str(tmp_path))
    assert (tmp_path / "rank_3").is_file()
    called = {
        "gloo": ([mock.call(True, True, False)], []),
        "nccl": ([], [mock.call(True, True, False)]),
        "nccl2": ([mock.call(True, True, False, backend="nccl2")], []),
    }
    assert (general.mock_calls, nccl.mock_calls) == called[backend]


def test_ranks_leave_a_group_of_nccl_with_shrink_and_with_abort() -> None:
    """tests/nccl_stand_in.py replaces only the GPU and NCCL, so torch's own code runs.

    In the last case, shrink_group hangs with SHRINK_ABORT, as it does with NCCL 2.31. The time
    limit of the program then ends the two ranks that hang.
    """
    cases = ["old", "old --way=abort", "new --way=abort barrier", "old barrier"]
    command = [sys.executable, str(ROOT / STAND_IN), str(ROOT / SHRINK), *cases]
    done = subprocess.run(
        command,
        env=with_read_log(dict(os.environ)),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG,
    )
    results = json.loads(done.stdout)
    by_abort = results["old --way=abort"]["outputs"][0]
    raises = "wait() of this all-reduce raises DistBackendError"
    returns = "wait() of this all-reduce returns, but the sum is not complete"
    assert returns in by_abort
    assert results["new --way=abort barrier"]["outputs"][0] == by_abort.replace(returns, raises)
    by_shrink = results["old"]["outputs"]
    numbers = "    rank 0 has number 0, rank "
    for outputs in (by_abort, by_shrink[0]):
        assert f"{numbers}2 has number 1, rank 3 has number 2\nstep 7" in outputs
        assert f"{numbers}3 has number 1\n" in outputs
        assert "every rank: the weights of one process on 12 rows" in outputs
    for case in cases[:3]:
        assert results[case]["statuses"] == [0] * 4, results[case]["outputs"]
    # the excluded numbers, the flags, and the number of pending operations of each call
    calls = [output.splitlines()[-1] for output in by_shrink]
    survivor = "[([1], 0, 0), ([1], 1, 1)]"
    assert calls == [
        f"rank 0: {survivor}",
        "rank 1: []",
        "rank 2: [([1], 0, 0)]",
        f"rank 3: {survivor}",
    ]
    hang = results["old barrier"]
    assert hang["statuses"] == [1, 0, 0, 1]
    assert re.search(r"shrink_group.py\", line \d+ in shrink\n", hang["outputs"][3])


def test_the_report_of_a_machine_lists_its_gpus_and_their_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of three GPUs, only neighbours access each other's memory. Two of three links are up."""
    name = "snippets/01_parallelism_strategies/topology.py"
    report = runpy.run_path(str(ROOT / name), run_name="stand-in")["report_gpus"]
    answers = {
        "accelerator.device_count.return_value": 3,
        "accelerator.current_accelerator.return_value.type": "cuda",
        "cuda.get_device_properties.return_value.total_memory": 80 * 2**30,
        "cuda.can_device_access_peer.side_effect": lambda i, j: abs(i - j) == 1,
        "nvmlDeviceGetHandleByUUID.side_effect": [0, 1, 2],
        "nvmlDeviceGetNvLinkState.side_effect": [1, 0, 1, OSError] * 3,
        "nvmlDeviceGetMaxPcieLinkGeneration.return_value": 5,
        "nvmlDeviceGetCurrPcieLinkWidth.return_value": 8,
        "nvmlDeviceGetMaxPcieLinkWidth.return_value": 16,
        "nvmlDeviceGetTopologyCommonAncestor.side_effect": lambda i, j: 10 * (i + j),
    }
    stand_in = mock.Mock(NVML_NVLINK_MAX_LINKS=18, NVMLError=OSError, **answers)
    with (
        mock.patch.dict(report.__globals__, torch=stand_in),
        mock.patch.dict(sys.modules, pynvml=stand_in),
    ):
        report()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "accelerators: 3 × cuda; at most 3 ranks on this node with one each"
    assert all(line.endswith(", 80 GiB") for line in lines[1:4])
    assert lines[4] == "  peer access: 4 of 6 ordered pairs"
    links = "2 NVLinks up, PCIe generation 5, 8 of 16 lanes"
    assert lines[5:8] == [f"  GPU {i}: {links}" for i in range(3)]
    assert lines[8:] == [
        "  GPU 0 and 1 meet at one PCIe switch (PIX)",
        "  GPU 0 and 2 meet at several PCIe switches (PXB)",
        "  GPU 1 and 2 meet at a PCIe host bridge (PHB)",
    ]
