"""Tests of parts of the site that do not need a built site."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from html import escape
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import conftest
import pytest
from conftest import RECORDED, Book

pytest.importorskip("mkdocs")
pytest.importorskip("ziamath")

import markdown
from mkdocs.structure.files import Files

from worldsize.model import BookError, page
from worldsize.model.program import Program
from worldsize.site import (
    changes,
    cross_references,
    embeds,
    glossary,
    html_postprocess,
    instruments,
    llms_txt,
    math_svg,
    minify,
    page_stats,
    programs,
    search,
    tables,
    yaml_schema,
)
from worldsize.site.markdown_extension import BookMarkdown
from worldsize.site.yaml_schema import SchemaError

INPUTS = ["src"]


# --- data ------------------------------------------------------------------------------------


class Thing(yaml_schema.Schema):
    id: str
    size: int


class Things(yaml_schema.Schema):
    first: list[Thing]
    other: list[Thing]


def test_yaml_errors_name_the_line_and_data_appear_at_the_directive() -> None:
    text = "first:\n- {id: a, size: 1}\n- {id: b, size: 2}\nother:\n- {id: b, size: big}\n"
    with pytest.raises(yaml_schema.DataError, match=r"t\.yml:5: b: size: Expected"):
        yaml_schema.decode(text, "t.yml", Things)
    shows = {"list": lambda words, root: "\n".join(words)}
    lines = ["- item", "", "    <!-- list: a b -->"]
    assert yaml_schema.expand_directives(lines, shows, Path()) == [
        "- item",
        "",
        "",
        "    a",
        "    b",
        "",
    ]


# --- programs --------------------------------------------------------------------------------


def test_a_callout_marks_the_line_of_its_quote(book: Book) -> None:
    book.program("p", "a = 1\nb = 2\nprint(a + b)\n", "$ python p.py\none 3\ntwo 3\n")
    page = """# Title

```python
--8<-- "snippets/t/p.py"
```

<div class="callouts" markdown>

1. `b = ` The second number.
2. `print` Their sum.

