"""Try newer releases of the dependencies, and report what changes.

    export PYTHONPATH=src
    python -m worldsize.tools.upgrade_check                  each pinned package separately
    python -m worldsize.tools.upgrade_check torch=2.16.0     only this release
    python -m worldsize.tools.upgrade_check --but torch      all packages except torch
    python -m worldsize.tools.upgrade_check --together       all packages at once

Each newer release is installed into a temporary environment on top of the installed packages,
which do not change. Then the programs that import the package run. For torch, all tests run. If
no program imports the package, the tests of the site run. A program that uses the package only
through a different package is tested only with `--together`. `--report FILE` also writes the
report, as Markdown for an issue.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from worldsize.model.program import programs

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
ALL_TESTS = ["snippets", "labs", "assessment", "docs", "tests"]
SITE = ["docs", "tests/test_site.py"]
MAX_DIFF_LINES = 60  # a report shows at most this many lines of a difference


@dataclass
class UpgradeResult:
    """The result of testing the book with one or more packages at their newest release."""

    packages: dict[str, str]
    failures: dict[str, str] = field(default_factory=dict)  # name of the test → its message
    count: int = 0  # tests that ran

    @property
    def name(self) -> str:
        return " ".join(f"{name} {version}" for name, version in self.packages.items())


def pins(root: Path) -> dict[str, str]:
    """Return the packages that the book pins, each with its version."""
    texts = (path.read_text("utf-8") for path in sorted((root / "requirements").glob("*.txt")))
    return dict(pair for text in texts for pair in _PIN.findall(text))


def newest(name: str, pre: bool) -> str:
    """Return the newest release of a package; an empty string if pip finds no release."""
    done = _pip("index", "versions", name, *["--pre"] * pre)
    found = re.match(r"\S+ \((\S+)\)", done.stdout)
    return found[1] if found else ""


def affected_tests(root: Path, packages: dict[str, str]) -> list[str]:
    """Return the paths of the tests that these packages can change, for pytest."""
    if len(packages) > 1 or "torch" in packages:
        return [each for each in ALL_TESTS if (root / each).exists()]
    (name,) = packages
    provided = metadata.packages_distributions()
    modules = [module for module, by in provided.items() if name in by] or [name]
    found = [each.name for each in programs(root) if each.imports(*map(re.escape, modules))]
    return found or [each for each in SITE if (root / each).exists()]


@contextmanager
def environment_with(packages: dict[str, str], pre: bool) -> Iterator[tuple[Path, str]]:
    """Yield the Python of an environment with these packages, and the error message of pip.

    The environment also contains all packages of this Python. The message is empty if pip
    succeeds.
    """
    with tempfile.TemporaryDirectory(prefix="upgrade-check-") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = Path(folder, "bin/python")
        link = Path(
            sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}),
            "installed_packages.pth",
        )
        link.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        pins = [f"{name}=={version}" for name, version in packages.items()]
        done = _pip("--python", str(python), "install", *["--pre"] * pre, *pins)
        yield python, done.stderr if done.returncode else ""


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip, and return its exit status and its output."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_tests(root: Path, packages: dict[str, str], pre: bool) -> UpgradeResult:
    """Run the tests that these packages can change, in an environment with the packages."""
    result = UpgradeResult(packages)
    with environment_with(packages, pre) as (python, pip_error):
        if pip_error:
            result.failures["pip install"] = pip_error
            return result
        xml = python.with_name("results.xml")
        tests = affected_tests(root, packages)
        command = [str(python), "-m", "pytest", "--no-cache", f"--junitxml={xml}", *tests]
        env = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(root / "src"))}
        done = subprocess.run(command, cwd=root, env=env, stdout=sys.stderr, check=False)
        cases = ElementTree.parse(xml).iter("testcase") if xml.exists() else []
        for case in cases:
            result.count += case.find("skipped") is None
            for kind in (*case.iter("failure"), *case.iter("error")):
                name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
                result.failures[name] = kind.text or kind.get("message", "")
        if done.returncode and not result.failures:  # it crashed, or it found no test
            result.failures["pytest"] = f"pytest exited with status {done.returncode}"
    return result


def report(results: list[UpgradeResult]) -> str:
    """Return the results as Markdown."""
    parts = ["These are the differences that the newest releases of the book's packages cause."]
    for result in results:
        failed = len(result.failures)
        outcome = f"{failed} failed" if failed else "nothing changed"
        parts.append(f"## {result.name}: {outcome}, {result.count} tests ran")
        for name, why in result.failures.items():
            lines = why.strip().splitlines()
            if (omitted := len(lines) - MAX_DIFF_LINES) > 0:
                lines = [*lines[:MAX_DIFF_LINES], f"… and {omitted} more lines"]
            parts += [f"`{name}`", "\n".join(["````diff", *lines, "````"])]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Test the book with newer packages; return the number of installations with a failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="NAME[=VERSION]")
    parser.add_argument(
        "--but", action="append", default=[], metavar="NAME", help="skip this package"
    )
    parser.add_argument("--together", action="store_true", help="install all packages at once")
    parser.add_argument("--pre", action="store_true", help="also install pre-releases")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write the report into this file"
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    pinned, root = pins(options.root), options.root.resolve()
    requested = dict(each.partition("=")[::2] for each in options.packages) or dict.fromkeys(
        pinned, ""
    )
    if unknown := [name for name in requested if name not in pinned]:
        parser.error(f"requirements/*.txt do not pin {', '.join(unknown)}")
    requested = {
        name: version or newest(name, options.pre) for name, version in requested.items()
    }
    newer = {
        name: version
        for name, version in requested.items()
        if version not in ("", pinned[name]) and name not in options.but
    }
    groups = [newer] if options.together else [{name: newer[name]} for name in newer]
    results = [run_tests(root, packages, options.pre) for packages in groups if packages]
    text = report(results) if results else "No package of the book has a newer release.\n"
    print(text, end="")
    if options.report:
        options.report.write_text(text, "utf-8")
    return sum(bool(result.failures) for result in results)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
