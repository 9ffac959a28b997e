"""Tests of the notebooks: they write the files of the book and print its outputs."""

import copy
import json
import runpy
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from worldsize.execution import runner
from worldsize.model import ROOT
from worldsize.model.program import Program, programs
from worldsize.model.transcript import difference, output_lines
from worldsize.site import labs, notebooks

INPUTS = ("code of snippets", "labs", "graders", "assessment", "requirements")
WRITES = "%%writefile "
RUN = (
    "snippets/04_zero_and_fsdp/wrapping.py",  # uses torchrun
    # uses modules and tables next to it, draws a figure, and has a failing command
    "snippets/planner/rank_memory.py",
    "labs/lab07_pytorch_gpu.py",
)


@cache
def all_notebooks() -> dict[str, nbformat.NotebookNode]:
    """Return the notebooks of all programs that have one, by the path of the program."""
    page = "What it does.", "https://book.example/", "https://github.com/a/b"
    with_notebook = [each for each in programs(ROOT) if notebooks.notebook_uri(each)]
    texts = {each.name: notebooks.notebook(each, *page) for each in with_notebook}
    return {name: nbformat.from_dict(json.loads(text)) for name, text in texts.items()}


def written_files(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Return the files that a notebook writes, by name."""
    sources = [cell.source.partition("\n") for cell in notebook.cells]
    return {head[12:]: body + "\n" for head, _, body in sources if head.startswith(WRITES)}


def test_a_notebook_writes_the_files_of_a_program_and_runs_its_commands() -> None:
    assert all_notebooks()
    for name, notebook in all_notebooks().items():
        program = Program(ROOT, ROOT / name)
        if name.startswith("labs/"):
            continue
        needs = [program, *program.dependencies("cpu")]
        paths = [*(each.path for each in needs), *program.data("cpu")]
        assert written_files(notebook) == {each.name: each.read_text("utf-8") for each in paths}
        sources = [cell.source for cell in notebook.cells if "outputs" in cell]
        for command in program.transcript("cpu").commands:
            assert any(source.endswith(command.command_line) for source in sources), name


def test_the_notebook_of_a_lab_has_the_blanks() -> None:
    blank = runpy.run_path(str(ROOT / "labs/start.py"))["blank"]
    for name, notebook in all_notebooks().items():
        if name.startswith("labs/"):
            copy = "".join(text for _, text in sorted(written_files(notebook).items()))
            assert "raise NotImplementedError" in copy or '#error "step' in copy
            cells = labs.cells(blank((ROOT / name).read_text("utf-8")))
            code = "".join(f"# %%\n{c.source}\n\n" for c in cells if c.cell_type == "code")
            assert copy.split() == code.split()


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_prints_what_the_book_shows(name: str, tmp_path: Path) -> None:
    notebook, program = all_notebooks()[name], Program(ROOT, ROOT / name)
    run = copy.deepcopy(notebook)
    if is_lab := name.startswith("labs/"):
        for folder in ("labs", "graders"):  # otherwise the notebook would clone the repository
            (tmp_path / folder).symlink_to(ROOT / folder)
        run.cells.pop()  # the cell that grades the lab, which tests/test_labs.py tests
    where = {"resources": {"metadata": {"path": tmp_path}}, "timeout": None}
    NotebookClient(run, **where).execute(env=runner.environment(tmp_path, "cpu"))
    printed = [
        "".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in run.cells
    ]
    if is_lab:
        assert "step 1: " in printed[-1], printed
        return
    commands = program.transcript("cpu").commands
    at = next(
        n for n, cell in enumerate(run.cells) if cell.source == f"!{commands[0].command_line}"
    )
    for command, text in zip(commands, printed[at:], strict=False):
        wrong = difference(command.output, output_lines(text), program.tolerances)
        assert not [line for line in wrong if line.startswith("- ")], text
    if program.figure.exists():
        assert "image/svg+xml" in run.cells[-1].outputs[0].data