</div>
"""
    html = markdown.markdown(
        page,
        extensions=[
            "attr_list",
            "md_in_html",
            "pymdownx.highlight",
            "pymdownx.superfences",
            BookMarkdown(book.root),
        ],
    )
    block = re.search(r"(?s)<pre.*?</pre>", html)[0]
    marked = re.findall(r'<span class="hll" data-mark="(\d)">(.*)', block)
    assert [(n, re.sub("<.*?>", "", line)) for n, line in marked] == [
        ("1", "b = 2"),
        ("2", "print(a + b)"),
    ]
    assert "marks-" not in html and '<code class="quote">print</code>' in html
    path = book.write("docs/page.md", page.replace("`print`", "`a = `"))
    with pytest.raises(BookError, match=r"docs/page\.md:10: callout 2 quotes `a =`"):
        embeds.check_callouts(path, book.root)
    path = book.write("docs/page2.md", page.replace("`print` ", ""))
    with pytest.raises(
        BookError, match=r"docs/page2\.md:10: a callout must begin with a quote"
    ):
        embeds.check_callouts(path, book.root)


def test_a_folded_program_adds_no_reading_time() -> None:
    text = "# Title\n\nSome words.\n"
    block = (
        '\n??? example "The whole class"\n\n    ```python\n    x = 1\n    ```\n\nMore words.\n'
    )
    minutes = page_stats.reading_minutes(page.parse(text + "\nMore words.\n"))
    assert page_stats.reading_minutes(page.parse(text + block)) == minutes
    opened = block.replace("??? example", "??? question")
    assert page_stats.reading_minutes(page.parse(text + opened)) > minutes


def test_the_most_common_machine_is_printed_once(book: Book) -> None:
    for name in ("p", "q", "r"):
        book.program(name, "print(1)\n", "$ python p.py\n1\n")
    book.write(
        "snippets/t/r.cpu.txt",
        RECORDED.replace("2 CPU cores (test)", "64 CPU cores (other)") + "$ python r.py\n1\n",
    )
    fences = [
        f'```python\n--8<-- "snippets/t/{name}.py"\n```\n\n'
        f'```console\n--8<-- "snippets/t/{name}.cpu.txt"\n```'
        for name in "pqr"
    ]
    page = page_stats.with_facts("# Title\n\n" + "\n\n".join(fences), book.root, "01_t.md")
    assert "outputs recorded on 2 CPU cores (test), torch" in page
    assert "unless a note says otherwise · also run on 64 CPU cores (other)" in page
    shown = "\n".join(embeds.render(page.split("\n"), book.root))
    assert shown.count("\nRecorded ") == 1 and "on 64 CPU cores (other)" in shown
    alone = page_stats.with_facts("# Title\n\n" + fences[0], book.root, "01_t.md")
    assert "unless a note" not in alone
    assert "\nRecorded " in "\n".join(embeds.render(alone.split("\n"), book.root))


def test_transcripts_are_shown_as_they_were_printed(book: Book) -> None:
    book.program("p", "print(1)\n", "$ python p.py\none\ntwo\n")
    gpu = RECORDED.replace("2 CPU cores (test)", "1 × NVIDIA H100 80GB HBM3")
    book.write("snippets/t/p.cuda.txt", gpu + "$ python p.py\nuno\ndos\n")

    def shown(embed: str, language: str = "console", ticks: str = "```") -> str:
        fence = f'{ticks}{language}\n--8<-- "snippets/t/{embed}"\n{ticks}'
        return "\n".join(embeds.render(fence.split("\n"), book.root))

    both = shown("p.cpu.txt")
    assert both.index('=== "CPU"') < both.index('=== "H100"') and "# recorded" not in both
    recorded = book.read("snippets/t/p.cpu.txt")
    book.write("snippets/t/p.cpu.txt", RECORDED + "$ python p.py\n[exit status 1]\n")
    refused = shown("p.cpu.txt")
    assert refused.index('=== "H100"') < refused.index('=== "CPU"')
    book.write("snippets/t/p.cpu.txt", recorded)
    measured = book.write("snippets/measured.toml", '[numbers]\n"snippets/t/p.py" = [".*"]\n')
    speed = shown("p.cpu.txt")  # the program measures speed, so the GPU comes first
    assert speed.index('=== "H100"') < speed.index('=== "CPU"')
    measured.unlink()
    book.write("snippets/t/p.rtx-4090.txt", gpu.replace("H100", "RTX 4090") + "$ python p.py\n")
    assert '=== "RTX 4090"' in shown("p.cpu.txt")
    drawn = [book.write(f"snippets/t/p.{each}svg", "<svg/>").name for each in ("", "cuda.")]
    whole = programs._page(Program(book.root, book.root / "snippets/t/p.py"), [], "")
    assert re.findall(r"\]\((p\..*svg)\)\n\n\*(\w+)", whole) == [
        (drawn[0], "CPU"),
        (drawn[1], "H100"),
    ]
    part = shown("p.cuda.txt:3:4")
    assert "uno\ndos\n" in part and "one" not in part and "===" not in part
    parts = shown('p.cuda.txt:2:2"\n--8<-- "snippets/t/p.cuda.txt:4:4')
    assert "$ python p.py\ndos\n" in parts and "uno" not in parts
    with pytest.raises(BookError, match=r"p\.cuda\.txt and another file are in one block"):
        shown('p.cuda.txt:2:2"\n--8<-- "snippets/t/p.cpu.txt:2:2')
    book.write("snippets/t/p.py", 'print("""\n```\n""")\n')
    assert shown("p.py", "python").count("\n````") == 2
    figures = ["![a](../../snippets/t/p.svg)", "[l](../labs/l.py) ![b](../../labs/l.svg)"]
    copies = ["![a](/programs/t/p.svg)", "[l](../labs/l.py) ![b](/programs/labs/l.svg)"]
    assert embeds.render(figures, book.root) == copies


def test_page_stats_count_programs_once_and_failures_by_their_programs(book: Book) -> None:
    book.program("p", "def f():\n    pass\n\n\nf()\n", "$ python p.py\n")
    text = """
        # 02

        ## What goes wrong

        ### Nothing to see

        ### It hangs

        ```python
        --8<-- "snippets/t/p.py:f"
        ```

        ```python
        --8<-- "snippets/t/p.py"
        ```

        ## Another

        ### It hangs too

        ```python
        --8<-- "snippets/t/p.py"
        ```
        """
    here = page.read(book.write("docs/02_p.md", text))
    shown = page_stats.with_facts("\n".join(here.lines), book.root, "02_p.md")
    assert "minutes · 1 program · run on 2 CPU cores (test) · [what ran where]" in shown
    assert page_stats._failures(here) == 1


def test_a_page_lists_programs_that_wait_for_a_gpu(book: Book) -> None:
    for name in ("p", "q"):
        book.program(name, "print(1)\n", f"$ python {name}.py\n1\n", embed=False)
    embeds = "".join(f'```python\n--8<-- "snippets/t/{name}.py"\n```\n' for name in "pq")
    text = f"# T\n\n{embeds}"

    def built_page(name: str) -> str:
        return page_stats.with_facts(text, book.root, name).partition("\n```")[0]

    assert built_page("setup.md") == "# T\n"
    book.write("snippets/gpu.toml", '"snippets/t/p.py" = "$ python p.py"\n')
    note = "ot yet recorded on a GPU: 1 program · [what ran where](/what_ran_where.md)\n"
    assert f"\nN{note}" in built_page("setup.md") and f" · n{note}" in built_page("02_p.md")
    waits = programs._what_ran_where(book.root)
    assert "1 program would show more on a GPU, but" in waits and waits.count("p.py") == 2
    book.write("snippets/t/p.a100.txt", RECORDED + "$ python p.py\n1\n")
    assert built_page("setup.md") == "# T\n"
    assert "no output from a GPU" not in programs._what_ran_where(book.root)


