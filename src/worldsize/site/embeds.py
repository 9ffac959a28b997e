"""Render the programs, outputs and figures that a page embeds.

- If a code block embeds a program or a part of it, a link to the page of the program precedes
  it.
- If a code block embeds a transcript, it becomes the output. If the program was recorded on a
  CPU and on GPUs, each output is a tab. A line below the output names the machine of the
  recording, unless the page names this machine at its top.
- If callouts follow a block, each line that they explain gets a numbered marker.
- If a block is not run (`skip="why"`), a line below it gives the reason.
- The path of a figure in the repository, such as `![…](../snippets/02_ddp/overlap.svg)`,
  becomes the path of its copy on the site.

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
from worldsize.model.traces import trace_settings
from worldsize.model.transcript import Command, Provenance, difference
from worldsize.site import template


def program_page(name: str) -> str:
    """Return the path of a program's page, such as ``/programs/02_ddp/naive.md``."""
    folder, _, rest = name.partition("/")
    stem = rest.rsplit(".", 1)[0]
    return f"/programs/{stem}.md" if folder == "snippets" else f"/programs/{folder}/{stem}.md"


def program_link(name: str) -> str:
    """Return the Markdown link to a program's page, with the file name of the program."""
    return f"[{Path(name).name}]({program_page(name)})"


def trace_page(name: str) -> str:
    """Return the path of the page on which a reader steps through a program."""
    return f"/traces/{Path(name).stem}.md"


Machine = tuple[str, str, str]  # a device, a release of torch, a release of Python


def usual_machine(page: Page, root: Path) -> Machine | None:
    """Return the machine on which most CPU outputs of a page were recorded.

    Return None if no machine recorded at least two outputs. A note below each output then names
    its machine.
    """
    counts: Counter[Machine] = Counter()
    for embed in page.embeds:
        path = root / embed.file
        program = owning_program(path, root) if transcript_device(path) == "cpu" else None
        if program and "cpu" in program.devices:
            origin = program.transcript("cpu").provenance
            counts.update([(origin.device, origin.torch, origin.python)] if origin else [])
    (machine, count), *_ = counts.most_common(1) or [(None, 0)]
    return machine if count > 1 else None


def transcript(
    program: Program,
    parts: Sequence[str] = (),
    device: str = "cpu",
    usual: Machine | None = None,
    quotes: Sequence[str] = (),
    *,
    step_through: bool = True,
) -> str:
    """Return the Markdown of a program's outputs, which are tabs if there are several devices.

    If `parts` contains ranges of lines ("2:9"), the Markdown contains only these lines of the
    transcript of `device`. Otherwise, a folded box below the output shows the outputs of older
    releases of torch. The tab of the CPU is usually the first one. It is the last one if the
    program measures something, because readers then want the numbers of a GPU, or if the
    program fails on a CPU. An output from the `usual` machine of the page does not name the
    machine. The lines that contain `quotes` get markers. With `step_through`, a link below the
    output opens the page on which a reader steps through the program, if there is one.

    Raise QuoteNotFound if no output contains one of the quotes.
    """
    ran = program.transcript("cpu").commands if "cpu" in program.devices else []
    fails = all(each.status for each in ran if not each.command_line.startswith("nvcc "))
    cpu_is_last = fails or bool(program.tolerances.measured)
    devices = sorted(program.devices, key=lambda each: cpu_is_last and each == "cpu")
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
        each["header"] = header_with_marks("console", each["marks"])
    found = {number for each in outputs for number in each["marks"]}
    for number, quote in enumerate(quotes, start=1):
        if number not in found:
            raise QuoteNotFound(program.transcript_name(device), number, quote)
    older = {} if parts else older_outputs(program)
    traced = step_through and program.name in trace_settings(program.root)
    page = trace_page(program.name) if traced else ""
    return template.render("transcript", outputs=outputs, older=older, trace_page=page)


def _unusual(origin: Provenance | None, usual: Machine | None) -> Provenance | None:
    """Return the provenance; None if it is the usual machine of the page."""
    is_usual = origin and (origin.device, origin.torch, origin.python) == usual
    return None if is_usual else origin


def marks(lines: Sequence[str], quotes: Sequence[str]) -> dict[int, int]:
    """Return, for the number of each callout, the number of the line that contains its quote.

    The search for a quote starts below the line of the callout before it. If no line contains
    the quote, the callout is not in the result.
    """
    found, above = {}, 0
    for number, quote in enumerate(quotes, start=1):
        below = range(above, len(lines))
        index = next((each for each in below if quote in lines[each]), None)
        if index is not None:
            found[number] = above = index + 1
    return found


class QuoteNotFound(BookError):
    """A callout quotes a text that no line of its block contains."""

    def __init__(self, file: str, number: int, quote: str) -> None:
        where = " below the line of the callout before it" if number > 1 else ""
        super().__init__(
            f"callout {number} quotes `{quote}`, but no line of {file} contains it{where}"
        )
        self.number = number


def header_with_marks(header: str, marks: dict[int, int]) -> str:
    """Return the header of a fence whose lines get markers, for pymdownx.superfences."""
    if not marks:
        return header
    language, _, options = header.strip().partition(" ")
    numbers = "-".join(map(str, marks))
    lines = " ".join(map(str, marks.values()))
    return f'{{ .{language} .marks-{numbers} {options} hl_lines="{lines}" }}'


