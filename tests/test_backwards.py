"""Tests that hand-written backward methods support second derivatives or raise an error."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["code of snippets"]
# Autograd can differentiate these backward methods, because they only use saved tensors.
DIFFERENTIABLE = {
    "custom_function:Plain",
    "dispatcher:Double",
    "lora:DecodedProduct",
    "lse_gradient:Part",
    "qat:RoundThrough",
    "sharded_embeddings:MeanOfLosses",
}


def test_a_second_derivative_is_correct_or_raises_an_error() -> None:
    """Check all backward methods of the programs, apart from those in `DIFFERENTIABLE`.

    Each method must raise an error if autograd records it, have the decorator
    once_differentiable, which raises an error in many cases, or call an autograd function.
    """
    unmarked = set()
    for path in (ROOT / "snippets").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if not any(ast.unparse(base).endswith("Function") for base in node.bases):
                continue
            (backward,) = (x for x in node.body if getattr(x, "name", "") == "backward")
            is_marked = any(
                ast.unparse(d) == "once_differentiable" for d in backward.decorator_list
            )
            first = backward.body[0]
            is_marked |= ast.unparse(first).startswith(
                "if torch.is_grad_enabled():\n    raise "
            )
            if not is_marked and ".apply(" not in ast.unparse(backward.body[-1]):
                unmarked.add(f"{path.stem}:{node.name}")
    assert unmarked == DIFFERENTIABLE