@pytest.mark.parametrize(
    ("name", "text", "summary"),
    [
        (
            "a.py",
            '"""It needs torch 2.13 or later. More.\n"""\n',
            "It needs torch 2.13 or later.",
        ),
        (
            "b.py",
            "# %% [markdown]\n# # Lab\n#\n# It is\n# one. Two.\n\n# %%\n1\n",
            "It is one.",
        ),
        ("c.cu", "/* It adds.\n * Not more.\n */\nint main() {}\n", "It adds."),
        ("d.cpp", "// It adds\n// two.\n\nint main() {}\n", "It adds two."),
        ("e.sh", "#!/bin/bash\n# It starts.\nsrun\n", "It starts."),
    ],
)
def test_a_summary_is_the_first_sentence(
    book: Book, name: str, text: str, summary: str
) -> None:
    path = book.root / "snippets" / name
    path.write_text(text)
    assert programs.summary(Program(book.root, path)) == summary


# --- tables ----------------------------------------------------------------------------------


def table(*rows: str) -> str:
    """Return the HTML of a table from rows with | between cells.

    The first row is the header.
    """
    cells = [
        "".join(f"<{tag}>{cell.strip()}</{tag}>" for cell in row.split("|"))
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    ]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


TEXT = "a cell with more words than a phone has room for"


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (["symbol | meaning | unit", f"N | {TEXT} | count"], "data"),
        (["option | what it does", f"--a | {TEXT}"], "data"),
        (["you see | it is | fix", f"{TEXT} | {TEXT} | {TEXT}"], "data cards"),
        (["a | b | c | d | e", "1234567 | 1234567 | 1234567 | 1234567 | 1234567"], "data"),
        ([" | ".join("abcdefgh"), " | ".join(["1.25 TB/s"] * 8)], "data wide"),
    ],
)
def test_a_table_too_wide_for_a_phone_becomes_cards_or_scrolls(
    rows: list[str], kind: str
) -> None:
    assert f'<table class="{kind}"' in tables.with_layout(table(*rows))


