"""Tests of the labs: they run, starters report their blanks, and wrong answers get their hints.

The wrong answers are in `tests/wrong_answers/`. `check.py` grades all wrong answers of a lab in
one process.
"""

import ast
import dataclasses
import importlib
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import grading
import pytest
from grading import (
    LABS,
    ROOT,
    all_hints,
    assert_gets_its_hint,
    check,
    hints_in,
    hints_not_provoked,
    run,
    unwrapped,
    wrong_answers,
)
from processes import HANG
from wrong_answers import Answer, Body, Stale, Table, edited, is_sampled

from graders import sandbox, verdict
from graders.protocol import Call, Group, RankReport, Wrong
from graders.step import Step
from worldsize.execution import host_checks, processes, runner
from worldsize.model.program import Program
from worldsize.testing.plugin import SESSION

INPUTS = [
    "assessment", "src/worldsize/model", "src/worldsize/execution", "src/worldsize/testing", "graders", "labs", "tests/grading.py", "tests/wrong_answers",
]  # fmt: skip

REFERENCES = {path.name[:5]: path for path in sorted(LABS.glob("lab??_*.py"))}
REFERENCE = REFERENCES["lab02"]
ASSESSED = [path.stem for path in sorted(ROOT.glob("graders/assessment/*.py"))]
WRONG = {lab: wrong_answers(lab) for lab in REFERENCES}


# --- wrong answers ------------------------------------------------------------------------


# conftest.py sends all answers of a lab to the same worker, which grades them in one process
@pytest.mark.parametrize("answer", [a for lab in WRONG.values() for a in lab.values()], ids=str)
def test_wrong_answer_gets_its_hint(answer: Answer, request: pytest.FixtureRequest) -> None:
    others = WRONG[answer.reference.stem[:5]].values()
    assert_gets_its_hint(answer, others, request.session)


@pytest.mark.parametrize("lab", REFERENCES)
def test_every_hint_of_a_lab_has_a_wrong_answer(lab: str) -> None:
    assert hints_not_provoked(lab) <= {"average", "other"}


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ("no such line", "`old` occurs 0 times, not once: no such line"),
        ("import torch", "`old` occurs 3 times, not once: import torch"),
        (Body("no_such"), "`old` is defined 0 times, not once: no_such"),
    ],
)
def test_an_edit_that_does_not_fit_the_program_is_reported(old: str, why: str) -> None:
    wrong = Table("labs/lab02_ddp.py")
    wrong("stale", step=4, hint="other", old=old, new="")
    with pytest.raises(Stale, match=f"^stale, a wrong answer to labs/lab02_ddp.py: {why}$"):
        wrong["stale"].program()


MAKE_GROUPS = {
    "by_keyword": """
    inner = [dist.new_group(ranks=range(n * ranks, n * ranks + ranks)) for n in range(nodes)]
    outer = [dist.new_group(ranks=range(r, nodes * ranks, ranks)) for r in range(ranks)]
    other = dist.GroupMember.NON_GROUP_MEMBER
    return tuple(next(group for group in made if group != other) for made in (inner, outer))
""",
    "by_enumeration": """
    inner, _ = dist.new_subgroups(ranks)
    across = [list(range(r, nodes * ranks, ranks)) for r in range(ranks)]
    return inner, dist.new_subgroups_by_enumeration(across)[0]
""",
    "by_a_mesh": """
    mesh = dist.init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("nodes", "ranks"))
    return mesh.get_group("ranks"), mesh.get_group("nodes")
""",
}


def test_lab09_accepts_groups_that_different_functions_create(tmp_path: Path) -> None:
    """These right answers differ from the finished program."""
    reference = REFERENCES["lab09"]
    answers = [tmp_path / f"{reference.stem}-{name}.py" for name in MAKE_GROUPS]
    for path, answer in zip(answers, MAKE_GROUPS.values(), strict=True):
        path.write_text(edited(reference.read_text(), (Body("make_groups"), answer)))
    done = run("python", LABS / "check.py", "--step", "3", *answers, cwd=tmp_path)
    assert done.stdout.count("step 3  passed") == len(answers), done.stdout + done.stderr


