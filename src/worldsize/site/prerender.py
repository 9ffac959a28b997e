"""The cache of rendered pages, which makes builds fast. The plugin option is `cache`.

Two forms of every page are stored in `.cache/pages/`: the HTML that Markdown makes of its text
(the content), and the HTML file that the theme makes of this content (the output). The name of
a stored file is a digest of everything that the content or the output depends on. If the digest
of the book has changed, all processor cores first render the missing pages. A build also writes
only those files of the site that differ from the files of the last build.

A page that causes a warning is not stored, so that the next build shows the warning again.

This is the only module that uses private interfaces of MkDocs:

- `mkdocs.commands.build._build_page`, with which a child process renders the output of a page;
- `Page._title_from_render`, which is stored together with the content of a page;
- the functions `write_file`, `copy_file` and `clean_directory` of `mkdocs.utils`, which are
  replaced during a build;
- the method `render` of a page whose content is stored, which is replaced by a function that
  does nothing.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jinja2
from jinja2 import ChoiceLoader, DictLoader, Environment, FileSystemBytecodeCache
from mkdocs import utils
from mkdocs.commands.build import _build_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils.templates import TemplateContext

from worldsize.model import ROOT, atomic_write, compatibility
from worldsize.model.fingerprint import digest, file_hashes
from worldsize.model.program import GPU_COMMANDS, Program, gpu_commands, is_program
from worldsize.site import incremental_output
from worldsize.site.programs import folder_state

FOLDER = ".cache/pages"
# A digest of the code of the site. The process that imported this code computes it once.
CODE = digest(ROOT, ROOT / "src/worldsize/model", *sorted(Path(__file__).parent.glob("*.py")))
SOURCES = ("src/worldsize/site/templates", "docs/glossary.md", "mkdocs.yml", "overrides")
UNREADABLE = (OSError, EOFError, pickle.UnpicklingError)
CONTENT = (  # the attributes of a page that are stored
    "content",
    "plain_markdown",
    "meta",
    "toc",
    "_title_from_render",
    "present_anchor_ids",
)
EMBEDDED = re.compile(r'--8<--[ \t]+"((?:[^":]*/)?[^":/.]*)')  # a path without its suffix
STORED_OUTPUT = "stored_output.html"  # the template of a page whose output is stored


class PageCache:
    """The stored pages of one build."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / FOLDER
        # contains the digest of the book after a build that stored all pages
        self.complete = root / ".cache" / "pages.of"
        self.used: set[Path] = set()  # the stored files that this build reads or writes
        self.output: dict[str, str] = {}  # the stored output of pages, by their source path
        self._missing: _MissingContent | None = None
        self._patches = ExitStack()

    def start_build(self) -> None:
        """Make MkDocs write only files that differ, and not empty the folder of the site."""
        self._patches.close()
        for name, function in (
            ("write_file", incremental_output.write),
            ("copy_file", incremental_output.copy),
            ("clean_directory", lambda site: None),  # see `prerender_output`
        ):
            self._patches.enter_context(mock.patch.object(utils, name, function))

    def end_build(self) -> None:
        """Restore the functions of MkDocs that `start_build` replaced."""
        self._patches.close()

    def start_pages(self, files: Files, state_of: Callable[[Path], str]) -> None:
        """Compute the digest of the book, on which the names of all stored files depend.

        `state_of` returns the state that a folder had before any file in it was read.
        """
        self.state_of = state_of
        self.embedded_inputs = functools.cache(functools.partial(embedded_inputs, self.root))
        published = [file for file in files if not file.inclusion.is_excluded()]
        paths = [f"{file.src_uri} {file.dest_uri} {file.inclusion}" for file in published]
        self.book = digest(self.root, CODE, *(self.root / name for name in SOURCES), *paths)

    # ---- the content of pages

    def prerender_content(
        self, config: MkDocsConfig, files: Files, finish: Callable[..., None]
    ) -> None:
        """Store the content of all pages, if the book is not stored yet.

        After `page.render`, call `finish(page, config, files)`.
        """

        def render(page: Page) -> None:
            config.plugins.on_pre_page(page, config=config, files=files)
            page.read_source(config)
            page.markdown = config.plugins.on_page_markdown(
                page.markdown, page=page, config=config, files=files
            )
            page.render(config, files)
            finish(page, config, files)

        self._prerender(
            [file.page for file in files.documentation_pages() if file.page], render
        )

    def restore_content(self, page: Page, inputs: str, files: Files) -> bool:
        """Set the content of the page, if it is stored. Return whether it is stored.

        `inputs` is the text of the page, with everything that it depends on except the
        programs that it embeds.
        """
        embedded = sorted(set(EMBEDDED.findall(inputs)))
        folders = {(self.root / name).parent for name in [GPU_COMMANDS, *embedded]}
        states = {folder: self.state_of(folder) for folder in folders}
        programs = [self.embedded_inputs(name) for name in embedded]
        path = self._path(page, inputs, *programs)
        stored = self._load(path)
        if stored is None:
            self._missing = _MissingContent(path, states)
            logging.getLogger("mkdocs").addHandler(_WARNINGS)
            _WARNINGS.count = 0
            return False
        attributes, links = stored
        vars(page).update(attributes)
        page.links_to_anchors = {
            files.get_file_from_path(uri): anchors for uri, anchors in links
        }
        page.render = lambda config, files: None
        self._missing = None
        return True

    def has_content(self, page: Page) -> bool:
        """Return whether the last call of `restore_content` found the content of its page."""
        return self._missing is None

    def store_content(self, page: Page) -> None:
        """Store the content, unless the page caused a warning or a program has changed."""
        logging.getLogger("mkdocs").removeHandler(_WARNINGS)
        path, states = self._missing
        if _WARNINGS.count or {folder: folder_state(folder) for folder in states} != states:
            return
        links = [
            (file.src_uri, anchors) for file, anchors in (page.links_to_anchors or {}).items()
        ]
        self._store(path, ({name: getattr(page, name) for name in CONTENT}, links))

    # ---- the output of pages

    def prerender_output(
        self, env: Environment, config: MkDocsConfig, files: Files, nav: Navigation
    ) -> None:
        """Load the output of all pages. Store it first, if the book is not stored yet."""
        incremental_output.remove_others(config.site_dir, files)
        env.bytecode_cache = self._compiled_templates()
        stored = DictLoader({STORED_OUTPUT: "{{ stored_output }}"})
        env.loader = ChoiceLoader([stored, env.loader])
        self.navigation = "\n".join(f"{each.title} {each.url}" for each in nav.pages)
        docs = files.documentation_pages()
        pages = [file.page for file in docs]
        self._prerender(pages, lambda page: _build_page(page, config, docs, nav, env))
        for page in pages:
            if (output := self._load(self._output_path(page))) is not None:
                self.output[page.file.src_uri] = output
                page.meta["template"] = STORED_OUTPUT

    def has_output(self, page: Page) -> bool:
        """Return whether the output of the page was loaded from the cache."""
        return page.meta.get("template") == STORED_OUTPUT

    def restore_output(self, context: TemplateContext, page: Page) -> None:
        """Give the stored output of the page to its template, if there is one."""
        if self.has_output(page):
            context["stored_output"] = self.output.pop(page.file.src_uri)

    def store_output(self, page: Page, output: str) -> None:
        """Store the output of the page."""
        self._store(self._output_path(page), output)

    def _output_path(self, page: Page) -> Path:
        inputs = [page.title, page.edit_url, page.meta, str(page.toc)]
        return self._path(page, self.navigation, repr(inputs), page.content)

    def _compiled_templates(self) -> FileSystemBytecodeCache | None:
        """Return the cache of compiled templates, or None if its folder is not writable."""
        folder = self.root / ".cache/templates"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
        return FileSystemBytecodeCache(folder, f"{jinja2.__version__}-%s") if usable else None

    # ---- the folder

    def _path(self, page: Page, *inputs: str) -> Path:
        text = "\0".join([self.book, page.file.src_uri, *inputs])
        path = self.folder / hashlib.sha256(text.encode()).hexdigest()
        self.used.add(path)
        return path

    def _load(self, path: Path) -> object | None:
        with suppress(*UNREADABLE):
            return pickle.loads(path.read_bytes())
        return None

    def _store(self, path: Path, value: object) -> None:
        with suppress(OSError):  # if the folder is not writable, every build renders the page
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, pickle.dumps(value))

    def prune(self) -> None:
        """Store the digest of the book, and remove the files that this build did not use."""
        with suppress(OSError):
            atomic_write(self.complete, self.book)
            for path in self.folder.iterdir():
                if path not in self.used:
                    path.unlink(missing_ok=True)

    def _prerender(self, pages: list[Page], render: Callable[[Page], object]) -> None:
        """Call `render` for all pages in one process per core, if the book is not stored yet.

        An exception in a child process is ignored, because the build renders the page again.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        with suppress(OSError):
            if self.complete.read_text() == self.book:
                return
        if cores == 1 or threading.active_count() > 1:  # a fork copies only one thread
            return
        # Every child process reads the number of its next page from this pipe.
        numbers, writer = os.pipe()
        os.write(writer, b"".join(n.to_bytes(2, "big") for n in range(len(pages))))
        os.close(writer)
        children = []
        for _ in range(cores):
            if pid := os.fork():
                children.append(pid)
                continue
            for handler in logging.getLogger("mkdocs").handlers:
                handler.setLevel(logging.CRITICAL + 1)
            _WARNINGS.setLevel(logging.WARNING)
            while number := os.read(numbers, 2):
                with suppress(Exception):
                    render(pages[int.from_bytes(number, "big")])
            os._exit(0)
        os.close(numbers)
        for pid in children:
            os.waitpid(pid, 0)


class _MissingContent(NamedTuple):
    """Where to store the content of a page, and the states of the folders that it embeds."""

    path: Path
    states: dict[Path, str]


class _WarningCounter(logging.Handler):
    """A handler that counts the warnings of MkDocs."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


_WARNINGS = _WarningCounter(logging.WARNING)


def embedded_inputs(root: Path, name: str) -> str:
    """Return a text that changes whenever a page that embeds the program `name` could change.

    The text depends on `NAME.py`, `NAME.cpu.txt`, `NAME.svg` and similar files. Such a page
    also lists the files that the program needs, so the text contains the names of these files.
    """
    (folder, slash, stem), gpu = name.rpartition("/"), gpu_commands(root)
    names = os.listdir(root / folder) if (root / folder).is_dir() else []
    own = sorted(folder + slash + each for each in names if each.split(".")[0] == stem)
    lines = [line for each in own for line in [*file_hashes(root / each), gpu.get(each, "")]]
    programs = [Program(root, root / each) for each in own if is_program(root / each, root)]
    lines += [str(compatibility.releases(each)) for each in programs]
    for program in programs:
        lines += [each.name for each in (*program.dependencies(), *program.data())]
    return "\n".join(lines)
