"""Tests that hand-written backward methods support second derivatives or raise an error."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["snippets"]
# autograd can differentiate the backward methods of these, because they only use saved tensors
DIFFERENTIABLE = {
    "custom_function:Plain",
    "dispatcher:Double",
    "lora:DecodedProduct",
    "lse_gradient:Part",
    "qat:RoundThrough",
    "sharded_embeddings:MeanOfLosses",
}


def test_a_second_derivative_is_correct_or_raises_an_error() -> None:
    """Check that every other backward method rejects create_graph or calls a function.

    The decorator once_differentiable raises an error in many cases. The programs that a page
    shows raise an error in all cases.
    """
    silent = set()
    for path in (ROOT / "snippets").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if not any(ast.unparse(base).endswith("Function") for base in node.bases):
                continue
            (backward,) = (x for x in node.body if getattr(x, "name", "") == "backward")
            marked = any(
                ast.unparse(d) == "once_differentiable" for d in backward.decorator_list
            )
            first = backward.body[0]
            marked |= ast.unparse(first).startswith("if torch.is_grad_enabled():\n    raise ")
            if not marked and ".apply(" not in ast.unparse(backward.body[-1]):
                silent.add(f"{path.stem}:{node.name}")
    assert silent == DIFFERENTIABLE
