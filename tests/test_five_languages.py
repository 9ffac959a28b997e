"""Tests of the softmax kernel in several languages: equal problems, and missing packages."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from worldsize.execution import requirements
from worldsize.model.program import Program, Transcript

INPUTS = [
    "snippets/06_gpu_computing",
    "snippets/gpu.toml",
    "requirements",
    "snippets/requirements.toml",
    "src/worldsize/execution/requirements.py",
]
FOLDER = ROOT / "snippets/06_gpu_computing"
LANGUAGES = "triton", "gluon", "cute", "cutile", "helion", "tilelang"


def constants(text: str, names: dict[str, str]) -> dict[str, list[float]]:
    """Return the numbers in the first assignment to each constant.

    `names` maps each key of the result to the name of the constant in this program.
    """
    found = {}
    for name, constant in names.items():
        line = re.search(rf"\b{constant} = (.*)", text)[1].partition("//")[0].partition("#")[0]
        found[name] = [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", line)]
    return found


def test_the_cuda_program_solves_the_same_problem_as_the_others() -> None:
    problem = (FOLDER / "softmax_problem.py").read_text("utf-8")
    cuda = (FOLDER / "softmax_cuda.cu").read_text("utf-8")
    names = {name: name for name in ("OFFSETS", "WIDTHS", "LARGE", "BOUND")}
    python = constants(problem, names)
    in_c = constants(cuda, names | {"LARGE": "LARGE_ROWS"})
    assert re.search(r"LARGE_ROWS = (\d+), LARGE_COLUMNS = (\d+);", cuda)
    assert python["OFFSETS"] == in_c["OFFSETS"] == [0, 1000, -1000]
    assert python["WIDTHS"] == in_c["WIDTHS"]
    assert python["LARGE"] == in_c["LARGE"]
    assert python["BOUND"][0] == in_c["BOUND"][0]
    wave = "8 * std::sin(0.7 * i)", "8 * np.sin(0.7 * np.arange(columns))"
    assert wave[0] in cuda and wave[1] in problem


@pytest.mark.parametrize("language", LANGUAGES)
def test_rows_reference_and_bound_are_imported_from_one_module(language: str) -> None:
    text = (FOLDER / f"softmax_{language}.py").read_text("utf-8")
    imported = re.search(r"^from softmax_problem import (.*)", text, re.M)[1].split(", ")
    assert {"Binary", "run_program"} <= {*imported}
    shared = "OFFSETS =", "BOUND =", "assert_close", "def make_rows", "def check"
    assert not [word for word in shared if word in text]
    recorded = (FOLDER / f"softmax_{language}.cpu.txt").read_text("utf-8")
    for columns in (4096, 1000):
        assert re.search(rf"^\w.*, {columns} +\d+ x \d+ +≈?\d+", recorded, re.M)
    only_gpu = "only a GPU can check" in recorded
    assert only_gpu == (language == "cutile") != ("equal to float64" in recorded)


def test_the_check_rejects_the_softmax_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a program must not report the speed and the result of torch as its own."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    from softmax_problem import without_library

    x = torch.ones(2, 4)
    with pytest.raises(AssertionError, match=r"torch's aten\._softmax\.default runs"):
        without_library(lambda x: x.softmax(dim=-1), x)
    assert (
        without_library(lambda x: x.exp() / x.exp().sum(1, True), x).tolist()
        == [[0.25] * 4] * 2
    )


def test_a_program_without_its_package_is_skipped_with_an_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    for language in ("cute", "cutile", "helion", "tilelang"):
        path = FOLDER / f"softmax_{language}.py"
        command_line = Transcript.parse(f"$ python {path.name}\n")
        why = requirements.missing_requirement(Program(ROOT, path), command_line)
        file = f"requirements/{language}.txt"
        assert f"pip install -r {file}" in why
        # the program itself also names the command
        assert f"pip install -r {file}" in path.read_text("utf-8")
        lines = (ROOT / file).read_text("utf-8").splitlines()
        pinned = [line for line in lines if not line.startswith(("#", "-r "))]
        assert pinned and all(re.fullmatch(r"[\w.\[\]-]+==[\d.]+", line) for line in pinned)

    def missing_parent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(requirements.importlib.util, "find_spec", missing_parent)
    # the parent package `cuda` is missing, too
    assert not requirements.is_installed("cuda.tile")


class Array(np.ndarray):
    """An array with the method of a tensor that the program calls."""

    def new_empty(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, np.nan, self.dtype).view(type(self))


def stand_in_for_cutile(rows: int) -> ModuleType:
    """Return a module that runs a cuTile kernel with NumPy: one block after the other.

    It replaces only what softmax_cutile.py uses. `launch` runs the kernel for each row.
    """
    block = 0
    module = ModuleType("cuda.tile")

    def part(array: np.ndarray, index: tuple, shape: tuple) -> tuple[slice, ...]:
        return tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, shape, strict=True))

    def load(array: np.ndarray, index: tuple, shape: tuple, padding_mode: float = np.nan):
        tile = np.full(shape, padding_mode, array.dtype)
        found = array[part(array, index, shape)]
        tile[tuple(map(slice, found.shape))] = found
        return tile

    def store(array: np.ndarray, index: tuple, tile: np.ndarray) -> None:
        target = array[part(array, index, tile.shape)]
        target[...] = tile[tuple(map(slice, target.shape))]

    def launch(_stream: None, grid: tuple, kernel, arguments: tuple) -> None:
        nonlocal block
        assert grid == (rows, 1, 1)
        for row in range(rows):
            block = row
            kernel(*arguments)

    vars(module).update(
        bid=lambda axis: (block, 0, 0)[axis], load=load, store=store, launch=launch,
        exp=np.exp, max=np.max, sum=np.sum, kernel=lambda function, occupancy=0: function,
        PaddingMode=SimpleNamespace(NEG_INF=-np.inf, ZERO=0.0, UNDETERMINED=np.nan),
        Constant={int: int}, compilation=ModuleType("compilation"),
    )  # fmt: skip
    return module


def test_the_cutile_kernel_is_right_when_numpy_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import softmax_problem as problem

    module = stand_in_for_cutile(len(problem.OFFSETS))
    parent = ModuleType("cuda")
    parent.tile = module
    monkeypatch.setitem(sys.modules, "cuda", parent)
    monkeypatch.setitem(sys.modules, "cuda.tile", module)
    torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    text = (FOLDER / "softmax_cutile.py").read_text("utf-8")

    def check(text: str) -> None:
        names = {"__name__": "softmax_cutile"}
        exec(compile(text, "softmax_cutile.py", "exec"), names)
        for name, kernel in names["KERNELS"].items():

            def softmax(x: np.ndarray, kernel=kernel) -> np.ndarray:
                return np.asarray(names["softmax"](kernel, x.view(Array)))

            problem.check(name, softmax)

    with np.errstate(all="ignore"):
        check(text)
        for right, wrong in (
            ("tile - ct.max", "tile + ct.max"),
            ("PaddingMode.NEG_INF", "PaddingMode.ZERO"),
            (", padding_mode=ct.PaddingMode.NEG_INF", ""),
            ("ct.sum(e, 1,", "ct.sum(e, 0,"),
            ("e / ct.sum", "e * ct.sum"),
        ):
            assert right in text
            with pytest.raises(AssertionError, match="the relative error is"):
                check(text.replace(right, wrong))
