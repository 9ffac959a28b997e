"""Tests of the packages: layers import only lower layers, and the figure shows all imports."""

from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("importlinter")
from importlinter import cli

from worldsize.tools import package_figure

INPUTS = ["src", "graders", "docs/contributing/packages.svg"]


def test_layers_import_only_lower_layers(capsys: pytest.CaptureFixture) -> None:
    broken = cli.lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
    assert not broken, capsys.readouterr().out


def test_an_import_of_a_higher_layer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The same contract fails for a package whose lower module imports a higher one."""
    package = tmp_path / "upward"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "low.py").write_text("import upward.high\n")
    (package / "high.py").touch()
    config = tmp_path / "contract.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "upward"\n[[tool.importlinter.contracts]]\n'
        'name = "layers"\ntype = "layers"\nlayers = ["upward.high", "upward.low"]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.lint_imports(str(config), no_cache=True)
    assert "upward.low -> upward.high" in capsys.readouterr().out


def test_the_figure_shows_the_imports() -> None:
    committed = package_figure.FIGURE.read_text("utf-8")
    assert committed == package_figure.figure(), (
        "the imports have changed, so draw the figure: python -m worldsize.tools.package_figure"
    )


def test_no_arrow_of_the_figure_points_upwards() -> None:
    rows = package_figure.layers()
    level = {name: row for row, names in enumerate(rows) for name in names}
    arrows = package_figure.imports(sorted(level))
    assert arrows, "the figure has no arrow"
    assert [(start, end) for start, end in arrows if level[start] >= level[end]] == []
