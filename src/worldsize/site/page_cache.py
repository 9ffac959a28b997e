"""Kept: what was made of a page, from one build to the next, in `.cache/pages/`.

Two things are: what Markdown made of its text, and what the theme made of that. The name of
what is kept is a digest of all that it was made of: the page's text, the files of the programs
that it embeds, the addresses of the book's files (its links), the glossary, the settings, the
code and the packages; for the theme also the page's HTML, what is said of it, and the
navigation. A page that draws a warning is not kept, so that it draws it again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import FileSystemBytecodeCache, Template
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from worldsize.model import ROOT, atomic_write, compatibility
from worldsize.model.fingerprint import contents, digest
from worldsize.model.program import ON_GPUS, Program, frozen_files, is_program, on_gpus
from worldsize.site.html_postprocess import fixed

FOLDER = ".cache/pages"
# as this process has read it; hooks.py is read in each build
CODE = digest(ROOT, ROOT / "src/worldsize/model", *sorted(Path(__file__).parent.glob("*.py")))
MADE_BY = (
    "src/worldsize/site/hooks.py", "src/worldsize/site/templates", "docs/glossary.md",
    "mkdocs.yml", "overrides",
)  # fmt: skip
NOT_KEPT = (OSError, EOFError, pickle.UnpicklingError)
MADE = ("content", "plain", "meta", "toc", "_title_from_render", "present_anchor_ids")
EMBEDDED = re.compile(r'--8<--[ \t]+"((?:[^":]*/)?[^":/.]*)')  # its path, without an ending


def beside(root: Path, place: str) -> str:
    """What a page may show of `NAME`: of `NAME.py`, `NAME.cpu.txt`, `NAME.svg` and the like.

    With an output stand the names of the files that it needs, which may need others.
    """
    (folder, slash, name), gpu = place.rpartition("/"), on_gpus(root)
    names = os.listdir(root / folder) if (root / folder).is_dir() else []
    own = sorted(folder + slash + each for each in names if each.split(".")[0] == name)
    lines = [line for each in own for line in [*contents(root / each), gpu.get(each, "")]]
    of_programs = [Program(root, root / each) for each in own if is_program(root / each, root)]
    lines += [str(compatibility.releases(each)) for each in of_programs]
    for it in of_programs:
        lines += [other.name for other in it.dependencies()] + [each.name for each in it.data()]
    return "\n".join(lines)


def state(folder: Path) -> str:
    """Which files lie directly in a folder, each with its time and its size."""
    with suppress(OSError), os.scandir(folder) as found:
        stats = {each.name: each.stat() for each in found if each.is_file()}
        return str({name: (each.st_mtime_ns, each.st_size) for name, each in stats.items()})
    return ""


def around(nav: Navigation) -> str:
    """What the navigation says of all its pages."""
    return "\n".join(f"{each.title} {each.url}" for each in nav.pages)


class PageCache:
    """Renders the pages of one build, each from what is kept where that still holds.

    ``state_of`` a folder says what it was before anything that is ``known`` was read there.
    """

    def __init__(
        self, root: Path, files: Files, known: dict, state_of: Callable[[Path], str]
    ) -> None:
        self.root, self.folder, self.used = root, root / FOLDER, set[Path]()
        self.known, self.state_of = known, state_of
        self.beside = functools.cache(functools.partial(beside, root))
        self.around = functools.cache(around)
        there = [file for file in files if not file.inclusion.is_excluded()]
        places = [f"{file.src_uri} {file.dest_uri} {file.inclusion}" for file in there]
        self.book = digest(root, CODE, *(root / each for each in MADE_BY), *places)
        self.whole = root / ".cache" / "pages.of"  # of which book all pages have been kept

    def render(self, page: Page, text: str, make: Callable[[], None], files: Files) -> None:
        """Do what `make` does to a page, of which ``text`` says all but what it embeds."""
        embedded = sorted(set(EMBEDDED.findall(text)))
        folders = {(self.root / each).parent for each in [ON_GPUS, *embedded]}
        before = {each: self.state_of(each) for each in folders}
        with frozen_files(self.known):
            shown = [self.beside(each) for each in embedded]
        place = self._place(page, text, *shown)
        with suppress(*NOT_KEPT):
            made, links = pickle.loads(place.read_bytes())
            vars(page).update(made)
            page.links_to_anchors = {files.get_file_from_path(to): of for to, of in links}
            return
        said = _Warnings(logging.WARNING)
        logging.getLogger("mkdocs").addHandler(said)
        try:
            with frozen_files(self.known):
                make()
        finally:
            logging.getLogger("mkdocs").removeHandler(said)
        if not said.any and {each: state(each) for each in folders} == before:
            links = [(to.src_uri, of) for to, of in (page.links_to_anchors or {}).items()]
            made = {name: getattr(page, name) for name in MADE}
            self._keep(place, (made, links))

    def prerender(self, pages: list[Page], render: Callable[[Page], object]) -> None:
        """Where everything is to be made anew, let every core make and keep some first.

        What goes wrong there is left out: whoever wants that page meets it again.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        with suppress(OSError):
            if self.whole.read_text() == self.book:
                return
        if cores == 1 or threading.active_count() > 1:  # a fork has no other thread
            return
        left, all_of_them = os.pipe()  # whoever is free takes the next page's number
        os.write(all_of_them, b"".join(n.to_bytes(2, "big") for n in range(len(pages))))
        os.close(all_of_them)
        parts = []
        for _ in range(cores):
            if pid := os.fork():
                parts.append(pid)
                continue
            for handler in logging.getLogger("mkdocs").handlers:
                handler.setLevel(logging.CRITICAL + 1)
            while number := os.read(left, 2):
                with suppress(Exception):
                    render(pages[int.from_bytes(number, "big")])
            os._exit(0)
        os.close(left)
        for pid in parts:
            os.waitpid(pid, 0)

    def finish(self, template: Template, context: dict[str, Any]) -> str:
        """What a template makes of a page, as it is published."""
        page, around = context["page"], self.around(context["nav"])
        said = [template.name, page.title, page.edit_url, page.meta, str(page.toc)]
        place = self._place(page, around, repr(said), page.content)
        with suppress(*NOT_KEPT):
            return pickle.loads(place.read_bytes())
        output = fixed(Template.render(template, context))
        self._keep(place, output)
        return output

    def templates(self) -> FileSystemBytecodeCache | None:
        """Where the theme's templates are kept, compiled; nowhere if a book is only read."""
        folder = self.root / ".cache/templates"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
        return FileSystemBytecodeCache(folder, f"{jinja2.__version__}-%s") if usable else None

    def _place(self, page: Page, *made_of: str) -> Path:
        text = "\0".join([self.book, page.file.src_uri, *made_of])
        place = self.folder / hashlib.sha256(text.encode()).hexdigest()
        self.used.add(place)
        return place

    def _keep(self, place: Path, made: object) -> None:
        with suppress(OSError):  # a book that is only read is built anew each time
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(place, pickle.dumps(made))

    def prune(self) -> None:
        """Remove what this build did not use."""
        with suppress(OSError):
            atomic_write(self.whole, self.book)
            for each in self.folder.iterdir():
                if each not in self.used:
                    each.unlink(missing_ok=True)


class Finished(Template):
    """A template of the theme; what it has made of a page is kept."""

    def render(self, context: dict[str, Any]) -> str:
        if context["page"]:
            return context["config"].extra["keeper"].finish(self, context)
        return super().render(context)  # 404.html, or the site map


class _Warnings(logging.Handler):
    any = False

    def emit(self, record: logging.LogRecord) -> None:
        self.any = True
