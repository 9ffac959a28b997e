"""Tests of the pages on which a reader steps through a program, without a browser."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from conftest import Book

pytest.importorskip("mkdocs")

from worldsize.execution.trace_run import load_recorder
from worldsize.model import ROOT, BookError
from worldsize.model.traces import trace_settings
from worldsize.site import embeds, offline_zip, trace_pages, trace_picture
from worldsize.site.yaml_schema import DataError, SchemaError

INPUTS = [
    "src", "docs/02_ddp.md", "docs/01_collectives.md", "docs/assets/instruments", "docs/assets/pack_viewer.py",
    "labs/rank_trace.py", "snippets",
]  # fmt: skip
SETTINGS = trace_settings(ROOT)
PROGRAM = """x = 1
print(x)
"""
TRACE = {
    "format": "worldsize-trace 1", "program": "p.py", "ranks": 2, "files": ["p.py"], "functions": [["f", 0]],
    "groups": [[0, 1]],
    "operations": [
        {"rank": 0, "name": "send", "line": 1, "group": 0, "peer": 1, "end": "never"},
        {"rank": 1, "name": "send", "line": 1, "group": 0, "peer": 0, "end": "never"},
    ],
    "messages": [], "collectives": [], "hangs": [2],
    "ends": [{"how": "error", "status": "RuntimeError", "line": 1, "function": 0, "in": ["send"]}] * 2,
    "notes": [],
    "steps": [
        [1, 0, "line", 1, 0, 0, {"x": 1}], [1, 1, "line", 1, 0, 0, {}],
        [2, 0, "call", 1, [0]], [2, 1, "call", 1, [1]],
    ],
    "times": [0, 0, 0, 0],
}  # fmt: skip


def traced_book(book: Book, name: str = "a/p.py", **changes: object) -> Path:
    """Add a program with a trace to a book, and return the root of the book."""
    root = book.root
    path = root / "snippets" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM)
    path.with_suffix(".trace.json").write_text(json.dumps(TRACE))
    labs = root / "labs"
    labs.mkdir(exist_ok=True)
    (labs / "rank_trace.py").write_text((ROOT / "labs/rank_trace.py").read_text("utf-8"))
    keys = {
        "command": f"torchrun --nproc-per-node=2 {path.name} --n 3",
        "watch": "The first sentence. The second sentence.",
        "question": "Why?",
        "group": "Failures",
        "section": ["f"],
        **changes,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    with (root / "snippets/traces.toml").open("a") as file:
        file.write("\n".join([f'["snippets/{name}"]', *lines, ""]))
    return root


def generated(root: Path) -> dict[str, str]:
    """Return the generated files by their names. Only their names and contents matter here."""
    config = SimpleNamespace(
        site_dir=str(root / "site"),
        use_directory_urls=True,
        plugins=SimpleNamespace(_current_plugin="worldsize"),
    )
    return {
        file.src_uri: "" if file.src_uri.endswith(".py") else file.content_string
        for file in trace_pages.files(config, root)
    }


def test_a_trace_has_a_page_its_data_a_picture_and_the_recorder(book: Book) -> None:
    files = generated(traced_book(book))
    assert files.keys() == {
        "traces/rank_trace.py", "traces/p.md", "traces/p.json", "traces/p.svg",
    }  # fmt: skip
    page = files["traces/p.md"]
    assert "# Why?" in page and "The first sentence. The second sentence." in page
    assert 'description: "The first sentence."' in page
    assert 'data-trace="../p.json"' in page
    command = "python rank_trace.py --nproc-per-node=2 --section=f --open run.html p.py --n 3\n"
    assert command in page
    data = json.loads(files["traces/p.json"])
    assert data == {"trace": TRACE, "sources": [PROGRAM]}


def test_the_table_of_a_page_is_one_line_with_every_step(book: Book) -> None:
    page = generated(traced_book(book))["traces/p.md"]
    (line,) = [line for line in page.split("\n") if line.startswith("<details")]
    assert line.endswith("</details>")
    assert line.count("<tr") == len(TRACE["steps"]) + 2  # the head, and the line of the hang
    assert "All 4 steps as a table" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": None}, "snippets/a/p.py: add the keys `question` and `group`"),
        ({"group": "Other"}, "The group must be one of: Collectives; "),
    ],
)
def test_wrong_settings_stop_the_build(book: Book, changes: dict, message: str) -> None:
    root = traced_book(book, **changes)
    with pytest.raises(BookError, match=re.escape(message)):
        generated(root)


def test_a_missing_trace_and_an_equal_name_stop_the_build(book: Book) -> None:
    root = traced_book(book)
    stored = root / "snippets/a/p.trace.json"
    stored.unlink()
    with pytest.raises(BookError, match=r"traces\.toml:1: snippets/a/p\.py has no trace: run"):
        generated(root)
    stored.write_text(json.dumps(TRACE))
    traced_book(book, "b/p.py")
    with pytest.raises(BookError, match=r"a/p\.py and snippets/b/p\.py need different"):
        generated(root)


def test_a_comment_links_to_the_page_of_a_trace(book: Book) -> None:
    root = traced_book(book)
    text = trace_pages.show(["snippets/a/p.py"], root)
    assert text == "**Why?** [Step through p.py](/traces/p.md){ .md-button .step-through }"
    text = trace_pages.show_all(["all"], root)
    assert "- [Why?](/traces/p.md) `p.py`" in text
    # the picture is a link, too
    assert re.search(r"\[!\[.+\]\(/traces/p\.svg\).*\]\(/traces/p\.md\)", text)
    with pytest.raises(SchemaError, match=r"snippets/a/q\.py has no trace"):
        trace_pages.show(["snippets/a/q.py"], root)


def test_a_wrong_comment_names_its_file_and_line(book: Book) -> None:
    root = traced_book(book)
    page = root / "docs/page.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("# Page\n\n<!-- trace: snippets/a/p.py -->\n")
    trace_pages.check_page(page, root)
    page.write_text("# Page\n\n<!-- trace: snippets/a/q.py -->\n")
    with pytest.raises(DataError, match=r"^docs/page\.md:3: snippets/a/q\.py has no trace"):
        trace_pages.check_page(page, root)


def test_the_first_output_of_each_traced_program_has_a_link() -> None:
    lines = (ROOT / "docs/02_ddp.md").read_text("utf-8").split("\n")
    text = "\n".join(embeds.render(lines, ROOT))
    links = re.findall(r"\]\((/traces/\w+\.md)\)\{ \.md-button \.step-through \}", text)
    assert links == [f"/traces/{name}.md" for name in ("naive", "hooks", "buckets", "mini_ddp")]
    transcript = "snippets/01_parallelism_strategies/send_deadlock.cpu.txt"
    fence = ["```console", f'--8<-- "{transcript}"', "```", ""]
    text = "\n".join(embeds.render([*fence, *fence], ROOT))
    assert text.count("/traces/send_deadlock.md") == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_of_a_trace_names_lines_that_ran(name: str) -> None:
    settings, program = SETTINGS[name], ROOT / name
    trace = json.loads(program.with_suffix(".trace.json").read_text("utf-8"))
    assert settings.question.endswith("?")
    sentences = re.split(r"(?<=[.:?]) ", settings.watch.strip())
    assert 2 <= len(sentences) <= 6
    named = re.findall(r"\blines? (\d+)(?: to (\d+))?", settings.watch)
    ran = {step[3] for step in trace["steps"]}
    # a rank waits in `send`, so it never reaches this line
    never = {35} if name.endswith("send_deadlock.py") else set()
    assert {int(number) for pair in named for number in pair if number} <= ran | never
    source = program.read_text("utf-8").split("\n")
    for call, number in re.findall(r"`(\w+)` at line (\d+)", settings.watch):
        assert f"{call}(" in source[int(number) - 1], f"`{call}` at line {number}"
    linked = [int(number) for number in re.findall(r"\]\(\?tick=(\d+)\)", settings.watch)]
    assert all(1 <= number <= trace["steps"][-1][0] for number in linked)
    if name.endswith("gpipe.py"):  # ranks 0 and 3 begin their backwards
        first = [
            next(step[0] for step in trace["steps"] if step[1:4] == [rank, "line", 56])
            for rank in (0, 3)
        ]
        assert linked == first
    assert all(
        quote in program.read_text("utf-8") for quote in re.findall("`([^`]+)`", settings.watch)
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_the_picture_shows_when_each_rank_computes(name: str) -> None:
    trace = json.loads((ROOT / name).with_suffix(".trace.json").read_text("utf-8"))
    picture = trace_picture.draw(trace)
    svg = ElementTree.fromstring(picture)
    bars = [each for each in svg.findall(".//{*}rect") if each.get("fill")]
    assert len({each.get("fill") for each in bars}) == trace["ranks"]
    assert all(float(each.get("x")) >= 0 for each in bars)
    assert all(float(each.get("x")) + float(each.get("width")) <= 720 for each in bars)
    assert len(list(svg.findall(".//{*}path"))) == len(trace["messages"])
    assert ("bad" in {each.get("class") for each in svg.findall(".//{*}rect")}) == bool(
        trace["hangs"]
    )
    assert trace_picture.alt(trace).startswith(trace["program"])
    assert len(picture) < 12_000


def test_a_rank_does_not_compute_while_it_waits() -> None:
    picture = trace_picture.draw(TRACE)
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', picture)
    # two ticks on 708 pixels: each rank computes in the first one, and is in `send` afterwards
    assert bars == [("6.0", "354.0")] * 2
    assert picture.count('class="bad"/>') == 2


def test_the_offline_page_contains_its_trace(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/p.json").write_text('{"trace": 1}')
    html = '<div id="trace-viewer" data-trace="../p.json"></div>'
    found = re.search('data-trace="data:application/json;base64,([^"]+)"',
                      offline_zip.offline_page(html, tmp_path))  # fmt: skip
    assert base64.b64decode(found[1]) == b'{"trace": 1}'


def test_the_recorder_contains_the_viewer() -> None:
    path = ROOT / "docs/assets/pack_viewer.py"
    spec = importlib.util.spec_from_file_location("pack_viewer", path)
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    files = load_recorder(ROOT).viewer_files()
    assert "\0".join(files) == pack.viewer(), "run: python docs/assets/pack_viewer.py"
    assert "export const start" in files[0] and ".tv-lanes" in files[1]
