"""Notebooks: each program that a CPU runs, and each lab, for a browser tab.

A notebook cannot be several processes, and torchrun starts a file. So the notebook of a program
writes the file (`%%writefile`) and all that it needs beside it, and types the commands of its
transcript, whose outputs stand under them until they run again. The notebook of a lab is the
learner's copy: each cell writes a part of it, and the last ones join them, run and grade it.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from worldsize.model.program import Program
from worldsize.site import labs

OWN_NAMES = {  # packages that are not named as they are imported
    "cuda": "cuda-bindings",
    "google": "protobuf",
    "numba": "numba-cuda",
    "pynvml": "nvidia-ml-py",
}
THERE = {"torch", "numpy", "matplotlib", "triton"}  # on Colab and on Kaggle
IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)


def place(program: Program) -> str:
    """Where on the site the notebook of a program lies, beside the program; "" if it has none.

    A job script is typed in a folder of its own, and a part of the assessment is solved.
    """
    folder, *between, name = program.name.rpartition(".")[0].split("/")
    if folder == "snippets" and "cpu" in program.devices:
        return f"programs/{'/'.join(between)}/{name}.ipynb"
    return f"labs/{name}/{name}.ipynb" if labs.LAB.fullmatch(program.name) else ""


def notebook(program: Program, what: str, site: str, repository: str) -> str:
    """The notebook of a program that has one."""
    uri = place(program)
    if uri.startswith("labs/"):
        return of_lab(program, f"{site}{uri.rpartition('/')[0]}/", repository)
    return of_program(program, f"{site}{uri.removesuffix('.ipynb')}/", what)


def of_program(program: Program, page: str, what: str) -> str:
    """The notebook of a program that has a CPU transcript."""
    files = [program.path, *(each.path for each in program.dependencies("cpu"))]
    recorded = program.transcript("cpu")
    cells = [
        _text(
            f"# {program.path.name}\n\n{what}\n\n"
            f"[Its page in the book]({page}). Run the cells in turn: they write the program "
            "and what it needs into this folder, and type its commands. What stands under them "
            f"until then was {str(recorded.provenance).removeprefix('# ')}."
        ),
        *_set_up(program.root, files),
        *(_file(path.name, path.read_text("utf-8")) for path in [*files, *program.data("cpu")]),
    ]
    for command in recorded.commands:
        # `!` fills in what looks like a variable of Python's
        plain = not re.search(r"[${]", command.command_line)
        cell = _code(
            f"!{command.command_line}"
            if plain
            else f"%%bash --no-raise\n{command.command_line}"
        )
        if command.output:
            printed = "\n".join(command.output) + "\n"
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed}]
        cells.append(cell)
    if program.figure.exists():
        name = program.figure.name
        cells.append(_code(f'from IPython.display import SVG\n\nSVG("{name}")'))
    return _written(cells)


def of_lab(program: Program, page: str, repository: str) -> str:
    """The notebook of a lab: the copy that `labs/start.py` would write, in parts."""
    lab, parts = program.path, "my_labs/parts"
    text, blank = lab.read_text("utf-8"), _starter(program.root)["blank"]
    command = re.search(rf"^# +((?:torchrun|python) .*)\blabs/{lab.name}$", text, re.MULTILINE)
    cells = [
        *_set_up(program.root, [lab]),
        _text(
            f"[This lab's page in the book]({page}) is the finished lab. Here each cell writes "
            "a part of your copy of it: fill in the blanks, run the cells, and at the end the "
            "copy is put together, run and graded. The next cell gets what grades it."
        ),
        _code(
            "from pathlib import Path\n\n"
            'if not Path("labs/check.py").exists():\n'
            f"    !git clone --quiet --depth=1 {repository} world-size\n"
            "    %cd world-size\n"
            f'Path("{parts}").mkdir(parents=True, exist_ok=True)'
        ),
    ]
    title, *rest = labs.cells(text)
    cells.insert(0, _text(title.source))
    for number, cell in enumerate(rest, 1):
        if cell.cell_type == "markdown":
            cells.append(_text(cell.source))
        else:
            cells.append(_file(f"{parts}/{number:03}.py", f"# %%\n{blank(cell.source)}\n"))
    mine = f"my_labs/{lab.name}"
    cells += [
        _code(f"!cat {parts}/*.py > {mine}\n!{command[1]}{mine}"),
        _code(f"!python labs/check.py {mine}"),
    ]
    return _written(cells)


def links(program: Program, repository: str) -> dict[str, str]:
    """Where a notebook is opened: Colab and Kaggle take it from a branch that CI writes."""
    at = f"{repository}/blob/notebooks/{place(program)}"
    github = at.removeprefix("https://github.com")
    return {
        "Colab": f"https://colab.research.google.com/github{github}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={at}",
    }


def _set_up(root: Path, files: list[Path]) -> Iterator[dict]:
    """What installs the packages that Colab and Kaggle have not, and shows torch's release."""
    texts = [path.read_text("utf-8") for path in files if path.suffix == ".py"]
    found = {name for text in texts for name in IMPORTED.findall(text)}
    pinned = _pinned(root / "requirements/test.txt")
    wanted = {OWN_NAMES.get(name, name).lower() for name in found - sys.stdlib_module_names}
    needed = sorted(pinned[name] for name in wanted & set(pinned) - THERE)
    if needed:
        yield _code(f"%pip install --quiet {' '.join(needed)}")
    if "torch" in wanted:
        yield _code(f"import torch\n\ntorch.__version__  # the book's: {pinned['torch'][7:]}")


@lru_cache(maxsize=4)
def _starter(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "labs/start.py"))


@lru_cache(maxsize=4)
def _pinned(path: Path) -> dict[str, str]:
    pins = re.findall(r"^(([\w.-]+)==[^;\s]+)", path.read_text("utf-8"), re.MULTILINE)
    return {name.lower().replace("_", "-"): pin for pin, name in pins}


def _text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(source: str) -> dict:
    made = {"execution_count": None, "outputs": [], "source": source}
    return {"cell_type": "code", "metadata": {}, **made}


def _file(name: str, text: str) -> dict:
    """A cell that writes a file; the end of its last line is the magic's."""
    return _code(f"%%writefile {name}\n{text.removesuffix(chr(10))}")


def _written(cells: list[dict]) -> str:
    """The notebook as its file has it, the same text each time."""
    cells = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells, 1)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    return json.dumps(notebook | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"