def test_a_card_contains_the_titles_of_its_cells() -> None:
    html = tables.with_layout(table("you see | it's <b>so</b> | ", f"{TEXT} | {TEXT} | {TEXT}"))
    style = "--title-1: 'you see: '; --title-2: 'it\\'s so: '"
    assert f' style="{escape(style)}"' in html


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("torch.compile", None),  # short code is not split
        ("python a.py --fix", "python a.py --fix"),
        ("python -m ab.cdefghij", "python -m ab.cdefghij"),
        ("ZeroRedundancyOptimizer", "Zero<wbr>Redundancy<wbr>Optimizer"),
        ("NCCL_DEBUG_SUBSYS=&quot;A&amp;B&quot;", 'NCCL_<wbr>DEBUG_<wbr>SUBSYS=<wbr>"A&amp;B"'),
        ("a_b_c_d_e_f_g_h_i_j", "a_b_<wbr>c_d_<wbr>e_f_<wbr>g_h_i_j"),
    ],
)
def test_long_code_in_a_cell_can_break_after_separators(code: str, shown: str | None) -> None:
    html = tables.with_layout(table("a | b", f"<code>{code}</code> | 1"))
    expected = f'<code class="long">{shown}</code>' if shown else f"<code>{code}</code>"
    assert expected in html


# --- words and links -------------------------------------------------------------------------


def test_the_tooltip_of_a_term_is_its_first_sentence(book: Book) -> None:
    entry = "rank / process\n:   A [number](x.md) of torch 2.13 and `more`.\n    Then *more*.\n"
    book.write("docs/glossary.md", f"# Terms\n\n{entry}")
    meaning = "A number of torch 2.13 and more."
    assert glossary.terms(book.root) == {"rank": meaning, "process": meaning}


def test_cross_references_resolve_to_one_section(book: Book) -> None:
    lab = "# %% [markdown]\n# # Lab\n#\n# ## Step 1: average\n#\n# ## Step 10: all\n"
    book.write("labs/lab02_ddp.py", lab)
    book.write("docs/02_ddp.md", '# D\n\n??? question "Why a? So."\n\n??? question "Why b?"\n')
    found = cross_references.link("lab02#step-1", book.root)
    assert str(found) == "[Lab 02 · Step 1: average](/labs/lab02_ddp.py#step-1-average)"
    assert cross_references.link("02_ddp?Why a", book.root).title == "02 · “Why a?”"
    with pytest.raises(SchemaError, match="2 questions of"):
        cross_references.link("02_ddp?Why", book.root)


def test_search_indexes_the_text_under_each_heading() -> None:
    code = '<div class="language-python x"><pre>{} <span class="s2">says</span></pre></div>'
    html = (
        '<h1 id="top">T <code>x</code><a class="headerlink" href="#top">¶</a></h1><p>abc <b>b</b></p>'
        '<p>abc b</p><h2 id="one">One</h2><p>12.5</p><p>assert it holds</p><p>was <svg><path/>glyph</svg></p>'
        f'<h2 id="two">Two</h2>{code.format("count")}'
    )
    assert search.sections(html, "T", "02_ddp/") == [
        ("02_ddp/", "T <code>x</code>", "abc b", 1, ""),
        ("02_ddp/#one", "One", "was", 1, ""),
        ("02_ddp/#two", "Two", "", 1, "count says"),
    ]
    assert search.sections(html, "T", "labs/lab01/")[2] == (
        "labs/lab01/#two",
        "Two",
        "says",
        0.55,
        "",
    )
    early = search.sections(f"<p>before</p>{html}", "Title", "x/")
    assert early[0] == ("x/", "Title", "before", 1, "") and early[1][0] == "x/#top"
    error = (
        '<h2 id="what-goes-wrong">Wrong</h2><h3 id="e">Error</h3><h2 id="check-yourself">?</h2>'
    )
    weights = [weight for *_, weight, _ in search.sections(f"{html}{error}", "T", "x/")]
    assert weights == [1, 1, 1, 1, 1.2, 0.55]


