"""Tests of the cluster report of lab 01: each real fault must be reported within seconds.

The ranks are processes that the test starts as a scheduler would: with RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in their environment. Some of these variables are wrong. The tests
use free ports, and no fixed ones.
"""

import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import processes
import pytest
from processes import HANG, end, left_behind

INPUTS = ["labs/lab01_multi_gpu_setup.py"]

LAB = Path(__file__).parent.parent / "labs/lab01_multi_gpu_setup.py"
TAG = "WORLD_SIZE_DOCTOR_TEST"


@dataclass
class Result:
    """The exit status and the output of one process."""

    status: int
    stdout: str
    stderr: str

    def wrong(self) -> list[str]:
        """Return the faults in the report, without their numbers."""
        section = re.sub(r"\n {5,}(?!fix: )", " ", self.stdout.rpartition("\nwrong\n")[2])
        return re.findall(r"^  \d+\. (.*)$", section, re.M)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(*environments: Mapping[str, object], options: str = "",
          command: list[str] | None = None, lab: Path = LAB) -> list[Result]:  # fmt: skip
    """Run one process for each environment, and return their results.

    Fail if a process hangs or leaves another process behind.
    """
    tag = uuid.uuid4().hex
    common = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", TAG: tag}
    words = [*(command or ["python"]), str(lab), *options.split()]
    started = [
        processes.start(words, "/", common | {key: str(value) for key, value in each.items()})
        for each in environments
    ]
    results = []
    try:
        for process in started:
            out, err = process.communicate(timeout=HANG)
            results.append(Result(process.returncode, out, err))
        assert left_behind(tag) == []
    finally:
        end(tag)
        for process in started:
            process.wait()
    return results


