"""Embedded: how a program and its transcript look on a page.

- a fence that embeds (part of) a program is preceded by the program's path, a link to its page;
- a fence that embeds a transcript becomes the output, in tabs where the program was recorded on
  a CPU and on GPUs. A line under it says where it was recorded, except where the page already
  names that machine at its top;
- a block that callouts follow gets a numbered marker at each line that they explain;
- a fence that is not run (`skip="why"`) says so under it;
- `![…](../snippets/02_ddp/overlap.svg)`, which an editor can follow, becomes the site's copy.

Links start at the root of ``docs/`` (MkDocs resolves them: `absolute_links: relative_to_docs`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markdown.postprocessors import Postprocessor

from worldsize.model import BookError
from worldsize.model.page import Embed, Fence, Page, expand_embeds, parse, read, resolve
from worldsize.model.program import (
    Program,
    gpu_kind,
    is_program,
    owning_program,
    transcript_device,
)
from worldsize.model.transcript import Command, Provenance, difference
from worldsize.site import template


def program_page(name: str) -> str:
    """The page of a program, from the root of ``docs/``: ``/programs/02_ddp/naive.md``."""
    folder, _, rest = name.partition("/")
    stem = rest.rsplit(".", 1)[0]
    return f"/programs/{stem}.md" if folder == "snippets" else f"/programs/{folder}/{stem}.md"


def program_link(name: str) -> str:
    """The Markdown link to a program's page, with the program's file name."""
    return f"[{Path(name).name}]({program_page(name)})"


Machine = tuple[str, str, str]  # a device, a release of torch, a release of Python


def usual_machine(page: Page, root: Path) -> Machine | None:
    """Return the machine on which most CPU outputs of a page were recorded.

    Returns None where fewer than two outputs were recorded on one machine: the page then has
    nothing to say once for all of them.
    """
    counts: Counter[Machine] = Counter()
    for embed in page.embeds:
        path = root / embed.file
        program = owning_program(path, root) if transcript_device(path) == "cpu" else None
        if program and "cpu" in program.devices:
            at = program.transcript("cpu").provenance
            counts.update([(at.device, at.torch, at.python)] if at else [])
    (machine, count), *_ = counts.most_common(1) or [(None, 0)]
    return machine if count > 1 else None


def transcript(
    program: Program,
    parts: Sequence[str] = (),
    device: str = "cpu",
    usual: Machine | None = None,
    quotes: Sequence[str] = (),
) -> str:
    """The Markdown of a program's output, a tab for each device where there are several.

    `parts` are ranges of lines of the `device` transcript ("2:9"); then only they are shown.
    Below the whole stands, folded, what older releases of torch print in its place. The tab of
    a GPU comes before the tab of the CPU where the program reads a clock, since speed is about
    GPUs, and where the program only says on a CPU that it needs a GPU. An output from the
    `usual` machine of the page does not name it again. The lines that contain `quotes` get
    markers.

    Raises BookError where no output contains one of the quotes.
    """
    ran = program.transcript("cpu").commands if "cpu" in program.devices else []
    refused = all(each.status for each in ran if not each.command_line.startswith("nvcc "))
    last = refused or bool(program.tolerances.measured)
    devices = sorted(program.devices, key=lambda each: last and each == "cpu")
    outputs = [
        {
            "device": machine(program, each),
            "lines": [line for part in parts or [""] for line in _printed(program, each, part)],
            "provenance": _unusual(program.transcript(each).provenance, usual),
            "needs": needs(program, each),
        }
        for each in ([device] if parts else devices)
    ]
    for each in outputs:
        each["marks"] = marks(each["lines"], quotes)
        each["header"] = marked("console", each["marks"])
    found = {number for each in outputs for number in each["marks"]}
    for number, quote in enumerate(quotes, start=1):
        if number not in found:
            raise QuoteNotFound(program.transcript_name(device), number, quote)
    older = {} if parts else printed_before(program)
    return template.render("transcript", outputs=outputs, older=older)


def _unusual(at: Provenance | None, usual: Machine | None) -> Provenance | None:
    return None if at and (at.device, at.torch, at.python) == usual else at


def marks(lines: Sequence[str], quotes: Sequence[str]) -> dict[int, int]:
    """By the number of each callout, the number of the line that contains its quote.

    The line of a callout is looked for below the line of the callout before it. A callout whose
    quote is in none of those lines is left out.
    """
    found, above = {}, 0
    for number, quote in enumerate(quotes, start=1):
        below = range(above, len(lines))
        place = next((at for at in below if quote in lines[at]), None)
        if place is not None:
            found[number] = above = place + 1
    return found


class QuoteNotFound(BookError):
    """A callout quotes what no line of its block contains."""

    def __init__(self, file: str, number: int, quote: str) -> None:
        where = " below the line of the callout before it" if number > 1 else ""
        super().__init__(
            f"callout {number} quotes `{quote}`, but no line of {file} contains that{where}"
        )
        self.number = number


def marked(header: str, found: dict[int, int]) -> str:
    """The header of a fence whose lines get markers, in the syntax of pymdownx.superfences."""
    if not found:
        return header
    language, _, options = header.strip().partition(" ")
    numbers = "-".join(map(str, found))
    lines = " ".join(map(str, found.values()))
    return f'{{ .{language} .marks-{numbers} {options} hl_lines="{lines}" }}'


class Markers(Postprocessor):
    """Writes the numbers of the callouts next to the lines that they explain.

    The number is an attribute, which the style sheet shows: what a reader copies is the code.
    """

    def run(self, text: str) -> str:
        return re.sub(r'(?s)<div class="[^"]*\bmarks-([\d-]+).*?</pre>', self._block, text)

    def _block(self, block: re.Match[str]) -> str:
        numbers = iter(block[1].split("-"))
        html = re.sub(r"\bmarks-[\d-]+", "marked", block[0], count=1)
        opening = '<span class="hll">'
        return re.sub(opening, lambda _: f'{opening[:-1]} data-mark="{next(numbers)}">', html)


def check_callouts(path: Path, root: Path) -> None:
    """Raise BookError with file and line where a callout of a page explains no line."""
    here = read(path)
    for fence in here.fences:
        try:
            callouts = here.callouts(fence)
        except BookError as error:
            raise BookError(f"{path.relative_to(root)}:{error}") from None
        if callouts:
            try:
                _fence(fence, root, [each.quote for each in callouts])
            except QuoteNotFound as error:
                line = callouts[error.number - 1].line
                raise BookError(f"{path.relative_to(root)}:{line}: {error}") from None


def needs(program: Program, device: str) -> list[str]:
    """The Markdown links to what must lie beside a program for what it does on a device."""
    folder = program_page(program.name).rpartition("/")[0]
    tables = [f"[{each.name}]({folder}/{each.name})" for each in program.data(device)]
    return [program_link(each.name) for each in program.dependencies(device)] + tables


def printed_before(program: Program) -> dict[str, list[tuple[Command, Command]]]:
    """By the last release of torch that did so: the commands that printed something else, each
    as it did up to then and after."""
    newer, found = program.transcript("cpu") if program.older_transcripts else None, {}
    for (major, minor), device in program.older_transcripts.items():
        here = program.transcript(device)
        pairs = zip(here.commands, newer.commands, strict=True)
        found[f"{major}.{minor}"] = [
            (a, b) for a, b in pairs if a.status != b.status or difference(a.output, b.output)
        ]
        newer = here
    return found


def machine(program: Program, device: str) -> str:
    """What a tab calls a device: CPU, H100."""
    if device == "cpu":
        return "CPU"
    at = program.transcript(device).provenance
    return gpu_kind(at.device).replace("-", " ").upper() if at else "GPU"


def _printed(program: Program, device: str, part: str) -> list[str]:
    """The lines of a program's transcript, but for the one that says where it is from."""
    lines = resolve(Embed(1, "", f"{program.transcript_name(device)}:{part}"), program.root)
    return lines[lines[0] == str(program.transcript(device).provenance) :]