def copy_grading(folder: Path) -> None:
    """Copy the labs and everything that check.py needs into a folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.txt", "*.svg")
    for name in ("labs", "graders", "src/worldsize/execution"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "src/worldsize/__init__.py", folder / "src/worldsize")


# --- the finished program and the starter ----------------------------------------------------


def graded_on_its_page(lab: str) -> bool:
    """Return whether a transcript shows the verdict on the finished program.

    In that case, the test of the transcript already grades it.
    """
    command = f"python labs/check.py labs/{REFERENCES[lab].name}"
    program = Program(ROOT, REFERENCES[lab])
    found = (each.commands for each in program.transcripts().values())
    return any(each.command_line == command for commands in found for each in commands)


@pytest.mark.parametrize("lab", [lab for lab in REFERENCES if not graded_on_its_page(lab)])
def test_the_finished_program_passes_every_step(lab: str, tmp_path: Path) -> None:
    done = check(REFERENCES[lab], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 steps pass" in done.stdout


ENDS = {
    "lab01": "wrong\n  nothing",
    "lab02": "all versions reach the parameters of a single process",
    "lab03": "the losses are those of one process",
    "lab04": "three precisions, one loss",
    "lab05": "all stages, offload and FSDP2 equal one process",
    "lab10": "with every cut, the last loss is 2.4609, as in one process",
    "lab11": "trainer and sampler agree in every iteration",
}


class LabRun(NamedTuple):
    lab: str
    ranks: int

    @property
    def sampled(self) -> bool:
        """Return whether `make test` runs this lab with this number of ranks.

        It runs each lab with one rank, and a third of the labs with more ranks.
        """
        return self.ranks == 1 or is_sampled(str(self), REFERENCES[self.lab], 3)

    def __str__(self) -> str:
        return f"{self.lab}-{self.ranks}"


# numbers of ranks that are not in the transcripts; lab 06 is one process
RANKS = {"lab10": [1, 2], "lab11": [2]}
RUNS = [LabRun(lab, n) for lab in ENDS for n in RANKS.get(lab, [1, 3])]


@pytest.mark.parametrize("lab_run", RUNS, ids=str)
def test_the_finished_program_runs_in_a_folder_without_other_files(
    lab_run: LabRun, pytestconfig: pytest.Config
) -> None:
    lab, ranks = lab_run
    reference, warm = REFERENCES[lab], pytestconfig.stash[SESSION].launcher
    command = f"torchrun --nproc-per-node={ranks} {reference.name}"
    if warm is not None and not warm.accepts(command, f"labs/{reference.name}", number=1):
        warm = None  # as typed
    with runner.empty_folder() as folder:
        (folder / reference.name).write_text(reference.read_text())
        done = runner.run(command, folder, limit=HANG, launcher=warm)
    assert (done.status, done.timed_out, done.leftovers) == (0, False, []), (
        done.stdout + done.stderr
    )
    assert ENDS[lab] in done.stdout
    assert [f"step {n}" in done.stdout for n in range(1, 9)] == [True] * 8


def test_lab03_waits_until_threads_have_freed_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of gloo frees the buffers of a collective shortly after the collective ends."""
    import torch

    monkeypatch.setenv("RANK", "0")
    lab = importlib.import_module("graders.rank").load(REFERENCES["lab03"])
    with lab.Memory("cpu", limit=6000) as memory:
        buffers = [torch.ones(1000)]
        with pytest.raises(lab.OutOfMemory):
            torch.ones(1000)
        monkeypatch.setattr(lab.time, "sleep", lambda _: buffers.clear())
        tensor = torch.ones(1000)
        assert memory.used == tensor.nbytes


REFUSED = {
    "lab03": (5, "24 rows and 96 columns are cut into equal parts: start 1, 2, 3 or 4 ranks"),
    "lab10": (
        3,
        "the number of ranks must be 1, 2, 4 or 8, because 4 heads and 4 layers are cut into "
        "equal parts",
    ),
    "lab11": (
        3,
        "the number of ranks must be 2, 4 or 8, because half of the ranks are samplers, and "
        "the samplers cut 4 heads into equal parts",
    ),
}


