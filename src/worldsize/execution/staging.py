"""Copy the files that a program needs into the folder in which its commands run."""

from __future__ import annotations

import shutil
from pathlib import Path

from worldsize.model.program import LAUNCH, Program

# The files of the labs, with the same paths as in the repository. The graders use `execution`.
LABS = ("labs", "assessment", "graders", "src/worldsize/__init__.py", "src/worldsize/execution")
NO_COPIES = shutil.ignore_patterns("__pycache__", "*.txt", ".*")


def lab_files(root: Path) -> dict[str, Path]:
    """Return the files and folders that a learner needs for the labs, by name."""
    return {name: root / name for name in LABS if (root / name).exists()}


def required_files(program: Program) -> dict[str, Path]:
    """Return the files and folders that a program's commands need, by their name in the folder.

    For a program of snippets/, these are the program itself, its dependencies and its data. For
    a lab, these are all labs. For a program of labs/launch/, this is the whole folder, because
    its commands run in this folder.
    """
    if program.name.startswith(LAUNCH):
        return {".": program.root / LAUNCH}
    if program.name.startswith(("labs/", "assessment/")):
        return lab_files(program.root)
    paths = (program.path, *(each.path for each in program.dependencies()), *program.data())
    return {path.name: path for path in paths}


def stage_files(files: dict[str, Path], folder: Path) -> None:
    """Copy files and folders into ``folder`` under their names.

    Transcripts and hidden files are not copied from a folder.
    """
    for name, source in files.items():
        target = folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=NO_COPIES, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def stage_program(program: Program, folder: Path, source: str | None = None) -> None:
    """Copy all files that a program needs; ``source`` replaces the text of the program."""
    files = required_files(program)
    stage_files(files, folder)
    if source is not None:
        name, origin = next(
            each for each in files.items() if program.path.is_relative_to(each[1])
        )
        (folder / name / program.path.relative_to(origin)).write_text(source, "utf-8")
