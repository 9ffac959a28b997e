"""Explain the terms of `docs/glossary.md` with tooltips on all pages.

On the glossary page, each term gets an id. On every other page, the first use of a term in each
section becomes an `<abbr>`. Its title is the first sentence of the term's definition. If a page
uses terms in a different sense, it lists them:

    <!-- not of the glossary: node, capacity -->

The line ``<!-- glossary: index -->`` is replaced by an index of all terms by letter, and the
line ``<!-- glossary: letters -->`` by a row of links to the letters.
"""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

from markdown import Markdown
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

from worldsize.model import ROOT
from worldsize.site import template
from worldsize.site.yaml_schema import SchemaError

FILE = "docs/glossary.md"
NEVER_INSIDE = {"a", "abbr", "code", "pre", "th", "h1", "h2", "h3", "h4", "h5", "h6", "summary"}


def entries(root: Path = ROOT) -> dict[str, str]:
    """Return the definition of each entry, by its names, as in `tensor parallelism / TP`."""
    return _entries(_text(root))


def _text(root: Path) -> str:
    path = root / FILE
    return path.read_text("utf-8") if path.is_file() else ""


@functools.lru_cache(maxsize=2)
def _entries(text: str) -> dict[str, str]:
    found = re.findall(r"^(\S.*)\n:   (.+(?:\n    .+)*)", text, re.MULTILINE)
    return {names: " ".join(definition.split()) for names, definition in found}


def terms(root: Path = ROOT) -> dict[str, str]:
    """Return the first sentence of the definition of each term, by the term."""
    return _terms(_text(root))


def _terms(text: str) -> dict[str, str]:
    found = {}
    for names, definition in _entries(text).items():
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", definition)
        plain = re.sub(r"[`*$]", "", plain)
        sentence = re.match(r".*?[.](?= |$)", plain)
        found |= dict.fromkeys(names.split(" / "), sentence[0] if sentence else plain)
    return found


def slug(term: str) -> str:
    """Return a term in the form of an id: lower-case Latin letters, digits and hyphens."""
    latin = term.lower().replace("α", "alpha").replace("β", "beta").replace("+", "p")
    return re.sub(r"[^a-z0-9]+", "-", latin).strip("-")


def by_letter(root: Path = ROOT) -> dict[str, list[tuple[str, str]]]:
    """Return the terms with the slugs of their entries, by their first letters."""
    found: dict[str, list[tuple[str, str]]] = {}
    for names in (entry.split(" / ") for entry in entries(root)):
        for name in names:
            first = slug(name)[0].upper()
            letter = first if first.isalpha() else "0–9"
            found.setdefault(letter, []).append((name, slug(names[0])))
    return {
        letter: sorted(found[letter], key=lambda term: slug(term[0]))
        for letter in sorted(found)
    }


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- glossary: WORDS -->`."""
    if words not in (["letters"], ["index"]):
        raise SchemaError("write `<!-- glossary: letters -->` or `<!-- glossary: index -->`")
    return template.render(f"glossary/{words[0]}", letters=by_letter(root), slug=slug)


@functools.lru_cache(maxsize=128)
def _tooltip_terms(
    text: str, own_senses: frozenset[str]
) -> tuple[dict[str, tuple[str, str]], re.Pattern[str]]:
    """Return the terms to explain, and a pattern that finds them.

    The terms are a dictionary from the term in lower case to its name and its meaning. Raise
    ValueError if `own_senses` contains a term that is not in the glossary.
    """
    known = {name.lower(): (name, meaning) for name, meaning in _terms(text).items()}
    if unknown := own_senses - known.keys():
        raise ValueError(
            f"a page excludes {', '.join(sorted(unknown))}, but the glossary has no such term"
        )
    explained = {name: known[name] for name in known.keys() - own_senses}
    # a pattern that is grouped by the first letters is ten times as fast
    tails = defaultdict(list)
    for name in sorted(explained, key=len, reverse=True):
        tails[name[0]].append(re.escape(name[1:]))
    words = "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in tails.items())
    # a term may be a plural, and must not be a part of a longer, hyphenated word
    return explained, re.compile(rf"(?<![\w-])({words})(?:e?s)?(?![\w-])", re.IGNORECASE)


class Tooltips(Treeprocessor):
    """A processor that adds tooltips to a page, and ids to the terms of the glossary page."""

    def __init__(self, md: Markdown, root: Path = ROOT) -> None:
        super().__init__(md)
        self.root = root
        self.own_senses: set[str] = set()

    def without_own_senses(self, lines: list[str]) -> list[str]:
        """Return the lines without the comment that lists terms with a different sense.

        Store the terms of the comment in `own_senses`.
        """
        found = [re.match(r"<!-- not of the glossary: (.+) -->$", line) for line in lines]
        listed = ", ".join(match[1] for match in found if match)
        self.own_senses = {name.strip().lower() for name in listed.split(",") if name}
        return [line for line, match in zip(lines, found, strict=True) if not match]

    def run(self, root: ET.Element) -> None:
        lists = [e for e in root.iter("div") if e.get("class") == "glossary"]
        for name in (name for each in lists for name in each.iter("dt")):
            name.set("id", slug("".join(name.itertext()).split(" / ")[0]))
        if lists:
            return
        self.terms, self.pattern = _tooltip_terms(_text(self.root), frozenset(self.own_senses))
        self.seen: set[str] = set()
        if self.terms:
            self._walk(root)

    def _walk(self, element: ET.Element) -> None:
        if element.tag in ("h1", "h2"):
            self.seen.clear()
        classes = element.get("class", "").split()
        if element.tag in NEVER_INSIDE or {"formula", "page-facts", "quote"} & set(classes):
            return
        self._mark(element, None)
        for child in list(element):
            self._walk(child)
            self._mark(element, child)

    def _mark(self, parent: ET.Element, after: ET.Element | None) -> None:
        """Add tooltips to the text of `parent` that follows its child `after`."""
        text = parent.text if after is None else after.tail
        if not text or isinstance(text, AtomicString):
            return
        position = 0 if after is None else list(parent).index(after) + 1
        found = []
        for match in self.pattern.finditer(text):
            name, meaning = self.terms[match[1].lower()]
            if meaning in self.seen or (name != name.lower() and match[1] != name):
                continue  # already explained under some name, or "zeros" instead of "ZeRO"
            self.seen.add(meaning)
            found.append((match, meaning))
        for match, meaning in reversed(found):
            term = ET.Element("abbr", {"title": meaning})
            term.text, term.tail = AtomicString(match[0]), text[match.end() :]
            parent.insert(position, term)
            text = text[: match.start()]
        if after is None:
            parent.text = text
        else:
            after.tail = text
