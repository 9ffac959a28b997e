"""Draw which packages import which: python -m worldsize.tools.package_figure

The arrows are the imports that grimp finds in the source, without the arrows that follow from
two others. The rows are the layers that `pyproject.toml` declares for import-linter, so an
import of a higher layer is an arrow that points upwards. ``tests/test_packages.py`` fails if
there is such an arrow, or if the committed figure is not up to date.
"""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path

import grimp

from worldsize.model import ROOT, atomic_write

FIGURE = ROOT / "docs/contributing/packages.svg"
DOES = {
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
        (one, other)
        for one, other in product(packages, packages)
        if one != other
        and any(
            graph.direct_import_exists(importer=importer, imported=imported)
            for importer, imported in product(modules[one], modules[other])
        )
    }


def reduced(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that do not follow from two others (the transitive reduction)."""

    def reachable(start: str, but: tuple[str, str]) -> set[str]:
        found, queue = set(), [start]
        while queue:
            here = queue.pop()
            step = {end for one, end in arrows - {but} if one == here} - found
            found |= step
            queue += step
        return found

    return {(one, end) for one, end in arrows if end not in reachable(one, (one, end))}


def draw(rows: list[list[str]], arrows: set[tuple[str, str]]) -> str:
    """Return the SVG: one row of boxes for each layer, one arrow for each pair."""
    middle: dict[str, tuple[float, float]] = {}
    for row, names in enumerate(rows):
        for place, name in enumerate(names):
            x = WIDTH * (2 * place + 1) / (2 * len(names))
            above = [middle[one][0] for one, other in arrows if other == name and one in middle]
            if len(names) == 1 and above:  # below the packages that import it
                x = sum(above) / len(above)
            middle[name] = x, 8 + BOX_HEIGHT / 2 + row * ROW
    height = 16 + BOX_HEIGHT + (len(rows) - 1) * ROW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/>'
        "</marker></defs>",
    ]
    for one, other in sorted(arrows):
        (x1, y1), (x2, y2) = middle[one], middle[other]
        down = 1 if y2 > y1 else -1
        y1, y2 = y1 + down * BOX_HEIGHT / 2, y2 - down * BOX_HEIGHT / 2
        turn = (y2 - y1) / 2
        out.append(
            f'<path d="M{x1:g} {y1:g} '
            f'C{x1:g} {y1 + turn:g} {x2:g} {y2 - turn:g} {x2:g} {y2:g}" '
            f'fill="none" stroke="{FAINT}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    for name, (x, y) in middle.items():
        out.append(
            f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="#fff" stroke="{INK}" stroke-width="1.5"/>'
            f'<text x="{x:g}" y="{y - 6:g}" fill="{INK}" text-anchor="middle" '
            f'font-weight="600">{name}</text>'
            f'<text x="{x:g}" y="{y + 15:g}" fill="{FAINT}" text-anchor="middle" '
            f'font-size="12.5">{DOES[name]}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def figure() -> str:
    """Return the figure of the packages as they are now."""
    rows = layers()
    return draw(rows, reduced(imports([name for names in rows for name in names])))


if __name__ == "__main__":
    atomic_write(FIGURE, figure())