def render(lines: list[str], root: Path) -> list[str]:
    """A page's Markdown with its embeds as readers see them.

    Raises BookError where an embed has no file or section.
    """
    page = parse("\n".join(lines))
    stated = any(line.endswith(".page-machine }") for line in lines)
    usual = usual_machine(page, root) if stated else None
    out, last = [], 0
    for fence in page.fences:
        callouts = page.callouts(fence)
        quotes = [each.quote for each in callouts]
        out += [_with_figures(line) for line in lines[last : fence.line - 1]]
        shown = _fence(fence, root, quotes, usual)
        out += [fence.indent + line if line else "" for line in shown]
        last = fence.end
        for each in callouts:
            line = lines[each.line - 1]
            lines[each.line - 1] = re.sub(r"(`+)(.+?)\1", r"\g<0>{ .quote }", line, count=1)
    return out + [_with_figures(line) for line in lines[last:]]


def _with_figures(line: str) -> str:
    return re.sub(r"\]\((\.\./)+(?:snippets/|(?=labs/\w+\.svg))", "](/programs/", line)


def _fence(
    fence: Fence, root: Path, quotes: Sequence[str] = (), usual: Machine | None = None
) -> list[str]:
    """One fence as readers see it, without its indentation."""
    first = fence.embeds[0] if fence.has_only_embeds else None
    path = root / first.file if first else root
    if first and (device := transcript_device(path)):
        if len({embed.file for embed in fence.embeds}) > 1:
            raise BookError(f"{first.file} and another file are in one block")
        if program := owning_program(path, root):
            parts = [embed.part for embed in fence.embeds if embed.part]
            return transcript(program, parts, device, usual, quotes).split("\n")
        raise BookError(f"{first.file} is of no program, but it is shown")
    lines = expand_embeds(fence, root)
    header, before, after = fence.header, [], []
    if first and is_program(path, root):
        before = [f"[{first.file}]({program_page(first.file)}){{ .program-path }}", ""]
        header = _without(header, "title")
    if "skip" in fence.options:
        after = ["", f"Not run here: {fence.options['skip']}", "{ .not-run }", ""]
        header = _without(header, "skip")
    found = marks(lines, quotes)
    for number, quote in enumerate(quotes, start=1):
        if number not in found:
            raise QuoteNotFound("the block" if first is None else first.target, number, quote)
    header = marked(header, found)
    inside = (re.match(r"\s*(`{3,})?", line)[1] or "" for line in lines)
    ticks = "`" * max([3, *(len(mark) + 1 for mark in inside)])
    return [*before, f"{ticks}{header}", *lines, ticks, *after]


def _without(header: str, option: str) -> str:
    return re.sub(rf'\s*\b{option}="[^"]*"', "", header)
