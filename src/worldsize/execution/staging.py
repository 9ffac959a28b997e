"""Staging: the files that a program needs, copied into the folder in which its commands run."""

from __future__ import annotations

import shutil
from pathlib import Path

from worldsize.model.program import LAUNCH, Program

# what a learner has, with the same paths as in the repository; the graders use `execution`
LABS = ("labs", "assessment", "graders", "src/worldsize/__init__.py", "src/worldsize/execution")
NO_COPIES = shutil.ignore_patterns("__pycache__", "*.txt", ".*")


def labs(root: Path) -> dict[str, Path]:
    """Return the folders that a learner needs for the labs, by name."""
    return {name: root / name for name in LABS if (root / name).exists()}


def required_files(program: Program) -> dict[str, Path]:
    """Return the files and folders that a program's commands need, by their name in the folder.

    A program of snippets/ needs itself, the programs of its folder that its commands name or
    that it imports, and the tables that these programs read. A lab needs all labs, and a
    program of labs/launch/ needs that whole folder, because its commands are typed in there.
    """
    if program.name.startswith(LAUNCH):
        return {".": program.root / LAUNCH}
    if program.name.startswith(("labs/", "assessment/")):
        return labs(program.root)
    paths = (program.path, *(each.path for each in program.dependencies()), *program.data())
    return {path.name: path for path in paths}


def stage_files(files: dict[str, Path], folder: Path) -> None:
    """Copy files and folders into ``folder`` under their names, without transcripts."""
    for name, source in files.items():
        target = folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=NO_COPIES, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def stage_program(program: Program, folder: Path, source: str | None = None) -> None:
    """Copy all that a program needs; ``source`` replaces the text of the program itself."""
    files = required_files(program)
    stage_files(files, folder)
    if source is not None:
        name, origin = next(
            each for each in files.items() if program.path.is_relative_to(each[1])
        )
        (folder / name / program.path.relative_to(origin)).write_text(source, "utf-8")
