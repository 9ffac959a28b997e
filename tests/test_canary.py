"""Tests of the canary: a package whose next release says something else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import Book

from worldsize.model import ROOT
from worldsize.tools import dependency_canary

INPUTS = ("src",)


def _wheel(folder: Path, version: str, says: str) -> None:
    """Write a package of one module, `drifts`, as a wheel."""
    info = f"drifts-{version}.dist-info"
    with zipfile.ZipFile(folder / f"drifts-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("drifts.py", f"SAYS = {says!r}\n")
        head = f"Metadata-Version: 2.1\nName: drifts\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", head)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/top_level.txt", "drifts\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_release_that_says_something_else_is_reported(book: Book, tmp_path: Path) -> None:
    wheels, own = tmp_path / "wheels", tmp_path / "own"
    wheels.mkdir()
    _wheel(wheels, "1.0", "what it said")
    _wheel(wheels, "2.0", "something else")
    book.write("requirements/test.txt", "drifts==1.0\n# not this==3.0\n")
    code = "import drifts\nprint(drifts.SAYS)\n"
    book.program("uses", code, "$ python uses.py\nwhat it said\n")
    book.program("other", "print('as ever')\n", "$ python other.py\nas ever\n")

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    (folder,) = own.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheels / "drifts-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(folder)
    ours = sysconfig.get_path("purelib")
    (folder / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "PYTEST_"))
    }
    env |= {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }

    def canary(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(own / "bin/python"),
            "-m",
            "worldsize.tools.dependency_canary",
            *arguments,
        ]
        return subprocess.run(command, cwd=book.root, env=env, capture_output=True, text=True)

    done = canary("--report", "drift.md")
    assert done.returncode == 1, done.stderr
    assert done.stdout == book.read("drift.md")
    assert "## drifts 2.0: 1 not as recorded, 2 run\n" in done.stdout, done.stdout
    assert "\n- what it said\n+ something else\n" in done.stdout
    assert "snippets/t/uses.cpu.txt:2: `python uses.py`" in done.stdout
    assert "other" not in done.stdout  # it does not import what drifts
    now = subprocess.run(
        [str(own / "bin/python"), "-c", "import drifts; print(drifts.SAYS)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert now.stdout == "what it said\n"  # what was installed is as it was

    none = "No package of the book has a newer release.\n"
    assert [canary(*which).stdout for which in (["drifts=1.0"], ["--but", "drifts"])] == [
        none
    ] * 2
    nowhere = canary("drifts=3.0")
    assert nowhere.returncode == 1 and "No matching distribution" in nowhere.stdout
    assert "the book does not pin torch" in canary("torch").stderr


def test_a_run_that_breaks_off_is_not_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "<testsuites/>" > "${0%/*}/results.xml"\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(dependency_canary, "over", lambda *_: nullcontext((python, "")))
    found = dependency_canary.hold(tmp_path, {"drifts": "2.0"}, pre=False)
    assert found.wrong == {"pytest": "it left with status 3"}
