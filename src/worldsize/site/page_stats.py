"""Count the facts that a page shows: its reading time, its programs and their machines."""

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
LINES_PER_EMBED = 12  # the assumed length of an embedded program or output


def folded_lines(here: Page) -> set[int]:
    """Return the numbers of the lines in folded programs, which most readers do not open."""
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
    """Return how many minutes it takes to read a page, or some of its lines.

    The time includes programs and outputs, but not folded programs.
    """
    wanted = (set(here.section()) if lines is None else lines) - folded_lines(here)
    prose = {number: line for number, line in here.prose() if number in wanted}
    words = sum(len(re.findall(r"\w+", line)) for line in prose.values())
    embeds = sum(embed.line in wanted for embed in [*here.embeds, *here.stray_embeds])
    shown = len(wanted) - len(prose) + LINES_PER_EMBED * embeds
    return words / WORDS_PER_MINUTE + shown * SECONDS_PER_CODE_LINE / 60


def is_chapter(name: str) -> bool:
    """Return whether a page is a numbered chapter. `name` is its path in the folder docs/."""
    return bool(re.match(r"\d\d_\w+\.md$", name))


def with_facts(markdown: str, root: Path, name: str) -> str:
    """Return the Markdown of a page with a line of facts below its title.

    A chapter, or a page with a usual machine, shows the facts of `page_facts`. Every page also
    shows how many of its programs have no output from a GPU yet. `name` is the path of the page
    in the folder docs/. A page without facts does not change.
    """
    here = page.parse(markdown)
    own = [name] if name.startswith("labs/") else []
    names = dict.fromkeys([*own, *(embed.file for embed in here.embeds)])
    shown = [Program(root, root / each) for each in names if is_program(root / each, root)]
    usual = usual_machine(here, root)
    facts = page_facts(here, shown, usual) if is_chapter(name) or usual else []
    facts += missing_gpu_facts(shown)
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
    """Return the reading time, the number of programs, and the machines of their outputs.

    An output from the `usual` machine has no note of its own, so the facts contain its
    versions.
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


def not_recorded_on_gpu(programs: list[Program]) -> list[Program]:
    """Return the programs that would show more on a GPU, but have no output from a GPU."""
    return [each for each in programs if each.gpu_template and each.devices in ([], ["cpu"])]


def missing_gpu_facts(shown: list[Program]) -> list[str]:
    """Return the number of programs without an output from a GPU, as at most one fact."""
    count = len(not_recorded_on_gpu(shown))
    return [f"not yet recorded on a GPU: {count} program" + "s" * (count > 1)] if count else []


def counts(root: Path) -> dict[str, int]:
    """Return the numbers that the home page shows, by their names."""
    all_programs = programs(root)
    return {
        "programs": sum(
            program.name.startswith("snippets/") and "cpu" in program.devices
            for program in all_programs
        ),
        "transcripts": sum(len(program.devices) for program in all_programs),
        "figures": sum(program.figure.exists() for program in all_programs),
        "labs": sum(bool(re.match(r"labs/lab\d\d_", program.name)) for program in all_programs),
        "failures": sum(_failures(page.read(path)) for path in (root / "docs").glob("*.md")),
    }


def _failures(here: Page) -> int:
    """Return the number of errors that a page shows.

    An error is a section that embeds a program, below a heading "What goes wrong" or "What each
    error …". Only the sections of the deepest level count.
    """
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
    """Return the text, with `{{ name }}` replaced by the count of this name.

    Raise BookError for an unknown name.
    """
    numbers = counts(root)

    def count(match: re.Match[str]) -> str:
        if match[1] not in numbers:
            raise BookError(
                f"docs/index.md: there is no count {match[1]!r}: "
                f"use one of {', '.join(numbers)}"
            )
        return f"{numbers[match[1]]:,}"

    return re.sub(r"\{\{ (\w+) \}\}", count, markdown)
