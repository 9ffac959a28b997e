"""Hooks: all that the book adds to MkDocs, in the order in which it happens.

MkDocs loads this file by its path and calls its functions `on_…`, and Markdown `BookMarkdown`.
"""

from __future__ import annotations

import functools
from pathlib import Path

from jinja2 import Environment
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.commands.build import _build_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils.meta import get_data
from pymdownx.arithmatex import ArithmatexExtension

from worldsize.model import ROOT, BookError
from worldsize.model.page import check_embeds
from worldsize.model.program import Program, frozen_files
from worldsize.site import (
    changes,
    embeds,
    glossary,
    html_postprocess,
    incremental_output,
    labs,
    llms_markdown,
    math_svg,
    notebooks,
    page_cache,
    page_stats,
    programs,
    quiz,
    references,
    releases,
    scores,
    search,
    tracks,
    yaml_schema,
)

WATCHED = ("snippets", "labs", "assessment", "book", "overrides")  # beside docs/
SHOWS = {  # what a comment line `<!-- track: … -->` asks for
    "changes": changes.show,
    "references": references.show,
    "releases": releases.show,
    "track": tracks.show,
    "quiz": quiz.show,
    "scores": scores.show,
    "glossary": glossary.show,
}


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent


# ---- once


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    root = _root(config)
    # as the file has it: `mkdocs serve` puts its own there
    config.site_url = config.user_configs[0].get("site_url")
    config.watch += [str(root / each) for each in WATCHED if (root / each).exists()]
    config.extra["markdown"] = BookMarkdown(root)
    config.markdown_extensions.append(config.extra["markdown"])
    config.extra["index"] = search.Index(config)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    known = {}  # of programs, which this build takes to be as they are now
    state_of = functools.cache(page_cache.state)
    with frozen_files(known):
        for file in programs.files(config, _root(config), state_of):
            files.append(file)
    if (_root(config) / changes.FILE).exists():
        feed = changes.feed(_root(config), config)
        files.append(File.generated(config, changes.FEED, content=feed))
    html_postprocess.fit(files)
    config.extra["keeper"] = page_cache.PageCache(_root(config), files, known, state_of)
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    def render(page: Page) -> None:
        config.plugins.on_pre_page(page, config=config, files=files)
        page.read_source(config)
        around = {"page": page, "config": config, "files": files}
        page.markdown = config.plugins.on_page_markdown(page.markdown, **around)
        page.render(config, files)

    pages = [file.page for file in files.documentation_pages() if file.page]
    config.extra["keeper"].prerender(pages, render)
    config.extra["nav"] = nav
    return nav


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> Environment:
    if config.theme.custom_dir:
        html_postprocess.share_navigation(env)
    incremental_output.remove_others(config.site_dir, files)
    env.template_class = page_cache.Finished
    env.bytecode_cache = config.extra["keeper"].templates()
    docs, nav = files.documentation_pages(), config.extra["nav"]
    pages = [file.page for file in docs]
    config.extra["keeper"].prerender(
        pages, lambda page: _build_page(page, config, docs, nav, env)
    )
    return env


# ---- for each page: as text, as Markdown, as HTML, in its template


def on_pre_page(page: Page, config: MkDocsConfig, files: Files) -> Page:
    if labs.is_lab(page.file):
        vars(page).pop("render", None)  # mkdocs-jupyter's: a lab is rendered as any page is
    return page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    root, name = config.extra["keeper"].root, page.file.src_uri
    vars(page)["render"] = functools.partial(_render, page)
    if labs.is_lab(page.file):
        opens = notebooks.links(Program(root, root / name), config.repo_url)
        return page_stats.with_facts(labs.page_text(page, root, opens), root, name)
    with frozen_files(config.extra["keeper"].known):
        return page_stats.with_counts(markdown, root) if name == "index.md" else markdown


def _render(page: Page, config: MkDocsConfig, files: Files) -> None:
    keeper = config.extra["keeper"]
    with frozen_files(keeper.known):
        lines = yaml_schema.expand_directives(page.markdown.split("\n"), SHOWS, keeper.root)
    text = "\n".join([str(page.meta), page.markdown, *lines])
    keeper.render(page, text, functools.partial(_make, page, config, files), files)


def _make(page: Page, config: MkDocsConfig, files: Files) -> None:
    """Render a page of which nothing is kept."""
    complete(page, config)
    type(page).render(page, config, files)
    page.plain = llms_markdown.text(config.extra["markdown"].lines, page, config, files)


def complete(page: Page, config: MkDocsConfig) -> None:
    """Give a page the whole text that it is made of."""
    root, name = config.extra["keeper"].root, page.file.src_uri
    if text := getattr(page.file, "text", None):
        page.markdown, page.meta = get_data(text())
    elif not page.file.generated_by and not labs.is_lab(page.file):
        try:
            check_embeds(Path(page.file.abs_src_path), root)
            embeds.check_callouts(Path(page.file.abs_src_path), root)
        except BookError as error:
            raise BuildError(str(error)) from None
        if name != "index.md":
            page.markdown = page_stats.with_facts(page.markdown, root, name)


def with_all_it_shows(lines: list[str], root: Path) -> list[str]:
    return embeds.render(
        yaml_schema.expand_directives(lines, SHOWS, root), root
    )  # what is filled in may embed


class BookMarkdown(Extension):
    """What the book does to a page's Markdown."""

    def __init__(self, root: Path = ROOT) -> None:
        super().__init__()
        self.root, self.lines = root, list[str]()  # of the page that was made last
        tracks.loaded.cache_clear()  # what an earlier build has read

    def extendMarkdown(self, md: Markdown) -> None:
        ArithmatexExtension(generic=True, preview=False).extendMarkdown(md)
        tooltips = glossary.Tooltips(md, self.root)
        # Python-Markdown runs what has the higher priority first
        md.preprocessors.register(_Lines(self, tooltips), "book", 40)  # as written
        md.treeprocessors.register(math_svg.Drawer(md), "mathematics", 15)  # behind inline, 20
        md.postprocessors.register(math_svg.Glyphs(md), "glyphs", 5)  # behind raw HTML, 30
        md.postprocessors.register(embeds.Markers(md), "markers", 4)
        md.treeprocessors.register(tooltips, "glossary", 8)  # before the anchors of toc, 5


class _Lines(Preprocessor):
    """The lines of a page, before anything else reads them."""

    def __init__(self, of: BookMarkdown, tooltips: glossary.Tooltips) -> None:
        super().__init__()
        self.of, self.tooltips = of, tooltips

    def run(self, lines: list[str]) -> list[str]:
        self.of.lines = with_all_it_shows(lines, self.of.root)
        return self.tooltips.without_own_senses(self.of.lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    html = html_postprocess.with_sizes(
        html_postprocess.with_drawings(html, page, files), page, files
    )
    config.extra["index"].add(page, html)
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    llms_markdown.write(page)
    return output


def on_post_build(config: MkDocsConfig) -> None:
    llms_markdown.write_map(config.extra["nav"], config)
    config.extra["keeper"].prune()


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    return html_postprocess.fixed(output) if template_name.endswith(".html") else output
