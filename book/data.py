"""Data that becomes part of a page: what `quiz`, `tracks` and `references` have in common.

Each reads one YAML file, checks that nothing in it is missing or unknown, and puts Markdown in
the place of a comment line. What is wrong stops the build and names the file and the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import yaml
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

from book import ROOT, BookError

try:
    from mkdocs.exceptions import BuildError  # printed with the page's name, without a trace
except ImportError:
    BuildError = BookError


class DataError(BuildError):
    """Data that cannot be shown as it is written."""


def read_yaml(path: Path, name: str) -> object:
    """What the file at `path` holds; a DataError that begins with `name` if it is no YAML."""
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"{name}: {error}") from None


def check_fields(
    data: object, what: str, needed: Collection[str], allowed: Collection[str], where: str
) -> None:
    """Raise DataError unless `data`, `what` in words, has all it needs and nothing unknown."""
    if not isinstance(data, dict):
        raise DataError(f"{where}: {data!r} is not {what}")
    if missing := [name for name in sorted(needed) if name not in data]:
        raise DataError(f"{where}: {what} needs {', '.join(missing)}")
    if unknown := sorted(data.keys() - {*needed, *allowed}):
        raise DataError(f"{where}: {what} has no {', '.join(unknown)}")


Render = Callable[[list[str], Path], list[str]]  # the lines of a page, and the book's folder


def extension(name: str, render: Render, priority: int = 41) -> Callable[..., Extension]:
    """`makeExtension` for Python-Markdown: `render` sees a page's lines before others do.

    Its setting `root` is the folder that holds docs/ and snippets/, if it is not this book's.
    """

    class Rendering(Preprocessor):
        def __init__(self, md: Markdown, root: Path) -> None:
            super().__init__(md)
            self.root = root

        def run(self, lines: list[str]) -> list[str]:
            return render(lines, self.root)

    class RenderingExtension(Extension):
        def __init__(self, **kwargs) -> None:
            self.config = {"root": [str(ROOT), "the folder that holds docs/ and snippets/"]}
            super().__init__(**kwargs)

        def extendMarkdown(self, md: Markdown) -> None:
            rendering = Rendering(md, Path(self.getConfig("root")))
            md.preprocessors.register(rendering, name, priority)

    return RenderingExtension
