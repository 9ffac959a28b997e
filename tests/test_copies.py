"""What programs repeat, since each must survive being copied, is the same in all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["snippets", "tests/test_copies.py"]
ORIGINAL = ROOT / "snippets/08_quantization/char_model.py"
COPIES = sorted(path for path in (ROOT / "snippets").glob("0[89]_*/*.py") if path != ORIGINAL)


def definitions(path: Path) -> dict[str, str]:
    """The functions and classes of a program, without their comments and layout."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("path", COPIES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_character_model_is_the_same_in_every_program(path: Path) -> None:
    """What has the name of one of its parts is that part; what differs has another name."""
    original, copy = definitions(ORIGINAL), definitions(path)
    for name in {"unicode_names", "Block", "CharModel", "train", "bits_per_character"} & {
        *copy
    }:
        assert copy[name] == original[name], f"{name} is not that of char_model.py"