# --- changes ---------------------------------------------------------------------------------


def test_changes_appear_on_a_page_and_in_a_feed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    new = (
        "- {date: 2026-11-26, title: B & C, what: 'In [one](02_ddp.md), `x`.', corrects: true}"
    )
    old = "- {date: 2026-11-25, title: A, what: a}"
    (tmp_path / changes.FILE).write_text(f"{new}\n{old}\n")
    page = changes.show(["all"], tmp_path)
    assert page.index("## 2026-11-26") < page.index("## 2026-11-25")
    assert "**B & C.** *Was false before.* In [one](02_ddp.md), `x`." in page
    config = SimpleNamespace(site_url="https://book.example/", site_name="Book")
    channel = ElementTree.fromstring(changes.feed(tmp_path, config)).find("channel")
    assert [each.tag for each in channel][:4] == ["title", "link", "description", "item"]
    item = {each.tag: each.text for each in channel.find("item")}
    assert item["title"] == "B & C" and item["description"] == "In one, x."
    assert item["pubDate"] == "Thu, 26 Nov 2026 00:00:00 GMT"
    (tmp_path / changes.FILE).write_text(f"{old}\n{new}\n")
    with pytest.raises(yaml_schema.DataError, match="the newest first"):
        changes.show(["all"], tmp_path)


# --- formulas and figures --------------------------------------------------------------------


def points(path: str) -> list[tuple[float, float]]:
    """Return the points of the lines and curves of an SVG path, with their control points."""
    found, here, bend, last = [], (0.0, 0.0), None, ""
    for command, text in re.findall(r"([a-zA-Z])([^a-zA-Z]*)", path):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", text)]
        size = {"M": 2, "L": 2, "l": 2, "h": 1, "v": 1, "Q": 4, "q": 4, "t": 2}.get(command, 0)
        for at in range(0, len(numbers), size or 1):
            given = numbers[at : at + size]
            if command in "hv":
                given = [*given, 0.0] if command == "h" else [0.0, *given]
            ends = list(zip(given[::2], given[1::2], strict=True))
            if command.islower():
                ends = [(here[0] + x, here[1] + y) for x, y in ends]
            if command == "t":
                bent = bend if last in ("q", "t") else here
                ends.insert(0, (2 * here[0] - bent[0], 2 * here[1] - bent[1]))
            bend, here, last = ends[0], ends[-1], command
            found += ends
    return found


def test_a_drawn_formula_equals_the_outlines_of_the_font() -> None:
    """Coordinates are rounded to whole units, which halves the size; errors are at most two."""
    import ziamath

    drawing = ziamath.Math.fromlatex(r"\sum_i g_i S^2 \alpha = 8").svgxml()
    paths = [path.get("d") for each in drawing.iter("symbol") for path in each.iter("path")]
    assert len(paths) > 5
    for path in paths:
        # only lines of length zero may be missing
        there = [(10 * x, 10 * y) for x, y in points(path)]
        drawn = points(math_svg._outline(path, 10.0))
        assert (
            set(map(is_close_to(there), drawn)) == {True} == {*map(is_close_to(drawn), there)}
        )
    assert ' y="' not in math_svg.draw("x")  # it is on the baseline
    fraction = math_svg.draw(r"\frac{a}{a}")
    places = re.findall(r'<use href="#glyph [^"]+"(?: x="(-?\d+)")?(?: y="(-?\d+)")?', fraction)
    assert len(places) == 2 and places[0][0] == places[1][0]


