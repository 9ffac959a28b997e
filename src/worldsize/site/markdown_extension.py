"""The Markdown extension `worldsize`: everything that the book adds to Python-Markdown.

MkDocs and Zensical build the book with the same extension. It is registered as an entry point
of the group `markdown.extensions` (see pyproject.toml).
"""

from __future__ import annotations

from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from pymdownx.arithmatex import ArithmatexExtension

from worldsize.model import ROOT
from worldsize.model.program import assume_unchanged
from worldsize.site import (
    changes,
    embeds,
    glossary,
    instruments,
    math_svg,
    quiz,
    references,
    releases,
    scores,
    trace_pages,
    tracks,
    yaml_schema,
)

DIRECTIVES = {  # the functions that replace a comment such as `<!-- track: NAME path -->`
    "changes": changes.show,
    "references": references.show,
    "releases": releases.show,
    "track": tracks.show,
    "quiz": quiz.show,
    "scores": scores.show,
    "glossary": glossary.show,
    "instrument": instruments.show,
    "instruments": instruments.show_all,
    "trace": trace_pages.show,
    "traces": trace_pages.show_all,
}


def expand_directives(lines: list[str], root: Path) -> list[str]:
    """Return the lines of a page, with each directive replaced by its Markdown."""
    return yaml_schema.expand_directives(lines, DIRECTIVES, root)


def expand(lines: list[str], root: Path) -> list[str]:
    """Return the lines of a page, with the directives and then the embeds replaced."""
    return embeds.render(expand_directives(lines, root), root)


class BookMarkdown(Extension):
    """The directives, embeds, formulas and tooltips of a page.

    `root` is the folder of the book. `memo` is the dictionary of `assume_unchanged` for a whole
    build. Without it, each page gets a new dictionary, so changed files are read again.
    """

    def __init__(self, root: Path = ROOT, memo: dict | None = None) -> None:
        super().__init__()
        self.root, self.memo = root, memo
        self.lines: list[str] = []  # the expanded lines of the page that was converted last

    def extendMarkdown(self, md: Markdown) -> None:
        ArithmatexExtension(generic=True, preview=False).extendMarkdown(md)
        tooltips = glossary.Tooltips(md, self.root)
        # Python-Markdown runs the processors with the highest priority first.
        md.preprocessors.register(_Lines(self, tooltips), "book", 40)  # before all others
        md.treeprocessors.register(math_svg.Drawer(md), "mathematics", 15)  # after inline, 20
        md.postprocessors.register(math_svg.Glyphs(md), "glyphs", 5)  # after raw HTML, 30
        md.postprocessors.register(embeds.Markers(md), "markers", 4)
        md.treeprocessors.register(tooltips, "glossary", 8)  # before the anchors of toc, 5


class _Lines(Preprocessor):
    """A preprocessor that expands the lines of a page before other processors read them."""

    def __init__(self, extension: BookMarkdown, tooltips: glossary.Tooltips) -> None:
        super().__init__()
        self.extension, self.tooltips = extension, tooltips

    def run(self, lines: list[str]) -> list[str]:
        memo = self.extension.memo
        with assume_unchanged({} if memo is None else memo):
            self.extension.lines = expand(lines, self.extension.root)
        return self.tooltips.without_own_senses(self.extension.lines)
