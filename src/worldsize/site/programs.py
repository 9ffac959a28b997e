"""Generate the pages of programs, and the page "What ran where"."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, InclusionLevel

from worldsize.model import compatibility
from worldsize.model.page import embedded_files, read
from worldsize.model.program import Program, programs
from worldsize.model.transcript import Provenance
from worldsize.site import notebooks, page_stats, template
from worldsize.site.embeds import machine, program_link, program_page, transcript


class PageFile(File):
    """The file of a program's page. `text` returns its Markdown, if it is not in the cache."""

    text: Callable[[], str]


def folder_state(folder: Path) -> str:
    """Return a text with the name, the time and the size of each file of a folder."""
    with suppress(OSError), os.scandir(folder) as found:
        stats = {each.name: each.stat() for each in found if each.is_file()}
        return str({name: (each.st_mtime_ns, each.st_size) for name, each in stats.items()})
    return ""


LANGUAGES = {".py": "python", ".cu": "cuda", ".cpp": "cpp", ".sh": "bash"}


def files(config: MkDocsConfig, root: Path, state_of: Callable[[Path], str]) -> Iterator[File]:
    """Yield the generated files of the site.

    These are the pages of programs, the programs with their notebooks, figures and data, the
    page "What ran where", and the tables of the planner. `state_of` returns the state that a
    folder had before any file in it was read.
    """
    compatibility.releases.cache_clear()
    shown, downloads = embedded_files(root), {}
    for program in programs(root):
        state = state_of(program.path.parent)  # before any file of the folder is read
        page = program_page(program.name).lstrip("/")
        chapters = _chapters(program, shown.get(program.name, []))
        source = f'--8<-- "{program.name}"\n{chapters}'  # the inputs of the page, for the cache
        file = PageFile.generated(config, page, content=source)
        file.text = functools.partial(_page, program, chapters, config.repo_url)
        yield file
        if uri := notebooks.notebook_uri(program):
            text = _notebook(program, config.site_url, config.repo_url, state)
            yield File.generated(config, uri, content=text, inclusion=InclusionLevel.INCLUDED)
        for path in (program.path, *program.figures.values(), *program.data()):
            downloads[f"{page.rpartition('/')[0]}/{path.name}"] = str(path)
    for uri, path in downloads.items():  # several programs may need the same table
        yield File.generated(config, uri, abs_src_path=path)
    yield File.generated(config, "what_ran_where.md", content=_what_ran_where(root))
    # the tables of the planner, for the instruments that use its formulas
    tables = {
        each.stem: tomllib.loads(each.read_text("utf-8"))
        for each in root.glob("snippets/planner/*.toml")
    }
    uri = "assets/instruments/planner.json"
    yield File.generated(config, uri, content=json.dumps(tables))


@functools.lru_cache(maxsize=1024)
def _notebook(program: Program, site: str, repository: str, _folder: str) -> str:
    """Return the notebook of a program. The cache depends on the state of its folder."""
    return notebooks.notebook(program, summary(program), site, repository)


def summary(program: Program) -> str:
    """Return the first sentence of the docstring or of the first comment of a program."""
    text = program.path.read_text("utf-8")
    if program.path.suffix == ".py":
        docstring = re.match(r'(?:#[^\n]*\n)*"""(.*?)"""', text, re.DOTALL)
        text = docstring[1] if docstring else _first_cell(text)
    elif program.path.suffix == ".sh":
        text = re.match(r"(?:#!.*\n)?((?:# .*\n)*)", text)[1].replace("# ", "")
    else:
        text = re.sub(r"^\s*(//|/\*+|\*)\s?", "", text, flags=re.MULTILINE)
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0]


def _first_cell(text: str) -> str:
    """Return the first paragraph below the heading of a lab."""
    cell = text.partition("# %% [markdown]")[2].partition("# %%")[0]
    paragraphs = re.sub(r"^# ?", "", cell, flags=re.MULTILINE).strip().split("\n\n")
    return next((p for p in paragraphs if not p.startswith("#")), "")


def _chapters(program: Program, places: list[str]) -> list[str]:
    """Return Markdown links to the pages that show a program."""
    pages = dict.fromkeys(place.split(":")[0] for place in places)
    chapters = [
        f"[{read(program.root / page).title}](/{page.removeprefix('docs/')})" for page in pages
    ]
    if not chapters and program.name.startswith("labs/lab"):
        chapters = [f"[its lab](/{program.name})"]
    return chapters


def _page(program: Program, chapters: list[str], repository: str) -> str:
    """Return the Markdown of the page of a program."""
    return template.render(
        "program/page",
        program=program,
        summary=summary(program),
        chapters=chapters,
        language=LANGUAGES[program.path.suffix],
        transcript=transcript,
        machine=machine,
        tested_releases=compatibility.releases(program),
        notebook=notebooks.notebook_uri(program),
        notebook_links=notebooks.links(program, repository),
        repository=repository,
    )


def _what_ran_where(root: Path) -> str:
    """Return the Markdown of the page "What ran where"."""
    all_programs = programs(root)
    folders: dict[str, list[tuple[Program, str, Provenance]]] = defaultdict(list)
    for program in all_programs:
        for device, recorded in program.transcripts().items():
            if provenance := recorded.provenance:
                row = program, "CPU" if device == "cpu" else "GPU", provenance
                folders[program.path.parent.name].append(row)
    machines = [each.device for rows in folders.values() for _, _, each in rows]
    return template.render(
        "program/what_ran_where",
        folders=folders,
        tested_releases=compatibility.releases,
        machines=machines,
        not_recorded=[
            program_link(each.name) for each in page_stats.not_recorded_on_gpu(all_programs)
        ],
        program_link=program_link,
    )