class Markers(Postprocessor):
    """A processor that adds the numbers of callouts to the lines that they explain.

    The number is an attribute, which the style sheet shows. Readers who copy the block
    therefore copy only the code.
    """

    def run(self, text: str) -> str:
        return re.sub(r'(?s)<div class="[^"]*\bmarks-([\d-]+).*?</pre>', self._block, text)

    def _block(self, block: re.Match[str]) -> str:
        numbers = iter(block[1].split("-"))
        html = re.sub(r"\bmarks-[\d-]+", "marked", block[0], count=1)
        opening = '<span class="hll">'
        return re.sub(opening, lambda _: f'{opening[:-1]} data-mark="{next(numbers)}">', html)


def check_callouts(path: Path, root: Path) -> None:
    """Raise BookError, with file and line, if no line contains the quote of a callout."""
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
    """Return links to the files that a program needs in its folder to run on a device."""
    folder = program_page(program.name).rpartition("/")[0]
    tables = [f"[{each.name}]({folder}/{each.name})" for each in program.data(device)]
    return [program_link(each.name) for each in program.dependencies(device)] + tables


def older_outputs(program: Program) -> dict[str, list[tuple[Command, Command]]]:
    """Return the commands whose outputs a release of torch has changed.

    The keys are the last releases with the older output. Each value contains pairs of the same
    command, with its older output and with its newer output.
    """
    newer, found = program.transcript("cpu") if program.older_transcripts else None, {}
    for (major, minor), device in program.older_transcripts.items():
        older = program.transcript(device)
        pairs = zip(older.commands, newer.commands, strict=True)
        found[f"{major}.{minor}"] = [
            (a, b) for a, b in pairs if a.status != b.status or difference(a.output, b.output)
        ]
        newer = older
    return found


def machine(program: Program, device: str) -> str:
    """Return the title of the tab of a device, such as `CPU` or `H100`."""
    if device == "cpu":
        return "CPU"
    origin = program.transcript(device).provenance
    return gpu_kind(origin.device).replace("-", " ").upper() if origin else "GPU"


def _printed(program: Program, device: str, part: str) -> list[str]:
    """Return lines of a program's transcript, without the line about the recording."""
    lines = resolve(Embed(1, "", f"{program.transcript_name(device)}:{part}"), program.root)
    return lines[lines[0] == str(program.transcript(device).provenance) :]


def render(lines: list[str], root: Path) -> list[str]:
    """Return the Markdown of a page, with all embeds replaced.

    Raise BookError if an embed names a file or a section that does not exist.
    """
    page = parse("\n".join(lines))
    names_machine = any(line.endswith(".page-machine }") for line in lines)
    usual = usual_machine(page, root) if names_machine else None
    out, last = [], 0
    offered: set[str] = set()  # transcripts that have a link to step through their program
    for fence in page.fences:
        callouts = page.callouts(fence)
        quotes = [each.quote for each in callouts]
        out += [_with_figures(line) for line in lines[last : fence.line - 1]]
        files = {embed.file for embed in fence.embeds}
        shown = _fence(fence, root, quotes, usual, step_through=not files & offered)
        offered |= files
        out += [fence.indent + line if line else "" for line in shown]
        last = fence.end
        for each in callouts:
            line = lines[each.line - 1]
            lines[each.line - 1] = re.sub(r"(`+)(.+?)\1", r"\g<0>{ .quote }", line, count=1)
    return out + [_with_figures(line) for line in lines[last:]]


def _with_figures(line: str) -> str:
    """Return a line with the paths of figures on the site."""
    return re.sub(r"\]\((\.\./)+(?:snippets/|(?=labs/\w+\.svg))", "](/programs/", line)


def _fence(
    fence: Fence,
    root: Path,
    quotes: Sequence[str] = (),
    usual: Machine | None = None,
    *,
    step_through: bool = True,
) -> list[str]:
    """Return the lines that replace a fence, without its indentation."""
    first = fence.embeds[0] if fence.has_only_embeds else None
    path = root / first.file if first else root
    if first and (device := transcript_device(path)):
        if len({embed.file for embed in fence.embeds}) > 1:
            raise BookError(f"{first.file} and another file are in one block: use two blocks")
        if program := owning_program(path, root):
            parts = [embed.part for embed in fence.embeds if embed.part]
            text = transcript(program, parts, device, usual, quotes, step_through=step_through)
            return text.split("\n")
        raise BookError(f"{first.file} is embedded, but it is not the transcript of a program")
    lines = expand_embeds(fence, root)
    header, before, after = fence.header, [], []
    if first and is_program(path, root):
        before = [f"[{first.file}]({program_page(first.file)}){{ .program-path }}", ""]
        header = _without_option(header, "title")
    if "skip" in fence.options:
        after = ["", f"Not run here: {fence.options['skip']}", "{ .not-run }", ""]
        header = _without_option(header, "skip")
    found = marks(lines, quotes)
    for number, quote in enumerate(quotes, start=1):
        if number not in found:
            raise QuoteNotFound("the block" if first is None else first.target, number, quote)
    header = header_with_marks(header, found)
    inside = (re.match(r"\s*(`{3,})?", line)[1] or "" for line in lines)
    ticks = "`" * max([3, *(len(mark) + 1 for mark in inside)])
    return [*before, f"{ticks}{header}", *lines, ticks, *after]


def _without_option(header: str, option: str) -> str:
    return re.sub(rf'\s*\b{option}="[^"]*"', "", header)
