"""Tests of the glossary: a section explains each term, and no word of the field is missing."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

import markdown

from worldsize.model import page
from worldsize.site import glossary
from worldsize.site.glossary import entries
from worldsize.site.markdown_extension import BookMarkdown

INPUTS = ["src", "docs", "tests/field_terms.txt"]
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FIELD = ROOT / "tests/field_terms.txt"
USES = 3  # a page that uses a word so often needs an entry for it

# Words that a page may leave out of a term, because the whole page is about them.
QUALIFIERS = {"elastic", "scaling"}
SEE = re.compile(
    r"See \[(?P<page>\d\d|Lab \d\d|Set-up|Clusters) · (?P<title>.+)\]\((?P<file>[^)#]+)#(?P<anchor>[^)]+)\)\.$"
)


def plain(text: str) -> str:
    """Return the words of Markdown, on one line."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*`]", "", text).split())


@cache
def sections(file: str) -> dict[str, tuple[str, str]]:
    """Return the title and the text of each section of a page, by its anchor.

    The text ends at the next heading.
    """
    here = page.read(DOCS / file)
    starts = [heading.line for heading in here.headings.values()]
    found = {}
    for heading, end in zip(here.headings.values(), [*starts[1:], None], strict=True):
        text = [line for n, line in here.prose() if heading.line < n and (not end or n < end)]
        found[heading.anchor] = (heading.text, plain(" ".join([heading.text, "", *text])))
    return found


def names_of(entry: str) -> list[str]:
    return entry.split(" / ")


def uses(term: str, text: str) -> int:
    """Return how often a text contains a term or its plural; tooltips use the same rule."""
    if term.lower() not in text.lower():
        return 0
    flags = re.IGNORECASE if term == term.lower() else 0
    return len(re.findall(rf"(?<![\w-]){re.escape(term)}(?:e?s)?(?![\w-])", text, flags))


def base(name: str) -> str:
    """Return a name without its qualifier in brackets."""
    return re.sub(r" \(.*\)$", "", name)


def teaches(name: str, section: str, page_text: str) -> bool:
    """Return whether a section contains half of the words of a name, and its page all of them.

    Only the first five letters of a word are compared, so "pipelines" counts as "pipeline".
    """
    stems = {word[:5] for word in words_of(name).split() if word not in QUALIFIERS}
    inside = sum(stem in words_of(section) for stem in stems)
    return 2 * inside >= len(stems) and all(stem in words_of(page_text) for stem in stems)


def words_of(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def test_a_section_that_teaches_a_term_contains_its_words() -> None:
    whole = "Pipeline parallelism cuts the model by layers."
    assert teaches("pipeline parallelism", "The pipelines are filled.", whole)
    assert teaches("WORLD_SIZE", "the world size", whole + " world size")
    assert not teaches("pipeline parallelism", "The ring is filled.", whole)
    assert not teaches("pipeline schedule", "The pipelines are filled.", whole)


def test_the_index_lists_every_name_once() -> None:
    html = markdown.markdown("<!-- glossary: index -->", extensions=[BookMarkdown()])
    assert html.count("<li>") == html.count("<a ")  # one name on each line
    listed = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', html)
    assert sorted(name for _, name in listed) == sorted(
        name for entry in entries() for name in names_of(entry)
    )
    anchors = {glossary.slug(names_of(entry)[0]) for entry in entries()}
    assert len(anchors) == len(entries()) and {anchor for anchor, _ in listed} == anchors


def test_letters_link_to_the_index() -> None:
    page = "<!-- glossary: letters -->\n\n<!-- glossary: index -->\n"
    html = markdown.markdown(page, extensions=["attr_list", BookMarkdown()])
    letters = re.findall(r'<a href="#(terms-[^"]+)">([^<]+)</a>', html)
    assert [letter for _, letter in letters] == list(glossary.by_letter())
    for anchor, letter in letters:
        assert f'<strong id="{anchor}">{letter}</strong>' in html


def test_a_second_name_of_an_explained_term_gets_no_tooltip() -> None:
    html = markdown.markdown("Tensor parallelism (TP), TP, MoE.", extensions=[BookMarkdown()])
    assert re.findall(r"<abbr[^>]*>([^<]*)</abbr>", html) == ["Tensor parallelism", "MoE"]


def test_no_two_entries_share_a_name() -> None:
    every = [name.lower() for entry in entries() for name in names_of(entry)]
    assert every and not [name for name, count in Counter(every).items() if count > 1]


def fault_of(entry: str) -> str:
    """Return what is wrong with the link at the end of an entry, or an empty string."""
    see = SEE.search(entries()[entry])
    if not see:
        return "the entry does not end with “See [04 · Title](page.md#section).”"
    begins = {"Set-up": "setup", "Clusters": "clusters/"}.get(see["page"], f"{see['page']}_")
    if not see["file"].startswith(begins):
        return f"{see['file']} does not belong to {see['page']}"
    of_page = sections(see["file"])
    if see["anchor"] not in of_page:
        return f"{see['file']} has no section {see['anchor']}"
    title, text = of_page[see["anchor"]]
    if see["title"] != title:
        return f"the title of the section {see['anchor']} is “{title}”"
    page_text = " ".join(" ".join(each) for each in of_page.values())
    if not any(teaches(base(name), text, page_text) for name in names_of(entry)):
        return f"{see['file']}#{see['anchor']} does not contain the words of {entry}"
    return ""


def test_every_term_links_to_a_section_that_explains_it() -> None:
    faults = [f"{entry}: {fault}" for entry in entries() if (fault := fault_of(entry))]
    assert not faults, "\n".join(faults)


@cache
def field() -> dict[str, str]:
    """Return the reason why a word needs no entry, or an empty string, by word."""
    lines = FIELD.read_text("utf-8").splitlines()
    pairs = [line.split(": ", 1) for line in lines if line and not line.startswith("#")]
    assert len({pair[0] for pair in pairs}) == len(pairs), (
        "tests/field_terms.txt lists a word twice"
    )
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}