def ranks(world: int, port: int | None = None, **more: object) -> list[dict[str, object]]:
    """Return the environments of all ranks of a job on this machine."""
    port = port or free_port()
    return [
        {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        | more
        for rank in range(world)
    ]


def only_fault(result: Result) -> str:
    """Return the only fault that a process reported; fail if it printed a traceback."""
    assert result.status == 1, (result.status, result.stdout, result.stderr)
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    faults = result.wrong()
    assert len(faults) == 1, result.stdout + result.stderr
    assert result.stdout.count("     fix: ") == 1
    return faults[0]


def leaves_the_report_to_rank_0(result: Result) -> bool:
    """Return whether a process exited with status 1 and printed only a reference to rank 0."""
    printed = result.stdout or "Traceback" in result.stderr
    return result.status == 1 and not printed and "rank 0 prints the report" in result.stderr


@contextlib.contextmanager
def port_in_use() -> Iterator[int]:
    """Yield a port on which a server listens that never answers."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


# --- the environment of one process -------------------------------------------------------


def test_without_a_launcher_the_lab_prints_the_right_command() -> None:
    (result,) = start({})
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr == f"start this program with: torchrun --nproc-per-node=2 {LAB.name}\n"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set."),
        ({"WORLD_SIZE": "two"}, 'WORLD_SIZE is "two", but it must be a whole number from 1 to'),
        ({"RANK": 2}, "RANK is 2 and WORLD_SIZE is 1, but ranks have numbers from 0 to 0."),
        (
            {"MASTER_PORT": 70000},
            'MASTER_PORT is "70000", but it must be a whole number from 1 to',
        ),
    ],
)
def test_an_invalid_variable_is_reported(
    variables: dict, sentence: str, doctor: ModuleType
) -> None:
    (environment,) = ranks(1)
    with pytest.raises(doctor.Trouble, match=re.escape(sentence)):
        doctor.read_place({key: str(v) for key, v in (environment | variables).items()})


def test_a_missing_variable_is_reported() -> None:
    (environment,) = ranks(1)
    (result,) = start(environment | {"MASTER_ADDR": ""})
    assert only_fault(result) == "MASTER_ADDR is not set."


def test_a_master_address_that_does_not_resolve_is_reported() -> None:
    (result,) = start(ranks(2, MASTER_ADDR="no-such-host.invalid")[1], options="--wait 3")
    expected = 'MASTER_ADDR is "no-such-host.invalid", a name that this machine cannot resolve.'
    assert only_fault(result) == expected


def test_a_master_address_without_a_listener_is_reported() -> None:
    port = free_port()
    (result,) = start(ranks(2, port)[1], options="--wait 1")
    expected = (
        f"no process listens at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}. Connections were "
        "refused for 1 s."
    )
    assert only_fault(result).startswith(expected)


def test_the_master_address_of_a_different_machine_is_reported() -> None:
    (result,) = start(ranks(2, MASTER_ADDR="203.0.113.9")[0], options="--wait 2")
    expected = (
        "MASTER_ADDR is 203.0.113.9, but rank 0 runs on this machine, and the address does not "
        "lead to this machine."
    )
    assert only_fault(result) == expected


def test_a_port_in_use_is_reported() -> None:
    with port_in_use() as port:
        first, second = start(*ranks(2, port), options="--wait 2")
    fault = only_fault(first)
    assert fault.startswith(f"port {port} is in use by "), fault
    assert f"(process {os.getpid()}), so rank 0 cannot open its store there." in fault
    assert only_fault(second) == (
        f"a process listens at 127.0.0.1:{port}, but it is not a store of torch. "
        "A different program uses the port."
    )


@pytest.mark.parametrize(
    ("variables", "options", "sentence"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth77"}, "",
         r"GLOO_SOCKET_IFNAME=eth77, but there is no interface eth77\. The interfaces are .*\blo\b.*\."),
        ({"NCCL_SOCKET_IFNAME": "=ib"}, "",
         r"NCCL_SOCKET_IFNAME==ib, but there is no interface ib\. The interfaces are .*\blo\b.*\."),
        ({}, "--shm /no/shared/memory",
         r"there is no shared memory: /no/shared/memory does not exist\."),
        ({}, "--min-shm 1e12",
         r"/dev/shm has \d+ MiB free, but 1e\+12 MiB are needed\."),
        ({}, "--device gpu", r"\S+ has 0 accelerators for 1 ranks?\."),
    ],
)  # fmt: skip
def test_a_missing_resource_of_the_machine_is_reported(
    variables: dict, options: str, sentence: str
) -> None:
    (environment,) = ranks(1)
    (result,) = start(environment | variables, options=options)
    fault = only_fault(result)
    assert re.fullmatch(rf"(rank 0 \(\S+\): )?{sentence}", fault), fault


def test_interface_names_match_as_in_gloo_and_nccl(doctor: ModuleType) -> None:
    def absent(**variables: str) -> bool:
        return bool(doctor.interface_faults(variables, ["lo", "eth0", "eth1"]))

    assert not absent(GLOO_SOCKET_IFNAME="eth0,lo")
    assert absent(GLOO_SOCKET_IFNAME="eth")
    assert absent(GLOO_SOCKET_IFNAME="eth0,eth2")
    assert not absent(NCCL_SOCKET_IFNAME="eth")
    assert not absent(NCCL_SOCKET_IFNAME="ib,eth")
    assert not absent(NCCL_SOCKET_IFNAME="^docker")
    assert absent(NCCL_SOCKET_IFNAME="=eth")
    assert absent(NCCL_SOCKET_IFNAME="ib")


# --- several processes with faults --------------------------------------------------------


def test_different_world_sizes_are_reported() -> None:
    first, second = ranks(2)
    results = start(first, second | {"WORLD_SIZE": 3}, options="--wait 30")
    expected = "the ranks disagree on the world size: rank 0 expects 2, rank 1 expects 3."
    assert only_fault(results[0]) == expected
    assert leaves_the_report_to_rank_0(results[1]), results[1]


def test_a_missing_rank_is_reported() -> None:
    first, _, third = ranks(3)
    zero, two = start(first, third, options="--wait 20")
    fault = only_fault(zero)
    expected = r"rank 1 of 3 never arrived\. Within 20 s, only ranks 0 and 2 \(\S+\) arrived\."
    assert re.fullmatch(expected, fault), fault
    assert leaves_the_report_to_rank_0(two), two


def test_a_missing_rank_0_is_reported_if_torchrun_runs_the_store() -> None:
    dist = importlib.import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = ranks(2, store.port, TORCHELASTIC_USE_AGENT_STORE="True")
    (result,) = start(environments[1], options="--wait 1")
    assert only_fault(result) == "rank 0 of 2 never arrived. Within 1 s, only rank 1 arrived."


def test_two_processes_with_the_same_rank_are_reported() -> None:
    zero, one, _ = ranks(3)
    results = start(zero, one, one, options="--wait 30")
    faults = results[0].wrong()
    assert len(faults) == 2 and faults[0].startswith("rank 2 of 3 never arrived"), faults
    assert faults[1].startswith("2 processes have the rank 1, on "), faults
    assert leaves_the_report_to_rank_0(results[1]) and leaves_the_report_to_rank_0(results[2])


def test_the_same_fault_on_several_machines_is_reported_once() -> None:
    zero, one = ranks(2, GLOO_SOCKET_IFNAME="eth77")
    results = start(zero | {"DOCTOR_HOST": "a"}, one | {"DOCTOR_HOST": "b"})
    fault = only_fault(results[0])
    assert fault.startswith("rank 0 (a) and rank 1 (b): GLOO_SOCKET_IFNAME=eth77"), fault
    assert leaves_the_report_to_rank_0(results[1])


@pytest.mark.parametrize(
    ("plant", "world", "description"),
    [
        ("size", 2, "float32 [1000] on rank 0, float32 [1001] on rank 1"),
        ("dtype", 3, "float32 [1000] on ranks 0 and 1, int32 [1000] on rank 2"),
    ],
)
def test_different_tensors_are_reported(plant: str, world: int, description: str) -> None:
    results = start(*ranks(world), options=f"--plant {plant} --report brief")
    assert (
        only_fault(results[0]) == f"the tensors of the all-reduce do not match: {description}."
    )
    assert all(leaves_the_report_to_rank_0(other) for other in results[1:]), results[1:]


@pytest.mark.parametrize(("plant", "status"), [("death", 9), ("hang", 1)])
def test_a_rank_that_dies_or_hangs_is_reported(plant: str, status: int) -> None:
    zero, one, two = start(*ranks(3), options=f"--plant {plant} --wait 8")
    fault = only_fault(zero)
    assert re.fullmatch(r"rank 2 died or hung while the others were checking \S+\.", fault)
    assert (one.status, two.status) == (1, status)
    assert "Traceback" not in one.stderr + two.stderr


def test_a_wrong_result_of_a_collective_is_reported_and_the_run_continues(
    tmp_path: Path,
) -> None:
    wrong = tmp_path / LAB.name
    call = "dist.all_reduce(result)\n"
    assert LAB.read_text().count(call) == 1
    wrong.write_text(LAB.read_text().replace(call, call + " " * 12 + "result[0] += rank\n"))
    results = start(*ranks(2), lab=wrong)
    assert only_fault(results[0]) == "all-reduce returns wrong results on rank 1."
    assert "bus bandwidth" in results[0].stdout and results[1].status == 1


def test_the_time_limit_ends_the_run_and_reports_the_step() -> None:
    (result,) = start(ranks(2)[0], options="--limit 2")
    expected = "the run did not end within 2 s: rank 0 was waiting for all ranks."
    assert only_fault(result) == expected


# --- healthy machines ---------------------------------------------------------------------


def test_ranks_on_two_simulated_machines_pass() -> None:
    hosts = ["a", "a", "b"]
    results = start(*({**e, "DOCTOR_HOST": h} for e, h in zip(ranks(3), hosts, strict=True)))
    assert [rank.status for rank in results] == [0, 0, 0], results
    assert [rank.stdout for rank in results[1:]] == ["", ""]
    report = results[0].stdout
    assert "3 ranks on 2 machines met, with the same world size" in report
    assert "the CPU is used, because a has 0 accelerators for 2 ranks." in report
    assert "1 link (same machine): median" in report
    assert "2 links (between machines): median" in report
    assert report.endswith("\nwrong\n  nothing\n")
    for name in [
        "broadcast",
        "scatter",
        "gather",
        "all-gather",
        "reduce",
        "reduce-scatter",
        "barrier",
    ]:
        assert re.search(
            rf"(?s)\n  the results on 3 ranks are right: .*\b{name}\b.*\nmeasured\n", report
        )


def test_the_starter_file_runs_to_its_first_blank(tmp_path: Path) -> None:
    subprocess.run([sys.executable, LAB.with_name("start.py"), "1"], cwd=tmp_path, check=True)
    starter = tmp_path / "my_labs" / LAB.name
    (result,) = start(*ranks(1), lab=starter)
    assert result.status == 1 and "Traceback" not in result.stderr
    meeting, blank = result.stdout.splitlines()
    assert meeting == (
        "before the group: 1 rank on 1 machine met, with the same world size and version of "
        "torch"
    )
    line = re.fullmatch(rf"{LAB.name}, line (\d+), a blank: step 1: return the .*", blank)
    assert "raise NotImplementedError" in starter.read_text().splitlines()[int(line[1]) - 1]


def test_a_slow_link_is_found() -> None:
    results = start(*ranks(3), options="--plant slow")
    assert [rank.status for rank in results] == [0] * 3, results
    slow = results[0].stdout.partition("\nslow\n")[2].partition("\nwrong\n")[0]
    assert "link 0-2 (same machine): ≈" in slow, results[0].stdout


def test_under_torchrun_one_report_is_printed_and_a_dead_rank_ends_all_ranks() -> None:
    command = ["torchrun", "--nproc-per-node=3"]
    (result,) = start({}, options="--plant death", command=command)
    assert result.status == 1
    assert result.stdout.count("cluster report") == 1, result.stdout
    (fault,) = result.wrong()
    # torchrun ends the other ranks too, and on a busy machine rank 1 ends before it has reported
    assert re.match("(rank|ranks 1 and) 2 died or hung while the others were checking ", fault)


# --- faults that need several machines or GPUs: tests of single functions -------------------


def build_libcuda(status: int, folder: Path) -> str:
    """Compile a libcuda whose cuInit returns this status, and return its path."""
    path = folder / f"libcuda{status}.so"
    source = f"int cuInit(unsigned flags) {{ return flags ? 1 : {status}; }}"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return str(path)


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="this test compiles a C library"
)
def test_a_driver_that_does_not_start_is_reported(doctor: ModuleType, tmp_path: Path) -> None:
    (fault,) = doctor.driver_faults(build_libcuda(802, tmp_path))
    assert fault.what == (
        "CUDA's driver does not start: error 802, system not yet initialized."
    )
    assert "nvidia-fabricmanager" in fault.fix and "nvidia-smi -q" in fault.fix
    (fault,) = doctor.driver_faults(build_libcuda(803, tmp_path))
    assert "error 803" in fault.what and "fabricmanager" not in fault.fix
    # No fault is reported if the driver starts (0), finds no GPU (100), or is not installed.
    for status in (0, 100):
        assert doctor.driver_faults(build_libcuda(status, tmp_path)) == []
    assert doctor.driver_faults("no_such_library.so") == []


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="this test compiles a C library"
)
def test_a_fabric_manager_that_does_not_run_is_reported(tmp_path: Path) -> None:
    library = Path(build_libcuda(802, tmp_path))
    library.rename(tmp_path / "libcuda.so.1")
    environments = [one | {"LD_LIBRARY_PATH": tmp_path, "DOCTOR_HOST": "a"} for one in ranks(2)]
    command_line = ["python", "-u"]  # a forked process would not search for libraries again
    results = start(*environments, command=command_line)
    assert only_fault(results[0]) == (
        "ranks 0 and 1 (a): CUDA's driver does not start: error 802, system not yet "
        "initialized."
    )
    assert leaves_the_report_to_rank_0(results[1])
    (result,) = start(
        environments[0] | {"WORLD_SIZE": 1}, options="--device cpu", command=command_line
    )
    assert result.status == 0, result


def test_a_name_that_resolves_late_is_accepted(
    doctor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = importlib.import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    real, lookups = doctor.addresses, []

    def late(name: str, seconds: float = 10) -> list[str]:
        lookups.append(name)
        return real(name, seconds) if len(lookups) > 2 else []

    monkeypatch.setattr(doctor, "addresses", late)
    place = doctor.Place(rank=1, world=2, address="localhost", port=store.port, agent=False)
    reached, _ = doctor.open_store(place, 60)
    reached.set("found", "yes")
    assert store.get("found") == b"yes" and len(lookups) == 3


@pytest.fixture(scope="module")
def doctor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lab01", LAB)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab01"] = module
    spec.loader.exec_module(module)
    return module


def cards(*hosts: str, **more: object) -> list[dict]:
    """Return the cards that ranks on these machines send to rank 0."""
    card = {"world": len(hosts), "torch": "2.13.0", "accelerators": 8, "faults": []}
    card |= {"address": "10.0.0.1", "listens": 1, "name leads to": ["10.0.0.1"]}
    return [card | {"rank": rank, "host": host} | more for rank, host in enumerate(hosts)]


def test_the_cards_of_a_healthy_cluster_have_no_fault(doctor: ModuleType) -> None:
    assert doctor.judge_cards(cards("a", "a", "b", "b"), 4, 60) == []
    assert doctor.accelerator_faults(cards("a", "a", "b", "b")) == []


def test_a_missing_machine_is_reported(doctor: ModuleType) -> None:
    (fault,) = doctor.judge_cards(cards(*"aaaabbbb")[:4], 8, 60)
    assert fault.what.startswith(
        "ranks 4 to 7 of 8 never arrived. Within 60 s, only ranks 0 to 3 (a)"
    )


def test_different_versions_of_torch_are_reported(doctor: ModuleType) -> None:
    given = cards("a", "b", "c")
    given[1]["torch"] = "2.11.0"
    (fault,) = doctor.judge_cards(given, 3, 60)
    assert "(ranks 0 and 2: 2.13.0; rank 1: 2.11.0)" in fault.what


def test_a_name_that_resolves_to_loopback_is_reported(doctor: ModuleType) -> None:
    given = cards("a", "b")
    given[1]["name leads to"] = ["127.0.1.1"]
    (fault,) = doctor.loopback_faults(given)
    assert fault.what.startswith(
        "on b the machine's own name leads to 127.0.1.1, so gloo tells"
    )
    given[1]["name leads to"] = []
    (fault,) = doctor.loopback_faults(given)
    assert fault.what.startswith("on b the machine's own name does not resolve")
    given[1]["name leads to"] = None  # GLOO_SOCKET_IFNAME is set
    assert doctor.loopback_faults(given) == []


def test_a_machine_with_too_few_gpus_is_reported(doctor: ModuleType) -> None:
    (fault,) = doctor.accelerator_faults(cards("a", "b", "b", accelerators=1))
    assert fault.what == "b has 1 accelerator for 2 ranks."


def test_a_closed_port_of_a_rank_is_reported(doctor: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = cards("a", "b", "c", address="127.0.0.1", listens=server.getsockname()[1])
        assert doctor.unreachable(given, 0, seconds=2) == []
        given[2]["listens"] = free_port()
        (line,) = doctor.unreachable(given, 0, seconds=2)
    expected = "rank 0 (a) cannot connect to rank 2 (c) at 127.0.0.1: ConnectionRefusedError."
    assert line == expected


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0 to 2, 5, 7 and 8"),
    ],
)
def test_names_of_ranks_are_short(numbers: list[int], text: str, doctor: ModuleType) -> None:
    assert doctor.named(numbers) == text
