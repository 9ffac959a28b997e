"""Embedded: how a program and its transcript look on a page.

- a fence that embeds (part of) a program is preceded by the program's path, a link to its page;
- a fence that embeds a transcript becomes the output with the line that says where it was
  recorded, in tabs where the program was recorded on a CPU and on GPUs;
- a fence that is not run (`skip="why"`) says so under it;
- `![…](../snippets/02_ddp/overlap.svg)`, which an editor can follow, becomes the site's copy.

Links start at the root of ``docs/`` (MkDocs resolves them: `absolute_links: relative_to_docs`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from book.core import BookError
from book.core.page import Embed, Fence, expanded, parse, resolve
from book.core.program import Program, beside, gpu_kind, is_program, recorded_on
from book.core.transcript import Command, difference
from book.site import template


def program_page(name: str) -> str:
    """The page of a program, from the root of ``docs/``: ``/programs/02_ddp/naive.md``."""
    folder, _, rest = name.partition("/")
    stem = rest.rsplit(".", 1)[0]
    return f"/programs/{stem}.md" if folder == "snippets" else f"/programs/{folder}/{stem}.md"


def program_link(name: str) -> str:
    """The Markdown link to a program's page, with the program's file name."""
    return f"[{Path(name).name}]({program_page(name)})"


def transcript(program: Program, parts: Sequence[str] = (), device: str = "cpu") -> str:
    """The Markdown of a program's output, a tab for each device where there are several.

    `parts` are ranges of lines of the `device` transcript ("2:9"); then only they are shown.
    Below the whole stands, folded, what older releases of torch print in its place. A CPU on
    which all that it does is to say that it needs a GPU comes last.
    """
    ran = program.transcript("cpu").commands if "cpu" in program.devices else []
    refused = all(each.status for each in ran if not each.typed.startswith("nvcc "))
    devices = sorted(program.devices, key=lambda each: refused and each == "cpu")
    outputs = [
        {
            "device": machine(program, each),
            "lines": [line for part in parts or [""] for line in _printed(program, each, part)],
            "provenance": program.transcript(each).provenance,
            "needs": needs(program, each),
        }
        for each in ([device] if parts else devices)
    ]
    older = {} if parts else printed_before(program)
    return template.render("transcript", outputs=outputs, older=older)


def needs(program: Program, device: str) -> list[str]:
    """The Markdown links to what must lie beside a program for what it does on a device."""
    folder = program_page(program.name).rpartition("/")[0]
    tables = [f"[{each.name}]({folder}/{each.name})" for each in program.data(device)]
    return [program_link(each.name) for each in program.companions(device)] + tables


def printed_before(program: Program) -> dict[str, list[tuple[Command, Command]]]:
    """By the last release of torch that did so: the commands that printed something else, each
    as it did up to then and after."""
    newer, found = program.transcript("cpu") if program.older else None, {}
    for (major, minor), device in program.older.items():
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
    out, last = [], 0
    for fence in parse("\n".join(lines)).fences:
        out += [_with_figures(line) for line in lines[last : fence.line - 1]]
        out += [fence.indent + line if line else "" for line in _fence(fence, root)]
        last = fence.end
    return out + [_with_figures(line) for line in lines[last:]]


def _with_figures(line: str) -> str:
    return re.sub(r"\]\((\.\./)+(?:snippets/|(?=labs/\w+\.svg))", "](/programs/", line)


def _fence(fence: Fence, root: Path) -> list[str]:
    """One fence as readers see it, without its indentation."""
    first = fence.embeds[0] if fence.embeds_only else None
    path = root / first.file if first else root
    if first and (device := recorded_on(path)):
        if len({embed.file for embed in fence.embeds}) > 1:
            raise BookError(f"{first.file} and another file are in one block")
        if program := beside(path, root):
            parts = [embed.part for embed in fence.embeds if embed.part]
            return transcript(program, parts, device).split("\n")
        raise BookError(f"{first.file} is of no program, but it is shown")
    lines = expanded(fence, root)
    header, before, after = fence.header, [], []
    if first and is_program(path, root):
        before = [f"[{first.file}]({program_page(first.file)}){{ .program-path }}", ""]
        header = _without(header, "title")
    if "skip" in fence.options:
        after = ["", f"Not run here: {fence.options['skip']}", "{ .not-run }", ""]
        header = _without(header, "skip")
    inside = (re.match(r"\s*(`{3,})?", line)[1] or "" for line in lines)
    ticks = "`" * max([3, *(len(mark) + 1 for mark in inside)])
    return [*before, f"{ticks}{header}", *lines, ticks, *after]


def _without(header: str, option: str) -> str:
    return re.sub(rf'\s*\b{option}="[^"]*"', "", header)
