"""Site: the pages and facts that MkDocs takes from the programs.

Hooks, as thin as they can be: a page for each program, the page "What ran where", and under
each chapter's title its reading time and the machines its programs were run on.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from book import BookError
from book.embeds import EMBED, embedded_files, target_file
from book.markdown import DEVICE_NAMES, program_page, transcript_lines
from book.program import Program, is_program, programs
from book.transcript import Transcript

WORDS_PER_MINUTE = 220
SECONDS_PER_CODE_LINE = 2
LANGUAGES = {".py": "python", ".cu": "cuda", ".cpp": "cpp", ".sh": "bash"}


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Watch what the pages are made of, beside docs/."""
    for folder in ("snippets", "labs", "assessment", "book", "overrides"):
        if (_root(config) / folder).exists():
            config.watch.append(str(_root(config) / folder))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the programs' pages, the programs themselves, and their figures."""
    root = _root(config)
    shown = embedded_files(root)
    for program in programs(root):
        page = program_page(program.name).lstrip("/")
        places = shown.get(program.name, [])
        files.append(File.generated(config, page, content=_program_text(program, places)))
        folder = page.rsplit("/", 1)[0]
        for path in (program.path, program.figure):
            if path.exists():
                uri = f"{folder}/{path.name}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "what_ran_where.md", content=_what_ran_where(root)))
    return files


def summary(program: Program) -> str:
    """The first sentence of a program's docstring or leading comment."""
    text = program.path.read_text("utf-8")
    if program.path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or _first_cell(text)
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


def _program_text(program: Program, places: list[str]) -> str:
    """The page of a program: what it shows, the whole file, what it printed."""
    what = summary(program)
    pages = list(dict.fromkeys(place.split(":")[0] for place in places))
    chapters = ", ".join(
        f"[{_title(program.root / page)}](/{page.removeprefix('docs/')})" for page in pages
    )
    if not chapters and program.name.startswith("labs/lab"):
        chapters = f"[its lab](/{program.name})"
    front = ["---", "search:", "  exclude: true", f"description: {_quoted(what)}", "---", ""]
    lines = [*front, f"# {program.path.name}", "", what, ""]
    links = [f"[Download {program.path.name}]({program.path.name}){{ download }}"]
    lines += [" · ".join(filter(None, [f"In {chapters}" if chapters else "", *links])), ""]
    lines += [
        '<div class="program-source" markdown="1">',
        "",
        f"```{LANGUAGES[program.path.suffix]}",
        f'--8<-- "{program.name}"',
        "```",
        "",
        "</div>",
        "",
    ]
    if program.figure.exists():
        lines += [f"![Drawn by {program.path.name}: {what}]({program.figure.name})", ""]
    if program.devices:
        lines += ["## What it prints", "", *transcript_lines(program)]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "").replace('"', "'") + '"'