@pytest.mark.parametrize("lab", REFUSED)
def test_a_lab_rejects_a_number_of_ranks_that_does_not_divide_its_model(
    lab: str, tmp_path: Path
) -> None:
    ranks, sentence = REFUSED[lab]
    torchrun = ["torchrun", f"--nproc-per-node={ranks}"]
    done = run(*torchrun, REFERENCES[lab], cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count(f"{sentence}\n") == 1


def test_lab05_names_the_missing_package(tmp_path: Path) -> None:
    reference = REFERENCES["lab05"]
    (tmp_path / reference.name).write_text(reference.read_text())
    (tmp_path / "deepspeed.py").write_text("raise ImportError\n")
    torchrun = ["torchrun", "--nproc-per-node=2"]
    done = run(*torchrun, reference.name, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("this lab needs DeepSpeed: pip install deepspeed\n") == 1


def test_lab08_runs_in_a_folder_without_other_files(tmp_path: Path) -> None:
    """Lab 08 starts only one process."""
    reference = REFERENCES["lab08"]
    (tmp_path / reference.name).write_text(reference.read_text())
    done = run("python", reference.name, cwd=tmp_path)
    assert done.returncode == 0, (
        done.stderr
    )  # not empty, because the profiler prints a line there
    assert (
        "seven programs that ran out of memory fit now, and their results are the same"
        in done.stdout
    )
    assert [f"step {n}" in done.stdout for n in range(1, 9)] == [True] * 8


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (None, "a blank: step 1: count all parameters, also biases; then add .*"),
        ("predict_no_mask", "a check that failed: activations: .* predicted, .* measured"),
    ],
)
def test_lab08_ends_with_one_sentence(wrong: str | None, sentence: str, tmp_path: Path) -> None:
    copy = tmp_path / "my_labs" / REFERENCES["lab08"].name
    run("python", LABS / "start.py", "08", cwd=tmp_path)
    if wrong:
        copy.write_text(WRONG["lab08"][wrong].program())
    done = run("python", copy, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(rf"lab08_memory\.py, line \d+, {sentence}", last), done.stdout


def test_a_lab_without_torchrun_prints_the_right_command(tmp_path: Path) -> None:
    done = run("python", REFERENCE, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "start this lab with: torchrun --nproc-per-node=2 lab02_ddp.py\n"


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    done = run("python", LABS / "start.py", "02", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / "my_labs/lab02_ddp.py"


def test_a_starter_runs_to_the_first_blank_and_names_its_line(
    starter: Path, tmp_path: Path
) -> None:
    torchrun = ["torchrun", "--nproc-per-node=2"]
    done = run(*torchrun, starter, cwd=tmp_path)
    assert done.returncode != 0
    reference, blank = done.stdout.splitlines()
    assert reference.startswith("reference: a single process")
    line = re.fullmatch(r"lab02_ddp\.py, line (\d+), a blank: step 1: join .*", blank)
    assert line, blank
    assert "raise NotImplementedError" in starter.read_text().splitlines()[int(line[1]) - 1]


def test_the_line_of_a_blank_in_a_hook_is_named(tmp_path: Path) -> None:
    blank = 'raise NotImplementedError("step 5: start it")'
    text = edited(REFERENCE.read_text(), (Body("HookDDP.start"), blank))
    (tmp_path / "lab02_ddp.py").write_text(text)
    torchrun = ["torchrun", "--nproc-per-node=2"]
    done = run(*torchrun, "lab02_ddp.py", cwd=tmp_path)
    line = text.splitlines().index(f"        {blank}") + 1
    last = done.stdout.splitlines()[-1]
    assert last == f"lab02_ddp.py, line {line}, a blank: step 5: start it"


def test_a_failed_check_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "lab02_ddp.py").write_text(WRONG["lab02"]["average_not_divided"].program())
    torchrun = ["torchrun", "--nproc-per-node=2"]
    done = run(*torchrun, "lab02_ddp.py", cwd=tmp_path)
    assert done.returncode != 0
    sentence = (
        r"lab02_ddp\.py, line \d+, a check that failed: the parameters are not those of .*"
    )
    assert re.fullmatch(sentence, done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            None,
            "a blank: step 1: the number of this thread in the grid, the guard, and the sum",
        ),
        ("add_no_guard", "a check that failed: kernel vector_add, block 0, thread"),
    ],
)
def test_lab06_names_the_line_of_a_kernel(wrong: str | None, sentence: str, tmp_path: Path):
    """The copy imports the emulator from the folder of the labs."""
    reference = REFERENCES["lab06"]
    (tmp_path / "labs").mkdir()
    for name in ("start.py", "cuda_on_cpu.py", reference.name):
        (tmp_path / "labs" / name).write_text((LABS / name).read_text())
    run("python", "labs/start.py", "06", cwd=tmp_path)
    copy = tmp_path / "my_labs" / reference.name
    if wrong:
        copy.write_text(WRONG["lab06"][wrong].program())
    done = run("python", copy, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    line = re.fullmatch(rf"lab06_cuda_basics\.py, line (\d+), {sentence}.*\n", done.stdout)
    assert line, done.stdout
    marks = ('#error "step 1', "c[i] = a[i] + b[i];")
    assert any(mark in copy.read_text().splitlines()[int(line[1]) - 1] for mark in marks)


def test_a_starter_has_all_hints_and_no_solution(starter: Path) -> None:
    text = starter.read_text()
    assert text.count("raise NotImplementedError(") == REFERENCE.read_text().count("# >>> sol")
    assert text.count("# hint: ") == REFERENCE.read_text().count("# hint: ")
    assert "keep_in_bucket(parameter)\n        if self.sync" not in text
    ast.parse(text)


def test_a_starter_is_graded_as_blank(starter: Path, tmp_path: Path) -> None:
    done = check(starter, cwd=tmp_path)
    assert done.returncode == 1
    assert len(re.findall(r"^step \d  blank", done.stdout, re.M)) == 7
    assert "step 7  later" in done.stdout
    assert "0 of 8 steps pass" in done.stdout


def test_start_does_not_overwrite_a_file(starter: Path, tmp_path: Path) -> None:
    starter.write_text("mine\n")
    done = run("python", LABS / "start.py", "02", cwd=tmp_path)
    assert (done.returncode, done.stdout, starter.read_text()) == (1, "", "mine\n")
    assert done.stderr.startswith("my_labs/lab02_ddp.py already exists")


def test_start_lists_the_labs_and_rejects_other_names(tmp_path: Path) -> None:
    listed = run("python", LABS / "start.py", cwd=tmp_path)
    title = "Lab 02: build DDP from scratch, then use PyTorch's DDP"
    assert re.search(f"^02 +{title}$", listed.stdout, re.M)
    for wrong in ("99", "two", "-1", ""):
        done = run("python", LABS / "start.py", wrong, cwd=tmp_path)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert f'"{wrong}" is not the name of a lab' in done.stderr
    assert not (tmp_path / "my_labs").exists()


# --- harmful code of a learner ------------------------------------------------------------

# For each behaviour: the body of average_gradients, and the expected hint.
MISCHIEF = {
    "hangs alone": ("while True:\n    pass", "endless"),
    "sleeps": ("import time\ntime.sleep(1000)", "endless"),
    "exits": ("sys.exit(0)", "exit"),
    "leaves": ("os._exit(0)", "killed"),
    "kills itself": ("os.kill(os.getpid(), 9)", "killed"),
    "crashes in one rank": ("dist.get_rank() and 1 / 0\ndist.barrier()", "crash"),
    "recurses": ("average_gradients(module)", "recursion"),
    "interrupts": ("raise KeyboardInterrupt", "crash"),
    "leaves in one rank": ("dist.get_rank() and os._exit(0)\ndist.barrier()", "killed"),
    "closes everything": ("os.closerange(0, 1000)\nos._exit(3)", "killed"),
    "overflows its stack": ("__import__('ctypes').string_at(0)", "killed"),
    "waits for rank 0": ("dist.get_rank() or dist.barrier()", "some_ranks"),
    "takes no argument": (None, "missing"),
}


@pytest.fixture(scope="module")
def mischief(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the verdict on step 4 for each of these bodies of average_gradients."""
    folder = tmp_path_factory.mktemp("mischief")
    names = [f"lab02_ddp-{number}.py" for number in range(len(MISCHIEF))]
    for name, (body, _) in zip(names, MISCHIEF.values(), strict=True):
        edit = (Body("average_gradients"), body)
        if body is None:
            edit = ("def average_gradients(module: nn.Module)", "def average_gradients()")
        (folder / name).write_text(edited(REFERENCE.read_text(), edit))
    done = check(*names, "--step", "4", "--limit", "2", cwd=folder)
    assert done.returncode == 1, done.stderr
    parts = re.split(r"^lab02_ddp-\d+\.py, graded .*\n", done.stdout, flags=re.M)[1:]
    return dict(zip(MISCHIEF, map(unwrapped, parts), strict=True))


@pytest.mark.parametrize("what", MISCHIEF)
def test_check_survives_a_function_that(what: str, mischief: dict[str, str]) -> None:
    assert hints_in(mischief[what], REFERENCE) == [MISCHIEF[what][1]], mischief[what]


# Each program has an upper bound, so it ends even if the limit that it tests does not work.
PIPES = (
    "import stat, struct\n"
    "pipes = [n for n in range(3, 200) if os.path.exists(f'/proc/self/fd/{n}')]\n"
    "for n in pipes:\n    if stat.S_ISFIFO(os.fstat(n).st_mode):\n        try:\n"
    "            os.write(n, DATA)\n        except OSError:\n            pass\n"
    "dist.barrier()"
)
GREEDY = {
    "forks": (
        "import time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "time.sleep(1000)",
        "processes",
    ),
    "fills memory": (
        "grown = []\nfor _ in range(20):\n    grown.append(b'x' * (100 << 20))",
        "memory",
    ),
    "asks for too large a tensor": ("torch.empty(1 << 40)", "memory"),
    "writes a large file": (
        "with open('full', 'wb') as file:\n    for _ in range(30):\n"
        "        file.write(bytes(10 << 20))",
        "disk",
    ),
    "writes many files": (
        "import time\nfor n in range(30):\n    with open(f'full{n}', 'wb') as file:\n"
        "        file.write(bytes(10 << 20))\ntime.sleep(1000)",
        "disk",
    ),
    "prints a lot": ("for _ in range(1 << 16):\n    print('x' * 1023)", "output"),
    "opens sockets": (
        "import socket\nkept = [socket.socket() for _ in range(2000)]\ndist.barrier()",
        "crash",
    ),
    "calls collectives without end": ("for _ in range(10**6):\n    dist.barrier()", "endless"),
    "ignores signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
        "not_reduced",
    ),
    "removes the grader": (
        "import graders, shutil\nshutil.rmtree(os.path.dirname(graders.__file__))",
        "changes",
    ),
    "writes to the grader": (
        "import graders\nopen(graders.__file__, 'a').write('#')",
        "changes",
    ),
    "removes its own file": ("os.remove(__file__)", "changes"),
    "moves a file onto its own": (
        "open('other', 'w').close()\nos.rename('other', __file__)",
        "changes",
    ),
    "imports the solution": (
        "from labs.lab02_ddp import average_gradients as done\ndone(module)",
        "solution",
    ),
    "reads the solution": (
        "import graders, pathlib\n"
        "pathlib.Path(graders.__file__).parents[1].joinpath('labs/lab02_ddp.py').read_text()",
        "solution",
    ),
    "patches torch.distributed": (
        "dist.all_reduce = dist.broadcast = dist.barrier = lambda *_, **__: None",
        "not_reduced",
    ),
    "patches the finding": (
        "import graders.rank, graders.dsl\ngraders.rank.Wrong = graders.dsl.Wrong = None",
        "killed",
    ),
    "writes half an event": (
        PIPES.replace("DATA", "struct.pack('!i', 99) + b'x'"),
        "not_reduced",
    ),
    "forges an end": (PIPES.replace("DATA", 'b\'\\n{"end": "error"}\\n\''), "not_reduced"),
}
LOW_LIMITS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import check
from graders import sandbox
sandbox.MEMORY, sandbox.PROCESSES, sandbox.DISK = 1 << 30, 40, 32 << 20
sandbox.OUTPUT, sandbox.EVENTS, sandbox.FILES = 8 << 20, 2000, 200
check.main()
"""


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the verdict on step 4 for each of these bodies of average_gradients.

    They exceed limits or change files, so they are graded in a copy of the repository.
    """
    folder = tmp_path_factory.mktemp("greedy")
    copy_grading(folder)
    names = [f"lab02_ddp-{number}.py" for number in range(len(GREEDY))]
    for name, (body, _) in zip(names, GREEDY.values(), strict=True):
        edit = (Body("average_gradients"), body)
        (folder / name).write_text(edited(REFERENCE.read_text(), edit))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    options = ("--step", "4", "--limit", "4")
    done = run("python", "-B", "-c", LOW_LIMITS, folder / "labs", *names, *options, cwd=folder)
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before, "the graded files changed or wrote other files"
    parts = re.split(r"^lab02_ddp-\d+\.py, graded .*\n", done.stdout, flags=re.M)[1:]
    return dict(zip(GREEDY, map(unwrapped, parts), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what processes use")
@pytest.mark.parametrize("what", GREEDY)
def test_check_and_machine_survive_a_function_that(what: str, greedy: dict[str, str]) -> None:
    found = hints_in(greedy[what], REFERENCE)
    expected = GREEDY[what][1]
    if expected == "not_reduced":  # both hints describe a group without an all-reduce
        assert found in (["not_reduced"], ["copy_reduced"]), greedy[what]
    else:
        assert found == [expected], greedy[what]


def test_limits_count_files_and_shared_memory(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    assert sandbox._folder_size(tmp_path) == 3 << 16
    assert sandbox._within("/book/labs", "/book") and sandbox._within("/book", "/book")
    assert not sandbox._within("/bookshelf", "/book")
    if sys.platform == "linux":
        before = processes.memory_of(os.getpid())
        with mmap.mmap(-1, 64 << 20) as shared:
            shared.write(bytes(64 << 20))
            assert processes.memory_of(os.getpid()) > before + (32 << 20)


@pytest.mark.parametrize("slow_rank", range(2))
def test_lab01_waits_for_a_rank_that_is_slow_on_a_busy_machine(
    slow_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grader must wait, even if its timeouts are shorter than the delay of the rank."""
    lab01 = grading.grader("lab01_multi_gpu_setup")
    for name in ("LONG", "SHORT"):
        monkeypatch.setattr(lab01, name, timedelta(microseconds=1))
    submission = ModuleType("submission")

    def exchange(store, call, mine, rank, *rest):
        if rank == slow_rank:
            threading.Event().wait(0.01)
        return lab01.LAB.finished.exchange_metadata(store, call, mine, rank, *rest)

    submission.exchange_metadata = exchange
    assert len(list(lab01.compare(submission, 3))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows whether a process sleeps")
def test_a_delay_of_the_checker_does_not_count_as_sleep_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor, now = grading.supervisor(), [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(processes, "ticks_and_sleep", lambda _: (0, True))
    clock, looks = supervisor.Clock(), 0
    clock.observe([1])
    while clock.asleep <= supervisor.PATIENCE:
        now[0] += 3600.0
        clock.observe([1])
        looks += 1
    assert looks > supervisor.PATIENCE / supervisor.MAX_INTERVAL and not clock.is_over(60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows whether a process sleeps")
def test_a_process_that_waits_for_a_name_server_is_found() -> None:
    waits, pids = processes.waits_for_name_server, [os.getpid()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        assert not waits(pids)
        resolver.connect(("127.0.0.1", 53))  # nothing is sent
        assert waits(pids)


def test_the_mistake_of_a_rank_is_reported_before_the_hang_of_others() -> None:
    """A rank that has found a mistake calls no more collectives. This is not an error."""
    calls = [Call("all_reduce", 1, False, "") for _ in range(2)]
    found = {"what": "a mistake", "hint": "its_hint"}
    ranks = [
        RankReport(calls=calls[:1], end="wrong", error=found),
        RankReport(calls=calls, end="done"),
    ]
    with pytest.raises(Wrong, match="a mistake"):
        list(verdict.judge(Group(2, ranks), Step(1, "", "", ())))


def test_collectives_are_compared_within_each_group() -> None:
    """Point-to-point messages and collectives of other groups may differ between ranks."""
    call, pairs = Call, [(0, 1), (0, 1), (2, 3), (2, 3)]
    in_pairs = [call("all_reduce", 1 + min(pair), False, "", members=pair) for pair in pairs]
    in_all = [call("barrier", 0, False, "")] * 4
    messages = [call("send" if rank % 2 else "recv", 8, False, "") for rank in range(4)]
    step = Step(1, "", "", ())
    ranks = [
        RankReport(calls=list(calls)) for calls in zip(in_pairs, messages, in_all, strict=True)
    ]
    verdict.compare_calls(Group(4, ranks), step)
    ranks[3].calls[0] = call("broadcast", 3, False, "", members=(2, 3))
    with pytest.raises(Wrong, match="elements, and rank 3 called broadcast with 3"):
        verdict.compare_calls(Group(4, ranks), step)
    del ranks[3].calls[0]
    what = "only rank 2 of 4 called all_reduce with 3 elements in the group of ranks 2 and 3"
    with pytest.raises(Wrong, match=what):
        verdict.compare_calls(Group(4, ranks), step)


def test_a_step_replaces_the_code_that_it_does_not_grade() -> None:
    tools = importlib.import_module("graders.dsl")
    modules = [ModuleType("lab") for _ in range(2)]
    for number, module in enumerate(modules):
        text = f"def {{}}({{}}): return {number}\n".format
        methods = "".join(f"    {text(name, 'self')}" for name in ("graded", "other"))
        code = f"{text('graded', '')}{text('other', '')}class Kind:\n{methods}"
        exec(code, vars(module))
    reference, submission = modules
    tools.keep_only(submission, reference, "graded", "Kind.graded")
    kind = submission.Kind()
    results = submission.graded(), submission.other(), kind.graded(), kind.other()
    assert results == (1, 0, 1, 0)


def test_tensors_of_different_shapes_are_not_equal() -> None:
    torch, tools = map(importlib.import_module, ("torch", "graders.dsl"))
    assert tools.allclose(torch.ones(2, 3), torch.ones(2, 3))
    assert not tools.allclose(torch.ones(3), torch.ones(2, 3))
    assert not tools.allclose(torch.ones(1), torch.ones(()))


def test_check_survives_floods_orphans_and_broken_files(tmp_path: Path) -> None:
    text = REFERENCE.read_text()
    function = re.search(r"(?s)def average_gradients.*?# <<< solution", text)[0]
    flood = "    for _ in range(20_000):\n        print('x' * 200)\n"
    orphan = (
        "    import subprocess\n"
        "    subprocess.Popen(['setsid', 'sleep', '1000'], start_new_session=True)\n"
    )
    head, body = function.split("gradients(module: nn.Module) -> None:\n", 1)
    files = {
        "flood": text.replace(function, f"{head}gradients(module):\n{flood}{body}"),
        "orphan": text.replace(function, f"{head}gradients(module):\n{orphan}{body}"),
        "syntax": text + "def broken(:\n",
        "deleted": text.replace("def average_gradients", "def another_name"),
        "top": text + "import sys\nsys.exit(5)\n",
    }
    for name, content in files.items():
        (tmp_path / f"lab02_ddp-{name}.py").write_text(content)
    names = [f"lab02_ddp-{name}.py" for name in files]
    done = check(*names, "--step", "4", cwd=tmp_path)  # run() fails if the orphan still runs
    parts = re.split(r"^lab02_ddp-\w+\.py, graded .*\n", done.stdout, flags=re.M)[1:]
    result = dict(zip(files, map(unwrapped, parts), strict=True))
    hints = all_hints(REFERENCE)
    assert "step 4  passed" in result["flood"], result["flood"]
    assert "step 4  passed" in result["orphan"], result["orphan"]
    assert "cannot be imported: SyntaxError, line" in result["syntax"]
    assert hints["syntax"] in result["syntax"]
    assert "the file has no average_gradients" in result["deleted"]
    assert hints["missing"] in result["deleted"]
    assert hints["exit"] in result["top"]


def test_the_other_steps_pass_if_one_step_hangs(tmp_path: Path) -> None:
    hanging = (Body("average_gradients"), "dist.get_rank() or dist.barrier()")
    (tmp_path / "lab02_ddp.py").write_text(edited(REFERENCE.read_text(), hanging))
    done = check("lab02_ddp.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "step 4  wrong" in done.stdout
    assert "7 of 8 steps pass" in done.stdout


def test_check_is_deterministic(tmp_path: Path) -> None:
    (tmp_path / "lab02_ddp.py").write_text(WRONG["lab02"]["average_weights_only"].program())
    outputs = {check("lab02_ddp.py", "--step", "4", cwd=tmp_path).stdout for _ in range(3)}
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["nothing.py"],
            "The name of the file nothing.py must begin with the name of a lab, such as "
            "lab02_ddp, or of a part of the assessment, such as capstone. Rename the file.",
        ),
        (
            ["lab02_ddp.py"],
            "There is no file lab02_ddp.py. To write one, run: python labs/start.py lab02_ddp",
        ),
        (
            [str(REFERENCE), "--step", "9"],
            "There is no step 9 in lab02_ddp. Choose a step from 1 to 8.",
        ),
    ],
)
def test_check_reports_wrong_arguments_in_one_sentence(
    arguments, sentence, tmp_path: Path
) -> None:
    done = check(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, sentence + "\n")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("lab02_ddp.txt", REFERENCE, "lab02_ddp.txt is not a Python file. Rename it"),
        (
            "lab02_ddp.py",
            b"\n",
            "lab02_ddp.py is empty. To get a new copy in my_labs/, delete this file and run",
        ),
        (
            "lab02_ddp.py",
            b'"""Lab 02."""\n# later\n',
            "lab02_ddp.py contains no code. To get a new copy in my_labs/",
        ),
        (
            "lab02_ddp.py",
            "import os\n".encode("utf-16"),
            "is not a text file in UTF-8. Save it again",
        ),
        (
            "lab02_ddp.py",
            REFERENCES["lab08"],
            "contains functions of lab08_memory, and no function of lab02_ddp. Rename",
        ),
        (
            "capstone.py",
            REFERENCE,
            "contains functions of lab02_ddp, and no function of capstone",
        ),
        (
            "my_lab02.py",
            REFERENCE,
            "The name of the file my_lab02.py must begin with the name",
        ),
        ("lab99.py", REFERENCE, "The name of the file lab99.py must begin with the name of a"),
    ],
)
def test_check_rejects_a_file_that_it_cannot_grade(name, content, sentence, tmp_path) -> None:
    """The program must end with one sentence before it imports torch."""
    content = content if isinstance(content, bytes) else content.read_bytes()
    (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-X", "importtime", LABS / "check.py", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1 and not done.stdout
    assert len(lines) == 1 and sentence in lines[0], lines
    assert not re.search(r"\| +torch$", done.stderr, re.M)


def test_check_rejects_the_file_of_a_different_lab(tmp_path: Path) -> None:
    """Save each finished program under the name of the next lab; check.py must refuse it."""
    command = importlib.import_module("labs.check")
    programs = [*REFERENCES.values(), *(ROOT / f"assessment/{name}.py" for name in ASSESSED)]
    for program, other in zip(programs, [*programs[1:], programs[0]], strict=True):
        (tmp_path / other.name).write_bytes(program.read_bytes())
        message = f"contains functions of {program.stem}, and no function of {other.stem}"
        with pytest.raises(SystemExit, match=message):
            command.lab_name(tmp_path / other.name)


@pytest.mark.parametrize(
    ("name", "lab"),
    [
        ("lab02_ddp_é.py", "lab02_ddp"),
        ("lab02_ddp copy.py", "lab02_ddp"),
        ("lab02_ddp (1).py", "lab02_ddp"),
        ("Lab02_DDP.py", "lab02_ddp"),
        ("lab02.py", "lab02_ddp"),
        ("lab02-mine.py", "lab02_ddp"),
        ("assignment4.py", "assignment4_two_levels"),
        ("challenge_kernel 2.py", "challenge_kernel"),
    ],
)
def test_check_finds_the_lab_by_the_beginning_of_the_name(
    name: str, lab: str, tmp_path: Path
) -> None:
    folder = LABS if lab.startswith("lab") else ROOT / "assessment"
    (tmp_path / name).write_bytes((folder / f"{lab}.py").read_bytes())
    assert importlib.import_module("labs.check").lab_name(tmp_path / name) == lab


# For each end of a file, which begins on line 3: the reported error, and the hint.
IMPORTS = {
    "  import os\n": ("IndentationError, line 3: unexpected indent", "syntax"),
    "if os:\n        pass\n\tpass\n": ("TabError, line 5: inconsistent use of tabs", "syntax"),
    "import no_such\n": ("ModuleNotFoundError, line 3: No module named 'no_such'", "module"),
    "1 / 0\n": ("ZeroDivisionError, line 3: division by zero", "import"),
}


def test_an_import_that_fails_gets_its_hint(tmp_path: Path) -> None:
    """The names of these files contain a space and a letter that is not ASCII."""
    names = [f"lab02_ddp é {number}.py" for number in range(len(IMPORTS))]
    for name, code in zip(names, IMPORTS, strict=True):
        (tmp_path / name).write_text(f"import sys\nimport os\n{code}", "utf-8")
    done = check(*names, "--step", "2", cwd=tmp_path)
    parts = re.split(r"^lab02_ddp é \d\.py, graded .*\n", done.stdout, flags=re.M)[1:]
    for part, (error, hint) in zip(map(unwrapped, parts), IMPORTS.values(), strict=True):
        assert f"the file cannot be imported: {error}" in part
        assert hints_in(part, REFERENCE) == [hint]


STOPPED = (
    r": when the checker stopped them, rank 0 was in line (\d+) and rank 1 was in line (\d+)"
)
# For each body of average_gradients: the message, the lines of the ranks, and the hint.
LOOPS = {
    "while True:\n    pass": ("ranks 0 and 1 did not end", ("pass", "pass"), "endless"),
    "while not dist.get_rank():\n    len('')\ndist.barrier()": (
        "ranks 0 and 1 did not end", ("(", "dist.barrier()"), "endless",
    ),
    "if dist.get_rank():\n    __import__('time').sleep(1000)\ndist.barrier()": (
        "only rank 0 of 2 called barrier with 0 elements", ("dist.barrier()", "sleep(1000)"),
        "some_ranks",
    ),
}  # fmt: skip


def test_an_endless_loop_is_ended_and_the_line_of_each_rank_is_named(tmp_path: Path) -> None:
    """The message also names the line of a rank that waits in a collective."""
    names = [f"lab02_ddp é {number}.py" for number in range(len(LOOPS))]
    for name, body in zip(names, LOOPS, strict=True):
        program = edited(REFERENCE.read_text(), (Body("average_gradients"), body))
        (tmp_path / name).write_text(program, "utf-8")
    done = check(*names, "--step", "4", "--limit", "5", cwd=tmp_path)
    parts = re.split(r"^lab02_ddp é \d\.py, graded .*\n", done.stdout, flags=re.M)[1:]
    for name, part, (message, lines, hint) in zip(
        names, map(unwrapped, parts), LOOPS.values(), strict=True
    ):
        found = re.search(message + STOPPED, part)
        assert found, part
        assert hints_in(part, REFERENCE) == [hint]
        text = (tmp_path / name).read_text("utf-8").splitlines()
        for number, words in zip(found.groups(), lines, strict=True):
            is_loop = words == "pass" and "while True" in text[int(number) - 1]
            assert is_loop or words in text[int(number) - 1], (number, words)


def test_a_rank_may_use_a_tenth_of_the_limit_itself() -> None:
    supervisor = grading.supervisor().Supervisor
    limits = (0.5, 3.0, 60.0, 200.0)
    step = grading.grader("lab02_ddp").LAB[1]
    own_limits = [supervisor("lab02_ddp", limit).own_limit(step) for limit in limits]
    assert own_limits == [0.5, 1.0, 6.0, 20.0]
    compiles = dataclasses.replace(step, compiles=True)
    assert [supervisor("lab02_ddp", limit).own_limit(compiles) for limit in limits] == [*limits]


@pytest.mark.parametrize("program", ["check.py", "start.py"])
def test_help_is_printed_without_importing_torch(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", LABS / program, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout and not re.search(r"\| +(torch|numpy)$", done.stderr, re.M)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("assignment4", "wrote my_labs/assignment4_two_levels.py"),
        ("assignment 4", "wrote my_labs/assignment4_two_levels.py"),
        ("lab02", "wrote my_labs/lab02_ddp.py"),
        ("2", "wrote my_labs/lab02_ddp.py"),
        ("lab02_ddp", "wrote my_labs/lab02_ddp.py"),
        ("labs/lab02_ddp.py", "wrote my_labs/lab02_ddp.py"),
        ("Capston", "wrote my_labs/capstone.py"),
        ("challenge", "wrote my_labs/challenge.py"),
        ("assignmnt4_two_levels", "Did you mean assignment4_two_levels"),
        ("cpastone", "Did you mean capstone?"),
        ("assignment", "Did you mean assignment1_allocator or assignment2_tensor_cores"),
        (
            "lab99",
            '"lab99" is not the name of a lab or part of the assessment. To list all labs, run '
            "python labs/start.py without a name.",
        ),
    ],
)
def test_start_accepts_the_beginning_of_a_name(name: str, message: str, tmp_path: Path) -> None:
    command = [sys.executable, LABS / "start.py", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert message in done.stdout + done.stderr, done
    assert (tmp_path / "my_labs").exists() == message.startswith("wrote")


def test_a_copy_of_the_folders_works_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    copy_grading(tmp_path)
    done = run("python", "labs/start.py", "2", cwd=tmp_path)
    assert "grade it: python labs/check.py my_labs/lab02_ddp.py" in done.stdout
    done = run("python", "labs/check.py", "my_labs/lab02_ddp.py", "--step", "1", cwd=tmp_path)
    assert "step 1  blank" in done.stdout
    for number, folder in enumerate(["src/worldsize/execution", "graders"]):
        (tmp_path / folder).rename(tmp_path / f"elsewhere{number}")
        done = run("python", "labs/check.py", "x.py", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("check.py needs the folder ")
        assert f"{folder}, which does not exist. Use a complete copy" in done.stderr


UNDER_A_HOOK = """
import os, runpy, signal, sys, tempfile
{}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        # Python ignores a KeyboardInterrupt in a hook of a fork. The module logging has a hook.
        ("os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))",
         "Grading was interrupted."),
        # no folder has free space
        ("tempfile._candidate_tempdir_list = list",
         f"{host_checks.DISK_FULL}: check.py cannot write its temporary files. Free some space, or set the "
         "environment variable TMPDIR to a different folder."),
    ],
    ids=["an interrupt while ranks are forked", "no folder for temporary files"],
)  # fmt: skip
def test_check_prints_the_reason_if_it_ends_early(
    hook: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "under_a_hook.py").write_text(UNDER_A_HOOK.format(hook))
    lab = LABS / "lab02_ddp.py"
    done = run("python", "under_a_hook.py", LABS / "check.py", lab, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, [message]), done
    assert "passed" not in done.stdout and "Traceback" not in done.stderr
