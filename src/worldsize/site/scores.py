"""Show the reports in `assessment/scores/` as tables of our scores and the best scores."""

from __future__ import annotations

import tomllib
from pathlib import Path

from worldsize.site import template
from worldsize.site.yaml_schema import SchemaError

FOLDER = "assessment/scores"
REFERENCE = "reference"


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- scores: lab02_ddp -->`.

    The table contains each score of the reference, and the reports with a lower, best score.
    """
    reports = {
        path.stem: tomllib.loads(path.read_text("utf-8"))
        for path in sorted((root / FOLDER).glob("*.toml"))
    }
    rows = []
    for lab in words:
        if lab not in reports[REFERENCE]:
            raise SchemaError(f"{FOLDER}/{REFERENCE}.toml has no scores of {lab}")
        steps = {k: v for k, v in reports[REFERENCE][lab].items() if k.startswith("step")}
        for step, name in ((step, name) for step, found in steps.items() for name in found):
            values = {
                author: report.get(lab, {}).get(step, {}).get(name)
                for author, report in reports.items()
            }
            reference = values[REFERENCE]
            best = min(value for value in values.values() if value is not None)
            authors = [each for each, value in values.items() if value == best < reference]
            rows.append((lab, step.removeprefix("step"), name, reference, best, authors))
    return template.render("scores", rows=rows, several=len(words) > 1)
