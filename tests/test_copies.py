"""What programs repeat, since each must survive being copied, is the same in all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["snippets", "tests/test_copies.py"]
PROGRAMS = sorted((ROOT / "snippets").glob("0[89]_*/*.py"))
# what has one of these names is what the program has under it; what differs has another name
ORIGINALS = {
    "char_model": ("unicode_names", "Block", "CharModel", "train", "bits_per_character"),
    "int8_product": ("int_mm",),
}


def definitions(path: Path) -> dict[str, str]:
    """The functions and classes of a program, without their comments and layout."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("original", ORIGINALS)
def test_what_programs_repeat_is_the_same_in_all(original: str) -> None:
    defined = {path: definitions(path) for path in PROGRAMS}
    whole = next(parts for path, parts in defined.items() if path.stem == original)
    for name in ORIGINALS[original]:
        copies = {path: parts[name] for path, parts in defined.items() if name in parts}
        assert len(copies) > 1, f"no other program has {name}"
        different = [path.name for path, copy in copies.items() if copy != whole[name]]
        assert different == [], f"{name} is not that of {original}.py"