def is_close_to(points: list[tuple[float, float]]):
    """Return a function that tests whether one of these points is at most two units away."""
    return lambda at: min(max(abs(at[0] - x), abs(at[1] - y)) for x, y in points) <= 2


def test_a_figure_without_a_size_gets_one() -> None:
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 5"/>'
    files = Files([SimpleNamespace(src_uri="programs/a.svg", content_string=drawing)])
    here = SimpleNamespace(url="02_ddp/")

    def sized(html: str) -> str:
        return html_postprocess.with_sizes(html, here, files)

    assert 'width="9" height="5" alt' in sized('<img alt="a" src="../programs/a.svg">')
    for other in ('<img width="3" src="../programs/a.svg">', '<img src="../programs/b.svg">'):
        assert sized(other) == other


# --- pages as Markdown -----------------------------------------------------------------------


RICH = """# A `{ .b }` { #a }

A [b](../b.md?n=1#c){ .d }, [c](c.md), [here](#a), [l](/labs/l.py), [far](https://x.example/#a). { .e }

=== "CPU `x`"

    !!! note "So"

        ```html
        <br> { .f }


        ```
<!-- one -->
<div class="x" markdown="1">
<a class="y" href="z.zip" download>Take $x_{ .5}$</a>
<ol class="quiz-options" markdown="1">
<li markdown="1">one</li>
<li markdown="1">two `<br>`</li>
</ol>
<ol class="quiz-why quiz-ordered" markdown="1">
<li markdown="1">`` ` `` 3 < 4</li>
</ol>

</div>

| a<br>b |
"""


def test_syntax_of_this_site_becomes_plain_markdown() -> None:
    pages = {"b.md": "b/", "t/c.md": "t/c/", "t/a.md": "t/a/", "labs/l.py": "labs/l/"}
    files = SimpleNamespace(
        get_file_from_path=lambda path: path in pages and SimpleNamespace(url=pages[path])
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="t/a.md"), url="t/a/")
    markdown_text = llms_txt.plain_markdown(
        RICH.splitlines(),
        page,
        SimpleNamespace(site_url="https://a.example/s/"),
        files,
    )
    title, head, rest = markdown_text.split("\n\n", 2)
    assert title == "# A `{ .b }`" and "<https://a.example/s/t/a/>" in head
    site = "https://a.example/s/"
    assert (
        rest
        == f"""\
A [b]({site}b/?n=1#c), [c]({site}t/c/), [here]({site}t/a/#a), [l]({site}labs/l/), [far](https://x.example/#a).

- **CPU `x`**

    - **So**

        ```html
        <br> {{ .f }}


        ```
[Take $x_{{ .5}}$]({site}t/a/z.zip)
- A. one
- B. two `<br>`
1. `` ` `` 3 < 4

| a · b |
"""
    )


# --- instruments -----------------------------------------------------------------------------