def prose(markdown: str) -> str:
    """Return the words of a page without code, formulas, alternative texts and addresses."""
    text = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    text = re.sub(
        r"!\[[^]]*\]\([^)]*\)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", " , ", text, flags=re.DOTALL
    )
    return plain(text)


def undefined(texts: dict[str, str], words: dict[str, str], known: set[str]) -> list[str]:
    """Return a line for each word of the field that a page uses, but that has no entry.

    Such a word occurs `USES` times or in a heading. Words with a reason are allowed.
    """
    found = []
    for name, text in texts.items():
        here = page.parse(text)
        headings = [prose(heading.text) for heading in here.headings.values()]
        words_of_page = prose("\n".join(line for _, line in here.prose()))
        for word, reason in words.items():
            if reason or word.lower() in known:
                continue
            times, heads = uses(word, words_of_page), sum(uses(word, h) for h in headings)
            if times >= USES or heads:
                found.append(f"{name}: {word}, {times} times" + ", in a heading" * bool(heads))
    return found


@cache
def known() -> set[str]:
    """Return the names of all terms in lower case, with their qualifiers in brackets."""
    return {name.lower() for entry in entries() for name in names_of(entry)}


def test_every_word_of_the_field_on_a_page_has_an_entry_or_a_reason() -> None:
    assert known() & {word.lower() for word in field()}, "no word of the list has an entry"
    pages = {
        str(path.relative_to(DOCS)): path.read_text("utf-8")
        for path in sorted(DOCS.rglob("*.md"))
        if path != ROOT / glossary.FILE and "labs" not in path.relative_to(DOCS).parts
    }
    found = undefined(pages, field(), known())
    assert not found, "\n".join(
        [
            *found,
            "",
            "Add an entry to docs/glossary.md, or a reason to tests/field_terms.txt.",
        ]
    )


def test_definitions_use_only_words_with_an_entry() -> None:
    unknown = [
        word for word, reason in field().items() if not reason and word.lower() not in known()
    ]
    definitions = {entry: prose(definition) for entry, definition in entries().items()}
    found = [
        f"{entry}: {word}"
        for entry, definition in definitions.items()
        for word in unknown
        if uses(word, definition)
    ]
    assert not found, "\n".join(found)


def test_no_definition_uses_its_own_term() -> None:
    meanings = glossary.terms()
    found = [name for name, meaning in meanings.items() if uses(base(name), prose(meaning))]
    assert not found, f"these definitions use their own term: {', '.join(found)}"


def test_a_reason_names_a_section_that_contains_the_word() -> None:
    found = []
    for word, reason in field().items():
        if reason and word.lower() in known():
            found.append(f"{word} has an entry and needs no reason")
        for file, anchor in re.findall(r"(\w+\.md)#([\w-]+)", reason):
            _, text = sections(file).get(anchor, ("", ""))
            if word.lower() not in text.lower():
                found.append(
                    f"{word}: {file}#{anchor} does not exist or does not contain the word"
                )
    assert not found, "\n".join(found)


def test_a_word_without_an_entry_is_reported() -> None:
    page = "# A\n\nA gizmo, `gizmo`, two gizmos.\n\n```python\ngizmo\n```\n"
    words = {"gizmo": "", "widget": "", "gadget": "known to all"}
    assert undefined({"a.md": page}, words, set()) == []
    assert undefined({"a.md": page + "One gizmo more."}, words, set()) == [
        "a.md: gizmo, 3 times"
    ]
    assert undefined({"a.md": page + "One gizmo more."}, words, {"gizmo"}) == []
    assert undefined({"a.md": "## The widget\n"}, words, set()) == [
        "a.md: widget, 1 times, in a heading"
    ]
    assert undefined({"a.md": "## The gadget\n"}, words, set()) == []
