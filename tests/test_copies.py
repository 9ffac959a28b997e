"""What programs repeat, since each must survive being copied, is the same in all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["assessment", "snippets", "tests/test_copies.py"]
# what has one of these names is what the program has under it; what differs has another name
ORIGINALS = {
    "snippets/08_quantization/char_model": (
        "unicode_names", "Block", "CharModel", "train", "bits_per_character",
    ),
    "snippets/08_quantization/int8_product": ("int_mm",),
    "assessment/assignment1_allocator": ("stop_kindly",),
}  # fmt: skip
PROGRAMS = {"snippets": "0[89]_*/*.py", "assessment": "*.py"}  # where copies are looked for


def definitions(path: Path) -> dict[str, str]:
    """The functions and classes of a program, without their comments and layout."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("original", ORIGINALS)
def test_what_programs_repeat_is_the_same_in_all(original: str) -> None:
    folder = original.partition("/")[0]
    programs = sorted((ROOT / folder).glob(PROGRAMS[folder]))
    defined = {path: definitions(path) for path in programs}
    whole = defined[ROOT / f"{original}.py"]
    for name in ORIGINALS[original]:
        copies = {path: parts[name] for path, parts in defined.items() if name in parts}
        assert len(copies) > 1, f"no other program has {name}"
        different = [path.name for path, copy in copies.items() if copy != whole[name]]
        assert different == [], f"{name} is not that of {original}.py"


def test_a_blank_ends_a_program_kindly() -> None:
    """What has stop_kindly installs it, before main; what has blanks has one of these ways."""
    for path in sorted((ROOT / "assessment").glob("*.py")):
        text = path.read_text("utf-8")
        if "def stop_kindly" in text:
            assert text.endswith("    sys.excepthook = stop_kindly\n    main()\n"), path.name
        elif ">>> solution" in text:
            assert "except NotImplementedError as" in text, path.name
