"""Tests of package_check.py: a complete package passes, and each fault is reported."""

import importlib.util
import os
from pathlib import Path

import pytest
from grading import ROOT
from processes import HANG, start

INPUTS = ["assessment/package_check.py"]
PROGRAM = ROOT / "assessment/package_check.py"

FILES = {
    "pyproject.toml": '[tool.operator]\nname = "graded::twice"\nsamples = "twice:samples"\n',
    "README.md": "| n | old | new |\n|---|---|---|\n| 1024 | 3 | 2 |\n",
    "setup.py": 'CppExtension("twice._C", ["csrc/twice.cpp"])\n',
    "csrc/twice.cpp": "TORCH_CHECK(x);\nTORCH_LIBRARY(graded, m) {}\n"
    "TORCH_LIBRARY_IMPL(graded, CPU, m) {}\n",
    "csrc/twice.cu": "auto s = at::cuda::getCurrentCUDAStream();\nDeviceGuard guard(x);\n"
    "twice<<<1, 1, 0, s>>>();\nC10_CUDA_KERNEL_LAUNCH_CHECK();\n",
    "benchmark.py": "time.perf_counter()\n",
    "tests/test_twice.py": '''\
"""opcheck(op), gradcheck(op)"""


def test_nothing():
    pass
''',
    "twice/__init__.py": """\
import torch


@torch.library.custom_op("graded::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, grad: 2 * grad)


def samples():
    wanted = torch.ones(3, dtype=torch.float64, requires_grad=True)
    shapes = [(torch.ones(n),) for n in (0, 1, 5)]
    return [*shapes, (torch.ones(4, 5).t(),), (wanted,)]
""",
}
# For each fault: the file, a text in it, and the text that replaces it.
WRONG = {
    "names": ("pyproject.toml", "graded::twice", "twice"),
    "kernel": ("csrc/twice.cpp", "TORCH_LIBRARY_IMPL", "IMPL"),
    "build": ("setup.py", "CppExtension", "Nothing"),
    "checked_arguments": ("csrc/twice.cpp", "TORCH_CHECK", "CHECK"),
    "stream": ("csrc/twice.cu", "getCurrentCUDAStream", "getDefaultCUDAStream"),
    "guard": ("csrc/twice.cu", "DeviceGuard", "Nobody"),
    "launch_error": ("csrc/twice.cu", "C10_CUDA_KERNEL_LAUNCH_CHECK", "hope"),
    "fake": ("twice/__init__.py", "register_fake", "print"),
    "autograd": ("twice/__init__.py", "register_autograd", "print"),
    "opcheck": ("tests/test_twice.py", "opcheck(", "look("),
    "gradcheck": ("tests/test_twice.py", "gradcheck(", "look("),
    "benchmark": ("benchmark.py", "perf_counter", "time"),
    "readme": ("README.md", "| 1024 | 3 | 2 |", "soon"),
}
# Faults that only a run of the operator shows, in the same form.
AT_RUN_TIME = {
    "not_cpp": ("README.md", "1024", "1024"),  # no change: Python registers this kernel
    "samples": ("twice/__init__.py", "(0, 1, 5)", "(2, 1, 5)"),
    "gradient": ("twice/__init__.py", "dtype=torch.float64, ", ""),
    "opcheck_fails": ("twice/__init__.py", "torch.empty_like(x)", "x.new_empty(1)"),
    "gradcheck_fails": ("twice/__init__.py", "2 * grad)", "3 * grad)"),
    "import": ("twice/__init__.py", "import torch", "import torch, twice._C"),
    "tests_fail": ("tests/test_twice.py", "pass", "raise ValueError"),
}
# Check all folders in one process, because importing torch takes most of the time. Only two
# folders run the tests of the package: one whose tests pass, and one whose tests fail.
GRADE = """
import subprocess, sys, importlib.util, torch
spec = importlib.util.spec_from_file_location("package_check", sys.argv[1])
checker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checker)
from pathlib import Path
run, passed = subprocess.run, subprocess.CompletedProcess([], 0)
for folder in sys.argv[2:]:
    path = list(sys.path)
    runs_tests = Path(folder).name in ("tests_fail", "complete")
    subprocess.run = run if runs_tests else lambda *command, **options: passed
    print("FOUND", folder, *checker.missing_at_work(Path(folder)), flush=True)
    sys.path[:] = path
    sys.modules.pop("twice", None)
"""


def write(folder: Path, file: str = "", old: str = "", new: str = "") -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert name != file or old in text
        path.write_text(text.replace(old, new) if name == file else text)
    return folder


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("package_check", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_fault_is_reported_in_complete_files(checker, tmp_path: Path) -> None:
    assert list(checker.missing_in_files(write(tmp_path / "twice"))) == []


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_in_a_file_is_reported(fault: str, checker, tmp_path: Path) -> None:
    assert list(checker.missing_in_files(write(tmp_path / "twice", *WRONG[fault]))) == [fault]


def test_every_point_of_the_rubric_has_a_fault(checker) -> None:
    assert set(checker.RUBRIC) == {*WRONG, *AT_RUN_TIME}


def test_a_fault_of_a_running_operator_is_reported(tmp_path: Path) -> None:
    """Each package registers its operator in a separate namespace."""
    folders = []
    complete = write(tmp_path / "complete", "pyproject.toml", "graded::twice", "aten::celu")
    folders.append(str(complete))  # a C++ kernel of torch
    for fault, edit in AT_RUN_TIME.items():
        folder = write(tmp_path / fault, *edit)
        for name in ("pyproject.toml", "twice/__init__.py"):
            path = folder / name
            path.write_text(path.read_text().replace("graded::", f"graded_{fault}::"))
        folders.append(str(folder))
    (tmp_path / "grade.py").write_text(GRADE)
    grade = start(["python", "grade.py", str(PROGRAM), *folders], tmp_path, dict(os.environ))
    out, err = grade.communicate(timeout=HANG)
    assert grade.returncode == 0, err
    lines = [line.split()[1:] for line in out.splitlines() if line.startswith("FOUND")]
    found = {Path(folder).name: faults for folder, *faults in lines}
    assert found["complete"] == [], out
    for fault in AT_RUN_TIME:
        expected = [fault] if fault in ("not_cpp", "import") else sorted([fault, "not_cpp"])
        assert sorted(found[fault]) == expected, out


def test_an_existing_folder_or_an_invalid_name_is_rejected(checker, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name, sentence in (("mine", "I will not overwrite"), ("my-op", "cannot be imported")):
        with pytest.raises(SystemExit, match=sentence):
            checker.begin(tmp_path / name)


def test_a_new_folder_has_every_fault_except_those_of_cuda_code(
    checker, tmp_path: Path
) -> None:
    checker.begin(tmp_path / "mine")
    of_a_gpu = {"stream", "guard", "launch_error"}
    assert set(checker.missing_in_files(tmp_path / "mine")) == {*WRONG} - of_a_gpu