def _title(page: Path) -> str:
    """The title of a markdown page."""
    match = re.search(r"^# (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return match[1].strip() if match else page.stem


def _what_ran_where(root: Path) -> str:
    """Every program, each device it was recorded on, versions, date, seconds."""
    rows: dict[str, list[str]] = defaultdict(list)
    count, machines = 0, set()
    for program in programs(root):
        for device in program.devices:
            transcript = Transcript.parse(program.transcript_path(device).read_text("utf-8"))
            provenance = transcript.provenance
            if provenance is None:
                continue
            count += 1
            machines.add(provenance.device)
            rows[program.path.parent.name].append(
                f"| [{program.path.name}]({program_page(program.name)}) "
                f"| {DEVICE_NAMES[device]}: {provenance.device} | {provenance.torch} "
                f"| {provenance.python} | {provenance.date} | {provenance.seconds:.1f} |"
            )
    lines = [
        "---",
        "description: Every program of the book, the machines its output was recorded on, "
        "versions, dates and seconds.",
        "---",
        "",
        "# What ran where",
        "",
        "Every output in this book was printed by one of the programs below. "
        f"{count} outputs were recorded, on: {'; '.join(sorted(machines))}. "
        "Seconds are those of all the commands of a program together, process start included.",
        "",
    ]
    for folder, entries in rows.items():
        lines += [
            f"## {folder}",
            "",
            "| program | machine | torch | Python | date | seconds |",
            "|---|---|---|---|---|---:|",
            *entries,
            "",
        ]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put reading time and machines under the title of a chapter, counts into the home page."""
    if page.file.src_uri == "index.md":
        return with_counts(markdown, _root(config))
    if not re.match(r"\d\d_\w+\.md$", page.file.src_uri):
        return markdown
    facts = " · ".join(page_facts(markdown, _root(config)))
    return re.sub(
        r"^(# .+)$", rf"\1\n\n{facts}\n{{ .page-facts }}", markdown, count=1, flags=re.MULTILINE
    )


def counts(root: Path) -> dict[str, int]:
    """How many there are of what the home page speaks of."""
    every = programs(root)
    pages = [page.read_text("utf-8") for page in sorted((root / "docs").glob("*.md"))]
    galleries = re.findall(
        r"^## What (?:goes wrong|each error).*?(?=^## |\Z)", "\n".join(pages), re.M | re.S
    )
    return {
        "programs": sum(
            program.name.startswith("snippets/") and "cpu" in program.devices
            for program in every
        ),
        "transcripts": sum(len(program.devices) for program in every),
        "figures": sum(program.figure.exists() for program in every),
        "labs": sum(bool(re.match(r"labs/lab\d\d_", program.name)) for program in every),
        "failures": sum(_failures(gallery) for gallery in galleries),
    }


def _failures(gallery: str) -> int:
    """The failures of a gallery: its deepest headings, each with an embedded program."""
    deepest = "#### " if re.search(r"^#### ", gallery, re.MULTILINE) else "### "
    parts = re.split(rf"^{deepest}", gallery, flags=re.MULTILINE)[1:]
    return sum("--8<--" in part for part in parts)


def with_counts(markdown: str, root: Path) -> str:
    """Put the counts where the text has {{ their name }}; raise BookError for another name."""
    known = counts(root)

    def count(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise BookError(f"docs/index.md: nothing counts {match[1]!r}, only {list(known)}")
        return f"{known[match[1]]:,}"

    return re.sub(r"\{\{ (\w+) \}\}", count, markdown)


def reading_minutes(markdown: str) -> float:
    """How long a part of a page takes to read, its programs and outputs included."""
    prose = re.sub(r"^(\s*)(`{3,}).*?^\1\2", "", markdown, flags=re.MULTILINE | re.DOTALL)
    words = len(re.findall(r"\w+", prose))
    embeds = sum(1 for line in markdown.split("\n") if EMBED.match(line))
    shown = markdown.count("\n") - prose.count("\n") + 12 * embeds
    return words / WORDS_PER_MINUTE + shown * SECONDS_PER_CODE_LINE / 60


def page_facts(markdown: str, root: Path) -> list[str]:
    """Reading time, the number of programs, and the machines they were recorded on."""
    targets = [m["target"] for line in markdown.split("\n") if (m := EMBED.match(line))]
    names = dict.fromkeys(target_file(target) for target in targets)
    here = [Program(root, root / name) for name in names if is_program(root / name, root)]
    machines = set()
    for program in here:
        for device in program.devices:
            transcript = Transcript.parse(program.transcript_path(device).read_text("utf-8"))
            if transcript.provenance:
                machines.add(transcript.provenance.device)
    facts = [f"{max(1, round(reading_minutes(markdown)))} minutes"]
    if here:
        facts.append(f"{len(here)} programs")
        facts.append("run on " + " and ".join(sorted(machines)))
        facts.append("[what ran where](/what_ran_where.md)")
    return facts


def on_pre_page(page: Page, config: MkDocsConfig, files: Files) -> Page:
    """The edit and source links of a program's page lead to the program."""
    root = _root(config)
    for program in programs(root) if page.file.src_uri.startswith("programs/") else ():
        if program_page(program.name) == f"/{page.file.src_uri}":
            page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{program.name}"
    return page
