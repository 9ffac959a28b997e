"""Scores: the reports in `assessment/scores/` as tables, the finished programs and the best."""

from __future__ import annotations

import tomllib
from pathlib import Path

from worldsize.site import template
from worldsize.site.yaml_schema import SchemaError

FOLDER = "assessment/scores"
REFERENCE = "reference"


def show(words: list[str], root: Path) -> str:
    """What `<!-- scores: lab02_ddp -->` asks for, as Markdown."""
    reports = {
        path.stem: tomllib.loads(path.read_text("utf-8"))
        for path in sorted((root / FOLDER).glob("*.toml"))
    }
    rows = []
    for lab in words:
        if lab not in reports[REFERENCE]:
            raise SchemaError(f"{FOLDER}/{REFERENCE}.toml has no {lab}")
        steps = {k: v for k, v in reports[REFERENCE][lab].items() if k.startswith("step")}
        for step, name in ((step, name) for step, found in steps.items() for name in found):
            of = {
                who: each.get(lab, {}).get(step, {}).get(name) for who, each in reports.items()
            }
            best = min(value for value in of.values() if value is not None)
            who = [who for who, value in of.items() if value == best < of[REFERENCE]]
            rows.append((lab, step.removeprefix("step"), name, of[REFERENCE], best, who))
    return template.render("scores", rows=rows, several=len(words) > 1)