def test_a_comment_shows_a_small_instrument(book: Book) -> None:
    for name in instruments.INSTRUMENTS:
        book.write(f"docs/instruments/{name}.md", f'---\ntitle: "The {name}"\n---\n\n# T\n')
    home = [f"![A {each}.](assets/thumbnails/{each}.svg)\n" for each in instruments.INSTRUMENTS]
    book.write("docs/index.md", "\n".join(home))

    def expanded(line: str) -> str:
        directives = {"instrument": instruments.show, "instruments": instruments.show_all}
        return "\n".join(yaml_schema.expand_directives([line], directives, book.root))

    small = expanded(
        '<!-- instrument: collective ranks=8 size=4MiB "Which is the fastest?" -->'
    )
    assert (
        'data-instrument="collective" data-state="ranks=8&amp;size=4194304" markdown' in small
    )
    assert "**Which is the fastest?**" in small
    assert "![A collective.](/assets/thumbnails/collective.svg)" in small
    assert "](/instruments/collective.md?ranks=8&size=4194304)" in small
    assert instruments.INSTRUMENTS["memory"]["question"] in expanded(
        "<!-- instrument: memory -->"
    )
    every = expanded("<!-- instruments: all -->")
    assert every.count("data-gallery") == len(instruments.INSTRUMENTS)
    assert "**The formats.** [What is lost" in every
    code = "Write `<!-- instrument: x -->`."
    assert expanded(code) == code

    page = SimpleNamespace(file=SimpleNamespace(src_uri="t/a.md"), url="t/a/")
    config = SimpleNamespace(site_url="https://a.example/")
    files = SimpleNamespace(
        get_file_from_path=lambda path: SimpleNamespace(url=path.replace(".md", "/"))
    )
    text = llms_txt.plain_markdown(["# A", *small.split("\n")], page, config, files)
    assert "**Which is the fastest?**" in text and "<div" not in text
    assert "](https://a.example/assets/thumbnails/collective.svg)" in text
    assert "](https://a.example/instruments/collective/?ranks=8&size=4194304)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("colective", "there is no instrument colective: use one of collective, sche"),
        ("collective rank=8", "collective has no setting rank: use one of collective, ranks"),
        ("collective ranks=17", "ranks must be a whole number from 2 to 16, not 17"),
        ("collective size=4MB", "size must be a whole number from 1024 to 4294967296, not 4MB"),
        (
            "collective algorithm=star",
            "algorithm must be ring or tree or doubling or hierarchical",
        ),
        ("collective ranks", "ranks must have the form setting=value"),
    ],
)
def test_a_wrong_comment_of_an_instrument_names_file_and_line(
    book: Book, words: str, message: str
) -> None:
    path = book.write("docs/01_x.md", f"# X\n\n<!-- instrument: {words} -->\n")
    with pytest.raises(yaml_schema.DataError, match=rf"^docs/01_x\.md:3: {message}"):
        instruments.check_page(path, book.root)


def test_minified_modules_keep_their_strings_and_statements() -> None:
    module = """
// a comment
const a = b => ({ ...b, text: "x  // y" }) // the end
const c = `a  ${ [1, 2].map(each => `${ each } }`).join( " - " ) }  /* d */`
const d = [
  a,
  { b }
]
  .map(each => {
    each++
    return each ?
      1 : 2
  })
if (a / 2 > 1 && /["'`] +\\/[/ ]x/.test(c)) e = a - -1
/* two
   lines */
export const f = (x, y) => x ** 2 + y % 3
"""
    assert (
        minify.minify(module)
        == """\
const a=b=>({...b,text:"x  // y"})
const c=`a  ${[1,2].map(each=>`${each} }`).join(" - ")}  /* d */`
const d=[a,{b}].map(each=>{each++
return each?1:2})
if(a/2>1&&/["'`] +\\/[/ ]x/.test(c))e=a - -1
export const f=(x,y)=>x**2+y%3
"""
    )


# --- the inputs of tests of the site ---------------------------------------------------------


def test_the_inputs_of_a_test_are_the_files_that_it_requested(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requested files that do not exist are also inputs. Other files of the site are not."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/index.html").write_text("one")
    with conftest.serve(tmp_path) as url:
        assert urllib.request.urlopen(f"{url}a/?n=1").read() == b"one"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}b.js")
    assert conftest.SERVED_FILES[0] == {"a/index.html", "b.js"}

    monkeypatch.setattr(request.node._request, "getfixturevalue", lambda _: tmp_path)
    names = ["/a/index.html", "/b.js", "src/worldsize/model/fingerprint.py"]
    before = conftest.served_digest(request.node, names)
    assert before.splitlines()[1:] == names
    (tmp_path / "c.html").write_text("another page")
    assert conftest.served_digest(request.node, names) == before
    for name, text in {"a/index.html": "two", "b.js": "it comes"}.items():
        (tmp_path / name).write_text(text)
        assert conftest.served_digest(request.node, names) != before, name
        before = conftest.served_digest(request.node, names)
