"""Markdown: how an embedded program and its transcript look on a page.

A Python-Markdown extension that rewrites the text of a page before any other sees it:

- a fence that embeds (part of) a program is preceded by the program's path, a link to its page;
- a fence that embeds a transcript becomes the output with the line that says where it was
  recorded, in tabs where the program was recorded on a CPU and on a GPU;
- a fence that is not run (`skip="why"`) says so under it;
- `![…](../snippets/02_ddp/overlap.svg)`, which an editor can follow, becomes the site's copy.

Links start at the root of ``docs/`` (MkDocs resolves them: `absolute_links: relative_to_docs`).
"""

from __future__ import annotations

import re
from pathlib import Path

from book import BookError
from book.data import extension
from book.embeds import EMBED, resolve, target_file
from book.program import DEVICES, Program, companions, is_program
from book.transcript import Provenance, Transcript

DEVICE_NAMES = {"cpu": "CPU", "cuda": "GPU"}
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})(?P<header>.*)$")
_SKIP = re.compile(r'\s*\bskip="(?P<why>[^"]*)"')


def program_page(name: str) -> str:
    """The page of a program, from the root of ``docs/``: ``/programs/02_ddp/naive.md``."""
    folder, _, rest = name.partition("/")
    stem = rest.rsplit(".", 1)[0]
    return f"/programs/{stem}.md" if folder == "snippets" else f"/programs/{folder}/{stem}.md"


def provenance_sentence(provenance: Provenance) -> str:
    """Where an output is from, in words."""
    return (
        f"Recorded {provenance.date} on {provenance.device}, torch {provenance.torch}, "
        f"Python {provenance.python}; {provenance.seconds:.1f} s in all."
    )


def transcript_lines(program: Program, part: str = "", device: str = "cpu") -> list[str]:
    """The markdown of a program's output, tabs for CPU and GPU where both were recorded.

    ``part`` is a range of lines of the ``device`` transcript (":2:9"); then only that is shown.
    """
    devices = [device] if part else program.devices
    blocks = []
    for each in devices:
        path = program.transcript_path(each)
        transcript = Transcript.parse(path.read_text("utf-8"))
        lines, _ = resolve(f"{path.relative_to(program.root).as_posix()}{part}", program.root)
        if lines and lines[0].startswith("# recorded "):
            lines = lines[1:]
        said = provenance_sentence(transcript.provenance) if transcript.provenance else ""
        beside = companions(program) if said else []
        if beside:
            names = [path.relative_to(program.root).as_posix() for path in beside]
            links = " and ".join(f"[{Path(n).name}]({program_page(n)})" for n in names)
            said += f" Needs {links} in the same folder."
        block = ["```console", *lines, "```", ""]
        blocks.append([*block, said, "{ .provenance }", ""] if said else block)
    if len(blocks) == 1:
        return ["", '<div class="transcript" markdown="1">', "", *blocks[0], "</div>", ""]
    tabs = ["", '<div class="transcript" markdown="1">', ""]
    for each, block in zip(devices, blocks, strict=True):
        tabs += [f'=== "{DEVICE_NAMES[each]}"', ""]
        tabs += [f"    {line}" if line else "" for line in block]
    return [*tabs, "</div>", ""]


def render(lines: list[str], root: Path) -> list[str]:
    """A page's markdown with its embeds as readers see them.

    Raises BookError where an embed has no file or section.
    """
    out: list[str] = []
    number = 0
    while number < len(lines):
        match = _FENCE.match(lines[number])
        if match is None:
            line = re.sub(r"\]\((\.\./)+snippets/", "](/programs/", lines[number])
            out.append(line)
            number += 1
            continue
        close = number + 1
        while close < len(lines) and not re.fullmatch(
            rf"\s*{match['ticks']}`*\s*", lines[close]
        ):
            close += 1
        body, indent = lines[number + 1 : close], match["indent"]
        fence = _fence(match["header"], body, indent, root)
        out += [indent + line if line else "" for line in fence]
        number = close + 1
    return out


def _fence(header: str, body: list[str], indent: str, root: Path) -> list[str]:
    """One fence as readers see it, without its indentation."""
    targets = [m["target"] for line in body if (m := EMBED.match(line))]
    only = bool(targets) and all(EMBED.match(line) or not line.strip() for line in body)
    path = root / target_file(targets[0]) if targets else root
    if only and (match := re.fullmatch(r"(.+)\.(cpu|cuda)\.txt", path.name)):
        program = _program_beside(path.parent, match[1], root)
        part = targets[0][len(target_file(targets[0])) :]
        return transcript_lines(program, part, match[2])

    code: list[str] = []
    for line in body:
        if match := EMBED.match(line):
            if code:  # two sections of a file stand apart
                code += [""] * (2 if path.suffix == ".py" else 1)
            inner = match["indent"][len(indent) :]
            code += [inner + text if text else "" for text in resolve(match["target"], root)[0]]
        else:
            code.append(line.removeprefix(indent))
    before, after = [], []
    if only and is_program(path, root):
        name = path.relative_to(root).as_posix()
        before = [f"[{name}]({program_page(name)}){{ .program-path }}", ""]
        header = re.sub(r'\s*title="[^"]*"', "", header)
    if skipped := _SKIP.search(header):
        header = _SKIP.sub("", header)
        after = ["", f"Not run here: {skipped['why']}", "{ .not-run }", ""]
    ticks = "`" * max(
        [3, *(len(m[0]) + 1 for line in code if (m := re.match(r"\s*`{3,}", line)))]
    )
    return [*before, f"{ticks}{header}", *code, ticks, *after]


def _program_beside(folder: Path, stem: str, root: Path) -> Program:
    for suffix in (".py", ".cu", ".cpp", ".sh"):
        if (folder / (stem + suffix)).exists():
            return Program(root, folder / (stem + suffix))
    raise BookError(
        f"{folder.relative_to(root)}/{stem} is no program, but its transcript is shown"
    )


makeExtension = extension("book_embeds", render, priority=40)  # after what writes embeds


__all__ = ["DEVICES", "makeExtension", "program_page", "provenance_sentence", "render"]
