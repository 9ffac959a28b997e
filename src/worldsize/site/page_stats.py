"""Facts: what a page says of itself and of the book, counted when the site is built."""

from __future__ import annotations

import re
from pathlib import Path

from worldsize.model import BookError, page
from worldsize.model.page import Page
from worldsize.model.program import Program, is_program, programs
from worldsize.site.embeds import Machine, usual_machine

# The mean of 190 studies of silent reading of non-fiction (Brysbaert, 2019, "How many words do
# we read per minute?", Journal of Memory and Language 109).
WORDS_PER_MINUTE = 238
SECONDS_PER_CODE_LINE = 2
LINES_OF_AN_EMBED = 12


def folded(here: Page) -> set[int]:
    """The lines of a page that are in a folded program, which most readers leave closed."""
    found, indent = set[int](), None
    for number, line in enumerate(here.lines, start=1):
        if match := re.match(r"(\s*)\?\?\? (?:example|abstract) ", line):
            indent = len(match[1])
        elif line.strip() and indent is not None and len(line) - len(line.lstrip()) <= indent:
            indent = None
        if indent is not None:
            found.add(number)
    return found


def reading_minutes(here: Page, lines: set[int] | None = None) -> float:
    """How long a page, or some lines of it, take to read, programs and outputs included.

    A folded program is not counted.
    """
    wanted = (set(here.section()) if lines is None else lines) - folded(here)
    prose = {number: line for number, line in here.prose() if number in wanted}
    words = sum(len(re.findall(r"\w+", line)) for line in prose.values())
    embeds = sum(embed.line in wanted for embed in [*here.embeds, *here.stray_embeds])
    shown = len(wanted) - len(prose) + LINES_OF_AN_EMBED * embeds
    return words / WORDS_PER_MINUTE + shown * SECONDS_PER_CODE_LINE / 60


def is_chapter(name: str) -> bool:
    """Whether a page, from the folder docs/, is one of the numbered ones."""
    return bool(re.match(r"\d\d_\w+\.md$", name))


def with_facts(markdown: str, root: Path, name: str) -> str:
    """A page with its facts under its title: those of a chapter, or what a GPU has not run."""
    here = page.parse(markdown)
    own = [name] if name.startswith("labs/") else []
    names = dict.fromkeys([*own, *(embed.file for embed in here.embeds)])
    shown = [Program(root, root / each) for each in names if is_program(root / each, root)]
    usual = usual_machine(here, root)
    facts = page_facts(here, shown, usual) if is_chapter(name) or usual else []
    facts += not_on_gpus(shown)
    if not facts:
        return markdown
    if shown:
        facts.append("[what ran where](/what_ran_where.md)")
    title = next(iter(here.headings.values())).line
    line = " · ".join(facts)
    line = line[0].upper() + line[1:]
    classes = "{ .page-facts .page-machine }" if usual else "{ .page-facts }"
    return "\n".join([*here.lines[:title], "", line, classes, *here.lines[title:]])


def page_facts(here: Page, shown: list[Program], usual: Machine | None = None) -> list[str]:
    """Reading time, the number of programs, and the machines they were recorded on.

    An output from the `usual` machine has no note of its own, so its versions are given here.
    """
    facts = [f"{max(1, round(reading_minutes(here)))} minutes"]
    if shown:
        machines = {machine for program in shown for machine in program.machines}
        facts.append(f"{len(shown)} program" + "s" * (len(shown) > 1))
        if usual:
            device, torch, python = usual
            versions = f"outputs recorded on {device}, torch {torch}, Python {python}"
            facts.append(f"{versions}, unless a note says otherwise")
            machines.discard(usual[0])
        if machines:
            facts.append(
                ("also " if usual else "") + "run on " + " and ".join(sorted(machines))
            )
    return facts


def waiting(shown: list[Program]) -> list[Program]:
    """Those that have something to show on a GPU, and that none has recorded."""
    return [each for each in shown if each.gpu_template and each.devices in ([], ["cpu"])]


def not_on_gpus(shown: list[Program]) -> list[str]:
    """What a page says where no GPU has recorded what it could show; nothing elsewhere."""
    left = len(waiting(shown))
    return [f"not yet recorded on a GPU: {left} program" + "s" * (left > 1)] if left else []


def counts(root: Path) -> dict[str, int]:
    """How many there are of what the home page speaks of."""
    every = programs(root)
    return {
        "programs": sum(
            program.name.startswith("snippets/") and "cpu" in program.devices
            for program in every
        ),
        "transcripts": sum(len(program.devices) for program in every),
        "figures": sum(program.figure.exists() for program in every),
        "labs": sum(bool(re.match(r"labs/lab\d\d_", program.name)) for program in every),
        "failures": sum(_failures(page.read(path)) for path in (root / "docs").glob("*.md")),
    }


def _failures(here: Page) -> int:
    """The failures of a page's galleries: their deepest headings, each with a program."""
    count = 0
    for gallery in here.headings.values():
        if gallery.level == 2 and re.match(r"What (goes wrong|each error)", gallery.text):
            inside = here.section(gallery.anchor)
            under = [each for each in here.headings.values() if each.line in inside[1:]]
            deepest = 4 if any(each.level == 4 for each in under) else 3
            parts = [here.section(each.anchor) for each in under if each.level == deepest]
            count += sum(any(embed.line in part for embed in here.embeds) for part in parts)
    return count


def with_counts(markdown: str, root: Path) -> str:
    """Put the counts where the text has {{ their name }}; raise BookError for another name."""
    known = counts(root)

    def count(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise BookError(f"docs/index.md: nothing counts {match[1]!r}, only {list(known)}")
        return f"{known[match[1]]:,}"

    return re.sub(r"\{\{ (\w+) \}\}", count, markdown)
