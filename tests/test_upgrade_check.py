"""Tests of the upgrade check, with a package whose next release prints something else."""

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
from worldsize.tools import upgrade_check

INPUTS = ("src",)


def _write_wheel(folder: Path, version: str, text: str) -> None:
    """Write a wheel of the package `changing`, which has one module with the text `TEXT`."""
    info = f"changing-{version}.dist-info"
    with zipfile.ZipFile(folder / f"changing-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("changing.py", f"TEXT = {text!r}\n")
        head = f"Metadata-Version: 2.1\nName: changing\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", head)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/top_level.txt", "changing\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_release_that_changes_an_output_is_reported(book: Book, tmp_path: Path) -> None:
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    wheels.mkdir()
    _write_wheel(wheels, "1.0", "old text")
    _write_wheel(wheels, "2.0", "new text")
    book.write("requirements/test.txt", "changing==1.0\n# comment==3.0\n")
    code = "import changing\nprint(changing.TEXT)\n"
    book.program("uses", code, "$ python uses.py\nold text\n")
    book.program("other", "print('same')\n", "$ python other.py\nsame\n")

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (folder,) = venv.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheels / "changing-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(folder)
    packages = sysconfig.get_path("purelib")  # of this Python
    (folder / "packages.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
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

    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(venv / "bin/python"),
            "-m",
            "worldsize.tools.upgrade_check",
            *arguments,
        ]
        return subprocess.run(command, cwd=book.root, env=env, capture_output=True, text=True)

    done = check("--report", "report.md")
    assert done.returncode == 1, done.stderr
    assert done.stdout == book.read("report.md")
    assert "## changing 2.0: 1 failed, 2 tests ran\n" in done.stdout, done.stdout
    assert "\n- old text\n+ new text\n" in done.stdout
    assert "snippets/t/uses.cpu.txt:2: `python uses.py`" in done.stdout
    assert "other" not in done.stdout  # it does not import the package
    now = subprocess.run(
        [str(venv / "bin/python"), "-c", "import changing; print(changing.TEXT)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert now.stdout == "old text\n"  # the installed package did not change

    up_to_date = "No package of the book has a newer release.\n"
    assert [check(*which).stdout for which in (["changing=1.0"], ["--but", "changing"])] == [
        up_to_date
    ] * 2
    missing = check("changing=3.0")
    assert missing.returncode == 1 and "No matching distribution" in missing.stdout
    assert "requirements/*.txt do not pin torch" in check("torch").stderr


def test_a_crash_of_pytest_is_reported_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "<testsuites/>" > "${0%/*}/results.xml"\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(upgrade_check, "environment_with", lambda *_: nullcontext((python, "")))
    found = upgrade_check.run_tests(tmp_path, {"changing": "2.0"}, pre=False)
    assert found.failures == {"pytest": "pytest exited with status 3"}
