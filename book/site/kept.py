"""Kept: what Markdown made of a page, from one build to the next, in `.cache/pages/`.

The name of what is kept is a digest of all that it was made of: the page's text with everything
that it embeds, the addresses of the book's files (its links), the glossary, the settings, the
code and the packages. A page that draws a warning is not kept, so that it draws it again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FOLDER = ".cache/pages"
MADE_BY = ("book/core/*.py", "book/site/**/*.*", "docs/glossary.md", "mkdocs.yml")
PACKAGES = (
    "jupytext", "latex2mathml", "markdown", "mkdocs", "mkdocs-material", "pygments",
    "pymdown-extensions", "ziafont", "ziamath",
)  # fmt: skip
MADE = ("content", "toc", "_title_from_render", "present_anchor_ids")


class Keeper:
    """Renders the pages of one build, each from what is kept where that still holds."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root, self.folder, self.used = root, root / FOLDER, set[Path]()
        sources = sorted(
            {each for part in MADE_BY for each in root.glob(part) if each.is_file()}
        )
        places = [f"{file.src_uri} {file.dest_uri} {file.inclusion}" for file in files]
        packages = [f"{name} {version(name)}" for name in PACKAGES]
        parts = [each.read_bytes() for each in sources if each.suffix != ".pyc"]
        self.book = digest(*parts, "\n".join([sys.version, *packages, *places]).encode())

    def render(self, page: Page, text: str, config: MkDocsConfig, files: Files) -> None:
        """As `page.render`; ``text`` is the page with all that it embeds."""
        place = self.folder / digest(self.book, page.file.src_uri.encode(), text.encode()).hex()
        self.used.add(place)
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            made, links = pickle.loads(place.read_bytes())
            vars(page).update(made)
            page.links_to_anchors = {files.get_file_from_path(to): of for to, of in links}
            return
        said = _Warnings(logging.WARNING)
        logging.getLogger("mkdocs").addHandler(said)
        try:
            type(page).render(page, config, files)
        finally:
            logging.getLogger("mkdocs").removeHandler(said)
        if not said.any:
            links = [(to.src_uri, of) for to, of in (page.links_to_anchors or {}).items()]
            self._keep(
                place, pickle.dumps(({name: getattr(page, name) for name in MADE}, links))
            )

    def _keep(self, place: Path, data: bytes) -> None:
        with suppress(OSError):  # a book that is only read is built anew each time
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, place)

    def forget_others(self) -> None:
        """Remove what this build did not use."""
        with suppress(OSError):
            for each in self.folder.iterdir():
                if each not in self.used:
                    each.unlink(missing_ok=True)


class _Warnings(logging.Handler):
    any = False

    def emit(self, record: logging.LogRecord) -> None:
        self.any = True


def digest(*parts: bytes) -> bytes:
    """One digest of several texts, each by its own, so that no two sets run into one."""
    each = (hashlib.sha256(part).digest() for part in parts)
    return functools.reduce(lambda one, two: hashlib.sha256(one + two).digest(), each)
