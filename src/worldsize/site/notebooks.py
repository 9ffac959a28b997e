"""Write a notebook for each program with a CPU transcript, and for each lab.

A notebook runs in one process, but torchrun needs a file. The notebook of a program therefore
writes the program and the files that it needs (`%%writefile`). Then it runs the commands of the
transcript. The recorded outputs are below the commands until the commands run again. The
notebook of a lab writes the learner's copy of the lab. Each cell writes a part of the copy, and
the last cells join the parts, run the copy and grade it.
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

PACKAGE_NAMES = {  # packages whose names differ from the names of their modules
    "cuda": "cuda-bindings",
    "google": "protobuf",
    "numba": "numba-cuda",
    "pynvml": "nvidia-ml-py",
}
PREINSTALLED = {"torch", "numpy", "matplotlib", "triton"}  # on Colab and on Kaggle
IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)


def notebook_uri(program: Program) -> str:
    """Return the address of the notebook on the site; an empty string if there is none.

    Only programs in `snippets/` with a CPU transcript and labs have notebooks. The address is
    next to the program.
    """
    folder, *subfolders, name = program.name.rpartition(".")[0].split("/")
    if folder == "snippets" and "cpu" in program.devices:
        return f"programs/{'/'.join(subfolders)}/{name}.ipynb"
    return f"labs/{name}/{name}.ipynb" if labs.LAB.fullmatch(program.name) else ""


def notebook(program: Program, summary: str, site: str, repository: str) -> str:
    """Return the JSON of the notebook of a program or a lab."""
    uri = notebook_uri(program)
    if uri.startswith("labs/"):
        return of_lab(program, f"{site}{uri.rpartition('/')[0]}/", repository)
    return of_program(program, f"{site}{uri.removesuffix('.ipynb')}/", summary)


def of_program(program: Program, page: str, summary: str) -> str:
    """Return the notebook of a program with a CPU transcript. `page` is the URL of its page."""
    files = [program.path, *(each.path for each in program.dependencies("cpu"))]
    recorded = program.transcript("cpu")
    cells = [
        _text(
            f"# {program.path.name}\n\n{summary}\n\n"
            f"This program has [a page in the book]({page}). Run the cells from top to bottom. "
            "They write the program and the files that it needs into this folder, and run its "
            "commands. Until then, the outputs below the commands are those that were "
            f"{str(recorded.provenance).removeprefix('# ')}."
        ),
        *_setup_cells(program.root, files),
        *(_file(path.name, path.read_text("utf-8")) for path in [*files, *program.data("cpu")]),
    ]
    for command in recorded.commands:
        # in a line with `!`, IPython replaces `$name` and `{name}` by Python variables
        has_variables = re.search(r"[${]", command.command_line)
        cell = _code(
            f"%%bash --no-raise\n{command.command_line}"
            if has_variables
            else f"!{command.command_line}"
        )
        if command.output:
            printed = "\n".join(command.output) + "\n"
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed}]
        cells.append(cell)
    if program.figure.exists():
        name = program.figure.name
        cells.append(_code(f'from IPython.display import SVG\n\nSVG("{name}")'))
    return _to_json(cells)


def of_lab(program: Program, page: str, repository: str) -> str:
    """Return the notebook of a lab, which writes the same copy as `labs/start.py`, in parts."""
    lab, parts = program.path, "my_labs/parts"
    text, blank = lab.read_text("utf-8"), _starter(program.root)["blank"]
    command = re.search(rf"^# +((?:torchrun|python) .*)\blabs/{lab.name}$", text, re.MULTILINE)
    cells = [
        *_setup_cells(program.root, [lab]),
        _text(
            f"[The page of this lab in the book]({page}) contains the finished lab. In this "
            "notebook, each cell writes a part of your copy of the lab. Fill in the blanks and "
            "run the cells. The last cells join the parts, run your copy and grade it. The "
            "next cell downloads the grader."
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
    submission = f"my_labs/{lab.name}"
    cells += [
        _code(f"!cat {parts}/*.py > {submission}\n!{command[1]}{submission}"),
        _code(f"!python labs/check.py {submission}"),
    ]
    return _to_json(cells)


def links(program: Program, repository: str) -> dict[str, str]:
    """Return the links that open a notebook in Colab and Kaggle.

    Both services load the notebook from the branch `notebooks`, which CI writes.
    """
    url = f"{repository}/blob/notebooks/{notebook_uri(program)}"
    github = url.removeprefix("https://github.com")
    return {
        "Colab": f"https://colab.research.google.com/github{github}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={url}",
    }


def _setup_cells(root: Path, files: list[Path]) -> Iterator[dict]:
    """Yield the cells that install missing packages and print the release of torch."""
    texts = [path.read_text("utf-8") for path in files if path.suffix == ".py"]
    modules = {name for text in texts for name in IMPORTED.findall(text)}
    pins = _pins(root / "requirements/test.txt")
    packages = {
        PACKAGE_NAMES.get(name, name).lower() for name in modules - sys.stdlib_module_names
    }
    missing = sorted(pins[name] for name in packages & set(pins) - PREINSTALLED)
    if missing:
        yield _code(f"%pip install --quiet {' '.join(missing)}")
    if "torch" in packages:
        release = pins["torch"].removeprefix("torch==")
        yield _code(f"import torch\n\ntorch.__version__  # the book uses {release}")


@lru_cache(maxsize=4)
def _starter(root: Path) -> dict[str, Any]:
    """Return the names that `labs/start.py` defines."""
    return runpy.run_path(str(root / "labs/start.py"))


@lru_cache(maxsize=4)
def _pins(path: Path) -> dict[str, str]:
    """Return the pins of a requirements file, such as `torch==2.13.0`, by the package."""
    pins = re.findall(r"^(([\w.-]+)==[^;\s]+)", path.read_text("utf-8"), re.MULTILINE)
    return {name.lower().replace("_", "-"): pin for pin, name in pins}


def _text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(source: str) -> dict:
    fields = {"execution_count": None, "outputs": [], "source": source}
    return {"cell_type": "code", "metadata": {}, **fields}


def _file(name: str, text: str) -> dict:
    """Return a cell that writes a file. The magic command adds the last line break."""
    return _code(f"%%writefile {name}\n{text.removesuffix(chr(10))}")


def _to_json(cells: list[dict]) -> str:
    """Return the text of the notebook file, which is the same in every build."""
    cells = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells, 1)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    return json.dumps(notebook | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"
