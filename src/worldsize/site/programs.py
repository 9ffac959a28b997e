"""Programs as pages: one for each program, and the page "What ran where"."""

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
    """The file of a program's page. Its Markdown is made only if it is not in the cache."""

    text: Callable[[], str]


def folder_state(folder: Path) -> str:
    """Return a text with the name, the time and the size of every file in a folder."""
    with suppress(OSError), os.scandir(folder) as found:
        stats = {each.name: each.stat() for each in found if each.is_file()}
        return str({name: (each.st_mtime_ns, each.st_size) for name, each in stats.items()})
    return ""


LANGUAGES = {".py": "python", ".cu": "cuda", ".cpp": "cpp", ".sh": "bash"}


def files(config: MkDocsConfig, root: Path, state_of: Callable[[Path], str]) -> Iterator[File]:
    """The programs' pages, the programs themselves, their figures and tables, and what ran
    where."""
    compatibility.releases.cache_clear()
    shown, beside = embedded_files(root), {}
    for program in programs(root):
        state = state_of(program.path.parent)  # first of all that is asked of it
        page = program_page(program.name).lstrip("/")
        chapters = _chapters(program, shown.get(program.name, []))
        source = f'--8<-- "{program.name}"\n{chapters}'  # names what the page depends on
        file = PageFile.generated(config, page, content=source)
        file.text = functools.partial(_page, program, chapters, config.repo_url)
        yield file
        if uri := notebooks.place(program):
            around = config.site_url, config.repo_url
            text = _notebook(program, *around, state)
            yield File.generated(config, uri, content=text, inclusion=InclusionLevel.INCLUDED)
        for path in (program.path, *program.figures.values(), *program.data()):
            beside[f"{page.rpartition('/')[0]}/{path.name}"] = str(path)
    for uri, path in beside.items():  # several programs may need one table
        yield File.generated(config, uri, abs_src_path=path)
    yield File.generated(config, "what_ran_where.md", content=_what_ran_where(root))
    # the planner's tables, for the instruments that have its formulas
    tables = {
        each.stem: tomllib.loads(each.read_text("utf-8"))
        for each in root.glob("snippets/planner/*.toml")
    }
    uri = "assets/instruments/planner.json"
    yield File.generated(config, uri, content=json.dumps(tables))


@functools.lru_cache(maxsize=1024)
def _notebook(program: Program, site: str, repository: str, _folder: str) -> str:
    """The notebook of a program, made once for each state of the folder in which it lies."""
    return notebooks.notebook(program, summary(program), site, repository)


def summary(program: Program) -> str:
    """The first sentence of a program's docstring or leading comment."""
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
    """The paragraph under a lab's heading."""
    cell = text.partition("# %% [markdown]")[2].partition("# %%")[0]
    paragraphs = re.sub(r"^# ?", "", cell, flags=re.MULTILINE).strip().split("\n\n")
    return next((p for p in paragraphs if not p.startswith("#")), "")


def _chapters(program: Program, places: list[str]) -> list[str]:
    """The links to the pages that show a program."""
    pages = dict.fromkeys(place.split(":")[0] for place in places)
    chapters = [
        f"[{read(program.root / page).title}](/{page.removeprefix('docs/')})" for page in pages
    ]
    if not chapters and program.name.startswith("labs/lab"):
        chapters = [f"[its lab](/{program.name})"]
    return chapters


def _page(program: Program, chapters: list[str], repository: str) -> str:
    """The page of a program: what it shows, the whole file, what it printed."""
    return template.render(
        "program/page",
        program=program,
        what=summary(program),
        chapters=chapters,
        language=LANGUAGES[program.path.suffix],
        transcript=transcript,
        machine=machine,
        held=compatibility.releases(program),
        notebook=notebooks.place(program),
        opens=notebooks.links(program, repository),
        repository=repository,
    )


def _what_ran_where(root: Path) -> str:
    """Every program, each device it was recorded on, versions, date, seconds."""
    every = programs(root)
    folders: dict[str, list[tuple[Program, str, Provenance]]] = defaultdict(list)
    for program in every:
        for device, recorded in program.transcripts().items():
            if at := recorded.provenance:
                row = program, "CPU" if device == "cpu" else "GPU", at
                folders[program.path.parent.name].append(row)
    machines = [at.device for rows in folders.values() for _, _, at in rows]
    return template.render(
        "program/what_ran_where",
        folders=folders,
        held=compatibility.releases,
        machines=machines,
        waiting=[program_link(each.name) for each in page_stats.waiting(every)],
        program_link=program_link,
    )
