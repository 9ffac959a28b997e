"""Draw the packages and the imports between them.

    PYTHONPATH=src python -m worldsize.tools.package_figure

The arrows are the imports that grimp finds in the source, without the arrows that follow from
two other arrows. The rows are the layers that `pyproject.toml` declares for import-linter, so
an import of a higher layer is an arrow that points upwards. ``tests/test_packages.py`` fails if
there is such an import, or if the committed figure is not up to date.
"""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path

import grimp

from worldsize.model import ROOT, atomic_write

FIGURE = ROOT / "docs/contributing/packages.svg"
DESCRIPTIONS = {
    "graders": "grade a learner's file",
    "worldsize.tools": "record on GPUs, compare, upgrade",
    "worldsize.testing": "the pytest plugin: run and compare",
    "worldsize.site": "the MkDocs plugin: build the site",
    "worldsize.execution": "run commands and end them",
    "worldsize.model": "programs, transcripts, pages",
}
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT = 760, 112, 232, 58  # user units of the SVG
INK, FAINT = "#1f2937", "#52525b"


def layers(root: Path = ROOT) -> list[list[str]]:
    """Return the packages of each layer, the highest layer first, from `pyproject.toml`."""
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    declared = next(each["layers"] for each in contracts if each["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in declared]


def imports(packages: list[str]) -> set[tuple[str, str]]:
    """Return each pair (importer, imported) of packages with at least one direct import."""
    graph = grimp.build_graph("worldsize", "graders", cache_dir=None)
    modules = {name: {name, *graph.find_descendants(name)} for name in packages}
    return {
        (importer, imported)
        for importer, imported in product(packages, packages)
        if importer != imported
        and any(
            graph.direct_import_exists(importer=upper, imported=lower)
            for upper, lower in product(modules[importer], modules[imported])
        )
    }


def transitive_reduction(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that do not follow from two or more other arrows."""

    def reachable(start: str, excluded: tuple[str, str]) -> set[str]:
        """Return the packages that can be reached without the arrow `excluded`."""
        found, queue = set(), [start]
        while queue:
            package = queue.pop()
            new = {end for begin, end in arrows - {excluded} if begin == package} - found
            found |= new
            queue += new
        return found

    return {(begin, end) for begin, end in arrows if end not in reachable(begin, (begin, end))}


def draw(rows: list[list[str]], arrows: set[tuple[str, str]]) -> str:
    """Return the SVG: one row of boxes for each layer, one arrow for each pair."""
    middle: dict[str, tuple[float, float]] = {}
    for row, names in enumerate(rows):
        for column, name in enumerate(names):
            x = WIDTH * (2 * column + 1) / (2 * len(names))
            importers = [middle[a][0] for a, b in arrows if b == name and a in middle]
            if len(names) == 1 and importers:  # place it below the packages that import it
                x = sum(importers) / len(importers)
            middle[name] = x, 8 + BOX_HEIGHT / 2 + row * ROW
    height = 16 + BOX_HEIGHT + (len(rows) - 1) * ROW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/>'
        "</marker></defs>",
    ]
    for begin, end in sorted(arrows):
        (x1, y1), (x2, y2) = middle[begin], middle[end]
        down = 1 if y2 > y1 else -1
        y1, y2 = y1 + down * BOX_HEIGHT / 2, y2 - down * BOX_HEIGHT / 2
        bend = (y2 - y1) / 2
        out.append(
            f'<path d="M{x1:g} {y1:g} '
            f'C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}" '
            f'fill="none" stroke="{FAINT}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    for name, (x, y) in middle.items():
        out.append(
            f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="#fff" stroke="{INK}" stroke-width="1.5"/>'
            f'<text x="{x:g}" y="{y - 6:g}" fill="{INK}" text-anchor="middle" '
            f'font-weight="600">{name}</text>'
            f'<text x="{x:g}" y="{y + 15:g}" fill="{FAINT}" text-anchor="middle" '
            f'font-size="12.5">{DESCRIPTIONS[name]}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def figure() -> str:
    """Return the SVG of the packages, from the current imports."""
    rows = layers()
    arrows = imports([name for names in rows for name in names])
    return draw(rows, transitive_reduction(arrows))


if __name__ == "__main__":
    atomic_write(FIGURE, figure())
