"""Tests of the comparison with Zensical: two small sites, and the input of Zensical."""

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


def missing_parts(folder: Path, html: str, **files: str) -> list[Part]:
    """Return the parts of `PAGE` that are missing in a site with the page `html`."""
    for site, page, more in ("one", html, files), ("two", PAGE, {"llms.txt": "map"}):
        for name, text in {"a/index.html": page, **more}.items():
            path = folder / site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return compare_zensical.missing(folder / "one", folder / "two")


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ('href="../b/"', 'href="/b/"', []),  # the same target
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
def test_a_missing_part_of_a_page_is_found(
    tmp_path: Path, old: str, new: str, missing: list
) -> None:
    assert old in PAGE
    gaps = missing_parts(tmp_path, PAGE.replace(old, new), **{"llms.txt": "map"})
    assert [(gap.kind, gap.what) for gap in gaps] == missing


def test_a_missing_or_different_file_is_found(tmp_path: Path) -> None:
    assert missing_parts(tmp_path, PAGE) == [Part("file", "llms.txt")]
    (gap,) = missing_parts(tmp_path, PAGE, **{"llms.txt": "other"})
    assert gap[:2] == ("bytes", "llms.txt")


def test_unlisted_and_outdated_differences_are_reported() -> None:
    table = '[[difference]]\nkind = "img"\nwhat = "programs/* a.svg"\nwhy = "Not sized."\n'
    rows = compare_zensical.listed_differences(table)
    assert rows == {("img", "programs/* a.svg"): "Not sized."}
    one = Part("img", "programs/a/index.html", "a.svg")
    assert compare_zensical.unlisted_differences([one], rows) == []
    for other in (
        one._replace(page="b/index.html"),
        one._replace(what="b"),
        one._replace(kind="a"),
    ):
        assert compare_zensical.unlisted_differences([one, other], rows) == [
            "missing, but not listed: " + " ".join(other)
        ]
    assert compare_zensical.unlisted_differences([], rows) == [
        "listed, but not missing: img programs/* a.svg"
    ]


def test_the_modules_that_import_mkdocs_are_listed() -> None:
    rows = compare_zensical.listed_differences(compare_zensical.LIST.read_text("utf-8"))
    need = compare_zensical.mkdocs_imports(ROOT)
    assert (need.kind, f"{need.page} {need.what}") in rows


def test_links_become_relative_to_the_page() -> None:
    lines = [
        "[a](/programs/t/p.md#x) `[b](/c.md)` [l](../labs/lab02_ddp.py?a) [p](/programs/labs/lab02_ddp.py)",
        *("```", "[d](/e.md)", "```"),
        "[w](https://a.example/b.md) [h](#here) [i](./?x=1) [s](failures.md)",
    ]
    assert compare_zensical.relative_links(lines, "clusters/scale.md") == [
        "[a](../programs/t/p.md#x) `[b](/c.md)` [l](../labs/lab02_ddp.md?a) [p](../programs/labs/lab02_ddp.py)",
        *lines[1:],
    ]


def test_settings_equal_those_of_mkdocs_except_for_hooks_and_labs() -> None:
    actual, expected = (
        yaml.safe_load(compare_zensical.settings()),
        yaml.safe_load(MKDOCS.read_text("utf-8")),
    )
    assert str(actual["nav"]) == re.sub(r"(labs/\w+)\.py", r"\1.md", str(expected["nav"]))
    assert actual.keys() == expected.keys() - {"exclude_docs"}
