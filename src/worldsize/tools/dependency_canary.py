"""Canary: what the newest release of a package would change, before a reader meets it.

    python -m worldsize.tools.dependency_canary                  every pin that has a newer
    release, one by one
    python -m worldsize.tools.dependency_canary torch=2.16.0     this one
    python -m worldsize.tools.dependency_canary --but torch      all others
    python -m worldsize.tools.dependency_canary --together       all at once

Each newer release is installed into a folder over the packages that are installed, which stay
as they are; then the programs that import it run (for torch all), or the site where none does.
What needs it through another package shows with `--together`. `--report FILE` writes what came
of it as Markdown, for an issue.
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
EVERYTHING = ["snippets", "labs", "assessment", "docs", "tests"]
SITE = ["docs", "tests/test_site.py"]
LONGEST = 60  # lines of a difference that a report shows


@dataclass
class Drift:
    """One or more packages at their newest release, and what then is not as recorded."""

    packages: dict[str, str]
    wrong: dict[str, str] = field(default_factory=dict)  # by test: what it says
    count: int = 0

    @property
    def name(self) -> str:
        return " ".join(f"{name} {version}" for name, version in self.packages.items())


def pins(root: Path) -> dict[str, str]:
    """The packages that the book pins, each with its version."""
    texts = (path.read_text("utf-8") for path in sorted((root / "requirements").glob("*.txt")))
    return dict(pair for text in texts for pair in _PIN.findall(text))


def newest(name: str, pre: bool) -> str:
    """The newest release of a package that pip finds; empty where it finds none."""
    done = _pip("index", "versions", name, *["--pre"] * pre)
    found = re.match(r"\S+ \((\S+)\)", done.stdout)
    return found[1] if found else ""


def touched(root: Path, packages: dict[str, str]) -> list[str]:
    """What to run for these packages: paths for pytest."""
    if len(packages) > 1 or "torch" in packages:
        return [each for each in EVERYTHING if (root / each).exists()]
    (name,) = packages
    provided = metadata.packages_distributions()
    modules = [module for module, by in provided.items() if name in by] or [name]
    found = [each.name for each in programs(root) if each.imports(*map(re.escape, modules))]
    return found or [each for each in SITE if (root / each).exists()]


@contextmanager
def over(packages: dict[str, str], pre: bool) -> Iterator[tuple[Path, str]]:
    """A Python that has these packages over ours, and why pip refused, if it did."""
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = Path(folder, "bin/python")
        below = Path(
            sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}),
            "below.pth",
        )
        below.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        wanted = [f"{name}=={version}" for name, version in packages.items()]
        done = _pip("--python", str(python), "install", *["--pre"] * pre, *wanted)
        yield python, done.stderr if done.returncode else ""


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def hold(root: Path, packages: dict[str, str], pre: bool) -> Drift:
    """Run what the packages can change, with the packages over ours."""
    drift = Drift(packages)
    with over(packages, pre) as (python, refused):
        if refused:
            drift.wrong["pip install"] = refused
            return drift
        results = python.with_name("results.xml")
        what = touched(root, packages)
        command = [str(python), "-m", "pytest", "--no-cache", f"--junitxml={results}", *what]
        env = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(root))}
        done = subprocess.run(command, cwd=root, env=env, stdout=sys.stderr, check=False)
        cases = ElementTree.parse(results).iter("testcase") if results.exists() else []
        for case in cases:
            drift.count += case.find("skipped") is None
            for kind in (*case.iter("failure"), *case.iter("error")):
                name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
                drift.wrong[name] = kind.text or kind.get("message", "")
        if done.returncode and not drift.wrong:  # it broke off, or found nothing to run
            drift.wrong["pytest"] = f"it left with status {done.returncode}"
    return drift


def report(drifts: list[Drift]) -> str:
    """What came of it, as Markdown."""
    parts = [
        "What the newest releases of the book's packages change, each alone, then together."
    ]
    for drift in drifts:
        says = "all as recorded" if not drift.wrong else f"{len(drift.wrong)} not as recorded"
        parts.append(f"## {drift.name}: {says}, {drift.count} run")
        for name, why in drift.wrong.items():
            lines = why.strip().splitlines()
            if left := len(lines) - LONGEST:
                lines = lines if left < 0 else [*lines[:LONGEST], f"… and {left} lines more"]
            parts += [f"`{name}`", "\n".join(["````diff", *lines, "````"])]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Hold the book to newer packages; how many change something."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="NAME[=VERSION]")
    parser.add_argument("--but", action="append", default=[], metavar="NAME", help="not this")
    parser.add_argument("--together", action="store_true", help="all at once")
    parser.add_argument("--pre", action="store_true", help="also what is no release yet")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write it down here")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    known, root = pins(options.root), options.root.resolve()
    asked = dict(each.partition("=")[::2] for each in options.packages) or dict.fromkeys(
        known, ""
    )
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"the book does not pin {', '.join(unknown)}")
    asked = {name: version or newest(name, options.pre) for name, version in asked.items()}
    newer = {
        name: version
        for name, version in asked.items()
        if version not in ("", known[name]) and name not in options.but
    }
    each = [newer] if options.together else [{name: newer[name]} for name in newer]
    drifts = [hold(root, packages, options.pre) for packages in each if packages]
    said = report(drifts) if drifts else "No package of the book has a newer release.\n"
    print(said, end="")
    if options.report:
        options.report.write_text(said, "utf-8")
    return sum(bool(drift.wrong) for drift in drifts)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
