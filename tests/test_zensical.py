"""The comparison of two sites, on pages of a few words, and what Zensical is given."""

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

import yaml

from worldsize.model import ROOT
from worldsize.tools import compare_zensical
from worldsize.tools.compare_zensical import Part

INPUTS = ["src", "mkdocs.yml"]
MKDOCS = ROOT / "mkdocs.yml"
PAGE = """<head><title>A</title><meta name="description" content="d"></head>
<script id="__config">{"search": "../assets/search.js"}</script><nav><a href="../b/">B</a></nav>
<article><h1 id="a">Ring</h1><p>two words <img src="r.svg" width="9"></p>
<pre><code>x = <span class="n">1</span></code></pre><svg><use href="#G0"/></svg></article>"""


def sites(folder: Path, html: str, **files: str) -> list[Part]:
    """What `PAGE` has, and a site lacks in which it is `html`."""
    for site, page, more in ("one", html, files), ("two", PAGE, {"llms.txt": "map"}):
        for name, text in {"a/index.html": page, **more}.items():
            path = folder / site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return compare_zensical.missing(folder / "one", folder / "two")


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ('href="../b/"', 'href="/b/"', []),  # the same place
        ('<span class="n">1</span>', "1", []),  # the same code
        ("<nav>", '<nav><script src="/assets/javascripts/x.js"></script>', []),
        ('href="../b/"', 'href="../c/"', [("a", "/b/")]),
        (' id="a"', "", [("anchor", "a")]),
        ("1</span>", "2</span>", [("code", "x = 1")]),
        ("two words", "two", [("word", "words")]),
        (' width="9"', "", [("img", 'src="/a/r.svg" width="9"')]),
        ('content="d"', 'content="e"', [("meta", 'content="d" name="description"')]),
        ("<svg>", "", [("svg", "")]),
        ("assets/search", "assets/other", [("search", "/assets/search.js")]),
        ("<title>A", "<title>B", [("word", "A")]),
    ],
)
def test_what_a_page_has_lost_is_named(tmp_path: Path, old: str, new: str, lost: list) -> None:
    assert old in PAGE
    gaps = sites(tmp_path, PAGE.replace(old, new), **{"llms.txt": "map"})
    assert [(gap.kind, gap.what) for gap in gaps] == lost


def test_a_file_that_is_not_there_or_says_something_else_is_named(tmp_path: Path) -> None:
    assert sites(tmp_path, PAGE) == [Part("file", "llms.txt")]
    (gap,) = sites(tmp_path, PAGE, **{"llms.txt": "other"})
    assert gap[:2] == ("bytes", "llms.txt")


def test_the_list_is_what_is_missing_no_more_and_no_less() -> None:
    table = '[[difference]]\nkind = "img"\nwhat = "programs/* a.svg"\nwhy = "Not sized."\n'
    rows = compare_zensical.known(table)
    assert rows == {("img", "programs/* a.svg"): "Not sized."}
    one = Part("img", "programs/a/index.html", "a.svg")
    assert compare_zensical.judged([one], rows) == []
    for other in (
        one._replace(page="b/index.html"),
        one._replace(what="b"),
        one._replace(kind="a"),
    ):
        assert compare_zensical.judged([one, other], rows) == ["lost: " + " ".join(other)]
    assert compare_zensical.judged([], rows) == ["no longer missing: img programs/* a.svg"]


def test_what_needs_mkdocs_is_listed() -> None:
    rows = compare_zensical.known(compare_zensical.LIST.read_text("utf-8"))
    need = compare_zensical.imports(ROOT)
    assert (need.kind, f"{need.page} {need.what}") in rows


def test_links_lead_from_a_page_of_the_folder() -> None:
    lines = [
        "[a](/programs/t/p.md#x) `[b](/c.md)` [l](../labs/lab02_ddp.py?a) [p](/programs/labs/lab02_ddp.py)",
        *("```", "[d](/e.md)", "```"),
        "[w](https://a.example/b.md) [h](#here) [i](./?x=1) [s](failures.md)",
    ]
    assert compare_zensical.related(lines, "clusters/scale.md") == [
        "[a](../programs/t/p.md#x) `[b](/c.md)` [l](../labs/lab02_ddp.md?a) [p](../programs/labs/lab02_ddp.py)",
        *lines[1:],
    ]


def test_settings_are_the_books_own_and_labs_are_markdown() -> None:
    said, own = (
        yaml.safe_load(compare_zensical.settings()),
        yaml.safe_load(MKDOCS.read_text("utf-8")),
    )
    assert str(said["nav"]) == re.sub(r"(labs/\w+)\.py", r"\1.md", str(own["nav"]))
    assert said.keys() == own.keys() - {"exclude_docs"}
