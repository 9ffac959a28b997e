"""The MkDocs plugin `worldsize`: everything that the book adds to the build of its site.

The methods `on_…` are in the order in which MkDocs calls them. The plugin uses only public
events and attributes of MkDocs. The module `prerender`, which makes a second build fast, is the
exception. The option `cache: false` builds the same site without it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment
from mkdocs.config.base import Config
from mkdocs.config.config_options import ListOfItems, Type
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError
from mkdocs.plugins import BasePlugin, event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils.meta import get_data
from mkdocs.utils.templates import TemplateContext

from worldsize.model import BookError
from worldsize.model.page import check_embeds
from worldsize.model.program import Program, assume_unchanged
from worldsize.site import (
    changes,
    embeds,
    html_postprocess,
    instruments,
    labs,
    llms_txt,
    minify,
    notebooks,
    page_stats,
    programs,
    search,
    trace_pages,
)
from worldsize.site.markdown_extension import BookMarkdown, expand_directives

if TYPE_CHECKING:
    from worldsize.site.prerender import PageCache


class BookConfig(Config):
    """The options of the plugin in mkdocs.yml."""

    cache = Type(bool, default=True)
    """Whether to store rendered pages in `.cache/`, and to render them in several processes."""

    watch = ListOfItems(
        Type(str), default=["snippets", "labs", "assessment", "src", "overrides"]
    )
    """The folders, besides docs/, whose changes make `mkdocs serve` build the site again."""


class BookPlugin(BasePlugin[BookConfig]):
    """The plugin that builds the site. MkDocs creates a new instance for every build."""

    root: Path
    """The folder of mkdocs.yml."""

    memo: dict
    """The values that were computed during this build, see `assume_unchanged`."""

    markdown: BookMarkdown
    index: search.Index
    nav: Navigation
    cache: PageCache | None = None

    # ---- once in a build

    def on_config(self, config: MkDocsConfig) -> MkDocsConfig:
        self.root = Path(config.config_file_path).resolve().parent
        self.memo = {}
        # `mkdocs serve` replaces the address. Its pages must equal the published pages.
        config.site_url = config.user_configs[0].get("site_url")
        folders = [self.root / name for name in self.config.watch]
        config.watch += [str(folder) for folder in folders if folder.exists()]
        self.markdown = BookMarkdown(self.root, self.memo)
        config.markdown_extensions.append(self.markdown)
        self.index = search.Index(config)
        if self.config.cache:
            from worldsize.site.prerender import PageCache

            self.cache = PageCache(self.root)
        return config

    def on_pre_build(self, *, config: MkDocsConfig) -> None:
        if self.cache:
            self.cache.start_build()

    def on_files(self, files: Files, *, config: MkDocsConfig) -> Files:
        state_of = functools.cache(programs.folder_state)
        with assume_unchanged(self.memo):
            for file in programs.files(config, self.root, state_of):
                files.append(file)
            for file in trace_pages.files(config, self.root):
                files.append(file)
        if (self.root / changes.FILE).exists():
            feed = changes.feed(self.root, config)
            files.append(File.generated(config, changes.FEED, content=feed))
        html_postprocess.adapt_theme_files(files)
        minify.minify_instruments(files)
        if self.cache:
            self.cache.start_pages(files, state_of)
        return files

    def on_nav(self, nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:
        self.nav = nav
        if self.cache:
            self.cache.prerender_content(config, files, self.finish_content)
        return nav

    def on_env(self, env: Environment, *, config: MkDocsConfig, files: Files) -> Environment:
        html_postprocess.use_search_worker(env)
        if config.theme.custom_dir:
            html_postprocess.share_navigation(env)
        if self.cache:
            self.cache.prerender_output(env, config, files, self.nav)
        return env

    # ---- for every page: its text, its Markdown, its HTML, and its template

    def on_pre_page(self, page: Page, *, config: MkDocsConfig, files: Files) -> Page:
        if labs.is_lab(page.file):  # remove the method that mkdocs-jupyter gave this page
            vars(page).pop("render", None)
        return page

    def on_page_markdown(
        self, markdown: str, *, page: Page, config: MkDocsConfig, files: Files
    ) -> str:
        with assume_unchanged(self.memo):
            text = self._text(markdown, page, config)
            if not page.file.generated_by:
                instruments.check_page(Path(page.file.abs_src_path), self.root)
                trace_pages.check_page(Path(page.file.abs_src_path), self.root)
            if self.cache:
                lines = expand_directives(text.split("\n"), self.root)
                inputs = "\n".join([str(page.meta), text, *lines])
                if self.cache.restore_content(page, inputs, files):
                    return text
            return self._with_facts(text, page)

    def _text(self, markdown: str, page: Page, config: MkDocsConfig) -> str:
        """Return the Markdown of a page.

        For a lab, it comes from the script. On the home page, counts replace their names.
        """
        name = page.file.src_uri
        if labs.is_lab(page.file):
            links = notebooks.links(Program(self.root, self.root / name), config.repo_url)
            text = labs.page_text(page, self.root, links)
            return page_stats.with_facts(text, self.root, name)
        return page_stats.with_counts(markdown, self.root) if name == "index.md" else markdown

    def _with_facts(self, markdown: str, page: Page) -> str:
        """Check the embeds of a page, and return its Markdown with the facts below its title.

        The Markdown of a program's page is generated here, because a page from the cache does
        not need it. Raise BuildError if an embed or a callout is wrong.
        """
        file, name = page.file, page.file.src_uri
        if isinstance(file, programs.PageFile):
            markdown, page.meta = get_data(file.text())
            return markdown
        if file.generated_by or labs.is_lab(file):
            return markdown
        try:
            check_embeds(Path(file.abs_src_path), self.root)
            embeds.check_callouts(Path(file.abs_src_path), self.root)
        except BookError as error:
            raise BuildError(str(error)) from None
        if name == "index.md":
            return markdown
        return page_stats.with_facts(markdown, self.root, name)

    def on_page_content(
        self, html: str, *, page: Page, config: MkDocsConfig, files: Files
    ) -> str:
        self.finish_content(page, config, files)
        html = html_postprocess.with_drawings(html, page, files)
        html = html_postprocess.with_sizes(html, page, files)
        self.index.add(page, html)
        return html

    def finish_content(self, page: Page, config: MkDocsConfig, files: Files) -> None:
        """Set `page.plain_markdown`, and store the content of the page in the cache."""
        if self.cache and self.cache.has_content(page):
            return
        page.plain_markdown = llms_txt.plain_markdown(self.markdown.lines, page, config, files)
        if self.cache:
            self.cache.store_content(page)

    @event_priority(100)  # before the theme's search plugin, which changes `page.content`
    def on_page_context(
        self, context: TemplateContext, *, page: Page, config: MkDocsConfig, nav: Navigation
    ) -> TemplateContext:
        if self.cache:
            self.cache.restore_output(context, page)
            if self.cache.has_output(page) and self.index.replaces_theme:
                page.content = ""  # so that the theme's search plugin does not parse it
        return context

    def on_post_page(self, output: str, *, page: Page, config: MkDocsConfig) -> str:
        llms_txt.write(page)
        if self.cache and self.cache.has_output(page):
            return output
        output = html_postprocess.fix_html(output)
        if self.cache:
            self.cache.store_output(page, output)
        return output

    def on_post_template(self, output: str, *, template_name: str, config: MkDocsConfig) -> str:
        return html_postprocess.fix_html(output) if template_name.endswith(".html") else output

    # ---- at the end

    def on_post_build(self, *, config: MkDocsConfig) -> None:
        llms_txt.write_index(self.nav, config)
        if self.cache:
            self.cache.prune()
            self.cache.end_build()

    def on_build_error(self, *, error: Exception) -> None:
        if self.cache:
            self.cache.end_build()
