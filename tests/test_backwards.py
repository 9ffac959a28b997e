"""A backward that programs write by hand can be differentiated again, or says that it cannot."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["snippets"]
# what autograd knows makes up the backward of these, from inputs and outputs that are saved
DIFFERENTIABLE = {
    "custom_function:Plain",
    "dispatcher:Double",
    "lora:DecodedProduct",
    "lse_gradient:Part",
    "qat:RoundThrough",
    "sharded_embeddings:MeanOfLosses",
}


def test_a_second_derivative_is_right_or_raises() -> None:
    """The others refuse create_graph, are marked with once_differentiable, or apply a function.

    The mark raises an error in many cases. The programs that a page shows refuse in all cases.
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
