"""Tooltips for terms: `docs/glossary.md` is their one source.

On the glossary page each term gets an id. On every other page the first use of a term in each
section becomes an `<abbr>` whose title is the first sentence of the term's definition. A page
with a sense of its own for some says so: ``<!-- not of the glossary: node, capacity -->``.
The line ``<!-- glossary: index -->`` becomes an index of all terms by letter, and the line
``<!-- glossary: letters -->`` a row of links to its letters.
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
    """Each entry's definition, by its name or names: `tensor parallelism / TP`."""
    return _entries(_text(root))


def _text(root: Path) -> str:
    path = root / FILE
    return path.read_text("utf-8") if path.is_file() else ""


@functools.lru_cache(maxsize=2)
def _entries(text: str) -> dict[str, str]:
    found = re.findall(r"^(\S.*)\n:   (.+(?:\n    .+)*)", text, re.MULTILINE)
    return {names: " ".join(definition.split()) for names, definition in found}


def terms(root: Path = ROOT) -> dict[str, str]:
    """Each term of the glossary with the first sentence of its definition."""
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
    latin = term.lower().replace("α", "alpha").replace("β", "beta").replace("+", "p")
    return re.sub(r"[^a-z0-9]+", "-", latin).strip("-")


def by_letter(root: Path = ROOT) -> dict[str, list[tuple[str, str]]]:
    """For each first letter, the terms with the slugs of their entries."""
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
    """The Markdown of the index of all terms, or of the row of links to its letters."""
    if words not in (["letters"], ["index"]):
        raise SchemaError("write `<!-- glossary: letters -->` or `<!-- glossary: index -->`")
    return template.render(f"glossary/{words[0]}", letters=by_letter(root), slug=slug)


@functools.lru_cache(maxsize=128)
def _wanted(
    text: str, own_senses: frozenset[str]
) -> tuple[dict[str, tuple[str, str]], re.Pattern[str]]:
    """The terms to explain, in small letters, with name and meaning; and what finds them."""
    known = {name.lower(): (name, meaning) for name, meaning in _terms(text).items()}
    if unknown := own_senses - known.keys():
        raise ValueError(f"not in the glossary anyway: {', '.join(sorted(unknown))}")
    wanted = {name: known[name] for name in known.keys() - own_senses}
    tails = defaultdict(list)  # by first letter, the longest first: ten times as fast
    for name in sorted(wanted, key=len, reverse=True):
        tails[name[0]].append(re.escape(name[1:]))
    words = "|".join(f"{re.escape(first)}(?:{'|'.join(of)})" for first, of in tails.items())
    # a term may stand in the plural, and must not be a part of a longer, hyphenated word
    return wanted, re.compile(rf"(?<![\w-])({words})(?:e?s)?(?![\w-])", re.IGNORECASE)


class Tooltips(Treeprocessor):
    """Explains the terms of a page; on the glossary page, gives each its id."""

    def __init__(self, md: Markdown, root: Path = ROOT) -> None:
        super().__init__(md)
        self.root = root
        self.own_senses: set[str] = set()

    def without_own_senses(self, lines: list[str]) -> list[str]:
        """Take the comment that names the terms with another sense on this page."""
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
        self.terms, self.pattern = _wanted(_text(self.root), frozenset(self.own_senses))
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
        """Mark the terms in the text of `parent` that stands behind its child `after`."""
        text = parent.text if after is None else after.tail
        if not text or isinstance(text, AtomicString):
            return
        place = 0 if after is None else list(parent).index(after) + 1
        found = []
        for match in self.pattern.finditer(text):
            name, meaning = self.terms[match[1].lower()]
            if meaning in self.seen or (name != name.lower() and match[1] != name):
                continue  # explained already, perhaps by another name; or "zeros", not ZeRO
            self.seen.add(meaning)
            found.append((match, meaning))
        for match, meaning in reversed(found):
            term = ET.Element("abbr", {"title": meaning})
            term.text, term.tail = AtomicString(match[0]), text[match.end() :]
            parent.insert(place, term)
            text = text[: match.start()]
        if after is None:
            parent.text = text
        else:
            after.tail = text
