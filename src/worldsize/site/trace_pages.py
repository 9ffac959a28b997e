"""Generate the pages on which a reader steps through a program, rank by rank.

    <!-- trace: snippets/02_ddp/naive.py -->
    <!-- traces: all -->

Each program of `snippets/traces.toml` has a page `traces/NAME.md` with the viewer
(`docs/assets/instruments/trace_viewer.js`). The viewer loads the file `traces/NAME.json`, which
contains the trace and the source of the program. The first comment becomes a link to the page,
and the second comment becomes the list of all these pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, InclusionLevel

from worldsize.execution.trace_run import load_recorder
from worldsize.model import BookError
from worldsize.model.program import Program
from worldsize.model.traces import RECORDER, TRACES, TraceSettings, trace_path, trace_settings
from worldsize.site import template, trace_picture
from worldsize.site.embeds import program_page, trace_page
from worldsize.site.yaml_schema import SchemaError, check_comments

GROUPS = (  # the headings of the list, in their order
    "Collectives",
    "Data parallelism",
    "Pipelines",
    "Tensor parallelism, ZeRO and FSDP",
    "Ring attention and experts",
    "Failures",
)
DIRECTIVE = re.compile(r"^ *<!-- trace: (.*) -->\s*$")


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces `<!-- trace: snippets/FOLDER/NAME.py -->`.

    Raise SchemaError if the program has no trace.
    """
    name = _traced(" ".join(words), root)
    settings = trace_settings(root)[name]
    return template.render("trace/link", name=name, settings=settings, page=trace_page(name))


def show_all(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces `<!-- traces: all -->`."""
    if words != ["all"]:
        raise SchemaError("the comment must be <!-- traces: all -->")
    groups: dict[str, list[tuple[str, TraceSettings]]] = {group: [] for group in GROUPS}
    for name, settings in trace_settings(root).items():
        groups[settings.group].append((name, settings))
    return template.render(
        "trace/list", groups=groups, page=trace_page, alt=lambda name: _alt(root, name)
    )


def _alt(root: Path, name: str) -> str:
    """Return the alt text of the picture of a trace."""
    return trace_picture.alt(_trace(Program(root, root / name)))


def check_page(path: Path, root: Path) -> None:
    """Raise DataError, with file and line, if a comment of the page names no traced program."""
    check_comments(path, root, DIRECTIVE, lambda name: _traced(name, root))


def _traced(name: str, root: Path) -> str:
    """Return the name of a program. Raise SchemaError if it is not in snippets/traces.toml."""
    if name not in trace_settings(root):
        raise SchemaError(f"{name} has no trace: add it to {TRACES}, or use a program of it")
    return name


def _trace(program: Program) -> dict:
    """Return the stored trace of a program. Raise BookError if it was not recorded."""
    path = trace_path(program)
    if not path.exists():
        raise BookError(
            f"{TRACES}:1: {program.name} has no trace: run "
            f"`make record WHAT={program.name}` to record it"
        )
    return json.loads(path.read_text("utf-8"))


def files(config: MkDocsConfig, root: Path) -> Iterator[File]:
    """Yield the pages of all traces, and the JSON files that the viewer loads.

    Raise BookError, with the file, if two programs have the same name, if a program has no
    question or no group, or if its trace was not recorded.
    """
    pages: dict[str, str] = {}
    recorder = str(root / RECORDER)
    if trace_settings(root):
        yield File.generated(config, "traces/rank_trace.py", abs_src_path=recorder)
    for name, settings in trace_settings(root).items():
        uri = trace_page(name).lstrip("/")
        if other := pages.get(uri):
            raise BookError(f"{TRACES}:1: {other} and {name} need different file names")
        pages[uri] = name
        if not settings.question or settings.group not in GROUPS:
            raise BookError(
                f"{TRACES}:1: {name}: add the keys `question` and `group`. The group must be "
                f"one of: {'; '.join(GROUPS)}"
            )
        program = Program(root, root / name)
        trace = _trace(program)
        source = program.path.read_text("utf-8")
        text = _page(program, settings, trace, source)
        yield File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        picture = trace_picture.draw(trace)
        yield File.generated(config, uri.removesuffix(".md") + ".svg", content=picture)
        data = json.dumps(
            {"trace": trace, "sources": [source]}, ensure_ascii=False, separators=(",", ":")
        )
        yield File.generated(config, uri.removesuffix(".md") + ".json", content=data)


def _page(program: Program, settings: TraceSettings, trace: dict, source: str) -> str:
    """Return the Markdown of the page of a trace."""
    table = load_recorder(program.root).table(trace, [source])
    description = re.split(r"(?<=[.!?]) ", settings.watch.strip())[0].replace("`", "")
    options = settings.options()
    words = settings.command.split(" torchrun ")[-1].removeprefix("torchrun ")
    ranks, _, rest = words.partition(" ")
    command = " ".join(each for each in ["python rank_trace.py", ranks, options] if each)
    return template.render(
        "trace/page",
        program=program,
        settings=settings,
        ranks=trace["ranks"],
        steps=len(trace["steps"]),
        description=description.replace('"', "'"),
        alt=trace_picture.alt(trace),
        table=table.replace("\n", ""),
        data=f"../{program.path.stem}.json",
        command=f"{command} --open run.html {rest}",
        program_page=program_page(program.name),
    )
